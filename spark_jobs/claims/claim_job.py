"""Batches of entries that members of a Redis group claim one by one.

Each attempt of a batch has its own consumer name, ``<member>/<number>/<batch id>``. The ledger shows the status of a
name: open (its number may still be written), written (its batch is in the table), or dead (it never will be). A batch
has these steps:

 1. losses       Entries that are gone before they were written are recorded once, in the transaction sequence of their
                 shard.
 2. names        The idle names of other members are resolved: entries of written names are acknowledged, and open names
                 are fenced. Before entries are taken from a client of another kind, every open name is fenced, because
                 that client may have taken the entries from one of them.
 3. claim        Entries of dead names and new entries are claimed into a new name. If a reply is lost, the name is
                 abandoned. Then the ledger is read: the server may have lost its state of entries, so that those before
                 the last written entry are compared with the table.
 4. write        The dead letters and rows are written, and the commit is verified. A heartbeat keeps the claim.
 5. acknowledge  Only now are the entries acknowledged.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from pyspark.sql import SparkSession

from spark_jobs.batches.ingest_job import CHECK_INTERVAL_SECONDS
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, PlanAgain, Step, WrittenBatch, ignore_steps
from spark_jobs.batches.job import BatchJob, parallelism, write_batch
from spark_jobs.batches.run_control import BatchSizer, IdleWait
from spark_jobs.batches.source_checks import (
    check_epochs,
    check_only_group,
    check_removed_by_restore,
    check_sharing,
    without_positions,
)
from spark_jobs.batches.target_table import (
    OutdatedError,
    YieldTo,
    check_unwritten,
    initialize,
    register_streams,
)
from spark_jobs.claims.claim_state import (
    ClaimLosses,
    ClaimStatus,
    ClaimStatuses,
    PlannedLoss,
    claim_names,
    fence_claim,
)
from spark_jobs.ledger.entries import ClaimedRange, PlannedFields
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.session import check_served
from stream_consumers.batches import Range, fair_shares
from stream_consumers.errors import BrokerUnavailableError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.redis.claims import ClaimedEntries, ClaimName, Heartbeat, RedisClaims
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.group import PendingEntry

MAX_ABANDONED_CLAIMS = 5
# The most entries of a batch: their ids are in memory, and the heartbeat claims each of them again.
MAX_CLAIMED_ENTRIES = 500_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abandoned:
    """An entry that is pending for a dead name, or for an idle client of another kind."""

    shard: Shard
    name: ClaimName | bytes
    entry: PendingEntry


class ClaimJob(BatchJob):
    """The job of one member of a group that shares by claiming entries.

    Args:
        spark: a session that can write Delta tables.
        claims: the group; the caller closes it.
        ingestion: group and table; ``member`` is the name of this member.
        observer: called at each step.
        idle_wait: how long the run lingers, and how often it then claims a batch.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    claims_while_planning = True

    def __init__(
        self,
        spark: SparkSession,
        claims: RedisClaims,
        ingestion: Ingestion,
        *,
        observer: Observer = ignore_steps,
        idle_wait: IdleWait | None = None,
    ) -> None:
        super().__init__(spark, ingestion, url=claims.url, observer=observer, idle_wait=idle_wait)
        limits = ingestion.limits
        self.sizer = BatchSizer(replace(limits, max_records=min(MAX_CLAIMED_ENTRIES, limits.max_records)))
        self.wait_seconds = min(1.0, claims.policy.min_idle_seconds / 4)
        self._parallelism = parallelism(spark)
        self._claims = claims
        self._statuses = ClaimStatuses(self.ledger)
        self._origin: Mapping[Shard, int] | None = None
        self._own_batch_ids: set[str] = set()
        self._released: set[tuple[Shard, str]] = set()
        # Per shard, the server's time after which every open name was fenced: entries of other clients that were not
        # delivered or claimed since then are in no batch in flight.
        self._fenced_at: Mapping[Shard, int] = {}
        self._abandoned_claims = 0
        self._is_full = False
        self._losses = ClaimLosses(spark, claims, ingestion, observer=self.telemetry)
        # Rotates which shards get the larger shares of a batch.
        self._turn = 0
        self._next_check = 0.0

    def plan(self) -> Batch | YieldTo | None:
        """Steps 1 to 3: claim the next batch; ``None`` if there is nothing to claim at the moment, or it is not due.

        After a batch that had no room for more entries, the next one is always due.

        Raises:
            SourceRecreatedError: the group or the stream is not the one in the ledger.
            DataLossError: entries are gone, and ``on_data_loss`` is not ``record``; or a RESTORE removed rows.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        if not (self._is_full or self.idle_wait.is_due):
            return None
        self.idle_wait.begin()
        while True:
            state = self.ledger.read()
            if (request := self.yields.unanswered(state.version)) is not None:
                return request
            check_sharing(state, self.ingestion)
            check_epochs(state, self._claims.identities(), url=self._claims.url)
            check_removed_by_restore(state, self.ingestion)
            if state.newest is None:
                origin = self._claims.prepare(self.ingestion.start)
                initialize(self.target, state, origin, identities=self._claims.identities())
                continue
            if self._prepare(state):
                continue
            self.target.columns.check(state)
            checked = self.clean_up_dead_letters(state)
            loss = self._losses.next()
            if loss is not None:
                check_only_group(self.ingestion, state, (loss.job_data.shard.stream,), url=self._claims.url)
                return loss
            abandoned = self._find_abandoned()
            if abandoned is None:
                continue
            try:
                batch = self._claim(checked, abandoned)
            except BrokerUnavailableError as error:
                self._abandon_claim(error)
                continue
            except BaseException:
                self._release(self._own_claims())
                raise
            self._abandoned_claims = 0
            if batch is None and self._losses.are_known:
                continue
            if batch is None:
                self.clean_up_dead_letters(state, again=True)
            return batch

    def write(self, batch: Batch) -> WrittenBatch | PlanAgain:
        """Step 4: write a batch, while a heartbeat keeps the claim."""
        claimed = batch.job_data
        if isinstance(claimed, PlannedLoss):
            return write_batch(self, claimed.target, batch)
        try:
            with Heartbeat(self._claims, claimed):
                return write_batch(self, self.target, batch)
        except OutdatedError:
            # The next plan records the entries that are gone, and takes over the others from our own name.
            # If another member has fenced the name meanwhile, it has found the losses.
            if self.ledger.last_number(self.ledger.member) < batch.number:
                for shard, ids in self._claims.missing(claimed.ids).items():
                    self._losses.add(shard, ids)
            self._release((shard, claimed.name) for shard in claimed.ids)
            raise
        except BaseException:
            self._release((shard, claimed.name) for shard in claimed.ids)
            raise

    def check_read(self) -> None:
        """Refuse a batch if the next epoch was accepted: entries of a group that was created then belong to it."""
        check_epochs(self.ledger.read(), self._claims.identities(), url=self._claims.url)

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Step 5: acknowledge the entries, or account for those that are gone."""
        claimed = written.batch.job_data
        if isinstance(claimed, PlannedLoss):
            self._losses.account(claimed.shard, claimed.kind)
        else:
            self._acknowledge_all(claimed)
        self.telemetry(Step.COMMITTED, written.batch)
        return {shard: backlog.total for shard, backlog in self._claims.backlog().items()}

    def has_more(self) -> bool:
        """Return whether entries or shards were added since the ends were captured; then they are captured again.

        Raises:
            StreamAssetsError: the server does not answer, or the Spark server of the run has ended.
        """
        check_served(self.target.spark)
        is_due = time.monotonic() >= self._next_check
        has_grown = self._claims.has_grown(with_new_shards=is_due)
        self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS if is_due else self._next_check
        if has_grown:
            # The stream may have been recreated, and new shards need a group.
            self._origin = None
        return has_grown

    def is_group_drained(self) -> bool:
        """Return whether the whole group is done with the entries up to the captured ends."""
        return self._claims.is_drained()

    def _abandon_claim(self, error: BrokerUnavailableError) -> None:
        """Abandon a name after a lost reply, because it may have entries on the server that its batch would lack."""
        self._abandoned_claims += 1
        if self._abandoned_claims >= MAX_ABANDONED_CLAIMS:
            raise error
        _log.warning("a claim of group %s is abandoned: %s", self.ingestion.group, error)

    def _release(self, names: Iterable[tuple[Shard, ClaimName]]) -> None:
        """Release claims after an orderly failure, so that others need not wait, and the delivery does not count."""
        try:
            for shard, name in names:
                self._claims.release(shard, name)
                self._released.add((shard, name.bid))
        except StreamAssetsError as error:
            _log.warning("claims of group %s could not be released: %s", self.ingestion.group, error)

    def _own_claims(self) -> Iterator[tuple[Shard, ClaimName]]:
        for shard, names in self._claims.holders().items():
            for name in map(ClaimName.parse, names):
                if name is not None and name.bid in self._own_batch_ids:
                    yield shard, name

    def _prepare(self, state: LedgerState) -> bool:
        """Create or check the group on the server, register new streams, and once remove old empty names.

        Returns:
            Whether streams were registered, so that the ledger has to be read again.
        """
        known = {shard: known.written_end for shard, known in state.shards.items()}
        if self._origin is not None:
            self._claims.check(known)
            return False
        identities = self._claims.identities()
        check_unwritten(self.target, state, identities)
        origin = self._claims.prepare(self.ingestion.start, known=known)
        new = without_positions(state, (shard.stream for shard in origin))
        if new:
            starts = {shard: start for shard, start in origin.items() if shard.stream in new}
            register_streams(self.target, starts, identities=identities)
            return True
        self._origin = origin
        for shard, names in self._claims.names(empty=True).items():
            for name in claim_names(names, self.ledger).values():
                # Its number is used and it has no entries, so that its status does not matter.
                if name.number <= self.ledger.last_number(name.member):
                    self._claims.remove_name(shard, name)
        return False

    def _find_abandoned(self) -> list[_Abandoned] | None:
        """Step 2: find entries of others that may be taken over; ``None`` after a fence, which changes numbers."""
        held = self._claims.holders()
        members = claim_names(chain.from_iterable(held.values()), self.ledger)
        holders = {shard: self._names_to_take_over(shard, names, members) for shard, names in held.items()}
        parsed = {name for names in holders.values() for name in names if isinstance(name, ClaimName)}
        if self._fence_open(parsed):
            return None
        statuses = self._statuses.of(parsed)
        abandoned: list[_Abandoned] = []
        others: list[_Abandoned] = []
        for shard, names in holders.items():
            for name in names:
                if not isinstance(name, ClaimName):
                    others += self._pending_of(shard, name)
                elif statuses[name] is ClaimStatus.WRITTEN:
                    self._acknowledge(shard, name)
                else:
                    abandoned += self._pending_of(shard, name)
        if abandoned or not others:
            return abandoned
        if not self._fenced_at:
            # In this order: if a batch had an entry before another client took it, its name is in the list.
            self._fenced_at = {shard: self._claims.now(shard) for shard in holders}
            if self._fence_open(claim_names(chain.from_iterable(self._claims.names().values()), self.ledger).values()):
                return None
        return [one for one in others if one.shard in self._fenced_at]

    def _fence_open(self, names: Iterable[ClaimName]) -> bool:
        """Fence the names that are open; return whether there were any, so that numbers have changed."""
        # The highest number of a member, which also fences its lower ones.
        highest = {name.member: name for name in sorted(names)}
        still_open = [name for name in highest.values() if name.number > self.ledger.last_number(name.member)]
        for name in still_open:
            fence_claim(self.target.spark, self.ingestion, name)
        return bool(still_open)

    def _names_to_take_over(
        self, shard: Shard, names: Iterable[bytes], members: Mapping[bytes, ClaimName]
    ) -> list[ClaimName | bytes]:
        """Return the names that are idle or abandoned, and all other clients, whose entries are checked one by one."""
        idle = self._claims.idle_names(shard)
        found: list[ClaimName | bytes] = []
        for raw in names:
            name = members.get(raw)
            if name is None:
                found.append(raw)
            elif raw in idle or name.bid in self._own_batch_ids or self._claims.is_released(shard, name):
                found.append(name)
        return found

    def _acknowledge(self, shard: Shard, name: ClaimName) -> None:
        for page in self._claims.pending(shard, name, idle=False):
            self._claims.acknowledge({shard: [entry.id for entry in page]})
        self._claims.remove_name(shard, name)

    def _pending_of(self, shard: Shard, name: ClaimName | bytes) -> Iterator[_Abandoned]:
        """Yield the entries of a dead name, or the idle ones of another client, as many as one batch can hold."""
        # All entries of a dead name may be taken: none is added to it, and none is in the table.
        needs_idle = not isinstance(name, ClaimName)
        if isinstance(name, ClaimName) and name.bid in self._own_batch_ids and (shard, name.bid) not in self._released:
            # It was abandoned or lost a race, but its process was not killed, so that the delivery does not count.
            self._claims.release(shard, name)
            self._released.add((shard, name.bid))
        count = 0
        for page in self._claims.pending(shard, name, idle=needs_idle):
            # Deliveries to other clients are not attempts of ours.
            tries = (entry._replace(deliveries=min(1, entry.deliveries)) if needs_idle else entry for entry in page)
            yield from (_Abandoned(shard, name, entry) for entry in tries if entry.id not in self._losses.of(shard))
            count += len(page)
            if count >= self.sizer.limits.max_records:
                return

    def _claim(self, state: LedgerState, abandoned: list[_Abandoned]) -> Batch | None:
        """Step 3: claim entries into a new name, to which nothing is added later."""
        policy, limits = self._claims.policy, self.sizer.limits
        worst = max((one.entry.deliveries for one in abandoned), default=0)
        records = policy.batch_limit(limits.max_records, deliveries=worst)
        bid = uuid.uuid4().hex
        claimed = ClaimedEntries(ClaimName(self.ledger.member, state.last_number + 1, bid), records, limits.max_bytes)
        self._own_batch_ids.add(bid)
        since, self._fenced_at = self._fenced_at, {}
        chosen = [one for one in abandoned if worst <= 1 or one.entry.deliveries == worst]
        is_full = self._take_over(claimed, chosen, worst, since)
        if worst <= 1 and not is_full:
            is_full = self._claim_new(claimed)
        self._is_full = is_full or worst > 1
        if not claimed.count:
            return None
        ids = {shard: sorted(to_sequence(entry_id) for entry_id in listed) for shard, listed in claimed.ids.items()}
        check_only_group(self.ingestion, state, {shard.stream for shard in ids}, url=self._claims.url)
        # In this order: if others have written some of the entries, the ledger has them by now, even if the server
        # has lost that.
        written = {shard: known.written_end or 0 for shard, known in self.ledger.read().shards.items()}
        maybe_written = {
            shard: Range(places[0], min(places[-1] + 1, written.get(shard, 0))) for shard, places in ids.items()
        }
        fields = PlannedFields(
            claims={shard: ClaimedRange(places[0], places[-1] + 1, len(places)) for shard, places in ids.items()},
            origin={s: start for s, start in (self._origin or {}).items() if s in ids and s not in state.shards},
        )
        plan, identities = self._claims.plan(claimed, parallelism=self._parallelism), self._claims.identities()
        own = {shard: part for shard, part in maybe_written.items() if part.start < part.end}
        return Batch("batch", state, plan, fields, bid=bid, identities=identities, maybe_written=own, job_data=claimed)

    def _take_over(
        self, claimed: ClaimedEntries, abandoned: list[_Abandoned], deliveries: int, since: Mapping[Shard, int]
    ) -> bool:
        most = self._claims.policy.max_deliveries
        error = None
        if deliveries >= most:
            error = f"given up after {deliveries} deliveries: each time the process ended before the batch was written"
        names: dict[tuple[Shard, ClaimName | bytes], list[PendingEntry]] = {}
        for one in abandoned[: claimed.records]:
            names.setdefault((one.shard, one.name), []).append(one.entry)
        for (shard, name), entries in names.items():
            idle_since = None if isinstance(name, ClaimName) else since.get(shard)
            is_full, gone = self._claims.take_over(claimed, shard, name, entries, since=idle_since, error=error)
            if gone:
                self._losses.add(shard, gone)
            if isinstance(name, ClaimName):
                self._claims.remove_name(shard, name)
            if is_full:
                return True
        return claimed.count >= claimed.records

    def _claim_new(self, claimed: ClaimedEntries) -> bool:
        """Claim entries that no member has claimed; return whether the batch has no room for more."""
        self._turn += 1
        unread = {shard: backlog.unread for shard, backlog in self._claims.backlog().items() if backlog.unread}
        while unread and claimed.count < claimed.records:
            shares = fair_shares(unread, claimed.records - claimed.count, turn=self._turn)
            for shard, share in shares.items():
                before = len(claimed.ids.get(shard, ()))
                if self._claims.claim_new(claimed, shard, share):
                    return True
                got = len(claimed.ids.get(shard, ())) - before
                unread[shard] = unread[shard] - got if got == share else 0
            unread = {shard: left for shard, left in unread.items() if left > 0}
        return claimed.count >= claimed.records

    def _acknowledge_all(self, claimed: ClaimedEntries) -> None:
        """Acknowledge every entry of the batch, even if another consumer has claimed it meanwhile."""
        self._claims.acknowledge(claimed.ids)
        for shard in claimed.ids:
            self._claims.remove_name(shard, claimed.name)
