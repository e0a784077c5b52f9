"""The messages of a batch plan, read as executors do."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable

from stream_consumers.batches import MESSAGE_SCHEMA, BatchPlan
from stream_consumers.messages import Receipt

Identity = tuple[str, int, int]


def identities(receipts: Iterable[Receipt]) -> set[Identity]:
    """What was sent."""
    return {(r.shard.stream, r.shard.id, r.sequence) for r in receipts}


def split_rows(plan: BatchPlan) -> list[Counter[Identity]]:
    """The messages of each split, read as an executor does: from a pickle."""
    found = []
    for split in plan.splits:
        rows: Counter[Identity] = Counter()
        for batch in pickle.loads(pickle.dumps(split)).read():  # noqa: S301
            assert batch.schema == MESSAGE_SCHEMA
            assert batch.column("error").null_count == batch.num_rows
            rows.update(zip(*(batch.column(name).to_pylist() for name in ("stream", "shard", "sequence"))))
        found.append(rows)
    return found


def read(plan: BatchPlan) -> set[Identity]:
    """Everything in a plan; fails if something is in it twice."""
    rows = sum(split_rows(plan), Counter[Identity]())
    assert set(rows.values()) <= {1}, "splits overlap"
    return set(rows)
