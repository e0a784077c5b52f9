"""Modes and options, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeVar

from stream_consumers.errors import InvalidOptionError

Choice = TypeVar("Choice", bound=enum.Enum)


class ConsumerMode(str, enum.Enum):
    """How a consumer shares and remembers (SeaStreamer's three modes).

    ``real_time``: no group, from the end on; only the ledger remembers. ``resumable``: one member reads all shards
    and continues where its group was. ``load_balanced``: several members share the shards.
    """

    REAL_TIME = "real_time"
    RESUMABLE = "resumable"
    LOAD_BALANCED = "load_balanced"


class AutoStreamReset(str, enum.Enum):
    """Where a consumer starts that has no position yet."""

    EARLIEST = "earliest"
    LATEST = "latest"


class DataLoss(str, enum.Enum):
    """What to do when messages are gone from the stream before they were read.

    ``error``: stop, and say what is gone. ``record``: go on behind it; the exact range goes into the ledger, the
    metadata and the dead-letter table.
    """

    ERROR = "error"
    RECORD = "record"


def choice(kind: type[Choice], value: str, *, option: str) -> Choice:
    """The member of ``kind`` with this value.

    Raises:
        InvalidOptionError: listing the values there are.
    """
    known = [str(member.value) for member in kind]
    if value not in known:
        raise InvalidOptionError(f"{option}={value!r} is unknown", remedy=f"Use one of: {', '.join(known)}.")
    return kind(value)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one micro-batch holds.

    Args:
        max_records: messages; at least 1.
        max_bytes: payload bytes; a batch always takes at least one message.

    Example:
        >>> Limits(max_records=10).max_records
        10
    """

    max_records: int = 500_000
    max_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_records", "max_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidOptionError(f"{name}={value} leaves nothing to read", remedy="Use 1 or more.")


class FileCreation(str, enum.Enum):
    """What a producer does about the file: it must exist, may be created, or must be new."""

    NEVER = "never"
    IF_MISSING = "if_missing"
    ALWAYS_NEW = "always_new"


DEFAULT_BEACON_INTERVAL = 1024 * 1024
DEFAULT_FILE_SIZE_LIMIT = 16 * 1024**3


@dataclass(frozen=True, slots=True)
class FileProducerOptions:
    """Options of a ``.ss`` producer (SeaStreamer's names and defaults).

    Args:
        creation: see :class:`FileCreation`.
        beacon_interval: bytes between beacons, a multiple of 1024; the header of an existing file wins.
        end_with_eos: write an end-of-stream message when the producer ends.
        file_size_limit: bytes; a message that would pass it raises :class:`SizeLimitError`.
    """

    creation: FileCreation = FileCreation.IF_MISSING
    beacon_interval: int = DEFAULT_BEACON_INTERVAL
    end_with_eos: bool = False
    file_size_limit: int = DEFAULT_FILE_SIZE_LIMIT

    def __post_init__(self) -> None:
        if self.beacon_interval <= 0 or self.beacon_interval % 1024:
            raise InvalidOptionError(
                f"beacon_interval={self.beacon_interval} is not a multiple of 1024",
                remedy="Use 1024, 2048, … ; the default is 1048576.",
            )
