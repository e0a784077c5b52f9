"""Kafka topics, message by message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition
from confluent_kafka import Message as KafkaMessage

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import (
    DeadLetterObserver,
    Edge,
    LockedConsumer,
    Positions,
    ShardEnd,
    ShardObserver,
    check_positions,
    end_of_stream,
    log_dead_letter,
    no_message_error,
    resolve_positions,
    rewind_target,
)
from stream_consumers.errors import (
    BrokerError,
    BrokerUnavailableError,
    DataLossError,
    GroupActiveError,
    InvalidOptionError,
    NotSubscribedError,
    StreamNotFoundError,
    StreamRemovedError,
)
from stream_consumers.kafka.cluster import KafkaBrokers, places_of, shards_of
from stream_consumers.kafka.messages import read_message, shard_of
from stream_consumers.messages import WILDCARD, DeadLetter, Message, Shard, to_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode, Modes, check_iterable, choose_reset
from stream_consumers.urls import StreamUrl

METADATA_SECONDS = 5.0
# How long a member of a group waits for the brokers when it looks whether its topics are still there.
LOOK_SECONDS = 1.0
# How long a broker holds a fetch for which it has nothing: a replay ends so much later.
FETCH_WAIT_MS = 50
CONSUMER_MODES = Modes(
    of="consumers of Kafka", available=tuple(ConsumerMode), host_groups={ConsumerMode.RESUMABLE: "r"}
)


class KafkaConsumer(LockedConsumer):
    """A consumer of Kafka topics; see :class:`stream_consumers.consumer.Consumer`.

    Nothing is committed unless :meth:`commit` is called. Its group keeps a position in each shard, so that a member is
    the :class:`stream_consumers.consumer.PositionCommitter` of a tracked consumer that reads it.

    Args:
        url: ``kafka://host:9092/orders``; with ``*`` and mode ``real_time`` all topics, also those that come later.
        mode: ``real_time``: all partitions, no group. ``resumable``: all partitions, from where the group is.
            ``load_balanced``: those that the group assigns to this member; they come and go.
        group: the consumer group; for ``resumable`` by default the host's id and ``r`` (SeaStreamer's rule).
        reset: where to start without a position; resolved to offsets at once.
        live: wait at the end; without it the stream ends there.
        client: any configuration of librdkafka.
        on_dead_letter: called for messages that cannot be used (a header whose name is not UTF-8).

    Raises:
        InvalidOptionError: a group where there is none, or none where one is needed.
        StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: as the broker says.
        StreamRemovedError: from :meth:`next`: a topic was deleted, or deleted and made again, within some seconds; then
            at each call until the consumer is moved.

    Example::

        url = "kafka://localhost:9092/orders"
        with KafkaConsumer(url, mode=ConsumerMode.LOAD_BALANCED, group="billing") as consumer:
            for message in consumer:
                bill(message)
                consumer.ack(message)
                consumer.commit()
    """

    is_transactional = False

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        mode: ConsumerMode = ConsumerMode.REAL_TIME,
        group: str | None = None,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        client: ClientConfig | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> None:
        url = StreamUrl.parse(url)
        mode = CONSUMER_MODES.check(mode)
        has_group = mode is not ConsumerMode.REAL_TIME
        self._streams = url.required_streams() if has_group else url.subscribed_streams()
        super().__init__(self._streams, on_dead_letter)
        # A group has positions, from which there is something to read.
        reset = choose_reset(reset, live=live or has_group)
        self._group = CONSUMER_MODES.group(mode, group)
        self._url, self._mode, self._reset, self._live = url, mode, reset, live
        self._cluster = KafkaBrokers(url, client)
        # Held while a member commits, so that no shard is given away meanwhile; never while a message is waited for.
        self._committing = threading.RLock()
        self._observer: ShardObserver | None = None
        # The ids of the topics when they were first seen; a topic that is gone is reported until the consumer is moved.
        self._topic_ids: dict[str, str] = {}
        self._removed: StreamRemovedError | None = None
        self._is_released = False
        self._known = self._all_shards()
        self._assigned: frozenset[Shard] = frozenset()
        # What the group has given while the brokers did not say where it begins: taken, and not read yet.
        self._unplaced: frozenset[Shard] = frozenset()
        # Where the end was when it was reached.
        self._reached: dict[Shard, int] = {}
        self._newly_reached: dict[Shard, int] = {}
        # The positions behind what was acknowledged since the last commit.
        self._done: dict[Shard, int] = {}
        self._done_lock = threading.Lock()
        # Where reading was begun; the client reports how far it came from there.
        self._begun: dict[Shard, int] = {}
        self._unreached: set[Shard] = set()
        self._is_reached: Callable[[Message], bool] = lambda message: True
        self._look_again = time.monotonic() + METADATA_SECONDS
        self._consumer: Consumer = self._cluster.consumer(
            group=self._group, enable_partition_eof=True, fetch_wait_max_ms=FETCH_WAIT_MS
        )
        if mode is ConsumerMode.LOAD_BALANCED:
            self._consumer.subscribe(
                list(self._streams), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
            )
        else:
            self._go_to(self._first(self._known))

    def __repr__(self) -> str:
        return f"KafkaConsumer({str(self._url)!r}, mode={self._mode.value!r}, group={self._group!r})"

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` with mode ``real_time``."""
        return self._group

    def assigned(self) -> frozenset[Shard]:
        """The shards that are read now."""
        return self._assigned

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """See :meth:`stream_consumers.consumer.MeasurableConsumer.ends`; the cluster is asked, not the client."""
        self._check_open()
        shards = self._assigned
        readable = self._cluster.ends(shards)
        written = self._cluster.ends(shards, IsolationLevel.READ_UNCOMMITTED)
        return {shard: ShardEnd(readable[shard], written[shard]) for shard in shards}

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; Kafka looks the offset up by timestamp."""
        at = to_milliseconds(moment)
        with self._lock.moving():
            self._check_open()
            shards = self._selected()
            found = {s: offset for s, offset in self._cluster.at(shards, at).items() if offset >= 0}
            self._move(found, shards, lambda message: message.timestamp_ms >= at, f"at or after {moment.isoformat()}")

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        to = rewind_target(to)
        with self._lock.moving():
            self._check_open()
            shards = self._selected()
            if isinstance(to, Edge):
                places = self._cluster.starts(shards) if to is Edge.BEGINNING else self._cluster.ends(shards)
                self._unreached = set()
                self._assignment.begin()
                self._go_to(places)
                return
            sequence = max(0, to)
            starts, ends = self._cluster.starts(shards), self._cluster.ends(shards)
            found = {s: max(sequence, starts[s]) for s in shards if ends[s] > sequence}
            self._move(found, shards, lambda m: m.sequence >= sequence, f"from sequence {sequence} on")

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`.

        Raises:
            InvalidOptionError: in mode ``load_balanced``, where the group assigns.
        """
        self._check_own_assignment()
        super().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`.

        Raises:
            InvalidOptionError: in mode ``load_balanced``, where the group assigns.
        """
        self._check_own_assignment()
        super().unassign(shard)

    def ack(self, message: Message) -> None:
        """Say that a message is done, and with it those before it in its shard; the next :meth:`commit` sends it.

        A message of a shard that the group has given to another member meanwhile is left to that one.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            NotSubscribedError: it is of another stream.
        """
        self._check_open()
        self._check_group()
        shard = message.shard
        if not self._assignment.subscribes(shard.stream):
            raise NotSubscribedError(
                f"{shard} is not read by this consumer", remedy=f"Read are: {', '.join(self._streams)}."
            )
        with self._done_lock:
            if shard in self._assigned:
                self._done[shard] = max(self._done.get(shard, 0), message.sequence + 1)

    def commit(self, positions: Positions | None = None) -> int:
        """Set the group's positions in these shards; returns how many they are.

        Args:
            positions: the next sequence to read, per shard (one behind the last message that is done); by default
                behind what was acknowledged since the last commit.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            GroupActiveError: another member has the shards, or the group has members that are not this one.
        """
        # While it closes, an observer commits what it gives back.
        if self._is_released:
            self._check_open()
        group = self._check_group()
        if positions is not None:
            check_positions(positions)
        with self._done_lock:
            chosen = dict(self._done) if positions is None else positions
        if chosen:
            self._commit(group, chosen)
        with self._done_lock:
            for shard, position in chosen.items():
                if self._done.get(shard, position + 1) <= position:
                    del self._done[shard]
        return len(chosen)

    def _check_group(self) -> str:
        if self._group is None:
            raise InvalidOptionError("mode real_time has no group to commit for", remedy="Use mode resumable.")
        return self._group

    def _commit(self, group: str, positions: Positions) -> None:
        if self._mode is ConsumerMode.RESUMABLE:
            self._cluster.commit(group, positions)
            return
        with self._committing:
            lost = frozenset(positions) - self._assigned
            # The broker would take it, over what the new owner has committed.
            refusal = None if lost else self._cluster.commit_as_member(self._consumer, group, positions)
        if lost or refusal is not None:
            raise GroupActiveError(
                f"group {group!r} has given {min(lost or positions)} to another member",
                remedy="Its new owner reads it again from what is committed.",
                **({} if refusal is None else {"error": refusal.name()}),
            )

    def observe(self, observer: ShardObserver) -> None:
        """Report to ``observer`` the shards that the group assigns and revokes (mode ``load_balanced``)."""
        with self._lock.moving():
            self._check_open()
            self._observer = observer
            if self._assigned:
                observer.on_assigned(self._assigned)

    def committed(self) -> Positions:
        """What the group has committed; shards without a position are left out.

        In mode ``load_balanced`` it is asked for the shards of this member only.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            BrokerUnavailableError, AccessDeniedError: as the broker says.
        """
        self._check_open()
        group = self._check_group()
        is_member = self._mode is ConsumerMode.LOAD_BALANCED
        return self._cluster.committed(group, self._assigned if is_member else self._known)

    def group_metadata(self) -> Any:
        """The identity of this member, for a transaction that takes the group's positions along."""
        return self._consumer.consumer_group_metadata()

    def reached_ends(self) -> Positions:
        """The end of each shard that was read to its end since the last call: behind markers, which are no messages."""
        reached, self._newly_reached = self._newly_reached, {}
        return reached

    def go_to(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.consumer.PositionedConsumer.go_to`."""
        with self._lock.moving():
            self._check_open()
            places = resolve_positions(positions, self._assigned, lambda: self._cluster.ends(sorted(positions)))
            # The first message may be gone already; to the client, negative offsets are names of other places.
            first = self._cluster.starts([shard for shard, position in positions.items() if position < 0])
            others = {shard: self._position(shard) for shard in self._assigned - frozenset(places)}
            self._unreached -= frozenset(places)
            self._go_to({**others, **places, **first})

    def pause(self, shards: Iterable[Shard]) -> None:
        """Fetch nothing of these shards until :meth:`resume`; a seek or a change of owner ends it, too."""
        check_iterable("shards", shards)
        with self._lock.moving():
            self._check_open()
            self._consumer.pause([TopicPartition(s.stream, s.id) for s in sorted(shards) if s in self._assigned])

    def resume(self, shards: Iterable[Shard]) -> None:
        """Go on with these shards; nothing was lost meanwhile."""
        check_iterable("shards", shards)
        with self._lock.moving():
            self._check_open()
            self._consumer.resume([TopicPartition(s.stream, s.id) for s in sorted(shards) if s in self._assigned])

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock.moving(), self._committing:
            self._consumer.close()
            self._cluster.close()
            self._is_released = True

    def _take(self, seconds: float) -> Message | DeadLetter | None:
        item = self._fetch(seconds)
        if item is None and not self._live and self._is_at_its_end():
            raise end_of_stream()
        return item

    def _fetch(self, seconds: float) -> Message | DeadLetter | None:
        """The next item that is wanted; ``None`` if there was none in time."""
        if self._removed is not None:
            raise self._removed
        self._look(seconds)
        if self._unplaced:
            self._begin(self._first(self._unplaced))
        while (found := self._consumer.poll(seconds)) is not None:
            item = self._item(found)
            if item is not None:
                return item
            # The end of a partition is no reason to say that there is nothing in the others.
            seconds = 0.0
        return None

    def _item(self, found: KafkaMessage) -> Message | DeadLetter | None:
        """What the client gave, if it is wanted."""
        shard, error = shard_of(found), found.error()
        if error is not None:
            self._handle_error(error, shard, found.offset() or 0)
            return None
        item = read_message(found)
        self._forget_ends(frozenset([shard]))
        if isinstance(item, Message):
            if shard in self._unreached and not self._is_reached(item):
                return None
            self._unreached.discard(shard)
        return item

    def _handle_error(self, error: KafkaError, shard: Shard, offset: int) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._reached[shard] = self._newly_reached[shard] = offset
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._all_shards()
            raise DataLossError(
                f"{shard} of {self._url} does not hold the messages at the position",
                remedy="Rewind to the beginning or the end to go on.",
                reason=self._cluster.said(error),
                earliest=self._cluster.starts([shard])[shard],
                end=self._cluster.ends([shard])[shard],
            )
        else:
            raise self._cluster.explain(error, f"reading {shard} of {self._url}")

    def _all_shards(self, seconds: float | None = None) -> frozenset[Shard]:
        """The shards of all topics; an error if one of the topics is gone, or another one by now."""
        is_for_all = WILDCARD in self._streams
        try:
            topics = self._cluster.all_topics() if is_for_all else self._cluster.topics(self._streams, seconds=seconds)
        except StreamNotFoundError as error:
            if is_for_all or not self._topic_ids:
                raise
            raise self._note_removed("was deleted") from error
        for name, topic in topics.items():
            if self._topic_ids.setdefault(name, topic.id) != topic.id:
                raise self._note_removed("was deleted and made again", topic=name)
        return frozenset(shard for topic in topics.values() for shard in topic.shards)

    def _note_removed(self, what: str, **facts: object) -> StreamRemovedError:
        self._removed = StreamRemovedError(
            f"a topic of {self._url} {what} while it was read",
            remedy="What had not been read is lost. Rewind to the beginning, or make a new consumer, to read what "
            "there is now.",
            **facts,
        )
        return self._removed

    def _look(self, seconds: float) -> None:
        """Look for topics that are gone, and for partitions that were added to one."""
        if not self._live or time.monotonic() < self._look_again:
            return
        if self._mode is ConsumerMode.LOAD_BALANCED:
            # The group protocol finds new partitions by itself, and waits for brokers without a word.
            if seconds:
                self._look_again = time.monotonic() + METADATA_SECONDS
                with suppress(BrokerUnavailableError, BrokerError):
                    self._all_shards(LOOK_SECONDS)
            return
        self._look_again = time.monotonic() + METADATA_SECONDS
        found = self._all_shards()
        new = found - self._known if self._assignment.is_all_read else frozenset()
        if new:
            self._known |= new
            self._assigned |= new
            self._begun |= self._cluster.starts(new)
            self._consumer.incremental_assign(places_of({shard: self._begun[shard] for shard in new}))

    def _is_at_its_end(self) -> bool:
        """Whether every shard was read to its end; a member that the group has assigned nothing yet is at none."""
        is_assigned = bool(self._assigned) or self._mode is not ConsumerMode.LOAD_BALANCED
        return is_assigned and self._assigned <= self._reached.keys()

    def _selected(self) -> list[Shard]:
        """The shards that the next seek or rewind is about."""
        if self._mode is ConsumerMode.LOAD_BALANCED:
            return sorted(self._assigned)
        return self._assignment.of(self._known)

    def _first(self, shards: frozenset[Shard]) -> Positions:
        """Where reading begins: at the group's position, else as ``reset`` says."""
        is_earliest = self._reset is AutoStreamReset.EARLIEST
        places = self._cluster.starts(shards) if is_earliest else self._cluster.ends(shards)
        return {**places, **(self._cluster.committed(self._group, shards) if self._group else {})}

    def _move(self, found: Positions, shards: list[Shard], is_reached: Callable[[Message], bool], place: str) -> None:
        if not found:
            raise no_message_error(place)
        # A shard that has no such message yet goes on with the first one that comes.
        waiting = [shard for shard in shards if shard not in found]
        self._unreached, self._is_reached = set(waiting), is_reached
        self._assignment.begin()
        self._go_to({**found, **self._cluster.ends(waiting)})

    def _go_to(self, positions: Positions) -> None:
        """Read from here; what was fetched before is dropped by the client."""
        self._reached, self._newly_reached = {}, {}
        self._begun |= positions
        if self._removed is not None:
            # The topics as they are now are accepted.
            self._topic_ids, self._removed = {}, None
        self._take_on(positions, had=frozenset(positions))
        self._assigned = frozenset(positions)

    def _position(self, shard: Shard) -> int:
        (place,) = self._consumer.position([TopicPartition(shard.stream, shard.id)])
        return int(place.offset) if place.offset >= 0 else self._begun[shard]

    def _is_incremental(self) -> bool:
        """Whether the group assigns and revokes single shards (cooperative), so that the client must do the same."""
        settings = self._cluster.settings
        strategy = str(settings.get("partition.assignment.strategy", ""))
        is_new = settings.get("group.protocol") == "consumer"
        return self._mode is ConsumerMode.LOAD_BALANCED and (is_new or strategy.startswith("cooperative"))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        shards = shards_of(partitions)
        try:
            first = self._first(shards)
        except BaseException:
            # Left alone, the client would take the shards and read nothing of them, nor would another member.
            self._take_on(dict.fromkeys(shards, 0), had=frozenset())
            consumer.pause(partitions)
            self._unplaced |= shards
            raise
        self._begin(first)

    def _begin(self, first: Positions) -> None:
        """Read shards that the group has given."""
        shards = frozenset(first)
        self._begun |= first
        self._take_on(first, had=self._unplaced)
        self._unplaced -= shards
        with self._committing:
            self._assigned |= shards
        self._forget_ends(shards)
        if self._observer is not None:
            self._observer.on_assigned(shards)

    def _take_on(self, positions: Positions, *, had: frozenset[Shard]) -> None:
        """Have the client read these from here, all that it reads or, if it takes single shards, these as well."""
        places = places_of(positions)
        if self._is_incremental():
            self._consumer.incremental_unassign(places_of({s: positions[s] for s in had & positions.keys()}))
            self._consumer.incremental_assign(places)
        else:
            self._consumer.assign(places)
        # To the client, a pause is the application's, and outlasts all this.
        self._consumer.resume(places)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        shards = shards_of(partitions)
        # No commit comes between what the observer commits and the end of the ownership: it would be an older one.
        with self._committing:
            try:
                if self._observer is not None:
                    self._observer.on_revoked(shards)
            finally:
                self._assigned -= shards
                self._unplaced -= shards
                self._unreached -= shards
                self._forget_ends(shards)
                with self._done_lock:
                    # What was acknowledged and not committed is read again by the new owner.
                    self._done = {shard: position for shard, position in self._done.items() if shard not in shards}

    def _forget_ends(self, shards: frozenset[Shard]) -> None:
        for shard in shards:
            self._reached.pop(shard, None)
            self._newly_reached.pop(shard, None)

    def _check_own_assignment(self) -> None:
        if self._mode is ConsumerMode.LOAD_BALANCED:
            raise InvalidOptionError(
                "the group assigns the shards in mode load_balanced",
                remedy="Use mode real_time or resumable to choose them.",
            )
