"""The table that a transaction sequence writes into, and its commits without rows.

A group uses empty commits (:func:`commit_empty`) to begin, to register further streams, and to fence other sequences by
taking their numbers. A replay also uses one to ask live ingestion to pause (:class:`YieldRequests`), because Delta
refuses a replace if any other commit follows its snapshot. If ingestion commits every second, a replace of some seconds
would never land. Ingestion sees the request before it plans its next batch, and waits until the replay has committed
again, or the request is old. Correctness does not depend on a request: if a run does not see it, or stops waiting, the
replay only has to try once more.
"""

from __future__ import annotations

import logging
import random
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from spark_jobs.batches.bad_rows import BadRowFilter
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, Waiting
from spark_jobs.batches.row_columns import RowColumns
from spark_jobs.batches.source_checks import check_other_group, check_owner, without_positions
from spark_jobs.dead_letters.table import DeadLetterTable
from spark_jobs.decoding.isolation import prepare
from spark_jobs.ledger.entries import PAUSE, EntryFields, LedgerEntry, PlannedFields
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.session import check_session
from spark_jobs.writing.delta_table import DeltaWriter, check_landed, check_log_store, check_unseen, read_table
from spark_jobs.writing.layout import TableLayout, create_table
from stream_consumers.batches import LastMessage, PositionFacts
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, WriteError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_RACES = 20
"""The number of lost races in a row after which a run ends with an error."""
YIELD_SECONDS = 60.0
"""How long to honour a request, in seconds: the run that made it may have died."""
ASK_AFTER = 2
"""From this lost race on, other runs are asked to pause."""
MAX_PAUSE_SECONDS = 5.0
MAX_SEARCHED_COMMITS = 200
"""How many of the newest commits are searched for a request."""
_POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


