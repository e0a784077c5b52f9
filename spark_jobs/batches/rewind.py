"""Moves the position of a group, backwards or forwards, by one empty commit in each of its transaction sequences.

Backwards: the commit replaces nothing itself, but says up to where the batches that follow replace
(``until``); the ledger remembers what is left of that across crashes. Forwards: what is skipped counts as covered, and
the ledger says that it was skipped. A batch that is on its way loses its number to the commit and is planned again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion, check_claims, check_sharing, check_source
from spark_jobs.batches.ledger_recovery import commit_positions, keep, surviving_state
from spark_jobs.batches.replay import begun, check_replay
from spark_jobs.batches.retries import Retries, result_of
from spark_jobs.batches.writer import commit_empty
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import BatchSource, Extent, Range
from stream_consumers.errors import GroupActiveError, InvalidOptionError, LedgerTruncatedError
from stream_consumers.messages import Shard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Move:
    """What a rewind does to one shard.

    Args:
        shard: the shard.
        position: the next sequence to write now.
        covered: the end of the last that is in the table; after a RESTORE something before it may be missing.
        to: the new position.
    """

    shard: Shard
    position: int
    covered: int
    to: int

    @property
    def replaced(self) -> Range:
        """What is written again, in place of what is there."""
        return Range(min(self.to, self.covered), self.covered)

    @property
    def skipped(self) -> Range:
        """What is never read."""
        return Range(self.covered, max(self.to, self.covered))


def read_or_guess(source: BatchSource, ingestion: Ingestion) -> tuple[LedgerState, bool]:
    """The ledger; where its log was cleaned, what the rows in the table show, and whether it is that."""
    ledger = ingestion.ledger()
    source = ingestion.in_epochs(source, ledger)
    try:
        return ledger.read(), False
    except LedgerTruncatedError:
        return surviving_state(ingestion, source), True


def plan_moves(source: BatchSource, ingestion: Ingestion, to: Bound, *, state: LedgerState) -> list[Move]:
    """What :func:`rewind` would do, shard by shard; those that stay where they are are left out.

    Raises:
        StreamNotFoundError: the group has written nothing.
        UnsupportedError: the members of the group claim entries one by one.
        InvalidOptionError: the stream does not hold the place, or it lies behind what is still to be replaced; or
            another group writes the stream into the table.
    """
    check_replay(state, ingestion)
    check_sharing(state, ingestion)
    source = ingestion.in_epochs(source)
    extents = source.extents()
    check_source(source, ingestion.group, state, extents)
    moves = []
    for shard, sequence in sorted(to.resolve(source, extents).items()):
        move = _move(shard, sequence, state.shards.get(shard, ShardState()), extents[shard])
        if move.to != move.position:
            moves.append(move)
    check_claims(ingestion, state, {move.shard.stream for move in moves}, url=source.url)
    return moves


def _move(shard: Shard, to: int, known: ShardState, extent: Extent) -> Move:
    # A shard that was never read begins at its first message.
    end = known.covered.ranges[-1].end if known.covered else extent.start
    position = end if known.position is None else known.position
    if to > position and position < end:
        raise InvalidOptionError(
            f"{shard} cannot be moved forwards to {to}: the rows from {position} on are still to be written again",
            remedy="Ingest first; or, to take a rewind back, RESTORE the table to the version before it.",
        )
    return Move(shard, position, end, to)


def rewind(
    spark: SparkSession,
    source: BatchSource,
    ingestion: Ingestion,
    to: Bound,
    *,
    replay_id: str = "",
    on_wait: Callable[[str], object] = _log.warning,
) -> list[Move]:
    """Move the group's position; the next run continues there.

    What fails for a reason that may be gone soon is tried again for ``ingestion.retry_seconds``.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: group and table.
        to: the new position.
        replay_id: a rewind with the id of one that is in the ledger does nothing.
        on_wait: gets the reason of each wait.

    Returns:
        What was moved.

    A group whose log was cleaned so far that its position is unknown is set anew; see
    :mod:`spark_jobs.batches.ledger_recovery`.

    Raises:
        StreamNotFoundError, UnsupportedError, InvalidOptionError: see :func:`plan_moves`.
        WriteError: Spark failed; run it again.
    """
    rewind_id = replay_id or uuid.uuid4().hex
    moved: list[Move] = []

    def move() -> None:
        for one in _move_shards(spark, source, ingestion, to, rewind_id):
            moved.append(one)
        if moved:
            _tell_broker(ingestion.in_epochs(source), ingestion)

    result_of(Retries(ingestion.retry_seconds).call(move), on_wait)
    return moved


def _move_shards(
    spark: SparkSession, source: BatchSource, ingestion: Ingestion, to: Bound, rewind_id: str
) -> Iterator[Move]:
    """What was moved, when it is in the ledger; what was moved under this id before stays as it is."""
    source = ingestion.in_epochs(source)
    ledger = ingestion.ledger()
    state, is_guess = read_or_guess(source, ingestion)
    if is_guess:
        keep(spark, source, ingestion, state)
    known = begun(ledger, rewind_id, kind="batch")
    done = known.done.keys() if known else ()
    moves = [m for m in plan_moves(source, ingestion, to, state=ledger.read()) if m.shard not in done]
    for own, shards in ingestion.by_sequence(move.shard for move in moves):

        def fields(state: LedgerState, shards: Set[Shard] = shards) -> Mapping[str, object] | None:
            left = [m for m in plan_moves(source, ingestion, to, state=state) if m.shard in shards]
            skipped = {move.shard: move.skipped for move in left if move.to > move.covered}
            seen = {
                "last_messages": source.last_messages(skipped),
                "hint": source.hint({shard: part.end for shard, part in skipped.items()}, state.hint),
            }
            return _fields(left) | seen | {"replay": rewind_id, "begins": not done} if left else None

        commit_empty(spark, own, "batch", fields)
        yield from (move for move in moves if move.shard in shards)


def _fields(moves: list[Move]) -> dict[str, object]:
    back = [move for move in moves if move.to < move.covered]
    ahead = [move for move in moves if move.to > move.covered]
    return {
        "mode": "replace",
        "ranges": {m.shard: Range(m.to, m.to) for m in back} | {m.shard: m.skipped for m in ahead},
        "until": {m.shard: m.covered for m in back},
        "skipped": {m.shard: m.skipped for m in ahead},
    }


def _tell_broker(source: BatchSource, ingestion: Ingestion) -> None:
    streams = source.identities()
    for own, _ in ingestion.by_sequence(ingestion.ledger().read().positions):
        try:
            commit_positions(source, own, own.ledger().read(), streams)
        except GroupActiveError as error:
            _log.warning("the ledger is moved, but the broker's position is not: %s", error)
            return
