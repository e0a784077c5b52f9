"""Modes, options and checks of arguments."""

from __future__ import annotations

import enum
import itertools
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stream_consumers.errors import InvalidOptionError

Choice = TypeVar("Choice", bound=enum.Enum)


class ConsumerMode(str, enum.Enum):
    """How a consumer shares a stream and stores positions (SeaStreamer's three modes).

    ``real_time``: no group; ingestion starts at the end, and only the ledger stores positions. ``resumable``: one
    member reads all shards and continues at the position of its group. ``load_balanced``: several members share the
    shards or the messages.

    Example:
        >>> ConsumerMode("load_balanced") is ConsumerMode.LOAD_BALANCED
        True
    """

    REAL_TIME = "real_time"
    RESUMABLE = "resumable"
    LOAD_BALANCED = "load_balanced"


class AutoStreamReset(str, enum.Enum):
    """Where a consumer without a position starts.

    Example:
        >>> AutoStreamReset("latest") is AutoStreamReset.LATEST
        True
    """

    EARLIEST = "earliest"
    LATEST = "latest"


class DataLoss(str, enum.Enum):
    """What to do when messages were removed from the stream before they were read.

    Data loss is always reported. ``error``: stop with an error that names the lost ranges. ``record``: skip the lost
    range and continue; the exact range is recorded in the ledger, the metadata and the dead-letter table.

    Example:
        >>> DataLoss("record") is DataLoss.RECORD
        True
    """

    ERROR = "error"
    RECORD = "record"


class SchemaChanges(str, enum.Enum):
    """How to handle columns, and fields of structs, that a table does not have.

    ``fail``: raise an error that names them, before anything is read. ``add_columns``: add them to the table.
    ``rescue``: leave the table unchanged except for the column ``_rescued``, which stores them as a JSON object.

    Example:
        >>> SchemaChanges("add_columns") is SchemaChanges.ADD_COLUMNS
        True
    """

    FAIL = "fail"
    ADD_COLUMNS = "add_columns"
    RESCUE = "rescue"


class OnBadRows(str, enum.Enum):
    """How to handle rows that the table rejects, or for which the transform fails.

    ``fail``: fail the run with an error that gives the remedy. ``dead_letter``: turn their messages into dead letters,
    and write the other rows. Rows that the transform rejects become dead letters in both cases.

    Example:
        >>> OnBadRows("dead_letter") is OnBadRows.DEAD_LETTER
        True
    """

    FAIL = "fail"
    DEAD_LETTER = "dead_letter"


def choice(kind: type[Choice], value: object, *, option: str, others: str = "") -> Choice:
    """Return a member of an enumeration, given as the member or as the text of its value.

    Every argument of an enumeration type is checked here, so that text is accepted everywhere.

    Args:
        kind: the enumeration.
        value: a member, or its value as text.
        option: the name of the option, for the error.
        others: other values that the option accepts, for the error.

    Raises:
        InvalidOptionError: the value is unknown; the error lists the valid values.

    Example:
        >>> choice(ConsumerMode, "resumable", option="mode").name
        'RESUMABLE'
        >>> choice(ConsumerMode, ConsumerMode.RESUMABLE, option="mode").name
        'RESUMABLE'
    """
    if isinstance(value, kind):
        return value
    known = {str(member.value): member for member in kind}
    # Reject a member of another enumeration with the same text, because its meaning differs.
    if not isinstance(value, str) or isinstance(value, enum.Enum) or value not in known:
        raise InvalidOptionError(f"{option}={value!r} is unknown", remedy=f"Use {others}one of: {', '.join(known)}.")
    return known[value]


def choose_reset(reset: object, *, live: bool) -> AutoStreamReset:
    """Return where a consumer without a position starts; reject ``latest`` for a consumer that is not live.

    Args:
        reset: a member, or its value as text.
        live: whether the consumer waits for more messages at the end.

    Raises:
        InvalidOptionError: the value is unknown, or it is ``latest`` without ``live``, which reads nothing.

    Example:
        >>> choose_reset("latest", live=True).name
        'LATEST'
    """
    chosen = choice(AutoStreamReset, reset, option="reset")
    if chosen is AutoStreamReset.LATEST and not live:
        raise InvalidOptionError(
            "reset='latest' with live=False reads nothing, because it starts and ends at the end",
            remedy="Use reset='earliest', or live=True.",
        )
    return chosen


