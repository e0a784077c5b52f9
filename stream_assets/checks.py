"""Checks of stream assets, which run after each run of the asset, even if it read nothing, or on their own.

A check fails if the table has no commit of the group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.lag import Measurement, measure
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, Sequences, by_shard, within
from stream_assets.metadata import DEAD_LETTER_COMMANDS, dead_letter_commands, dead_letter_reasons
from stream_assets.stream_to_table import StreamCheck, StreamCheckContext
from stream_consumers.display import counted
from stream_consumers.errors import (
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    RestoreTargetError,
    StreamAssetsError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import check_count, check_range


def build_lag_check(
    *,
    max_messages: int,
    name: str = "lag",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
    budget_seconds: float = 20.0,
    answer_seconds: float = 5.0,
) -> StreamCheck:
    """Build a check that the lag is small, and that no unread messages are lost. It queries the broker.

    It fails if bytes after the last message of the stream cannot be read, because they may contain messages.

    Args:
        max_messages: the largest lag that passes.
        name: the name of the check.
        severity: the severity of a failure.
        blocking: whether downstream assets of the same run wait for the check, and are skipped if it fails.
        budget_seconds: how long to look for the ends of the stream.
        answer_seconds: how long to wait for an answer of the broker; without an answer the check fails.

    Raises:
        InvalidOptionError: a number is out of range, or the severity is unknown.

    Example:
        >>> build_lag_check(max_messages=100_000).description
        'The group is at most 100000 messages behind, and no unread messages are lost.'
    """
    check_count("max_messages", max_messages, at_least=0)

    def evaluate(context: StreamCheckContext) -> dg.AssetCheckResult:
        found = _measure(context, budget_seconds, answer_seconds)
        if isinstance(found, str):
            return dg.AssetCheckResult(passed=False, description=found)
        lost = [f"{shard} {part.start} to {part.end}" for shard, part in sorted(found.lost.items())]
        return dg.AssetCheckResult(
            passed=found.total <= max_messages and not lost and found.unreadable_tail is None,
            description=found.describe(),
            metadata={
                "stream/lag": found.total,
                "stream/max_lag": max_messages,
                "stream/lost": dg.MetadataValue.json(lost),
            },
        )

    description = f"The group is at most {counted(max_messages, 'message')} behind, and no unread messages are lost."
    return StreamCheck(name, description, evaluate, blocking, severity)


def build_freshness_check(
    *,
    max_seconds: float,
    name: str = "freshness",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
    budget_seconds: float = 20.0,
    answer_seconds: float = 5.0,
) -> StreamCheck:
    """Build a check that messages do not wait while nothing is written. It queries the broker.

    A quiet stream is fresh: the check passes if there is nothing to read, however old the last batch is. Bytes after
    the last message that cannot be read count as messages that wait, because they may contain some. Replays, redrives
    and maintenance write no new messages, so they do not count as batches, and neither does a batch that a RESTORE
    removed. A run writes all messages before its checks run, so schedule this check separately, too.

    Args:
        max_seconds: the largest age of the last batch that passes while messages wait.
        name: the name of the check.
        severity: the severity of a failure.
        blocking: whether downstream assets of the same run wait for the check, and are skipped if it fails.
        budget_seconds: how long to look for the ends of the stream.
        answer_seconds: how long to wait for an answer of the broker; without an answer the check fails.

    Raises:
        InvalidOptionError: a number is out of range, or the severity is unknown.

    Example:
        >>> build_freshness_check(max_seconds=900).description
        'No messages wait, or the last batch is at most 900 seconds old.'
    """
    check_range("max_seconds", max_seconds)

    def evaluate(context: StreamCheckContext) -> dg.AssetCheckResult:
        found = _measure(context, budget_seconds, answer_seconds)
        if isinstance(found, str):
            return dg.AssetCheckResult(passed=False, description=found)
        newest = next(filter(_is_ingestion_batch, _surviving(context)), None)
        written_ms = newest.timestamp_ms if newest else None
        age = None if written_ms is None else max(0.0, time.time() - written_ms / 1000)
        waits = found.total or found.unreadable_tail is not None
        written = "the time of the last batch is not in the log"
        if age is not None:
            written = f"the last batch was written {age:.0f} s ago"
        return dg.AssetCheckResult(
            passed=not waits or (age is not None and age <= max_seconds),
            description=f"{written}; {found.describe()}",
            metadata={
                "stream/lag": found.total,
                "stream/max_seconds": float(max_seconds),
                **({} if age is None else {"stream/seconds_since_batch": round(age, 1)}),
            },
        )

    description = f"No messages wait, or the last batch is at most {max_seconds:g} seconds old."
    return StreamCheck(name, description, evaluate, blocking, severity)


def build_dead_letter_ratio_check(
    *,
    max_ratio: float = 0.01,
    batches: int = 20,
    name: str = "dead_letter_ratio",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
) -> StreamCheck:
    """Build a check that few messages of the newest batches are dead letters.

    It reads only the Delta log. If rows were replaced, it also reads the dead-letter table, because dead letters that
    were redriven or replayed do not count any more.

    Args:
        max_ratio: the largest ratio of dead letters to messages, from 0 to 1.
        batches: how many of the newest batches count. Each message counts once, in the newest batch that has it.
        name: the name of the check.
        severity: the severity of a failure.
        blocking: whether downstream assets of the same run wait for the check, and are skipped if it fails.

    Raises:
        InvalidOptionError: a number is out of range, or the severity is unknown.

    Example:
        >>> build_dead_letter_ratio_check(max_ratio=0.05).description
        'At most 5 % of the messages of the newest 20 batches are dead letters.'
    """
    check_range("max_ratio", max_ratio)
    check_count("batches", batches)
    if max_ratio > 1:
        raise InvalidOptionError(f"max_ratio={max_ratio:g} is more than 1", remedy="Use a number from 0 to 1.")

    def evaluate(context: StreamCheckContext) -> dg.AssetCheckResult:
        newest = _newest_messages(context, batches)
        dead, messages = _count_dead_letters(context, newest), newest.count
        ratio = dead / messages if messages else 0.0
        nothing = _why_no_commit(context, context.state)
        return dg.AssetCheckResult(
            passed=ratio <= max_ratio and not nothing,
            description=nothing
            or f"{dead} of {counted(messages, 'message')} in the newest "
            f"{counted(len(newest.entries), 'batch', 'batches')} are dead letters",
            metadata={
                "stream/dead_letter_ratio": ratio,
                "stream/max_dead_letter_ratio": float(max_ratio),
                "stream/dead_letters": dead,
                "stream/messages": messages,
                "stream/dead_letter_table": context.stream.ingestion.dead_letters().path,
            },
        )

    description = f"At most {100 * max_ratio:g} % of the messages of the newest {batches} batches are dead letters."
    return StreamCheck(name, description, evaluate, blocking, severity)


def build_continuity_check(
    *,
    name: str = "no_gaps",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
) -> StreamCheck:
    """Build a check that the batches cover each shard without a gap. It reads only the Delta log.

    Args:
        name: the name of the check.
        severity: the severity of a failure.
        blocking: whether downstream assets of the same run wait for the check, and are skipped if it fails.

    Raises:
        InvalidOptionError: the severity is unknown.

    Example:
        >>> build_continuity_check(blocking=True).name
        'no_gaps'
    """

    def evaluate(context: StreamCheckContext) -> dg.AssetCheckResult:
        shards = context.state.shards
        broken = {str(shard): str(s.covered) for shard, s in shards.items() if len(s.covered.ranges) > 1 or s.redo}
        nothing = _why_no_commit(context, context.state)
        return dg.AssetCheckResult(
            passed=not broken and not nothing,
            description=nothing,
            metadata={"stream/shards": len(shards), "stream/gaps": dg.MetadataValue.json(broken)},
        )

    return StreamCheck(name, "The batches cover each shard without a gap.", evaluate, blocking, severity)


def _check_dead_letters(context: StreamCheckContext) -> dg.AssetCheckResult:
    dead_letters = context.stream.ingestion.dead_letters()
    totals = context.state.totals
    dead = totals.dead
    if totals.replaced:
        # Dead letters that were dismissed, or whose range was replaced since, are not open.
        dead = sum(part.num_rows for part in dead_letters.open_places(context.ledger))
    lost = [f"{shard} {part.start} to {part.end}" for shard, parts in sorted(totals.lost.items()) for part in parts]
    nothing = _why_no_commit(context, context.state)
    problems = []
    if dead:
        problems.append(f"dead letters: {dead}, in {dead_letters.path}")
    if lost:
        problems.append(f"ranges that were gone before they were read: {len(lost)}")
    metadata: dict[str, Any] = {
        "stream/dead_letters": dead,
        "stream/lost": dg.MetadataValue.json(lost),
        "stream/dead_letter_table": dead_letters.path,
    }
    if dead or lost:
        ingestion, stream = context.stream.ingestion, context.stream
        reasons = dead_letter_reasons(ingestion, payloads=stream.errors.dead_letter_payloads)
        metadata |= {"stream/dead_letter_reasons": reasons} if reasons else {}
        job = None if stream.is_claimed else stream.redrive_job_name
        metadata[DEAD_LETTER_COMMANDS] = dead_letter_commands(ingestion.table, ingestion.group, redrive_job=job)
    return dg.AssetCheckResult(
        passed=dead == 0 and not lost and not nothing,
        description=nothing or "; ".join(problems) or None,
        metadata=metadata,
    )


def _surviving(context: StreamCheckContext) -> Iterator[Commit]:
    """Yield the commits of the group whose rows are in the table, the newest first, as far as the log is readable."""
    # The log is not readable before a RESTORE to an unknown version.
    with suppress(LedgerUnreadableError, LedgerTruncatedError, RestoreTargetError):
        yield from context.ledger.surviving(context.state.version)


def _is_ingestion_batch(commit: Commit) -> bool:
    """Return whether ingestion wrote the batch; a batch that only moves the group or replaces rows does not count."""
    entry = commit.entry
    return entry is not None and entry.kind == "batch" and not (entry.skipped or entry.until)


@dataclass(frozen=True, slots=True)
class _NewestMessages:
    """The number of messages in the newest batches, and their ranges; claimed entries have no range."""

    entries: Sequence[LedgerEntry]
    count: int
    places: Mapping[Shard, Intervals]


def _newest_messages(context: StreamCheckContext, batches: int) -> _NewestMessages:
    """Find the newest batches, and count each message once."""
    entries: list[LedgerEntry] = []
    places: dict[Shard, Intervals] = {}
    messages = 0.0
    for commit in _surviving(context):
        entry = commit.entry
        if entry is None or entry.kind not in ("batch", "replay"):
            continue
        # A redrive writes rows of dead letters of other batches, and a replay that appends writes copies.
        if entry.places or entry.adds_copies:
            continue
        if len(entries) == batches:
            break
        own = {shard: parts - places.get(shard, Intervals()) for shard, parts in entry.affected.items()}
        size, left = (sum(parts.size for parts in found.values()) for found in (entry.affected, own))
        if size and not left:
            continue
        entries.append(entry)
        messages += (entry.messages + entry.dead) * (left / size if size else 1)
        places.update({shard: places.get(shard, Intervals()) | parts for shard, parts in own.items()})
    return _NewestMessages(entries, round(messages), places)


def _count_dead_letters(context: StreamCheckContext, newest: _NewestMessages) -> int:
    """Count the dead letters among these messages; those that were redriven, replayed or dismissed do not count."""
    if not context.state.totals.replaced:
        return sum(entry.dead for entry in newest.entries)
    letters, ledger = context.stream.ingestion.dead_letters(), context.ledger
    batches = pa.array([entry.bid for entry in newest.entries], pa.string())
    claimed = pa.array([entry.bid for entry in newest.entries if entry.claims], pa.string())
    found: dict[Shard, list[Sequences]] = {}
    of_batches = 0
    # The record of a lost range has neither, and is not a message.
    is_message = "_sequence IS NOT NULL OR payload IS NOT NULL"
    left_out, columns = letters.not_counting(ledger), [*ROW_PLACE, "_batch"]
    for part in letters.scan(ledger.group, left_out, columns, where=is_message, is_open=True):
        # A dead letter without framing has no sequence, and claimed entries lie between those of other members.
        is_placed = pc.and_(part.column("_sequence").is_valid(), pc.invert(pc.is_in(part.column("_batch"), claimed)))
        is_of_batch = pc.is_in(part.column("_batch"), batches)
        of_batches += pc.and_(pc.invert(is_placed), is_of_batch).true_count
        for shard, sequences in by_shard(part.filter(is_placed).to_pandas(), *ROW_PLACE):
            found.setdefault(shard, []).append(within(sequences, newest.places.get(shard, Intervals())))
    return of_batches + sum(len(np.unique(np.concatenate(own))) for own in found.values())


def _measure(context: StreamCheckContext, budget_seconds: float, answer_seconds: float) -> Measurement | str:
    """Measure the lag, or return the reason why it cannot be measured."""
    declared = context.stream
    ingestion = declared.ingestion
    try:
        found = measure(declared.stream, ingestion, budget_seconds=budget_seconds, answer_seconds=answer_seconds)
    except StreamAssetsError as error:
        # The check fails, not the run before it, which has written its batches.
        return str(error)
    return _why_no_commit(context, found.state) or found


def _why_no_commit(context: StreamCheckContext, state: LedgerState) -> str | None:
    """Return why a table without a commit of the group cannot be checked; ``None`` if it has one."""
    if state.newest is not None:
        return None
    table, group = context.stream.ingestion.table, context.stream.ingestion.group
    what = f"table {table} does not exist" if state.version < 0 else f"group {group!r} has written nothing into {table}"
    return f"{what}, so nothing can be checked. Materialize the asset, or correct its table and group."


NO_DEAD_LETTERS = StreamCheck(
    "no_dead_letters",
    "No message became a dead letter, and no message was lost.",
    _check_dead_letters,
    severity=dg.AssetCheckSeverity.WARN,
)
NO_GAPS = build_continuity_check()
DEFAULT_CHECKS = (NO_DEAD_LETTERS, NO_GAPS, build_dead_letter_ratio_check())
"""The default checks, which do not query the broker."""
