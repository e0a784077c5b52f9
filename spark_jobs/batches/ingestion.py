"""What is ingested where, and what is told of it. No Spark session is needed to know that."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pyspark.sql import DataFrame

from spark_jobs.decoding.decoders import Decoder, Raw, rescuing
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import last_sequences
from spark_jobs.table_location import check_location
from spark_jobs.writing.dead_letters import DeadLetterTable, dead_letter_path
from spark_jobs.writing.layout import TableLayout
from stream_consumers.batches import BatchPlan, BatchSource, Extent, Range
from stream_consumers.epochs import (
    Names,
    accept_remedy,
    epoch_name,
    named,
    newest_epochs,
    split_epoch,
    truncation_remedy,
)
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    SourceTruncatedError,
    TableUnreadableError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import (
    AutoStreamReset,
    ConsumerMode,
    DataLoss,
    Limits,
    OnBadRows,
    SchemaChanges,
    check_name,
    check_range,
    check_switch,
    choose_fields,
)
from stream_consumers.urls import StreamUrl

RETRY_SECONDS = 300.0
DRIVER_RECORDS = 10_000
SWITCHING = "switching"
CLAIMS = "load_balanced by claims"
LEAVING_CLAIMS = "switching from claims"
# Whose transaction sequence has the positions: that of the one member, that of each shard, or none, in claim mode.
_SEQUENCES = {
    ConsumerMode.REAL_TIME.value: "member",
    ConsumerMode.RESUMABLE.value: "member",
    ConsumerMode.LOAD_BALANCED.value: "shard",
    CLAIMS: "claims",
}
Transform = Callable[[DataFrame], DataFrame]
T = TypeVar("T")


class Step(enum.Enum):
    """What has just been done when an observer is told.

    A batch that is written while it is read has no ``READ`` and no ``DEAD_LETTERS_WRITTEN``. If it turns out not to be
    clean, ``UNCLEAN`` follows, and then the steps of a batch that is read and counted first; ``WRITING`` comes twice.
    """

    INITIALIZED = "initialized"
    PLANNED = "planned"
    READ = "read"
    DEAD_LETTERS_WRITTEN = "dead letters written"
    WRITING = "writing"
    UNCLEAN = "unclean"
    ROWS_WRITTEN = "rows written"
    VERIFIED = "verified"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch.

    Args:
        entry: what its commit will say.
        plan: how to read it.
        doubtful: where messages may be in the table already, so that it has to be looked at.
        previous: the newest entry of the group when it was planned.
        identities: the fingerprint of each stream that is read; most entries of many shards do not say them.
    """

    entry: LedgerEntry
    plan: BatchPlan
    doubtful: Mapping[Shard, Range] = field(default_factory=dict)
    previous: LedgerEntry | None = None
    identities: Mapping[str, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The transaction number."""
        return self.entry.number


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch that is in the table.

    Args:
        batch: what was planned.
        version: the table version that holds it.
        messages: messages decoded, per shard.
        rows: rows in the commit, after the transform.
        dead: dead letters.
        lag: what is left, per shard: of all shards of the group the messages between its position and the end offset
            captured before (an upper bound); of a replay or a redrive what it has left to do.
        seconds: from the plan to the commit.
        replaced: rows that were there before, and were replaced; ``None`` if the log of the table does not tell.
        bytes: of the data files of the commit.
    """

    batch: Batch
    version: int
    messages: Mapping[Shard, int]
    rows: int
    dead: int
    lag: Mapping[Shard, int]
    seconds: float
    replaced: int | None = 0
    bytes: int = 0


Observer = Callable[[Step, "Batch | None"], None]


def ignore_steps(step: Step, batch: Batch | None) -> None:
    """The default observer."""


@dataclass(frozen=True, slots=True)
class Ingestion:
    """What to ingest, and where to.

    Args:
        group: the consumer group.
        table: the Delta table, a path or URI; a relative path is taken from the working directory of now.
        decoder: how payloads become columns.
        transform: from the decoded rows to the rows to write; they must keep the stream columns.
        member: the name of this member in its group.
        shard: instead: the shard whose transaction sequence is used, where every shard has its own.
        sharing: how the group shares its shards.
        claims: whether members share by claiming entries one by one (Redis, load_balanced), not whole shards.
        on_data_loss: what to do about messages that are gone before they were read.
        on_bad_rows: what becomes of rows that break a constraint of the table, or that the transform fails for.
        start: where a group without a position starts.
        limits: the most that one batch holds; those of a job get smaller while they take longer than a minute.
        retry_seconds: how long a run tries again, with growing pauses, what failed for a reason that may be gone soon,
            like a broker that does not answer; 0 for not at all. A batch that succeeds gives the whole time back.
        schema_changes: what becomes of columns, and of fields of structs, that the table does not have.
        storage_options: of an object store, for reading the Delta log.
        single_writer: no two drivers write the table at the same time, so that its storage need not tell which of two
            commits came first.
        layout: how the table is made if it is not there yet.
        driver_records: batches of at most so many messages are read by the driver; 0 leaves all of them to executors.
    """

    group: str
    table: str
    decoder: Decoder = field(default_factory=Raw)
    transform: Transform | None = None
    member: str = "main"
    shard: Shard | None = None
    sharing: ConsumerMode = ConsumerMode.RESUMABLE
    claims: bool = False
    on_data_loss: DataLoss = DataLoss.ERROR
    on_bad_rows: OnBadRows = OnBadRows.FAIL
    start: AutoStreamReset = AutoStreamReset.EARLIEST
    limits: Limits = field(default_factory=Limits)
    retry_seconds: float = RETRY_SECONDS
    schema_changes: SchemaChanges = SchemaChanges.FAIL
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    single_writer: bool = False
    layout: TableLayout = field(default_factory=TableLayout)
    driver_records: int = DRIVER_RECORDS

    def __post_init__(self) -> None:
        choose_fields(
            self,
            sharing=ConsumerMode,
            on_data_loss=DataLoss,
            on_bad_rows=OnBadRows,
            start=AutoStreamReset,
            schema_changes=SchemaChanges,
        )
        check_range("retry_seconds", self.retry_seconds)
        check_name("group", self.group, without="/")
        check_name("member", self.member, without="/")
        check_switch("single_writer", self.single_writer)
        if isinstance(self.decoder, type) or not callable(getattr(self.decoder, "ddl", None)):
            raise InvalidOptionError(
                f"decoder={self.decoder!r} decodes nothing", remedy="Use Json(schema), Text(), Raw(), or one like them."
            )
        if self.schema_changes is SchemaChanges.RESCUE:
            object.__setattr__(self, "decoder", rescuing(self.decoder))
        # A relative path would be another one for Spark, and after the next change of the working directory.
        object.__setattr__(self, "table", check_location(self.table))

    @property
    def sharing_mode(self) -> str:
        """How the ledger calls the way in which the group shares; it tells which transaction sequences there are."""
        return CLAIMS if self.claims else self.sharing.value

    @property
    def transform_name(self) -> str:
        """What the ledger calls the transform; empty without one."""
        return "" if self.transform is None else str(getattr(self.transform, "__name__", "transform"))

    def own(self, shards: Mapping[Shard, T], streams: Container[str]) -> Mapping[Shard, T]:
        """Those of these streams and of this transaction sequence."""
        return {s: value for s, value in shards.items() if s.stream in streams and self.shard in (None, s)}

    def by_sequence(self, shards: Iterable[Shard]) -> list[tuple[Ingestion, frozenset[Shard]]]:
        """The ingestion of each transaction sequence and its part of ``shards``: all in one, or each in its own."""
        if self.sharing is ConsumerMode.LOAD_BALANCED:
            return [(replace(self, shard=shard), frozenset((shard,))) for shard in sorted(shards)]
        all_shards = frozenset(shards)
        return [(replace(self, shard=None), all_shards)] if all_shards else []

    def epochs(self, streams: Collection[str], ledger: Ledger | None = None) -> Names:
        """For each stream the name of its newest epoch: by the ledger, or by the rows where it cannot tell.

        Args:
            streams: their keys.
            ledger: of the group, where the caller has one: what one read of it has found, the next one need not.
        """
        ledger = ledger or self.ledger()
        try:
            state = ledger.read()
            known: Iterable[str] = state.identities
            is_told = state.newest is not None
        except LedgerTruncatedError:
            known, is_told = (), False
        log = ledger.log
        snapshot = None if is_told else log.snapshot()
        if snapshot is not None and snapshot.may_hold(frozenset(epoch_name(stream, 2) for stream in streams)):
            # A table without our columns has no epochs.
            with suppress(TableUnreadableError):
                known = {shard.stream for shard in last_sequences(log, self.dead_letters().log())}
        return newest_epochs(known, streams)

    def in_epochs(self, source: BatchSource, ledger: Ledger | None = None) -> BatchSource:
        """The source, with its streams called by the names of their newest epochs; see :meth:`epochs`."""
        return named(source, self.epochs(source.url.required_streams(), ledger))

    def ledger(self) -> Ledger:
        """The ledger of the group in the table."""
        log = DeltaLog(self.table, storage_options=self.storage_options)
        return Ledger(log, group=self.group, member=self.shard or self.member)

    def dead_letters(self) -> DeadLetterTable:
        """The dead letters of the table."""
        return DeadLetterTable(dead_letter_path(self.table), self.storage_options)


def lag(source: BatchSource, state: LedgerState, extents: Mapping[Shard, Extent]) -> Mapping[Shard, int]:
    """Per shard, the messages to write: those behind what is covered, and those to replace; an upper bound."""
    known = {shard: state.shards.get(shard, ShardState()) for shard in extents}
    ends = {shard: s.covered.position for shard, s in known.items()}
    starts = {shard: extents[shard].start if end is None else end for shard, end in ends.items()}
    total = dict(source.count({shard: Range(start, extents[shard].end) for shard, start in starts.items()}))
    for turn in range(max((len(s.redo.ranges) for s in known.values()), default=0)):
        parts = {shard: s.redo.ranges[turn] for shard, s in known.items() if turn < len(s.redo.ranges)}
        for shard, count in source.count(parts).items():
            total[shard] += count
    return total


def check_sharing(state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse a group with other transaction sequences than ours: a batch in flight there would land next to ours.

    Raises:
        InvalidOptionError: with the mode of the group and the way to change it.
    """
    wanted = ingestion.sharing.value
    if not state.sharing or _SEQUENCES.get(state.sharing) == _SEQUENCES[ingestion.sharing_mode]:
        return
    raise InvalidOptionError(
        f"group {ingestion.group!r} of {ingestion.table} is {state.sharing}, not {ingestion.sharing_mode}",
        remedy=f"Change the group's mode with: stream-assets switch --to {wanted}; or use mode {state.sharing!r}."
        if state.sharing not in (SWITCHING, LEAVING_CLAIMS)
        else f"A switch was begun and not finished: run stream-assets switch --to {wanted}.",
    )


def without_positions(state: LedgerState, streams: Iterable[str]) -> frozenset[str]:
    """Those of the streams in which the group has no position."""
    return frozenset(streams) - {shard.stream for shard in state.shards}


def check_other_group(ingestion: Ingestion, streams: frozenset[str], *, url: StreamUrl) -> None:
    """One group a stream and table: a replace would take the rows of the other one away.

    Args:
        ingestion: group and table.
        streams: those that the group begins with.
        url: of the source, for the message.

    Raises:
        InvalidOptionError: another group writes one of them into the table.
        LedgerTruncatedError: the log was cleaned, and rows of them are there: whose they are is unknown.
    """
    other = ingestion.ledger().other_group(streams)
    if other is not None:
        raise InvalidOptionError(
            f"group {other!r} already writes {url} into {ingestion.table}",
            remedy=f"Use group {other!r}, or another table: a row is known by stream, shard and sequence only.",
        )


def check_loss(source: BatchSource, ingestion: Ingestion, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
    """What of ``gaps`` is gone from the stream, if that is to be recorded.

    Raises:
        DataLossError: if it is not, with the numbers.
    """
    lost = source.lost(gaps)
    if lost and ingestion.on_data_loss is DataLoss.ERROR:
        ranges = ", ".join(f"{shard} from {part.start} to {part.end}" for shard, part in sorted(lost.items()))
        raise DataLossError(
            f"messages of {source.url} are gone that group {ingestion.group!r} has not read: {ranges}",
            remedy="The stream keeps them no longer. To skip them and continue, with the loss recorded in the table's "
            "log and its dead letters, set on_data_loss to 'record'; or bring them back.",
            **{
                str(shard): f"committed {part.start}, earliest {part.end}, latest {gaps[shard].end}"
                for shard, part in sorted(lost.items())
            },
        )
    return lost


def check_source(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    *,
    reads_last_messages: bool = True,
) -> None:
    """Refuse a stream that is not the one the ledger remembers, that was cut, or that ends before the position.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the stream holds.
        reads_last_messages: look at the last message that was read of each shard, too.

    Raises:
        SourceRecreatedError: with both identities, or the position and the end.
        SourceTruncatedError: with the last message that was read, and what stands in its place.
    """
    identities = source.identities()
    check_epochs(state, identities, url=source.url)
    found = recreations(source, group, state, extents, identities, reads_last_messages=reads_last_messages)
    for error in found.values():
        raise error


def check_last_messages(source: BatchSource, group: str, state: LedgerState, extents: Mapping[Shard, Extent]) -> None:
    """Refuse a stream in which other messages stand in the place of those that were read.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger.
        extents: what the shards hold that are looked at.

    Raises:
        SourceTruncatedError: with the last message that was read, and what stands in its place.
    """
    for error in truncations(source, group, state, extents).values():
        raise error


def truncations(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    *,
    reads_last_messages: bool = True,
) -> Mapping[Shard, SourceTruncatedError]:
    """For each shard that lost messages which were read, how that is known.

    The last message that was read is compared with what the stream holds in its place. Leader epochs alone would miss a
    broker that was restored to a snapshot, which may get the same epoch again. Rows alone would miss the messages that
    a transform drops. One fetch answers for all shards, so plans ask each time, and need not detect a new leader or a
    new connection.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the shards hold that are looked at.
        reads_last_messages: look at the messages, not only at the ends.
    """
    known = {shard: last for shard, last in state.last_messages.items() if shard in extents}
    asked = {shard: Range(MIN_SEQUENCE, last.sequence + 1) for shard, last in known.items() if reads_last_messages}
    held = source.last_messages(asked)
    errors: dict[Shard, SourceTruncatedError] = {}
    for shard, last in known.items():
        position, end = state.shards[shard].covered.position, extents[shard].end + extents[shard].blocked
        found = held.get(shard)
        if end <= last.sequence:
            what = "ends before the last message that"
        elif found is not None and source.is_replaced(shard, last, found):
            what = "holds other messages than"
        else:
            continue
        errors[shard] = SourceTruncatedError(
            f"{shard} of {source.url} {what} group {group!r} has read: the broker lost its newest messages",
            remedy=truncation_remedy(shard.stream),
            shard=str(shard),
            sequence=last.sequence,
            expected_timestamp_ms=last.timestamp_ms,
            found_sequence=None if found is None else found.sequence,
            found_timestamp_ms=None if found is None else found.timestamp_ms,
            position=position,
            end=end,
        )
    return errors


def check_epochs(state: LedgerState, streams: Iterable[str], *, url: StreamUrl) -> None:
    """Refuse to continue with streams whose next epoch was accepted meanwhile.

    Raises:
        SourceRecreatedError: with the name of the epoch.
    """
    for name in streams:
        stream, epoch = split_epoch(name)
        newest = newest_epochs(state.identities, [stream])[stream]
        if split_epoch(newest)[1] > epoch:
            raise SourceRecreatedError(
                f"{url} was recreated, and accepted as {newest!r} while this run was at work on {name!r}",
                remedy="Nothing was lost; run again.",
            )


def recreations(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    identities: Mapping[str, str],
    *,
    reads_last_messages: bool = True,
) -> Mapping[str, SourceRecreatedError]:
    """For each epoch of the source that is another stream than the ledger remembers, or was cut, how that is known.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the stream holds.
        identities: of the source.
        reads_last_messages: see :func:`truncations`.
    """
    found: dict[str, SourceRecreatedError] = {}
    for name, identity in identities.items():
        known = state.identities.get(name, identity)
        if known != identity:
            found[name] = SourceRecreatedError(
                f"{source.url} is not the stream that group {group!r} has read so far as {name!r}",
                remedy=accept_remedy(name),
                ledger=known,
                found=identity,
            )
    for shard in sorted(source.recreated(state.positions)):
        found.setdefault(
            shard.stream,
            SourceRecreatedError(
                f"{shard} of {source.url} was deleted and made again since group {group!r} has read it: its entries "
                "are counted anew, and what was not read before is gone",
                remedy=accept_remedy(shard.stream),
                position=state.positions[shard],
            ),
        )
    own = {shard: extent for shard, extent in extents.items() if shard.stream not in found}
    cut = truncations(source, group, state, own, reads_last_messages=reads_last_messages)
    for shard, truncation in cut.items():
        found.setdefault(shard.stream, truncation)
    for shard, known_shard in state.shards.items():
        position = known_shard.covered.position or 0
        end = extents[shard].end + extents[shard].blocked if shard in extents else None
        if shard.stream in identities and (end is None or end < position) and position > 0:
            found.setdefault(
                shard.stream,
                SourceRecreatedError(
                    f"{source.url} ends before the position of group {group!r} in {shard}",
                    remedy=f"The stream was cut or replaced. Bring it back. {accept_remedy(shard.stream)}",
                    position=position,
                    end=end,
                ),
            )
    return found
