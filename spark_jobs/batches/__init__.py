"""Micro-batches: the jobs that plan, write, verify and commit them.

The commit order of a batch; every step may be the last one of a process:

1. *Snapshot.* One table version gives the next number of the transaction sequence and the positions.
2. *Init.* The first commit of a group is empty and records the resolved origin of each shard.
3. *Reconcile.* The positions of the broker are brought in line with the ledger; orphaned dead letters are deleted.
4. *Plan.* The lowest gap up to the end offset captured at run start, and a new batch id.
5. *Dead letters.* Into their own table, under its own number, with the batch id.
6. *Rows.* With number, batch id and ranges as batch metadata in the same commit.
7. *Verify.* The commit with our number carries our batch id; if not, drop the batch and plan again.
8. *Commit.* Only now the position is committed to the broker.

Whatever a write raised, step 7 decides. If the ledger cannot be read then, the run ends and commits
nothing to the broker.
"""
