"""Jobs on dead letters: a redrive decodes them again, and a dismissal marks that they stay as they are.

Both follow the commit order of :mod:`spark_jobs.batches`, like a replay, with these differences:

 1. They read the dead-letter table, so that the stream need not hold the messages any more. But a redrive into a table
    with a row per key, in the order of positions, needs all later messages, which are merged again after its own.
 2. A batch replaces exactly the places of its dead letters, in the transaction sequence of ingestion, as a replay does.
    So rows between the places stay, and if two jobs found the same dead letters, one of them has to read them again.
 3. No progress is stored. The dead letters that still count and are not dismissed are left to do, so that a job that
    was killed is simply run again.

A redrive replaces the places of the dead letters that today's decoder can turn into rows. The commit of these rows is
what makes the dead letters no longer count. The other dead letters stay as they are.

A dismissal appends copies of its dead letters to the dead-letter table, with who dismissed them and why, and commits no
rows. Then the copies count in place of the originals, except where another batch has replaced the originals since the
plan. A dead letter without a sequence has no place, so that its copy names the batch of the original. A RESTORE undoes
a dismissal like any other commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, PlanAgain, WrittenBatch, ignore_steps
from spark_jobs.batches.job import BatchJob
from spark_jobs.batches.read_and_commit import commit_recorded, refused_messages
from spark_jobs.batches.replay import check_replay
from spark_jobs.batches.source_checks import check_keys, check_source, not_held, redoes_rest
from spark_jobs.batches.target_table import no_rows
from spark_jobs.dead_letters.corrections import (
    MESSAGE_PLACE,
    Corrections,
    StoredSplit,
    corrected_messages,
    with_payloads,
)
from spark_jobs.dead_letters.reader import (
    MAX_DEAD_LETTER_BYTES,
    MAX_DEAD_LETTERS,
    OTHER_REASONS,
    DeadLetterFilter,
    DeadLetterReader,
    DeadLetters,
    SequencesByShard,
    Span,
    at_places,
    each_place,
    first_places,
    kind_of_reason,
    messages_of,
    without_first,
)
from spark_jobs.dead_letters.table import COPIED_COLUMNS
from spark_jobs.ledger.entries import REPLAYER, PlannedFields
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, by_shard, sequences_of, within
from stream_consumers.batches import BatchPlan, Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, OnBadRows, check_count
from stream_consumers.urls import StreamUrl

MAX_REDRIVEN_MESSAGES = 10_000
"""The most dead letters of a redriven batch: each may add a term to the condition of the replace."""
MAX_REDRIVEN_BYTES = 16 * 1024 * 1024
"""The most payload bytes of a redriven batch: they go to Spark with the plan."""
MAX_REFUSAL_KINDS = 50
"""The most kinds of reasons that are counted separately."""
NOT_OPEN = "no open dead letter and no correction has its place: none counts, or it was dismissed"
REST_GONE = "the stream may no longer hold all later messages, of which one may have deleted its key"
NO_SEQUENCE = "it has no sequence, so its place in the stream is unknown"
_places = partial(each_place, names=MESSAGE_PLACE)


@dataclass(frozen=True, slots=True)
class Redrive:
    """The settings of a redrive.

    Args:
        start: the first dead letters, by sequence or by the time of the message; without it, all of them.
        stop: the ones to stop before.
        limit: how many to try at most, in the order of their shards and sequences.
        corrections: only these dead letters, and messages that were corrected before, are tried, with these payloads.

    Raises:
        InvalidOptionError: the limit is not a positive number.

    Example:
        >>> Redrive(start=Bound.parse("2026-11-01T00:00:00Z"), limit=1000).span().start_ms
        1793491200000
    """

    start: Bound | None = None
    stop: Bound | None = None
    limit: int | None = None
    corrections: Corrections | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_count("limit", self.limit)

    def span(self) -> Span:
        """Return its bounds as a span; see :func:`dead_letter_span`.

        Raises:
            InvalidOptionError: the bounds select no dead letters.
        """
        return dead_letter_span(self.start, self.stop)


def dead_letter_span(start: Bound | None, stop: Bound | None) -> Span:
    """Return the span of the dead letters between two bounds, each of which may be missing.

    Raises:
        InvalidOptionError: it begins at the end of the stream, or stops before it begins.

    Example:
        >>> dead_letter_span(None, Bound.parse("7")).stop_sequence
        7
    """
    start, stop = start or Bound(), stop or Bound()
    if start.edge is AutoStreamReset.LATEST or stop.edge is AutoStreamReset.EARLIEST:
        raise InvalidOptionError(
            "a start at latest, or a stop at earliest, selects no dead letters", remedy="Leave that bound out."
        )
    both = [
        (start.timestamp_ms, stop.timestamp_ms),
        (start.sequence, stop.sequence),
        *((first, stop.sequences.get(shard)) for shard, first in start.sequences.items()),
    ]
    if any(first is not None and end is not None and end < first for first, end in both):
        raise InvalidOptionError(
            f"it would stop at {stop}, before its start at {start}", remedy="Give a later stop, or an earlier start."
        )
    return Span(
        start_ms=start.timestamp_ms,
        stop_ms=stop.timestamp_ms,
        start=start.sequences or None,
        stop=stop.sequences,
        start_sequence=start.sequence,
        stop_sequence=stop.sequence,
    )


@dataclass(slots=True)
class Refusal:
    """The dead letters that stay as they are for one kind of reason.

    Args:
        count: how many.
        first: the place of one of them, as ``orders/0=17``; empty if it has none.
    """

    count: int = 0
    first: str = ""


@dataclass(slots=True)
class Outcome:
    """The result for the dead letters that were tried.

    Args:
        decoded: how many become rows: today's decoder can decode them, and today's transform does not reject them.
        refused: the others, by the kind of today's reason.
    """

    decoded: int = 0
    refused: dict[str, Refusal] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        """How many stay dead letters."""
        return sum(refusal.count for refusal in self.refused.values())

    def refuse(self, reason: str, *, count: int = 1, first: str = "") -> None:
        """Count dead letters that stay as they are. Beyond ``MAX_REFUSAL_KINDS`` kinds, others are one kind."""
        kind = kind_of_reason(reason)
        known = kind if kind in self.refused or len(self.refused) < MAX_REFUSAL_KINDS else OTHER_REASONS
        self.refused.setdefault(known, Refusal(first=first)).count += count

    def add(self, other: Outcome) -> None:
        """Add the result for other dead letters."""
        self.decoded += other.decoded
        for reason, refusal in other.refused.items():
            self.refuse(reason, count=refusal.count, first=refusal.first)


@dataclass(frozen=True, slots=True)
class _Try:
    """The result of decoding some dead letters.

    Args:
        count: how many were tried.
        messages: those that can be decoded, as the stream had them.
        places: the places of these messages.
        outcome: the result for all that were tried.
        corrected: the records of new corrections, for the dead-letter table.
    """

    count: int
    messages: pa.Table
    places: Mapping[Shard, Intervals]
    outcome: Outcome
    corrected: pa.Table | None = None


class RedriveJob(BatchJob):
    """Redrives into a table, batch by batch, in the order of the shards and sequences of the dead letters.

    It lists the dead letters once, at the first plan.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group and table; its decoder and its transform make the rows.
        wanted: the settings of the redrive.
        url: the stream of the dead letters. It is opened only if the table has a row per key in the order of positions.
        client: the configuration of the client that opens it.
        observer: called at each step, for progress bars and for tests that kill the process there.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
        InvalidOptionError: the bounds select no dead letters.
    """

    asks_others_to_yield = True

    def __init__(
        self,
        spark: SparkSession,
        ingestion: Ingestion,
        wanted: Redrive,
        *,
        url: StreamUrl,
        client: ClientConfig | None = None,
        observer: Observer = ignore_steps,
    ) -> None:
        # What cannot become a row stays a dead letter, also where a bad row ends a run of ingestion.
        errors = replace(ingestion.errors, on_bad_rows=OnBadRows.DEAD_LETTER)
        own = replace(ingestion, member=REPLAYER, shard=None, errors=errors)
        super().__init__(spark, own, url=url, observer=observer)
        self._wanted, self._client = wanted, client
        self._reader = DeadLetterReader(own.dead_letters(), own.ledger(), url.required_streams(), wanted.span())
        self._left: SequencesByShard | None = None
        self.outcome = Outcome()
        """The result for the dead letters so far."""

    def preview(self) -> Outcome:
        """Try the dead letters that are left, and return the result; nothing is written.

        Raises:
            StreamNotFoundError, UnsupportedError: see :func:`spark_jobs.batches.replay.check_replay`.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        self._checked_state()
        while (tried := self._try_next()) is not None:
            self._done_with(tried)
        return self.outcome

    def plan(self) -> Batch | None:
        """Return the next batch; ``None`` if every dead letter was tried.

        Raises:
            StreamNotFoundError, UnsupportedError: see :func:`spark_jobs.batches.replay.check_replay`.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        state = self._checked_state()
        checked = self.clean_up_dead_letters(state)
        while (tried := self._try_next()) is not None:
            if not tried.places:
                self._done_with(tried)
                continue
            fields = PlannedFields(places=tried.places, mode=self.ingestion.write_mode(again=True))
            plan = _plan_of(tried.messages)
            return Batch("replay", checked, plan, fields, dead_letters=tried.corrected, job_data=tried)
        self.clean_up_dead_letters(state, again=True)
        return None

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Return how many dead letters are left to try; nothing is committed to the broker."""
        self._done_with(written.batch.job_data)
        return {shard: len(own) for shard, own in self._places_left().items()}

    def is_still_next(self, batch: Batch, state: LedgerState) -> bool:
        """Return whether all dead letters of the batch still count."""
        found, _ = self._reader.places()
        places: Mapping[Shard, Intervals] = batch.job_data.places
        counts = {shard: len(within(found[shard], parts)) for shard, parts in places.items() if shard in found}
        return counts == {shard: parts.size for shard, parts in places.items()}

    def _checked_state(self) -> LedgerState:
        state = self.ledger.read()
        check_replay(state, self.ingestion)
        check_keys(state, self.ingestion)
        self.target.columns.check(state)
        return state

    def _places_left(self) -> SequencesByShard:
        """Return the places of the dead letters that are left to try."""
        if self._left is None:
            found, unplaced = self._reader.places()
            if self._wanted.corrections is not None:
                found, unplaced = self._corrected_only(found, self._wanted.corrections), 0
            self._left = found if self._wanted.limit is None else first_places(found, self._wanted.limit)
            if unplaced:
                self.outcome.refuse(NO_SEQUENCE, count=unplaced)
        return self._left

    def _corrected_only(self, found: SequencesByShard, corrections: Corrections) -> SequencesByShard:
        again = sequences_of(self._reader.selected(_changed(self._corrections(), corrections)).to_batches())
        known = {s: np.concatenate([own[s] for own in (found, again) if s in own]) for s in sorted({*found, *again})}
        own = {shard: [n for s, n in corrections.payloads if s == shard] for shard in known}
        kept = {shard: np.intersect1d(places, own[shard]) for shard, places in known.items()}
        left = corrections.payloads.keys() - {(shard, n) for shard, places in kept.items() for n in places.tolist()}
        for shard, sequence in sorted(left):
            self.outcome.refuse(NOT_OPEN, first=f"{shard}={sequence}")
        return {shard: places for shard, places in kept.items() if len(places)}

    def _corrections(self) -> pa.Table:
        return self.target.dead_letters.corrections(self.ledger)

    def _try_next(self) -> _Try | None:
        """Decode the next dead letters, the same ones until :meth:`_done_with`; ``None`` if none are left."""
        most = min(MAX_REDRIVEN_MESSAGES, self.ingestion.limits.max_records)
        max_bytes = min(MAX_REDRIVEN_BYTES, self.ingestion.limits.max_bytes)
        while places := first_places(self._places_left(), most):
            found = self._reader.dead_letters(places, max_bytes=max_bytes)
            count = sum(map(len, places.values()))
            if found is not None:
                return self._decode(found, places, count)
            most = count // 2
        return None

    def _done_with(self, tried: _Try) -> None:
        self._left = without_first(self._places_left(), tried.count)
        self.outcome.add(tried.outcome)

    def _decode(self, found: pa.Table, places: SequencesByShard, count: int) -> _Try:
        outcome, records, wanted = Outcome(), self._corrections(), self._wanted.corrections
        if wanted is not None:
            # A message that was corrected otherwise before has no open dead letter. The record has the original.
            before = _changed(records, wanted).select(found.column_names)
            found = at_places(pa.concat_tables([found, before]), places)
            records = _records(found, wanted)
        messages = messages_of(found)
        if not messages.num_rows:
            # Another run has redriven, replayed or dismissed them since this job listed them.
            return _Try(count, messages, {}, outcome)
        if records.num_rows:
            corrected = corrected_messages(records)
            messages = pa.Table.from_batches(with_payloads(block, corrected) for block in messages.to_batches())
        decoded = pa.Table.from_batches(self.target.columns.source.decode(messages.to_batches()))
        read = _kept(messages, decoded.column("_error"), outcome)
        rejected = refused_messages(self.target, _plan_of(read)) if read.num_rows else {}
        if rejected:
            reasons = [rejected.get((Shard(stream, number), sequence)) for stream, number, sequence in _places(read)]
            read = _kept(read, pa.chunked_array([reasons], pa.string()), outcome)
        if read.num_rows and redoes_rest(self.ingestion):
            read = self._followed(read, outcome)
        outcome.decoded = read.num_rows
        made = None if wanted is None else at_places(records, sequences_of(read.to_batches(), MESSAGE_PLACE))
        return _Try(count, read, intervals_of(read, MESSAGE_PLACE), outcome, made)

    def _followed(self, messages: pa.Table, outcome: Outcome) -> pa.Table:
        """Leave out messages if the stream may lack later ones, which have to be merged again after them."""
        state, places = self.ledger.read(), [(Shard(s, number), at) for s, number, at in _places(messages)]
        starts = {shard: min(at for s, at in places if s == shard) + 1 for shard in {s for s, _ in places}}
        with StreamSource(self.target.url, client=self._client).open() as opened:
            source = self.ingestion.in_epochs(opened, self.ledger)
            extents = source.extents()
            check_source(source, self.ingestion.group, state, extents)
            ranges = {shard: Range(start, start) for shard, start in starts.items()}
            gone = not_held(source, self.ingestion, state, extents, ranges)
        reasons = [REST_GONE if shard in gone and at + 1 < gone[shard].end else None for shard, at in places]
        return _kept(messages, pa.chunked_array([reasons], pa.string()), outcome)


