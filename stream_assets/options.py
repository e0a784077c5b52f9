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
from spark_jobs.batches.ingestion import ignore_steps
from spark_jobs.batches.replay import OnReplay, Replay
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch

Count = Annotated[int, Field(gt=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class BatchLimits(dg.Config):
    """The size of a micro-batch, and how long a run retries. An option that is left out keeps its default."""

    model_config = ConfigDict(extra="forbid")

    max_records: Count | None = Field(default=None, description="The most messages in a micro-batch.")
    max_bytes: Count | None = Field(default=None, description="The most payload bytes in a micro-batch.")
    retry_seconds: Seconds | None = Field(
        default=None,
        description="How long a run retries, with growing pauses, after a temporary error, like a broker that does not "
        "answer, in seconds; 0 for no retries.",
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
    """How much a run does: the size of its micro-batches, how long it polls, and how often it is materialized.

    The run config has the same options, and overrides those of the asset.

    Example:
        >>> RunLimits(max_records=1000, linger_seconds=600).max_records
        1000
    """

    linger_seconds: Seconds | None = Field(
        default=None,
        description="How long a run keeps polling for new messages, in seconds from its start; with 0, "
        "the default, a run ends when it has written the messages that were there when it started.",
    )
    materialize_seconds: Seconds | None = Field(
        default=None,
        description="The least time between two materializations of a run, in seconds; 0 for one per batch. The "
        "default is 30 in a run with linger_seconds; any other run is materialized once, at its end. A run that is "
        "materialized several times also observes its batches only that often.",
    )
    batch_seconds: Seconds | None = Field(
        default=None,
        description="The least time between two batches of a run with linger_seconds, in seconds, 1 by default. With "
        "more, like 10, the table gets fewer versions and small files. A backlog is written without pauses.",
    )

    def overridden(self, other: BatchLimits) -> "RunLimits":
        """Return these limits, overridden by those that are set in another object.

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
        retry_policy: the retry policy of the op.
        tags: the tags of the op, for executors that run each step in its own process or pod; the generated jobs do not.
        pool: the pool of the op, whose limit is the number of runs that may write at the same time.
        hooks: the hooks of the op.
        run_tags: the tags of all runs that ingest, replay, redrive or maintain: ``{"dagster/priority": "3"}``, or
            ``{"dagster-k8s/config": {…}}``, which sets the memory of the pod of a run.
        backfill_policy: how many runs replay a selection of partitions; one by default.
        single_writer: you guarantee that no two runs write the table at the same time. Without this guarantee, a run
            refuses a table whose storage could then lose a commit: Amazon S3 with Delta's own log store. The sensor
            requests no run until Dagster knows that the last one has ended, so set ``run_monitoring``. All jobs that
            write the table share ``pool``, whose limit must be 1.
        observer: called at each step of a batch, for tests that inject faults.

    Raises:
        InvalidOptionError: the pool has no name, or a single writer has no pool.

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
    observer: Callable[..., None] = ignore_steps

    def __post_init__(self) -> None:
        check_switch("single_writer", self.single_writer)
        if self.pool is not None and not self.pool:
            raise InvalidOptionError(f"pool={self.pool!r} is empty", remedy="Set a name, or leave it out.")
        if self.single_writer and self.pool is None:
            raise InvalidOptionError(
                "single_writer=True needs a pool, which keeps ingestion, replays and maintenance from running together",
                remedy="Add a pool with a limit of 1, as in OpOptions(single_writer=True, pool='orders').",
            )


class ReplayMode(enum.Enum):
    """How a replay treats the rows that its range has in the table. Dagster shows the names."""

    replace = "replace"
    append = "append"


class BadRows(enum.Enum):
    """How a run treats rows that violate a table constraint or fail in the transform. Dagster shows the names."""

    fail = "fail"
    dead_letter = "dead_letter"


class PlaceConfig(dg.Config):
    """A position in the stream, as ``rewind`` or ``seek``, or none.

    Example:
        >>> str(PlaceConfig(rewind={"orders/0": 100, "orders/1": 90}).bound())
        'orders/0=100,orders/1=90'
        >>> str(PlaceConfig(seek="2026-11-01T00:00:00Z").bound())
        '2026-11-01T00:00:00+00:00'
    """

    # The default is not None, because a launchpad hides a field whose default is None.
    rewind: Any = Field(
        default="", description="earliest, latest, a sequence, or a sequence per shard: {orders/0: 100, orders/1: 90}."
    )
    seek: str = Field(
        default="", description="The first message with this time or a later one, like 2026-11-01T00:00:00Z."
    )

    def bound(self) -> Bound | None:
        """Return the position; ``None`` if none is set.

        Raises:
            InvalidOptionError: both options are set, or the value is not a position.
        """
        if self.rewind in (None, "") and not self.seek:
            return None
        if self.rewind not in (None, "") and self.seek:
            raise InvalidOptionError(
                f"rewind={self.rewind!r} and seek={self.seek!r} are both set", remedy="Set one of the two."
            )
        if self.seek:
            return Bound.at_time(self.seek)
        if isinstance(self.rewind, dict):
            return Bound.at_sequences(self.rewind)
        bound = Bound.parse(str(self.rewind))
        if bound.moment is not None:
            raise InvalidOptionError(f"rewind={self.rewind!r} is a time", remedy="Use seek for a time.")
        return bound


class WriterConfig(BatchLimits):
    """How much one run does, how long it retries, and how it treats bad rows. Dagster reports a wrong key."""

    on_bad_rows: BadRows | None = Field(
        default=None,
        description="How to treat rows that violate a constraint of the table or fail in the transform: fail the run, "
        "or make dead letters of their messages. The default is the setting of the asset.",
    )

    def check(self) -> None:
        """Check the values, and that they can be combined.

        Raises:
            InvalidOptionError: a value is wrong, or two of them contradict each other.
        """


class ReplayConfig(WriterConfig):
    """The run config of a replay job, which replays its partition completely."""

    on_replay: ReplayMode = Field(
        default=ReplayMode.replace, description="Whether to replace the rows of the range, or to append to them."
    )


class RedriveConfig(WriterConfig):
    """The run config of a redrive job: which dead letters are decoded again; all of them by default.

    Example:
        >>> RedriveConfig(start=PlaceConfig(seek="2026-11-01"), limit=1000).redrive().limit
        1000
    """

    start: PlaceConfig | None = Field(default=None, description="The first dead letter; all by default.")
    stop: PlaceConfig | None = Field(default=None, description="The dead letter to stop before.")
    limit: int | None = Field(default=None, gt=0, description="The most dead letters to try.")
    max_batches: int | None = Field(
        default=None, gt=0, description="Stop after this many micro-batches; by default all dead letters are tried."
    )
    dry_run: bool = Field(
        default=False, description="Log how many would become rows, and why the others do not; change nothing."
    )
    dismiss: str = Field(default="", description="Dismiss the dead letters, with this note, in place of decoding them.")
    reason: str = Field(
        default="", description="With dismiss: dismiss only dead letters with this text in their reason."
    )

    def redrive(self) -> Redrive:
        """Return the redrive that is requested.

        Raises:
            InvalidOptionError: a bound is not a position.
        """
        start, stop = (bound.bound() if bound else None for bound in (self.start, self.stop))
        return Redrive(start, stop, self.limit)

    def check(self) -> None:
        """Check the bounds, and that the options can be combined."""
        self.redrive().span()
        if self.dismiss and (self.dry_run or self.max_batches is not None):
            raise InvalidOptionError(
                "dismiss cannot be combined with dry_run or max_batches", remedy="Leave them out, or use limit."
            )
        if self.reason and not self.dismiss:
            raise InvalidOptionError("reason needs dismiss", remedy="Leave it out, or set dismiss to a note.")


class StreamConfig(ReplayConfig, RunLimits):
    """The run config of a stream asset. Without ``start`` the run ingests from the group's position.

    With ``start`` the run replays from there to ``stop``, or to the group's position, and no position moves. With
    ``start`` and ``move_group`` it moves the group to ``start``, and ingests from there.

    Example:
        >>> config = StreamConfig(start=PlaceConfig(rewind="earliest"), stop=PlaceConfig(seek="2026-11-01"))
        >>> config.replay().on_replay.value
        'replace'
    """

    start: PlaceConfig = Field(default=PlaceConfig(), description="Replay from this position, or move the group to it.")
    stop: PlaceConfig = Field(default=PlaceConfig(), description="Stop at this position.")
    move_group: bool = Field(
        default=False, description="Move the group to start, also backwards; later runs continue after this run."
    )

    accept: list[str] = Field(
        default=[],
        description=(
            "Continue with streams that were deleted and created again, by the names of their next epochs, like "
            "orders#2. An epoch that was accepted before is ignored."
        ),
    )

    max_batches: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this many micro-batches; by default the run continues to its end. Not for a replay.",
    )
    rebuild: bool = Field(
        default=False, description="Make the whole table anew from the first message, and swap it in by one commit."
    )

    def check(self) -> None:
        """Check the bounds, and that the options can be combined."""
        start, stop = self.start.bound(), self.stop.bound()
        others = {"start": start, "stop": stop, "accept": self.accept, "linger_seconds": self.linger_seconds}
        given = [name for name, value in {**others, "max_batches": self.max_batches}.items() if value]
        if self.rebuild and given:
            raise InvalidOptionError(
                f"rebuild cannot be combined with {', '.join(given)}, because it makes the whole table anew",
                remedy="Leave one of them out.",
            )
        is_append = self.on_replay is ReplayMode.append
        if start is None and (self.move_group or is_append):
            raise InvalidOptionError(
                f"{'move_group' if self.move_group else 'on_replay: append'} needs start",
                remedy="Set start, as {rewind: earliest} or {seek: 2026-11-01T00:00:00Z}.",
            )
        if self.move_group and is_append:
            raise InvalidOptionError(
                "on_replay: append cannot be combined with move_group: a group that moves back replaces rows",
                remedy="Leave one of the two out.",
            )

        if self.max_batches is not None and start is not None and not self.move_group:
            raise InvalidOptionError(
                f"max_batches={self.max_batches} would stop a replay before its end, and no run would continue it",
                remedy="Leave it out, and set stop to the end of the replay.",
            )

        if self.linger_seconds and (stop is not None or (start is not None and not self.move_group)):
            raise InvalidOptionError(
                f"linger_seconds={self.linger_seconds:g} cannot be combined with "
                f"{'stop' if stop is not None else 'the start of a replay'}, because such a run ends there",
                remedy="Leave one of them out.",
            )

    def replay(self) -> Replay:
        """Return the replay that is requested."""
        return Replay(self.start.bound(), self.stop.bound(), OnReplay(self.on_replay.value))


def with_config_check(op: dg.OpDefinition, kind: type[WriterConfig]) -> dg.OpDefinition:
    """Return the op with a config mapping that checks the run config.

    Dagster evaluates the mapping when a run is launched, so a launchpad refuses a wrong config before a run exists.

    Args:
        op: the op that takes the config.
        kind: the class of the config.
    """

    def check(given: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            kind(**given).check()
        except InvalidOptionError as error:
            # Dagster would wrap any other error, and show the reason only below its own message.
            reason = f"the run config of {op.name} is invalid: {error}"
            raise dg.DagsterInvalidConfigError(reason, [], given) from error  # type: ignore[no-untyped-call]
        return given

    return op.configured(check, op.name, op.config_schema.config_type)
