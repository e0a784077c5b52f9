"""Batches of entries that are claimed one by one, where members share a Redis group.

Each batch attempt has a consumer name of its own, ``<member>/<number>/<batch id>``, and the ledger tells what became of
it: open (the number may still be written), written (it is in the table), dead (it never will be). One batch:

 1. names        what names of others hold that nobody touched: acknowledge the written, fence the open ones
 2. loss         entries that are gone unread are recorded, once, on the transaction sequence of their shard
 3. claim        entries of dead names and new ones into a new name; after a lost reply the name is given up
 4. write        dead letters, rows, the look into the log; a heartbeat keeps the claim meanwhile
 5. acknowledge  only now
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingest import LOOK_SECONDS
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, check_epochs, check_sharing, ignore_steps
from spark_jobs.batches.job import BatchJob
from spark_jobs.batches.pace import Pace
from spark_jobs.batches.writer import OutdatedError, Written, commit_empty
from spark_jobs.claims.losses import ClaimLosses, OpenBatch, check_restored
from spark_jobs.claims.status import ClaimStatus, ClaimStatuses
from spark_jobs.ledger.entries import ClaimedRange
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.session import check_served
from stream_consumers.batches import fair_shares
from stream_consumers.errors import BrokerUnavailableError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.redis.claim_name import ClaimName
from stream_consumers.redis.claims import ClaimedEntries, Heartbeat, RedisClaims
from stream_consumers.redis.group import PendingEntry
from stream_consumers.redis.ids import to_sequence

MAX_GIVEN_UP = 5
# The ids of all entries of a batch are held in memory, and each is claimed again by the heartbeat.
MOST_CLAIMED = 500_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abandoned:
    """An entry that a dead name or an idle client of another kind holds."""

    shard: Shard
    name: ClaimName | bytes
    entry: PendingEntry


class ClaimJob(BatchJob):
    """One member of a group that shares by claiming entries.

    Args:
        spark: a session that can write Delta tables.
        claims: the group; the caller closes it.
        ingestion: what goes where; ``member`` is the name of this member.
        observer: told of each step.
        on_wait: told why the job waits, and how long.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        claims: RedisClaims,
        ingestion: Ingestion,
        *,
        observer: Observer = ignore_steps,
        on_wait: Callable[[str], object] = _log.warning,
    ) -> None:
        super().__init__(spark, ingestion, url=claims.url, observer=observer, on_wait=on_wait)
        limits = ingestion.limits
        self._pace = Pace(replace(limits, max_records=min(MOST_CLAIMED, limits.max_records)))
        self._claims = claims
        self._statuses = ClaimStatuses(self._ledger)
        self._origin: Mapping[Shard, int] | None = None
        self._mine: set[str] = set()
        self._let_go: set[tuple[Shard, str]] = set()
        self._given_up = 0
        self._losses = ClaimLosses(spark, claims, ingestion, observer=observer)
        self._open: OpenBatch | None = None
        self._turn = 0
        self._look_at = 0.0

    def _next_batch(self) -> Batch | None:
        """The next batch, or ``None`` if there is nothing to claim at the moment.

        Raises:
            SourceRecreatedError: the group or the stream is not what the ledger remembers.
            DataLossError: entries are gone, and that is not to be recorded; or a RESTORE removed rows.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        while True:
            state = self._ledger.read()
            if self._turns.wait(state.version):
                continue
            check_sharing(state, self._ingestion)
            check_epochs(state, self._claims.identities(), url=self._claims.url)
            check_restored(self._ledger, state, self._ingestion)
            if state.newest is None:
                origin = self._claims.prepare(self._ingestion.start)
                self._writer.initialize(state, origin, identities=self._claims.identities())
                continue
            self._prepare(state)
            self._writer.check_columns(state)
            self._writer.delete_orphaned(state)
            loss = self._losses.next()
            if loss is not None:
                self._open = loss
                self._observer(Step.PLANNED, loss.batch)
                return loss.batch
            abandoned = self._settle_names(state)
            if abandoned is None:
                continue
            try:
                batch = self._claim(state, abandoned)
            except BrokerUnavailableError as error:
                self._give_up(error)
                continue
            except BaseException:
                self._release_mine()
                raise
            self._given_up = 0
            if batch is None and self._losses.are_known:
                continue
            if batch is None:
                self._writer.delete_orphaned(state, again=True)
            return batch

    def _write(self, batch: Batch) -> Written | None:
        assert self._open is not None
        held, writer = self._open.held, self._open.writer
        try:
            if held is None:
                return writer.write(batch)
            with Heartbeat(self._claims, held):
                return writer.write(batch, check=self._check_epochs)
        except OutdatedError:
            # The next plan records what is gone, and takes over the rest from our own name.
            # If it was fenced meanwhile, the one who did it found what there was to find.
            if held is not None and self._ledger.last_number(self._ledger.member) < batch.number:
                for shard, ids in self._claims.missing(held.ids).items():
                    self._losses.add(shard, ids)
            self._release(held)
            raise
        except BaseException:
            self._release(held)
            raise

    def _check_epochs(self) -> None:
        """After the read: entries of a group that was created after an accept are of the next epoch."""
        check_epochs(self._ledger.read(), self._claims.identities(), url=self._claims.url)

    def _finish(self, batch: Batch) -> Mapping[Shard, int]:
        assert self._open is not None
        self._open.finish()
        self._observer(Step.COMMITTED, batch)
        return {shard: backlog.total for shard, backlog in self._claims.backlog().items()}

    def has_more(self) -> bool:
        """Whether entries were added, or shards, since the ends were captured; then they are captured anew.

        Raises:
            StreamAssetsError: the server cannot be asked, or the Spark server of the run has ended.
        """
        check_served(self._spark)
        is_look = time.monotonic() >= self._look_at
        is_more = self._retries.call(lambda: self._claims.has_grown(with_new_shards=is_look))
        self._look_at = time.monotonic() + LOOK_SECONDS if is_look else self._look_at
        if is_more:
            # The stream may be another one by now, and new shards need a group.
            self._origin = None
        else:
            # Nothing is left to do, so that nothing can be wrong with it.
            self._retries.reset()
        return is_more

    @property
    def wait_seconds(self) -> float:
        """How long to wait before asking again whether there is something to take over."""
        return min(1.0, self._claims.policy.min_idle_seconds / 4)

    def is_drained(self) -> bool:
        """Whether the whole group is done with what was there at the beginning."""
        return self._retries.call(self._claims.is_drained)

    def _give_up(self, error: BrokerUnavailableError) -> None:
        """Part of a reply was lost: the name may hold more than its batch would, so nothing is made of it."""
        self._given_up += 1
        if self._given_up >= MAX_GIVEN_UP:
            raise error
        _log.warning("a claim of group %s is given up: %s", self._ingestion.group, error)

    def _release_mine(self) -> None:
        try:
            for shard, names in self._claims.holders().items():
                for name in map(ClaimName.parse, names):
                    if name is not None and name.bid in self._mine:
                        self._claims.release(shard, name)
        except StreamAssetsError as error:
            _log.warning("the claims of group %s could not be released: %s", self._ingestion.group, error)

    def _release(self, held: ClaimedEntries | None) -> None:
        """An orderly failure is no reason to count a delivery, nor to let others wait."""
        if held is None:
            return
        try:
            for shard in held.ids:
                self._claims.release(shard, held.name)
                self._let_go.add((shard, held.name.bid))
        except StreamAssetsError as error:
            _log.warning("the claim of %s could not be released: %s", held.name, error)

    def _prepare(self, state: LedgerState) -> None:
        """Once: the group is where it should be, and names that were left behind are removed."""
        if self._origin is not None:
            return
        self._writer.check_unwritten(state, self._claims.identities())
        known = {shard: known.claimed for shard, known in state.shards.items()}
        self._origin = self._claims.prepare(self._ingestion.start, known=known)
        for shard, names in self._claims.empty_names().items():
            for name in names:
                # Whatever became of it: its number is gone, and it holds nothing.
                if name.number <= self._ledger.last_number(name.member):
                    self._claims.forget(shard, name)

    def _settle_names(self, state: LedgerState) -> list[_Abandoned] | None:
        """Step 1: what others hold that may be taken over; ``None`` after a fence, since numbers have changed."""
        holders = {shard: self._touchable(shard, names) for shard, names in self._claims.holders().items()}
        parsed = {name for names in holders.values() for name in names if isinstance(name, ClaimName)}
        statuses = self._statuses.of(parsed)
        still_open = {name for name in parsed if statuses[name] is ClaimStatus.OPEN}
        if still_open:
            for member, number in sorted({(name.member, name.number) for name in still_open}):
                self._fence(member, number)
            return None
        abandoned: list[_Abandoned] = []
        for shard, names in holders.items():
            for name in names:
                if isinstance(name, ClaimName) and statuses[name] is ClaimStatus.WRITTEN:
                    self._acknowledge(shard, name)
                else:
                    abandoned += self._held(shard, name)
        return abandoned

    def _fence(self, member: str, number: int) -> None:
        """Take the next number of another member, so that a batch that is on its way with it never lands."""

        def fields(state: LedgerState) -> Mapping[str, object] | None:
            check_restored(self._ledger, state, self._ingestion)
            return {"by": self._ledger.member} if state.last_number < number else None

        commit_empty(self._spark, replace(self._ingestion, member=member), "fence", fields)

    def _touchable(self, shard: Shard, names: Iterable[bytes]) -> list[ClaimName | bytes]:
        """Names that nobody touched, or that were given up; others: their entries are looked at singly."""
        idle = self._claims.idle_names(shard)
        found: list[ClaimName | bytes] = []
        for raw in names:
            name = ClaimName.parse(raw)
            if name is None:
                found.append(raw)
            elif raw in idle or name.bid in self._mine or self._claims.is_released(shard, name):
                found.append(name)
        return found

    def _acknowledge(self, shard: Shard, name: ClaimName) -> None:
        for page in self._claims.pending(shard, name, idle=False):
            self._claims.acknowledge({shard: [entry.id for entry in page]})
        self._claims.forget(shard, name)

    def _held(self, shard: Shard, name: ClaimName | bytes) -> Iterator[_Abandoned]:
        """The entries of a dead name, or those of another client that nobody touched, as many as one batch can hold."""
        # Of a name that is dead all may be taken: nobody adds to it, and what it held is not in the table.
        needs_idle = not isinstance(name, ClaimName)
        if isinstance(name, ClaimName) and name.bid in self._mine and (shard, name.bid) not in self._let_go:
            # Given up or outrun, but by no means killed: that one delivery does not count.
            self._claims.release(shard, name)
            self._let_go.add((shard, name.bid))
        count = 0
        for page in self._claims.pending(shard, name, idle=needs_idle):
            # What clients of another kind did is no try of ours.
            tries = (entry._replace(deliveries=min(1, entry.deliveries)) if needs_idle else entry for entry in page)
            yield from (_Abandoned(shard, name, entry) for entry in tries if entry.id not in self._losses.of(shard))
            count += len(page)
            if count >= self._pace.limits.max_records:
                return

    def _claim(self, state: LedgerState, abandoned: list[_Abandoned]) -> Batch | None:
        """Step 3: fill a new name; from here on nothing is added to it."""
        policy, limits = self._claims.policy, self._pace.limits
        worst = max((one.entry.deliveries for one in abandoned), default=0)
        records = policy.most(limits.max_records, deliveries=worst)
        bid = uuid.uuid4().hex
        held = ClaimedEntries(ClaimName(self._ledger.member, state.last_number + 1, bid), records, limits.max_bytes)
        self._mine.add(bid)
        is_full = self._take_over(
            held, [one for one in abandoned if worst <= 1 or one.entry.deliveries == worst], worst
        )
        if worst <= 1 and not is_full:
            self._claim_new(held)
        if not held.count:
            return None
        ids = {shard: sorted(to_sequence(entry_id) for entry_id in listed) for shard, listed in held.ids.items()}
        batch = self._planned(
            "batch",
            state,
            self._claims.plan(held, parallelism=self._parallelism),
            doubtful=dict(held.doubtful),
            bid=bid,
            identities=self._claims.identities(),
            claims={shard: ClaimedRange(places[0], places[-1] + 1, len(places)) for shard, places in ids.items()},
            origin={s: start for s, start in (self._origin or {}).items() if s in ids and s not in state.shards},
        )
        self._open = OpenBatch(batch, self._writer, lambda: self._acknowledge_all(held), held)
        return batch

    def _take_over(self, held: ClaimedEntries, abandoned: list[_Abandoned], deliveries: int) -> bool:
        most = self._claims.policy.max_deliveries
        error = None
        if deliveries >= most:
            error = f"given up after {deliveries} deliveries: each time the process ended before the batch was written"
        names: dict[tuple[Shard, ClaimName | bytes], list[PendingEntry]] = {}
        for one in abandoned[: held.records]:
            names.setdefault((one.shard, one.name), []).append(one.entry)
        for (shard, name), entries in names.items():
            is_ours = isinstance(name, ClaimName)
            is_full, gone = self._claims.take_over(held, shard, name, entries, idle=not is_ours, error=error)
            if gone:
                self._losses.add(shard, gone)
            if isinstance(name, ClaimName):
                self._claims.forget(shard, name)
            if is_full:
                return True
        return held.count >= held.records

    def _claim_new(self, held: ClaimedEntries) -> None:
        self._turn += 1
        unread = {shard: backlog.unread for shard, backlog in self._claims.backlog().items() if backlog.unread}
        while unread and held.count < held.records:
            shares = fair_shares(unread, held.records - held.count, turn=self._turn)
            for shard, share in shares.items():
                before = len(held.ids.get(shard, ()))
                if self._claims.claim_new(held, shard, share):
                    return
                got = len(held.ids.get(shard, ())) - before
                unread[shard] = unread[shard] - got if got == share else 0
            unread = {shard: left for shard, left in unread.items() if left > 0}

    def _acknowledge_all(self, held: ClaimedEntries) -> None:
        """Step 5: every entry of the batch, whoever holds it by now."""
        self._claims.acknowledge(held.ids)
        for shard in held.ids:
            self._claims.forget(shard, held.name)