def _plan_of(messages: pa.Table) -> BatchPlan:
    return BatchPlan({}, [StoredSplit.of(messages)], messages.num_rows)


def intervals_of(table: pa.Table, place: Sequence[str] = ROW_PLACE) -> Mapping[Shard, Intervals]:
    """Return the places of rows, by the columns that have the stream, the shard and the sequence."""
    return {
        shard: Intervals.of(*((sequence, sequence + 1) for sequence in own.tolist()))
        for shard, own in by_shard(table.select(list(place)).to_pandas(), *place)
    }


def _changed(records: pa.Table, corrections: Corrections) -> pa.Table:
    """Return the records of messages to which the corrections give another payload."""
    payloads = _payloads(records, corrections)
    known = records.column("correction").to_pylist()
    is_changed = [new not in (None, old) for new, old in zip(payloads, known, strict=True)]
    return records.filter(pa.array(is_changed, pa.bool_()))


def _payloads(dead_letters: pa.Table, corrections: Corrections) -> list[bytes | None]:
    places = each_place(dead_letters)
    return [corrections.payloads.get((Shard(stream, number), sequence)) for stream, number, sequence in places]


def _records(dead_letters: pa.Table, corrections: Corrections) -> pa.Table:
    """Return the records of the corrections of these dead letters, as the dead-letter table stores them."""
    payloads = _payloads(dead_letters, corrections)
    for name, value in (("corrected_by", corrections.by), ("note", corrections.note)):
        dead_letters = dead_letters.append_column(name, pa.array([value] * len(payloads), pa.string()))
    return dead_letters.append_column("correction", pa.array(payloads, pa.binary()))