class OutdatedError(Exception):
    """The stream or the table has changed since the batch was planned, so that it has to be planned again.

    Args:
        reason: the error to raise if it happens at every attempt.
    """

    def __init__(self, reason: StreamAssetsError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Everything that is needed to write the batches of one transaction sequence.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group and table.
        url: the URL of the source, for messages.
        observer: called at each step.
        ledger: the ledger of the group.
        columns: the columns of the rows.
        filter: finds bad rows.
    """

    spark: SparkSession
    ingestion: Ingestion
    url: StreamUrl
    observer: Observer
    ledger: Ledger
    columns: RowColumns
    filter: BadRowFilter

    @classmethod
    def of(cls, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> TargetTable:
        """Return the target of an ingestion.

        Raises:
            SparkSessionError: the session cannot write Delta tables.
            UnsafeStorageError: another driver could overwrite the commits of this one.
        """
        _check_session(spark, ingestion)
        if ingestion.driver_records:
            prepare()
        ledger = ingestion.ledger()
        columns = RowColumns(spark, ingestion, ledger, url=url)
        bad_rows = BadRowFilter(spark, ingestion, ledger.log, columns)
        return cls(spark, ingestion, url, observer, ledger, columns, bad_rows)

    @property
    def dead_letters(self) -> DeadLetterTable:
        """The dead-letter table of its table."""
        return self.ingestion.dead_letters()

    @property
    def writer(self) -> DeltaWriter:
        """The writer of its rows."""
        ingestion = self.ingestion
        changes = ingestion.errors.schema_changes
        properties = ingestion.layout.all_properties()
        return DeltaWriter(ingestion.table, properties, changes, ingestion.keys, columns=self.columns.settable)

    def entry(self, batch: Batch, **fields: Unpack[EntryFields]) -> LedgerEntry:
        """Return the ledger entry of a batch, with fields that are known after the read."""
        known: EntryFields = {
            "bid": batch.bid,
            "transform": self.ingestion.transform_name,
            "identities": {**batch.state.identities, **batch.identities},
            **batch.fields,
            **fields,
        }
        return self.ledger.entry(batch.kind, batch.state, **known)


def layout_of(ingestion: Ingestion, columns: StructType) -> TableLayout:
    """Return the layout of a table with these columns."""
    return ingestion.layout.of_columns(columns, keys=ingestion.keys.columns if ingestion.keys is not None else ())


def initialize(
    target: TargetTable,
    state: LedgerState,
    origin: Mapping[Shard, int],
    *,
    identities: Mapping[str, str],
    last_messages: Mapping[Shard, LastMessage] | None = None,
    hint: Mapping[str, object] | None = None,
) -> None:
    """Commit the first entry of a group, without rows: the resolved origin, with its last messages and its hint.

    Raises:
        OutdatedError: another run created the table meanwhile, and the group has no entry in it.
    """
    ingestion, log = target.ingestion, target.ledger.log
    target.ledger.check_first(origin)
    target.columns.check(state)
    empty = target.columns.no_rows()
    check_alone(target)
    if state.version < 0:
        check_unseen(target.spark, log)
        if not ingestion.layout.is_plain:
            required = ingestion.keys.required if ingestion.keys is not None else ()
            create_table(target.spark, log, empty.schema, layout_of(ingestion, empty.schema), required=required)
            state = target.ledger.read()
    check_unwritten(target, state, identities)
    fields = PlannedFields(
        origin=origin,
        switch=ingestion.sharing_mode,
        last_messages=last_messages or {},
        hint=hint,
        keys=ingestion.key_order,
    )
    entry = target.entry(Batch("init", state, identities=identities, fields=fields))
    failure = target.writer.try_write(empty, entry, creates=state.version < 0)
    # A lost race to create the table causes many kinds of errors. Any entry of the group is a success.
    found = target.ledger.read().newest
    check_landed(found, failure, spark=target.spark, log=log, bid=entry.bid)
    if found is None:
        raise OutdatedError(lost_races(target.ledger, ingestion))
    target.observer(Step.INITIALIZED, None)


def register_streams(
    target: TargetTable,
    origin: Mapping[Shard, int],
    *,
    identities: Mapping[str, str],
    facts: Mapping[Shard, PositionFacts] | None = None,
) -> None:
    """Commit the origins of more streams of a group, without rows, so that other groups see them.

    Args:
        target: the table.
        origin: of the shards of these streams.
        identities: the fingerprints of the streams that are read.
        facts: what the source knows at these origins.

    Raises:
        InvalidOptionError, LedgerTruncatedError: see :func:`check_unwritten`.
        WriteError: Spark failed, or other runs were always faster.
    """

    def fields(state: LedgerState) -> EntryFields | None:
        new = without_positions(state, (shard.stream for shard in origin))
        check_unwritten(target, state, new)
        starts = {shard: start for shard, start in origin.items() if shard.stream in new}
        known = {shard: one for shard, one in (facts or {}).items() if shard in starts}
        more = {**state.identities, **identities}
        return {"origin": starts, "facts_at_start": known, "identities": more} if new else None

    commit_empty(target.spark, target.ingestion, "init", fields)


def check_alone(target: TargetTable) -> None:
    """Refuse a group beside another one in a keyed table: rows of different groups may have the same key.

    Raises:
        InvalidOptionError: this group or another group of the table has keys.
    """
    ingestion = target.ingestion
    for group in sorted(target.ledger.other_groups()):
        if ingestion.keys is not None or Ledger(target.ledger.log, group=group, member=ingestion.member).read().keys:
            raise InvalidOptionError(
                f"{ingestion.table} is written by group {group!r}, and a keyed table takes only one group",
                remedy=f"Write group {ingestion.group!r} into another table, or read all streams by one group.",
            )


def check_unwritten(target: TargetTable, state: LedgerState, streams: Iterable[str]) -> None:
    """Refuse to begin with a stream if the table already has rows of it.

    A copy of a table (CREATE TABLE … AS SELECT, a clone, INSERT INTO) has the rows, but the positions are only in the
    log of the original table. Ingestion from the start would write each message a second time.

    Args:
        target: the table.
        state: the ledger; streams in which it has positions are not checked.
        streams: the streams that are about to be written.

    Raises:
        InvalidOptionError: another group writes them, or the table has rows but the ledger has no positions; or see
            :func:`spark_jobs.batches.source_checks.check_owner`.
        LedgerTruncatedError: the log was cleaned, so that it is unknown which group wrote the rows.
        OutdatedError: the group has begun with them since the state was read.
    """
    new, ingestion = without_positions(state, streams), target.ingestion
    if not new:
        return
    check_other_group(ingestion, state, new, url=target.url)
    _check_rows(target, new)
    check_owner(ingestion, url=target.url)


def _check_rows(target: TargetTable, new: frozenset[str]) -> None:
    ingestion, snapshot = target.ingestion, target.ledger.log.snapshot()
    if snapshot is None or not snapshot.may_hold(new):
        return
    table = read_table(target.spark, target.ledger.log)
    if "_stream" in table.columns and not table.where(f.col("_stream").isin(*new)).isEmpty():
        options = ["--source", str(target.url), "--table", ingestion.table, "--group", ingestion.group]
        refusal = InvalidOptionError(
            f"{ingestion.table} holds rows of {', '.join(sorted(new))}, and its log does not record how "
            f"far group {ingestion.group!r} has read: a copy of a table has the rows, but no positions",
            remedy=f"To continue after these rows, run: stream-assets adopt {shlex.join(options)}. "
            "If the rows belong to another stream, ingest into another table.",
        )
        # Another member may have begun with the stream, and written rows, since the state was read.
        if without_positions(target.ledger.read(), new) != new:
            raise OutdatedError(refusal)
        raise refusal


def lost_races(ledger: Ledger, ingestion: Ingestion) -> WriteError:
    """Return the error of a run that was always slower than others."""
    return WriteError(
        f"{ledger.app} lost {MAX_RACES} races for a commit to {ingestion.table} in a row",
        remedy="Other runs of the same group are faster. Limit the group to one run at a time.",
    )


def _check_session(spark: SparkSession, ingestion: Ingestion) -> None:
    check_session(spark)
    check_log_store(spark, ingestion.table, single_writer=ingestion.single_writer)


def commit_empty(
    spark: SparkSession,
    ingestion: Ingestion,
    kind: str,
    fields: Callable[[LedgerState], EntryFields | None],
    *,
    read: Callable[[], LedgerState] | None = None,
) -> None:
    """Take the next number of a transaction sequence with a commit without rows.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard of the sequence.
        kind: the kind of the entry.
        fields: called at each attempt with the state of the ledger; returns more fields of the entry, or ``None`` to
            commit nothing.
        read: returns the state to use in place of the ledger's, if the log was cleaned.

    Raises:
        WriteError: Spark failed, or other runs were always faster.
    """
    _check_session(spark, ingestion)
    ledger, writer = ingestion.ledger(), DeltaWriter(ingestion.table)
    rows = no_rows(spark, ledger)
    for _ in range(MAX_RACES):
        state = (read or ledger.read)()
        more = fields(state)
        if more is None:
            return
        if writer.commit(rows, ledger.entry(kind, state, **more), ledger=ledger) is not None:
            return
    raise lost_races(ledger, ingestion)


def fence(spark: SparkSession, ingestion: Ingestion, number: int, *, by: str) -> None:
    """Take a number of a transaction sequence, and all before it, so that a batch in flight with one never lands.

    The next number is taken first, also if ``number`` is far ahead: the numbers between them are then between two
    commits in the log, which shows that no batch has one of them.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard of the sequence.
        number: the number.
        by: the member that fences.
    """
    steps: tuple[EntryFields, ...] = ({"by": by}, {"by": by, "number": number})
    for step in steps:

        def fields(state: LedgerState, step: EntryFields = step) -> EntryFields | None:
            return step if state.last_number < number else None

        commit_empty(spark, ingestion, "fence", fields)


def fence_abandoned(spark: SparkSession, ingestion: Ingestion, abandoned: Mapping[str, int]) -> None:
    """Fence the sequences of abandoned batches, so that the next check deletes their dead letters.

    In the sequence of a shard that has ended, of a member that is gone, or of the redrives of a group whose shards have
    their own sequences, there may be no other batch that takes their number. In the own sequence, the next batch does.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard of the own sequence.
        abandoned: see :class:`spark_jobs.dead_letters.table.CheckedDeadLetters`.
    """
    own = ingestion.ledger()
    for app, number in abandoned.items():
        fenced = ingestion.of_sequence(app)
        if app != own.app and fenced.ledger().app == app:
            fence(spark, fenced, number, by=own.member)


def no_rows(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """Return an empty frame with the columns that a commit to the table needs."""
    snapshot = ledger.log.snapshot()
    # Delta refuses a frame with an identity column, even an empty one.
    computed = snapshot.computed_columns if snapshot else frozenset[str]()
    return read_table(spark, ledger.log).limit(0).drop(*computed)


@dataclass(frozen=True, slots=True)
class YieldTo:
    """The result of a plan if another run has asked this one to pause.

    Args:
        version: the table version of the request.
    """

    version: int


class YieldRequests:
    """Finds and makes the requests to pause in one table, for one run.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard of the transaction sequence.
        ledger: the ledger of that sequence.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, ledger: Ledger) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._ledger = ledger
        self._lost = 0
        # Wait for each request once: the clock of its run may be ahead, so that the request would never be old.
        self._waited_for = -1

    def unanswered(self, version: int) -> YieldTo | None:
        """Return the newest request after which its run has not committed; then :meth:`wait` before the next plan.

        Args:
            version: the version of the table that was read for the plan.
        """
        return self._newest(range(version, self._waited_for, -1))

    def wait(self, asked: YieldTo) -> Iterator[Waiting]:
        """Yield why this run waits, then wait until the run that asked has committed, or the request is old."""
        yield Waiting(
            f"a run that replaces rows of {self._ingestion.table} has asked others to pause (version {asked.version}); "
            f"this one waits until that run has written, up to {YIELD_SECONDS:g} s"
        )
        deadline = time.monotonic() + YIELD_SECONDS
        request: YieldTo | None = asked
        while request is not None and time.monotonic() < deadline:
            self._waited_for = request.version
            time.sleep(_POLL_SECONDS)
            request = self._newest(self._ledger.log.newest_versions(after=self._waited_for - 1))

    def ask(self) -> None:
        """Wait a moment after the first lost race; after each further one, ask other runs to pause.

        Raises:
            WriteError: the request cannot be committed.
        """
        self._lost += 1
        what = f"another run wrote to {self._ingestion.table} while this one replaced rows in it"
        if self._lost < ASK_AFTER:
            pause = random.uniform(0, MAX_PAUSE_SECONDS)  # noqa: S311 - not a secret
            _log.warning("%s; it tries again in %.1f s", what, pause)
            time.sleep(pause)
            return
        _log.warning("%s; it asks other runs to pause, and tries again", what)
        commit_empty(self._spark, self._ingestion, PAUSE, lambda state: {})

    def _newest(self, newest_first: range) -> YieldTo | None:
        """Return the newest request that is neither answered nor old."""
        oldest = (time.time() - YIELD_SECONDS) * 1000
        # A keyed table has one transaction sequence, so that runs differ in their writer, and not in their app id.
        answered = {(self._ledger.group, self._ledger.member)}
        for version in newest_first[:MAX_SEARCHED_COMMITS]:
            commit = self._ledger.log.commit(version)
            if commit is None or (commit.timestamp_ms or 0) < oldest:
                return None
            entry = commit.entry
            if entry is not None and (entry.group, entry.by) not in answered:
                if entry.kind == PAUSE:
                    return YieldTo(version)
                answered.add((entry.group, entry.by))
        return None
