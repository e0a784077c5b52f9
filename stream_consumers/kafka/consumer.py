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
    FormatError,
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
# How long a member of a group waits for the brokers when it checks that its topics still exist.
TOPIC_CHECK_SECONDS = 1.0
# How many milliseconds a broker holds a fetch without messages, which delays the end of a replay.
FETCH_WAIT_MS = 50
CONSUMER_MODES = Modes(
    of="consumers of Kafka", available=tuple(ConsumerMode), host_groups={ConsumerMode.RESUMABLE: "r"}
)


class KafkaConsumer(LockedConsumer):
    """A consumer of Kafka topics; see :class:`stream_consumers.consumer.Consumer`.

    Only :meth:`commit` commits positions. The group keeps a position in each shard, so that a member is also the
    :class:`stream_consumers.consumer.PositionCommitter` of a tracked consumer that wraps it.

    Args:
        url: ``kafka://host:9092/orders``; with ``*`` and mode ``real_time`` all topics, including later ones.
        mode: ``real_time`` reads all partitions, without a group. ``resumable`` reads all partitions, from the group's
            positions. ``load_balanced`` reads the partitions that the group currently assigns to this member.
        group: the consumer group; for ``resumable`` by default the host's id and ``r`` (SeaStreamer's rule).
        reset: where to start without a position; resolved to offsets at once.
        live: wait for more messages at the end; otherwise the stream ends there.
        client: any configuration of librdkafka.
        on_dead_letter: called for messages that cannot be used (a header whose name is not UTF-8).

    Raises:
        InvalidOptionError: the group does not fit the mode.
        StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: the topic is missing, or the broker does not
            answer or refuses.
        StreamRemovedError: from :meth:`next`, within some seconds after a topic was deleted or recreated; then at each
            call until the consumer is moved.
        FormatError: from :meth:`next`, a batch is damaged; then at each call. Create a new consumer to read elsewhere.

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
        # A group may have positions before the end, so that even LATEST without live may read messages.
        reset = choose_reset(reset, live=live or has_group)
        self._group = CONSUMER_MODES.group(mode, group)
        self._url, self._mode, self._reset, self._live = url, mode, reset, live
        self._cluster = KafkaBrokers(url, client)
        # Held while a member commits, so that no shard is revoked meanwhile; never held during a wait for a message.
        self._committing = threading.RLock()
        self._observer: ShardObserver | None = None
        # The ids of the topics when they were first read; a deleted topic is reported until the consumer is moved.
        self._topic_ids: dict[str, str] = {}
        self._removed: StreamRemovedError | None = None
        # Raised at each call: after a damaged batch, the client may skip messages, or return bytes of it as messages.
        self._damage: FormatError | None = None
        self._is_released = False
        self._known = self._all_shards()
        self._assigned: frozenset[Shard] = frozenset()
        # Assigned shards that are not read yet because the brokers have not returned their start.
        self._without_start: frozenset[Shard] = frozenset()
        self._paused: frozenset[Shard] = frozenset()
        # The ends of the shards that were read to their ends.
        self._reached: dict[Shard, int] = {}
        self._newly_reached: dict[Shard, int] = {}
        # The positions after the messages that were acknowledged since the last commit.
        self._acknowledged: dict[Shard, int] = {}
        self._acknowledged_lock = threading.Lock()
        # The lowest valid offset of the next message of each shard.
        self._lowest: dict[Shard, int] = {}
        self._unreached: set[Shard] = set()
        self._is_reached: Callable[[Message], bool] = lambda message: True
        self._next_check = time.monotonic() + METADATA_SECONDS
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
        """Return the shards that are read now."""
        return self._assigned

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """See :meth:`stream_consumers.consumer.MeasurableConsumer.ends`; requests the ends from the cluster."""
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
                self._assignment.apply()
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
        """Mark a message and all before it in its shard as finished; the next :meth:`commit` sends that.

        A message is ignored if the group has assigned its shard to another member meanwhile.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            NotSubscribedError: the message is of another stream.
        """
        self._check_open()
        self._check_group()
        shard = message.shard
        if not self._assignment.subscribes(shard.stream):
            raise NotSubscribedError(
                f"{shard} is not read by this consumer", remedy=f"It reads: {', '.join(self._streams)}."
            )
        with self._acknowledged_lock:
            if shard in self._assigned:
                self._acknowledged[shard] = max(self._acknowledged.get(shard, 0), message.sequence + 1)

    def commit(self, positions: Positions | None = None) -> int:
        """Set the group's positions in these shards, and return their number.

        Args:
            positions: the position of each shard, one after its last finished message; by default those after the
                messages that were acknowledged since the last commit.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            GroupActiveError: another member has the shards, or the group has other members.
        """
        # During close, an observer commits the shards that it releases.
        if self._is_released:
            self._check_open()
        group = self._check_group()
        if positions is not None:
            check_positions(positions)
        with self._acknowledged_lock:
            chosen = dict(self._acknowledged) if positions is None else positions
        if chosen:
            self._commit(group, chosen)
        with self._acknowledged_lock:
            for shard, position in chosen.items():
                if self._acknowledged.get(shard, position + 1) <= position:
                    del self._acknowledged[shard]
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
            # The broker would accept an older position, and overwrite the new owner's.
            refusal = None if lost else self._cluster.commit_as_member(self._consumer, group, positions)
        if lost or refusal is not None:
            raise GroupActiveError(
                f"group {group!r} has given {min(lost or positions)} to another member",
                remedy="That member reads it again from the committed position.",
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
        """Return the group's committed positions; shards without a position are left out.

        In mode ``load_balanced`` these are the positions of this member's shards only.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            BrokerUnavailableError, AccessDeniedError: the broker does not answer, or refuses.
        """
        self._check_open()
        group = self._check_group()
        is_member = self._mode is ConsumerMode.LOAD_BALANCED
        return self._cluster.committed(group, self._assigned if is_member else self._known)

    def group_metadata(self) -> Any:
        """Return the identity of this member, for a transaction that includes the group's positions."""
        return self._consumer.consumer_group_metadata()

    def reached_ends(self) -> Positions:
        """Return the end of each shard that was read to its end since the last call, after any transaction markers."""
        reached, self._newly_reached = self._newly_reached, {}
        return reached

    def go_to(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.consumer.PositionedConsumer.go_to`."""
        with self._lock.moving():
            self._check_open()
            places = resolve_positions(positions, self._assigned, lambda: self._cluster.ends(sorted(positions)))
            # The first message may have been deleted, and negative offsets have special meanings for the client.
            first = self._cluster.starts([shard for shard, position in positions.items() if position < 0])
            others = {shard: self._position(shard) for shard in self._assigned - frozenset(places)}
            self._unreached -= frozenset(places)
            self._go_to({**others, **places, **first})

    def pause(self, shards: Iterable[Shard]) -> None:
        """Fetch no messages of these shards until :meth:`resume`; a seek or a change of owner also ends the pause."""
        check_iterable("shards", shards)
        with self._lock.moving():
            self._check_open()
            chosen = self._assigned.intersection(shards)
            self._paused |= chosen
            self._consumer.pause([TopicPartition(shard.stream, shard.id) for shard in chosen])

    def resume(self, shards: Iterable[Shard]) -> None:
        """Fetch messages of these shards again, from where they were paused."""
        check_iterable("shards", shards)
        with self._lock.moving():
            self._check_open()
            if chosen := self._paused.intersection(shards):
                self._paused -= chosen
                self._consumer.resume([TopicPartition(shard.stream, shard.id) for shard in chosen])

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
        """Return the next message or dead letter to return; ``None`` if none arrived in time."""
        failure = self._damage or self._removed
        if failure is not None:
            raise failure
        self._check_topics(seconds)
        if self._without_start:
            self._begin(self._first(self._without_start))
        while (found := self._consumer.poll(seconds)) is not None:
            item = self._item(found)
            if item is not None:
                return item
            # Other partitions may still have messages.
            seconds = 0.0
        return None

    def _item(self, found: KafkaMessage) -> Message | DeadLetter | None:
        """Convert a message of the client; ``None`` if it is skipped, or is an event."""
        shard, error = shard_of(found), found.error()
        if error is not None:
            self._handle_error(error, shard, found)
            return None
        offset, lowest = found.offset() or 0, self._lowest.get(shard, 0)
        if offset < lowest:
            self._damage = self._cluster.misplaced(str(shard), lowest, offset)
            raise self._damage
        self._lowest[shard] = offset + 1
        item = read_message(found)
        self._forget_ends(frozenset([shard]))
        if isinstance(item, Message):
            if shard in self._unreached and not self._is_reached(item):
                return None
            self._unreached.discard(shard)
        return item

    def _handle_error(self, error: KafkaError, shard: Shard, found: KafkaMessage) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._reached[shard] = self._newly_reached[shard] = found.offset() or 0
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._all_shards()
            if self._consumed(shard) is None and found.offset() != self._lowest[shard]:
                # It is about a fetch from before the shard was moved, and may have stopped the fetch that followed.
                self._go_to({shard: self._position(shard) for shard in self._assigned})
                return
            raise DataLossError(
                f"{shard} of {self._url} no longer has the messages at the position",
                remedy="Rewind to the beginning or the end to continue.",
                reason=self._cluster.said(error),
                earliest=self._cluster.starts([shard])[shard],
                end=self._cluster.ends([shard])[shard],
            )
        else:
            explained = self._cluster.explain_read(found, error)
            if isinstance(explained, FormatError):
                self._damage = explained
            raise explained

    def _all_shards(self, seconds: float | None = None) -> frozenset[Shard]:
        """Return the shards of all topics, after a check that no topic was deleted or recreated."""
        is_for_all = WILDCARD in self._streams
        try:
            topics = self._cluster.all_topics() if is_for_all else self._cluster.topics(self._streams, seconds=seconds)
        except StreamNotFoundError as error:
            if is_for_all or not self._topic_ids:
                raise
            raise self._note_removed("was deleted") from error
        for name, topic in topics.items():
            if self._topic_ids.setdefault(name, topic.id) != topic.id:
                raise self._note_removed("was deleted and recreated", topic=name)
        return frozenset(shard for topic in topics.values() for shard in topic.shards)

    def _note_removed(self, what: str, **facts: object) -> StreamRemovedError:
        self._removed = StreamRemovedError(
            f"a topic of {self._url} {what} while it was read",
            remedy="Unread messages are lost. Rewind to the beginning, or create a new consumer, to read the current "
            "topic.",
            **facts,
        )
        return self._removed

    def _check_topics(self, seconds: float) -> None:
        """Check for deleted topics and for new partitions."""
        if not self._live or time.monotonic() < self._next_check:
            return
        if self._mode is ConsumerMode.LOAD_BALANCED:
            # The group protocol finds new partitions itself, and waits for brokers without an error.
            if seconds:
                self._next_check = time.monotonic() + METADATA_SECONDS
                with suppress(BrokerUnavailableError, BrokerError):
                    self._all_shards(TOPIC_CHECK_SECONDS)
            return
        self._next_check = time.monotonic() + METADATA_SECONDS
        found = self._all_shards()
        new = found - self._known if self._assignment.is_all_read else frozenset()
        if new:
            self._known |= new
            self._assigned |= new
            self._lowest |= self._cluster.starts(new)
            self._consumer.incremental_assign(places_of({shard: self._lowest[shard] for shard in new}))

    def _is_at_its_end(self) -> bool:
        """Return whether every shard was read to its end; false for a member before its first assignment."""
        is_assigned = bool(self._assigned) or self._mode is not ConsumerMode.LOAD_BALANCED
        return is_assigned and self._assigned <= self._reached.keys()

    def _selected(self) -> list[Shard]:
        """Return the shards that the next seek or rewind moves."""
        if self._mode is ConsumerMode.LOAD_BALANCED:
            return sorted(self._assigned)
        return self._assignment.select(self._known)

    def _first(self, shards: frozenset[Shard]) -> Positions:
        """Return where reading begins: at the group's position, else at the start or the end, by ``reset``."""
        is_earliest = self._reset is AutoStreamReset.EARLIEST
        places = self._cluster.starts(shards) if is_earliest else self._cluster.ends(shards)
        return {**places, **(self._cluster.committed(self._group, shards) if self._group else {})}

    def _move(self, found: Positions, shards: list[Shard], is_reached: Callable[[Message], bool], place: str) -> None:
        if not found:
            raise no_message_error(place)
        # A shard without such a message continues with the first one that arrives later.
        waiting = [shard for shard in shards if shard not in found]
        self._unreached, self._is_reached = set(waiting), is_reached
        self._assignment.apply()
        self._go_to({**found, **self._cluster.ends(waiting)})

    def _go_to(self, positions: Positions) -> None:
        """Read from these positions; the client drops fetched messages."""
        self._reached, self._newly_reached = {}, {}
        self._lowest |= positions
        if self._removed is not None:
            # Accept the topics as they are now.
            self._topic_ids, self._removed = {}, None
        self._assign_in_client(positions, had=frozenset(positions))
        self._assigned = frozenset(positions)

    def _position(self, shard: Shard) -> int:
        consumed = self._consumed(shard)
        return self._lowest[shard] if consumed is None else consumed

    def _consumed(self, shard: Shard) -> int | None:
        """Return the offset after the last message since the shard was moved; ``None`` if there was none."""
        (place,) = self._consumer.position([TopicPartition(shard.stream, shard.id)])
        return int(place.offset) if place.offset >= 0 else None

    def _is_incremental(self) -> bool:
        """Return whether the group, and so the client, assigns and revokes single shards (cooperative)."""
        settings = self._cluster.settings
        strategy = str(settings.get("partition.assignment.strategy", ""))
        is_new = settings.get("group.protocol") == "consumer"
        return self._mode is ConsumerMode.LOAD_BALANCED and (is_new or strategy.startswith("cooperative"))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        shards = shards_of(partitions)
        try:
            first = self._first(shards)
        except BaseException:
            # Otherwise the client would keep the shards without reading them, and no other member would get them.
            self._assign_in_client(dict.fromkeys(shards, 0), had=frozenset())
            consumer.pause(partitions)
            self._without_start |= shards
            raise
        self._begin(first)

    def _begin(self, first: Positions) -> None:
        """Start to read shards that the group has assigned."""
        shards = frozenset(first)
        self._lowest |= first
        self._assign_in_client(first, had=self._without_start)
        self._without_start -= shards
        with self._committing:
            self._assigned |= shards
        self._forget_ends(shards)
        if self._observer is not None:
            self._observer.on_assigned(shards)

    def _assign_in_client(self, positions: Positions, *, had: frozenset[Shard]) -> None:
        """Assign these positions in the client: incrementally if the group does, else in place of all others."""
        places = places_of(positions)
        # The client keeps a pause across assignments. If it is ended while the client starts an assignment, the client
        # may take all that it fetches for outdated.
        self._consumer.resume(places)
        self._paused -= positions.keys()
        if self._is_incremental():
            self._consumer.incremental_unassign(places_of({s: positions[s] for s in had & positions.keys()}))
            self._consumer.incremental_assign(places)
        else:
            self._consumer.assign(places)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        shards = shards_of(partitions)
        # No other commit may run between the observer's commit and the release: it would set an older position.
        with self._committing:
            try:
                if self._observer is not None:
                    self._observer.on_revoked(shards)
            finally:
                self._assigned -= shards
                self._without_start -= shards
                self._unreached -= shards
                self._forget_ends(shards)
                with self._acknowledged_lock:
                    # The new owner reads acknowledged messages without a committed position again.
                    self._acknowledged = {
                        shard: position for shard, position in self._acknowledged.items() if shard not in shards
                    }

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
