"""The run config of every stream asset, and of its jobs that replay and redrive."""

import enum
from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive
from spark_jobs.batches.replay import OnReplay, Replay
from stream_assets.options import BatchLimits, RunLimits
from stream_consumers.errors import InvalidOptionError


class ReplayMode(enum.Enum):
    """What becomes of the rows that a replayed range has in the table; Dagster shows the names."""

    replace = "replace"
    append = "append"


class BadRows(enum.Enum):
    """What becomes of rows that break a constraint of the table, or that the transform fails for.

    Dagster shows the names.
    """

    fail = "fail"
    dead_letter = "dead_letter"


class PlaceConfig(dg.Config):
    """A place in the stream: one of the two, or none.

    Example:
        >>> str(PlaceConfig(rewind={"orders/0": 100, "orders/1": 90}).bound())
        'orders/0=100,orders/1=90'
        >>> str(PlaceConfig(seek="2026-11-01T00:00:00Z").bound())
        '2026-11-01T00:00:00+00:00'
    """

    # Not None: a launchpad shows a field by its default, and one without is hidden.
    rewind: Any = Field(
        default="", description="earliest, latest, a sequence, or sequences of shards: {orders/0: 100, orders/1: 90}."
    )
    seek: str = Field(
        default="", description="The first message with this time or a later one, like 2026-11-01T00:00:00Z."
    )

    def bound(self) -> Bound | None:
        """The place; ``None`` if none is given.

        Raises:
            InvalidOptionError: both are given, or what is given is no place.
        """
        if self.rewind in (None, "") and not self.seek:
            return None
        if self.rewind not in (None, "") and self.seek:
            raise InvalidOptionError(
                f"rewind={self.rewind!r} and seek={self.seek!r} are two places", remedy="Give one of the two."
            )
        if self.seek:
            return Bound.at_time(self.seek)
        if isinstance(self.rewind, dict):
            return Bound.at_sequences(self.rewind)
        bound = Bound.parse(str(self.rewind))
        if bound.moment is not None:
            raise InvalidOptionError(f"rewind does not go to a time: {self.rewind!r}", remedy="Use seek for that.")
        return bound


class WriterConfig(BatchLimits):
    """How much one run does, how long it retries, and what becomes of bad rows. Dagster explains a wrong key."""

    on_bad_rows: BadRows | None = Field(
        default=None,
        description="What becomes of rows that break a constraint of the table, or that the transform fails for: fail "
        "the run, or make dead letters of their messages. By default as the asset says.",
    )

    def check(self) -> None:
        """Refuse values that make no sense, or that contradict each other.

        Raises:
            InvalidOptionError: naming them.
        """


class ReplayConfig(WriterConfig):
    """The run config of a replay job; its partition says what is replayed, and all of it is."""

    on_replay: ReplayMode = Field(
        default=ReplayMode.replace, description="replace the rows of the range, or append to them."
    )


class RedriveConfig(WriterConfig):
    """The run config of a redrive job: which dead letters are decoded again; all of them, if it says nothing.

    Example:
        >>> RedriveConfig(start=PlaceConfig(seek="2026-11-01"), limit=1000).redrive().limit
        1000
    """

    start: PlaceConfig | None = Field(default=None, description="The first dead letters; without it all.")
    stop: PlaceConfig | None = Field(default=None, description="The ones to stop before.")
    limit: int | None = Field(default=None, gt=0, description="Try so many dead letters at most.")
    max_batches: int | None = Field(
        default=None, gt=0, description="Stop after this many micro-batches; without it all dead letters are tried."
    )
    dry_run: bool = Field(
        default=False, description="Log how many would become rows, and why the others do not; change nothing."
    )
    dismiss: str = Field(
        default="", description="Decode none of them, but dismiss them, with this note: nothing will ever decode them."
    )
    reason: str = Field(default="", description="With dismiss: only those with this text in their reason.")

    def redrive(self) -> Redrive:
        """Which dead letters to read again.

        Raises:
            InvalidOptionError: a bound is no place.
        """
        start, stop = (bound.bound() if bound else None for bound in (self.start, self.stop))
        return Redrive(start, stop, self.limit)

    def check(self) -> None:
        """Refuse what is no place, and what does not go together."""
        self.redrive().span()
        if self.dismiss and (self.dry_run or self.max_batches is not None):
            raise InvalidOptionError(
                "dismiss does not go together with dry_run or max_batches", remedy="Leave them out, or use limit."
            )
        if self.reason and not self.dismiss:
            raise InvalidOptionError("reason is only for dismiss", remedy="Leave it out, or give a note as dismiss.")