def _kept(messages: pa.Table, errors: pa.ChunkedArray[Any], outcome: Outcome) -> pa.Table:
    """Return the messages without an error, and count the others in the outcome."""
    places = _places(messages.filter(errors.is_valid()))
    for reason, (stream, number, sequence) in zip(errors.drop_null().to_pylist(), places, strict=True):
        outcome.refuse(str(reason), first=f"{Shard(stream, number)}={sequence}")
    return messages.filter(errors.is_null())


@dataclass(frozen=True, slots=True)
class Dismissal:
    """The author and the reason of a dismissal.

    Args:
        by: a person, or a run.
        note: the reason.

    Raises:
        InvalidOptionError: one of them is empty.
    """

    by: str
    note: str

    def __post_init__(self) -> None:
        for name, value in (("by", self.by), ("note", self.note)):
            if not value.strip():
                raise InvalidOptionError(f"{name} of a dismissal must not be empty", remedy=f"Use --{name} TEXT.")


class DismissJob(BatchJob):
    """Dismisses dead letters that count, some thousand in each commit.

    Args:
        spark: a session that can write Delta tables.
        ingestion: the group, the table, and how long to retry.
        wanted: selects the dead letters.
        dismissal: the author and the reason.
        limit: how many at most.
        observer: called at each step.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        ingestion: Ingestion,
        wanted: DeadLetterFilter,
        dismissal: Dismissal,
        *,
        limit: int | None = None,
        observer: Observer = ignore_steps,
    ) -> None:
        own = replace(ingestion, member=REPLAYER, shard=None)
        # No stream is opened; the URL is only for error messages.
        super().__init__(spark, own, url=StreamUrl("file", (ingestion.table,), ()), observer=observer)
        self._wanted = wanted
        self._dismissal = dismissal
        self._left = limit

    def plan(self) -> Batch | None:
        """Plan to dismiss the next dead letters; ``None`` if there are no more.

        Raises:
            StreamNotFoundError, UnsupportedError: see :func:`spark_jobs.batches.replay.check_replay`.
        """
        # Read the ledger before the dead letters: another run that changes them in between takes our number.
        state = self.ledger.read()
        check_replay(state, self.ingestion)
        state = self.clean_up_dead_letters(state)
        most = MAX_DEAD_LETTERS if self._left is None else min(self._left, MAX_DEAD_LETTERS)
        found = _open(self.ingestion, self._wanted, most) if most > 0 else None
        if found is None or not found.num_rows:
            return None
        batches: Any = pc.if_else(found.column("_sequence").is_valid(), None, found.column("_batch"))
        copies = found.select(list(COPIED_COLUMNS)).append_column("dismisses", batches)
        for name, value in (("dismissed_by", self._dismissal.by), ("note", self._dismissal.note)):
            copies = copies.append_column(name, pa.array([value] * copies.num_rows, pa.string()))
        places = intervals_of(found.filter(found.column("_sequence").is_valid()))
        fields = PlannedFields(places=places, mode="dismiss", dead=found.num_rows)
        return Batch("dismiss", state, fields=fields, dead_letters=copies)

    def write(self, batch: Batch) -> WrittenBatch | PlanAgain:
        """Write the copies of the dead letters, then a commit without rows."""
        target, entry = self.target, self.target.entry(batch)
        # If another run has replaced some of the places since the plan, our copies do not count there.
        written = commit_recorded(target, batch, entry, no_rows(target.spark, self.ledger), {})
        if isinstance(written, PlanAgain):
            self.count_lost_race()
            self.yields.ask()
        return written

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Count the dismissed dead letters; nothing is committed to the broker."""
        if self._left is not None:
            self._left -= written.entry.dead
        return {}


def _open(ingestion: Ingestion, wanted: DeadLetterFilter, most: int) -> pa.Table:
    """Return the first open dead letters that are selected, one for each place, and those without a place."""
    reader = DeadLetters(ingestion.table, group=ingestion.group, storage_options=ingestion.storage_options)
    parts = [reader.schema().empty_table()]
    for part in reader.tables(replace(wanted, includes_uncounted=False, is_dismissed=False), limit=most):
        frame = part.select(list(ROW_PLACE)).to_pandas()
        is_first = part.column("_sequence").is_null().to_numpy() | ~frame.duplicated().to_numpy()
        parts.append(part.filter(pa.array(is_first)))
        if sum(part.nbytes for part in parts) > MAX_DEAD_LETTER_BYTES:
            break
    return pa.concat_tables(parts)