def choose_fields(options: object, **kinds: type[enum.Enum]) -> None:
    """Convert fields of a frozen dataclass that may be given as text to members of enumerations; see :func:`choice`.

    Args:
        options: the dataclass, in its ``__post_init__``.
        **kinds: the enumeration of each field.

    Raises:
        InvalidOptionError: a value is unknown; the error lists the valid values.

    Example:
        >>> FileProducerOptions(creation="never").creation
        <FileCreation.NEVER: 'never'>
    """
    for name, kind in kinds.items():
        object.__setattr__(options, name, choice(kind, getattr(options, name), option=name))


def check_range(
    name: str, value: float | None, *, at_least: float = 0.0, more_than: float | None = None, at_most: float = math.inf
) -> None:
    """Raise if a number is outside its range or not finite.

    Args:
        name: the name of the option.
        value: the value to check.
        at_least: the smallest valid number.
        more_than: an exclusive lower bound, instead of ``at_least``.
        at_most: the largest valid number.

    Raises:
        InvalidOptionError: the number is not valid; the error names the option, the value and the range.

    Example:
        >>> check_range("commit_interval_seconds", -1)
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: commit_interval_seconds=-1 is out of range. It must be a finite \
number >= 0.
    """
    # A Boolean would compare as a number, and text would raise a TypeError in the comparison.
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    is_enough = number >= at_least if more_than is None else number > more_than
    if not (math.isfinite(number) and is_enough and number <= at_most):
        lowest = f">= {at_least:g}" if more_than is None else f"> {more_than:g}"
        highest = f" and <= {at_most:g}" if math.isfinite(at_most) else ""
        raise InvalidOptionError(
            f"{name}={value!r} is out of range", remedy=f"It must be a finite number {lowest}{highest}."
        )


def check_count(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return ``value`` if it is a whole number in this range.

    Args:
        name: the name of the argument.
        value: the value to check.
        at_least: the smallest valid number.
        at_most: the largest valid number.

    Raises:
        InvalidOptionError: the value is not valid; the error names the argument, the value and the range.

    Example:
        >>> check_count("max_messages", 0)
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: max_messages=0 is out of range. It must be a whole number >= 1.
    """
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < at_least
        or (at_most is not None and value > at_most)
    ):
        highest = "" if at_most is None else f" and <= {at_most}"
        raise InvalidOptionError(
            f"{name}={value!r} is out of range", remedy=f"It must be a whole number >= {at_least}{highest}."
        )
    return value


def check_timeout(seconds: object, *, name: str = "timeout_seconds") -> float:
    """Return the seconds to wait; a negative number counts as 0, and ``math.inf`` waits without a limit.

    Args:
        seconds: the value to check.
        name: the name of the argument.

    Raises:
        InvalidOptionError: the value is not a number.

    Example:
        >>> check_timeout(-1), check_timeout(2.5)
        (0.0, 2.5)
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or math.isnan(seconds):
        raise InvalidOptionError(f"{name}={seconds!r} is not a number of seconds", remedy="Give one, or leave it out.")
    return max(0.0, float(seconds))


def check_switch(name: str, value: object) -> bool:
    """Return ``value`` if it is ``True`` or ``False``; text like ``"false"`` would count as true.

    Args:
        name: the name of the argument.
        value: the value to check.

    Raises:
        InvalidOptionError: the value is not a Boolean.

    Example:
        >>> check_switch("single_writer", "false")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: single_writer='false' is not a Boolean. Use True or False.
    """
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name}={value!r} is not a Boolean", remedy="Use True or False.")
    return value


def check_name(name: str, value: object, *, without: str = "") -> str:
    """Return ``value`` if it is a valid name.

    Clients written in C cut a name at its first NUL, so that two groups would become one, and crash the process on text
    that cannot be encoded as UTF-8.

    Args:
        name: the name of the argument.
        value: the value to check.
        without: the characters that the name must not contain.

    Raises:
        InvalidOptionError: the value is not text, is blank, or contains one of these characters, a NUL or a lone
            surrogate.

    Example:
        >>> check_name("group", "a/b", without="/")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: group='a/b' cannot be used. Use a name without '/'.
    """
    if not isinstance(value, str) or not value.strip() or set(value) & set(without):
        besides = f" without {without!r}" if without else ""
        raise InvalidOptionError(f"{name}={value!r} cannot be used", remedy=f"Use a name{besides}.")
    if not is_plain_text(value):
        raise InvalidOptionError(f"{name}={value!r} cannot be used", remedy="Use a name without NUL and surrogates.")
    return value


MAX_MEMBER_BYTES = 1024
"""The most bytes of the name of a member, which each of its commits has."""


