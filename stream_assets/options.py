"""The options of a stream asset that belong together: how much a run does, what it does about errors, how it runs."""

# No annotations from the future: Dagster reads those of the classes that it makes a schema of.
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Any

import dagster as dg
from pydantic import ConfigDict, Field, ValidationError, model_validator

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
