"""The options of a stream asset, and the run config that overrides them."""

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Any

import dagster as dg
from pydantic import ConfigDict, Field, ValidationError, model_validator

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive
from spark_jobs.batches.replay import OnReplay, Replay
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch

Count = Annotated[int, Field(gt=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class BatchLimits(dg.Config):
    """How much one micro-batch holds, and how long a run retries. What is left out stays at its default."""

    model_config = ConfigDict(extra="forbid")

    max_records: Count | None = Field(default=None, description="The most messages in one micro-batch.")
    max_bytes: Count | None = Field(default=None, description="The most payload bytes in one micro-batch.")
    retry_seconds: Seconds | None = Field(
        default=None,
        description="How long a run retries, with growing pauses, after an error that may be temporary, like a broker "
        "that does not answer; 0 for no retries.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_option(cls, given: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(given)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors()]
            raise InvalidOptionError("; ".join(found), remedy="Correct it, or leave it out.") from None


class RunLimits(BatchLimits):
    """How much one run does: the size of its micro-batches, how long it stays, how often it is materialized.

    Each option is also one of the run config, where it overrides what the asset was declared with.

    Example:
        >>> RunLimits(max_records=1000, linger_seconds=600).max_records
        1000
    """

    linger_seconds: Seconds | None = Field(
        default=None,
        description="How long a run keeps polling for new messages, in seconds from its start; 0, the default, for a "
        "run that ends when it has written the messages that were there.",
    )
    materialize_seconds: Seconds | None = Field(
        default=None,
        description="The least time between two materializations of a run; 0 for one a batch. The default is 30 in a "
        "run with linger_seconds; any other run has one, at its end.",
    )

    def overridden(self, other: BatchLimits) -> "RunLimits":
        """These limits, with those replaced that the other object has.

        Example:
            >>> RunLimits(max_records=10, max_bytes=20).overridden(BatchLimits(max_records=5)).max_records
            5
        """
        own = {name: value for name, value in other if name in RunLimits.model_fields and value is not None}
        return RunLimits(**{**dict(self), **own})


@dataclass(frozen=True)
class OpOptions:
    """How an asset runs in Dagster.

    Args:
        retry_policy: of a run that fails.
        tags: of the op, for executors that give each step a process or a pod of its own; the jobs here do not.
        pool: of the op; its limit says how many runs write at the same time.
        hooks: of the op.
        run_tags: of the runs of its jobs, those that ingest, replay, redrive and maintain: ``{"dagster/priority":
            "3"}``, or ``{"dagster-k8s/config": {…}}``, which says how much memory the pod of a run gets.
        backfill_policy: how many runs replay a selection of partitions; one by default.
        single_writer: you guarantee that no two runs write the table at the same time. Without it a table is refused
            whose storage could lose a commit then: Amazon S3 with Delta's own log store. The sensor asks for no run
            until Dagster knows that the last one has ended: set ``run_monitoring``. All jobs that write the table
            share ``pool``, whose limit has to be 1.

    Raises:
        InvalidOptionError: a pool without a name, or a single writer without a pool.

    Example:
        >>> OpOptions(pool="lake", run_tags={"dagster/priority": "3"}).pool
        'lake'
    """

    retry_policy: dg.RetryPolicy | None = None
    tags: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    hooks: AbstractSet[dg.HookDefinition] = frozenset()
    run_tags: Mapping[str, Any] = field(default_factory=dict)
    backfill_policy: dg.BackfillPolicy | None = None
    single_writer: bool = False

    def __post_init__(self) -> None:
        check_switch("single_writer", self.single_writer)
        if self.pool is not None and not self.pool:
            raise InvalidOptionError(f"pool={self.pool!r} is empty", remedy="Give a name, or leave it out.")
        if self.single_writer and self.pool is None:
            raise InvalidOptionError(
                "single_writer=True needs a pool: only that keeps ingestion, replays and maintenance apart",
                remedy="Add a pool with a limit of 1, as in OpOptions(single_writer=True, pool='orders').",
            )


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
    limit: int | None = Field(default=None, gt=0, description="The most dead letters to try.")
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
                f"max_batches={self.max_batches} would stop a replay before its end, and a run that ends well is "
                "not continued",
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


def with_config_check(op: dg.OpDefinition, kind: type[WriterConfig]) -> dg.OpDefinition:
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
