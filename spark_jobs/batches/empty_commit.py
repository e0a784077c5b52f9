"""Commits without rows: they take a number of a line, and change what the ledger says."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.entries import Entry
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.session import check_session
from spark_jobs.writing.sink import DeltaSink, explain, is_conflict
from stream_consumers.errors import WriteError

MAX_RACES = 20


def commit_empty(
    spark: SparkSession,
    ingestion: Ingestion,
    kind: str,
    fields: Callable[[LedgerState], Mapping[str, Any] | None],
    *,
    read: Callable[[], LedgerState] | None = None,
) -> None:
    """Take the next number of a line with an empty commit.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table and line.
        kind: of the entry.
        fields: more fields of :class:`spark_jobs.ledger.entries.Entry`, for the ledger as it is at each attempt;
            ``None`` if there is nothing to commit any more.
        read: tells what the ledger is, if not the ledger.

    Raises:
        WriteError: Spark failed, or others were always faster.
    """
    ledger = ingestion.ledger()
    rows = check_session(spark).read.format("delta").load(ingestion.table).limit(0)
    for _ in range(MAX_RACES):
        state = (read or ledger.read)()
        more = fields(state)
        if more is None:
            return
        newest = state.newest
        entry = Entry(
            kind=kind,
            group=ingestion.group,
            app=ledger.app,
            number=state.last_number + 1,
            by=ingestion.member,
            bid=uuid.uuid4().hex,
            base=state.version,
            state=state.shards,
            identities=newest.identities if newest else {},
            letters=state.letters,
            sharing=state.sharing,
            transform=newest.transform if newest else "",
            **{"hint": newest.hint if newest else None, **more},
        )
        failure: Exception | None = None
        try:
            DeltaSink(ingestion.table).write(rows, entry)
        except Exception as error:  # noqa: BLE001 - whether it landed is for the ledger to say
            failure = error
        commit = ledger.written(entry.number, after=entry.base)
        if commit is not None and commit.entry is not None and commit.entry.bid == entry.bid:
            return
        if commit is None and failure is not None and not is_conflict(failure):
            raise explain(failure, table=ingestion.table) from failure
    raise WriteError(
        f"others were always faster than the commit of {ledger.app} in {ingestion.table}",
        remedy="Stop the group's runs, then again.",
    )