def check_member(member: object) -> str:
    """Return ``member`` if it is a valid name of a member of a group.

    Raises:
        InvalidOptionError: it is no valid name, contains ``/``, or is longer than :data:`MAX_MEMBER_BYTES`.

    Example:
        >>> check_member("worker-1")
        'worker-1'
    """
    name = check_name("member", member, without="/")
    if len(name.encode()) > MAX_MEMBER_BYTES:
        raise InvalidOptionError(
            f"member={name[:20]!r}… is too long", remedy=f"Use a name of at most {MAX_MEMBER_BYTES:,} bytes."
        )
    return name


def check_iterable(name: str, values: object) -> None:
    """Raise unless ``values`` is an iterable of values; text is rejected, because each character would be a value.

    Args:
        name: the name of the argument.
        values: the values to check.

    Raises:
        InvalidOptionError: it is text, or not iterable.

    Example:
        >>> check_iterable("owners", ["team:shop"])
        >>> check_iterable("owners", "team:shop")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: owners='team:shop' is text, where several values are expected. \
Write owners=['team:shop'].
    """
    if isinstance(values, str | bytes):
        raise InvalidOptionError(
            f"{name}={values!r} is text, where several values are expected", remedy=f"Write {name}=[{values!r}]."
        )
    if not isinstance(values, Iterable):
        raise InvalidOptionError(
            f"{name}={values!r} is a {type(values).__name__}, where several values are expected",
            remedy="Give a list, a tuple or a set.",
        )


