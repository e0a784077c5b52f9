"""Micro-batches: the jobs that plan, write, verify and commit them.

The commit order of a batch. The process may end after any step:

1. *Snapshot* (:meth:`spark_jobs.ledger.ledger.Ledger.read`). One table version gives the next number of the transaction
   sequence and the positions.
2. *Initialize* (``Step.INITIALIZED``). The first commit of a group is empty and records the origin of each shard.
3. *Reconcile.* The broker gets the positions of the ledger; dead letters of batches that can no longer commit are
   deleted.
4. *Plan* (``PLANNED``). In each shard, the first range that is missing or must be replaced, up to the end that the run
   read at its start, and a new batch id.
5. *Read* (``READ``), *dead letters* (``DEAD_LETTERS_WRITTEN``). The messages are read; those that cannot become rows go
   into the dead-letter table, under its own number, with the batch id.
6. *Rows* (``WRITING``, ``ROWS_WRITTEN``). One commit with the number and the ledger entry, which has the batch id.
7. *Verify* (``VERIFIED``). The commit with our number carries our batch id; if not, the batch is discarded, and planned
   again (:class:`spark_jobs.batches.ingestion.PlanAgain`).
8. *Commit* (``COMMITTED``). Only now does the position go to the broker.

In one pass, steps 5 and 6 are one Spark job, because such a batch has no dead letters.

Step 7 decides whether the batch landed, even if the write raised an error. If the ledger cannot be read in step 7,
nothing is committed to the broker; the batch is planned again, until the retry time is over.
"""
