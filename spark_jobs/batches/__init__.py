"""Micro-batches: the jobs that plan, write, verify and commit them.

The commit order of a batch. The process may end after any step:

1. *Snapshot.* One table version gives the next number of the transaction sequence and the positions.
2. *Init.* The first commit of a group is empty and records the resolved origin of each shard.
3. *Reconcile.* The positions of the broker are brought in line with the ledger; orphaned dead letters are deleted.
4. *Plan.* The lowest gap up to the end offset captured at run start, and a new batch id.
5. *Dead letters.* Into their own table, under its own number, with the batch id.
6. *Rows.* With number, batch id and ranges as batch metadata in the same commit.
7. *Verify.* The commit with our number carries our batch id; if not, drop the batch and plan again.
8. *Commit.* Only now is the position committed to the broker.

Step 7 decides whether the batch landed, even if the write raised an error. If the ledger cannot be read in step 7, the
run ends and commits nothing to the broker.
"""