def is_plain_text(text: str) -> bool:
    r"""Return whether a client written in C accepts this text unchanged.

    Example:
        >>> is_plain_text("ü"), is_plain_text("a\0b"), is_plain_text("\ud800")
        (True, False, False)
    """
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one micro-batch.

    Args:
        max_records: the most messages; at least 1. If single Redis entries are claimed, the limit is at most 500,000.
        max_bytes: the most bytes of payloads, keys and headers, and of the names of headers and fields, and 64 for each
            header or further field; a batch always holds at least one message.

    Example:
        >>> Limits(max_records=10).max_records
        10
    """

    max_records: int = 2_000_000
    max_bytes: int = 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_records", "max_bytes"):
            check_count(name, getattr(self, name))

    def override(self, max_records: int | None = None, max_bytes: int | None = None) -> Limits:
        """Return these limits with the given ones replaced."""
        records = self.max_records if max_records is None else max_records
        return Limits(records, self.max_bytes if max_bytes is None else max_bytes)


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """How a run handles messages and rows that it cannot write unchanged.

    Args:
        on_data_loss: for messages that the stream removed before they were read: ``error`` fails the run, ``record``
            records the exact range and continues.
        on_bad_rows: for rows that violate a constraint of the table, or for which the transform fails: ``fail`` fails
            the run, ``dead_letter`` turns their messages into dead letters and continues. Rows that the transform
            rejects with :func:`stream_assets.reject` become dead letters in both cases.
        schema_changes: for columns, and fields of structs, that the table does not have: ``fail`` fails the run,
            ``add_columns`` adds them (and widens types if the table has ``delta.enableTypeWidening``), ``rescue``
            stores them in the column ``_rescued``. This includes JSON fields that are missing in the schema.
        dead_letter_payloads: whether Dagster gets values of messages: the beginning of one payload for each reason for
            dead letters, and the complete text of errors. Dagster stores them for a long time, and its users may not
            have access to the table, so by default it gets only the positions of messages.

    Raises:
        InvalidOptionError: a value is not one of the choices.

    Example:
        >>> ErrorPolicy(on_bad_rows="dead_letter").on_bad_rows is OnBadRows.DEAD_LETTER
        True
    """

    on_data_loss: DataLoss | str = DataLoss.ERROR
    on_bad_rows: OnBadRows | str = OnBadRows.FAIL
    schema_changes: SchemaChanges | str = SchemaChanges.FAIL
    dead_letter_payloads: bool = False

    def __post_init__(self) -> None:
        choose_fields(self, on_data_loss=DataLoss, on_bad_rows=OnBadRows, schema_changes=SchemaChanges)
        check_switch("dead_letter_payloads", self.dead_letter_payloads)


class FileCreation(str, enum.Enum):
    """Whether the file of a producer must exist, may be created, or must be new.

    Example:
        >>> FileProducerOptions(creation=FileCreation.NEVER).creation.value
        'never'
    """

    NEVER = "never"
    IF_MISSING = "if_missing"
    ALWAYS_NEW = "always_new"


DEFAULT_BEACON_INTERVAL = 1024 * 1024
DEFAULT_FILE_SIZE_LIMIT = 16 * 1024**3
# Redis counts idle time in milliseconds.
MIN_CLAIM_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class FileProducerOptions:
    """Options of a ``.ss`` producer (SeaStreamer's names and defaults).

    Args:
        creation: see :class:`FileCreation`.
        beacon_interval: bytes between beacons, a multiple of 1024; the value in an existing file takes precedence.
        end_with_eos: write an end-of-stream message when the producer ends.
        file_size_limit: the limit in bytes; a message that would exceed it raises :class:`SizeLimitError`. ``None`` is
            no limit.

    Example:
        >>> FileProducerOptions(beacon_interval=2048, end_with_eos=True).creation.value
        'if_missing'
    """

    creation: FileCreation = FileCreation.IF_MISSING
    beacon_interval: int = DEFAULT_BEACON_INTERVAL
    end_with_eos: bool = False
    file_size_limit: int | None = DEFAULT_FILE_SIZE_LIMIT

    def __post_init__(self) -> None:
        choose_fields(self, creation=FileCreation)
        check_switch("end_with_eos", self.end_with_eos)
        if self.file_size_limit is not None:
            check_count("file_size_limit", self.file_size_limit, at_least=0)
        if check_count("beacon_interval", self.beacon_interval, at_least=0) == 0 or self.beacon_interval % 1024:
            raise InvalidOptionError(
                f"beacon_interval={self.beacon_interval} is not a multiple of 1024",
                remedy="Use 1024, 2048, … ; the default is 1048576.",
            )


class AutoCommit(str, enum.Enum):
    """When a member of a Redis group acknowledges its messages to the server (SeaStreamer's four modes).

    ``immediate``: the server acknowledges on reading (at most once). ``delayed``: several seconds after a message was
    delivered to the user. ``rolling``: every second, for all messages that the user acknowledged by then.
    ``disabled``: only when ``commit`` is called.

    Example:
        >>> RedisGroupOptions(auto_commit=AutoCommit.DISABLED).auto_commit.value
        'disabled'
    """

    IMMEDIATE = "immediate"
    DELAYED = "delayed"
    ROLLING = "rolling"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisGroupOptions:
    """Options of a member of a Redis consumer group (SeaStreamer's names and defaults).

    Args:
        auto_commit: see :class:`AutoCommit`.
        auto_commit_delay_seconds: with ``delayed``, the time after which a delivered message counts as done.
        auto_commit_interval_seconds: the least time between two automatic commits.
        auto_claim_interval_seconds: with mode ``load_balanced``, the time between searches for pending entries of dead
            members; ``None`` disables them.
        auto_claim_idle_seconds: how long a member must have been inactive, and an entry idle, before it is taken over.
        batch_size: the number of entries to request from a shard; by default 100, and 10 with mode ``load_balanced``.
        create_stream: create a missing stream; without it, a missing stream is an error.
        consumer: this member's name in the group.
        max_deliveries: an entry that was delivered more often becomes a dead letter; ``None`` sets no limit.

    Example:
        >>> RedisGroupOptions(auto_commit=AutoCommit.ROLLING).auto_commit_interval_seconds
        1.0
    """

    auto_commit: AutoCommit = AutoCommit.DELAYED
    auto_commit_delay_seconds: float = 5.0
    auto_commit_interval_seconds: float = 1.0
    auto_claim_interval_seconds: float | None = 30.0
    auto_claim_idle_seconds: float = 60.0
    batch_size: int | None = None
    create_stream: bool = True
    consumer: str | None = None
    max_deliveries: int | None = None

    def __post_init__(self) -> None:
        choose_fields(self, auto_commit=AutoCommit)
        check_switch("create_stream", self.create_stream)
        for name in ("auto_commit_delay_seconds", "auto_commit_interval_seconds"):
            check_range(name, getattr(self, name))
        # A shorter idle time would take entries from members that are processing them.
        check_range("auto_claim_idle_seconds", self.auto_claim_idle_seconds, at_least=MIN_CLAIM_SECONDS)
        if self.auto_claim_interval_seconds is not None:
            check_range("auto_claim_interval_seconds", self.auto_claim_interval_seconds, at_least=MIN_CLAIM_SECONDS)
        for name in ("batch_size", "max_deliveries"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        if self.consumer is not None:
            check_name("consumer", self.consumer)


HOST_VARIABLE = "HOST_ID"
MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_CONTAINER_ID_DIGITS = 12
_numbers = itertools.count()


def host_id() -> str:
    """Return an id of this host: ``$HOST_ID``, the container's id, the MAC address, or systemd's machine id.

    The first one that exists is used. Default group names contain the id, so they survive restarts only on the same
    host: give groups explicit names if hosts change.

    Raises:
        InvalidOptionError: the host has no id that stays the same from run to run.

    Example:
        >>> host_id() == host_id()
        True
    """
    found = os.environ.get(HOST_VARIABLE) or _container_id() or _mac_address() or _machine_id()
    if found is None:
        raise InvalidOptionError(
            "this host has no id that stays the same from run to run: neither a MAC address nor "
            f"{' nor '.join(map(str, MACHINE_IDS))}",
            remedy=f"Give the group a name, or set the environment variable {HOST_VARIABLE}.",
        )
    return found


def new_consumer_name() -> str:
    """Return a unique name for a member of a group: host, process, thread and time (SeaStreamer's rule).

    Example:
        >>> new_consumer_name() == new_consumer_name()
        False
    """
    try:
        host = host_id()
    except InvalidOptionError:
        # The name need not be stable, because it is new in each run.
        host = socket.gethostname()
    return f"{host}:{os.getpid()}:{threading.get_native_id()}:{time.time_ns() + next(_numbers)}"


def _container_id() -> str | None:
    cgroup = Path("/proc/self/cgroup")
    last = cgroup.read_text().strip().rpartition("\n")[2] if cgroup.exists() else ""
    return last.partition("0::/docker/")[2][:_CONTAINER_ID_DIGITS] or None


def _mac_address() -> str | None:
    node = uuid.getnode()
    # Without a MAC address, Python generates a random one and sets this bit (RFC 4122, section 4.5).
    is_random = bool(node >> 40 & 1)
    return None if is_random else f"{node:012X}"


def _machine_id() -> str | None:
    found = (path.read_text().strip() for path in MACHINE_IDS if path.exists())
    return next(filter(None, found), None)


@dataclass(frozen=True, kw_only=True)
class Modes:
    """The available modes of a kind of reader, and the default names of its groups; all modes are checked here.

    Args:
        of: the kind of reader, for errors, like ``consumers of files``.
        available: the available modes.
        host_groups: the modes that need no explicit group name, each with the suffix that follows the host's id in the
            default name (SeaStreamer's rule).

    Example:
        >>> modes = Modes(of="consumers of files", available=(ConsumerMode.REAL_TIME, ConsumerMode.LOAD_BALANCED))
        >>> modes.group(ConsumerMode.LOAD_BALANCED, "billing")
        'billing'
        >>> modes.check(ConsumerMode.RESUMABLE)
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: mode 'resumable' is not available for consumers of files. \
Use mode 'real_time' or 'load_balanced'.
    """

    of: str
    available: tuple[ConsumerMode, ...]
    host_groups: Mapping[ConsumerMode, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "available", tuple(_mode(mode) for mode in self.available))
        object.__setattr__(self, "host_groups", {_mode(mode): tail for mode, tail in self.host_groups.items()})

    def check(self, mode: ConsumerMode) -> ConsumerMode:
        """Return the mode, which may be given as text, if it is available.

        Raises:
            InvalidOptionError: it is not available; the error lists the available modes.
        """
        chosen = _mode(mode)
        if chosen not in self.available:
            raise InvalidOptionError(
                f"mode {chosen.value!r} is not available for {self.of}", remedy=f"Use {_modes(self.available)}."
            )
        return chosen

    def group(self, mode: ConsumerMode, name: str | None) -> str | None:
        """Return the group's name; ``None`` with mode ``real_time``, which has no group.

        Args:
            mode: an available mode.
            name: the given name; ``None`` for the default.

        Raises:
            InvalidOptionError: the mode is not available, has no group but a name is given, or needs a name.
        """
        mode = self.check(mode)
        if mode is ConsumerMode.REAL_TIME:
            if name is None:
                return None
            with_group = [other for other in self.available if other is not mode]
            raise InvalidOptionError(
                f"mode real_time has no group, but group={name!r} is given",
                remedy=f"Leave the group out{f', or use {_modes(with_group)}' if with_group else ''}.",
            )
        if name is not None:
            return check_name("group", name)
        if mode not in self.host_groups:
            raise InvalidOptionError(f"mode {mode.value} needs a group", remedy="Give all members the same group.")
        return f"{host_id()}{self.host_groups[mode]}"


def _mode(mode: ConsumerMode) -> ConsumerMode:
    return choice(ConsumerMode, mode, option="mode")


def _modes(modes: Sequence[ConsumerMode]) -> str:
    return f"mode {' or '.join(repr(mode.value) for mode in modes)}"