class StreamConfig(ReplayConfig, RunLimits):
    """The run config of a stream asset. Without ``start`` the run ingests from the group's position on.

    With ``start`` it replays: from there to ``stop``, or to the group's position; no position moves. With
    ``move_group`` it moves the group to ``start`` instead, and ingests from there.

    Example:
        >>> config = StreamConfig(start=PlaceConfig(rewind="earliest"), stop=PlaceConfig(seek="2026-11-01"))
        >>> config.replay().on_replay.value
        'replace'
    """

    start: PlaceConfig = Field(default=PlaceConfig(), description="Replay from here, or move the group here.")
    stop: PlaceConfig = Field(default=PlaceConfig(), description="Go no further than this.")
    move_group: bool = Field(
        default=False, description="Move the group to start, also backwards; the next runs continue behind this one."
    )

    accept: list[str] = Field(
        default=[],
        description=(
            "Continue with streams that were deleted and made again, by the names of their next epochs, like orders#2. "
            "One that was accepted before is left alone."
        ),
    )

    max_batches: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this many micro-batches; without it the run drains to its end. Not for a replay.",
    )

    def check(self) -> None:
        """Refuse what is no place, and what does not go together."""
        start, stop = self.start.bound(), self.stop.bound()
        is_append = self.on_replay is ReplayMode.append
        if start is None and (self.move_group or is_append):
            raise InvalidOptionError(
                f"{'move_group' if self.move_group else 'on_replay: append'} says nothing without start",
                remedy="Give start, as {rewind: earliest} or {seek: 2026-11-01T00:00:00Z}.",
            )
        if self.move_group and is_append:
            raise InvalidOptionError(
                "on_replay: append does not go together with move_group",
                remedy="A group that moves back replaces what it writes again; leave one of the two out.",
            )

        if self.max_batches is not None and start is not None and not self.move_group:
            raise InvalidOptionError(
                f"max_batches={self.max_batches} would leave a replay in the middle: a start replays, and nobody "
                "continues a run that has ended well",
                remedy="Leave it out, and say with stop how far to replay.",
            )

        if self.linger_seconds and (stop is not None or (start is not None and not self.move_group)):
            raise InvalidOptionError(
                f"linger_seconds={self.linger_seconds:g} lets a run stay, but one with "
                f"{'a stop' if stop is not None else 'a start replays, and'} ends there",
                remedy="Leave one of them out.",
            )

    def replay(self) -> Replay:
        """What to replay."""
        return Replay(self.start.bound(), self.stop.bound(), OnReplay(self.on_replay.value))


def checked(op: dg.OpDefinition, kind: type[WriterConfig]) -> dg.OpDefinition:
    """The same op, whose run config is refused before there is a run if it makes no sense.

    A mapping of the config is evaluated when a run is launched: a launchpad refuses what the types let pass.

    Args:
        op: that takes the config.
        kind: of the config.
    """

    def check(given: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            kind(**given).check()
        except InvalidOptionError as error:
            # Dagster wraps any other error, so that the reason is below its own.
            reason = f"the run config of {op.name} is refused: {error}"
            raise dg.DagsterInvalidConfigError(reason, [], given) from error  # type: ignore[no-untyped-call]
        return given

    return op.configured(check, op.name, op.config_schema.config_type)
