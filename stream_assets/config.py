"""The run config of every stream asset."""

import dagster as dg
from pydantic import Field

from stream_consumers.options import Limits


class StreamConfig(dg.Config):
    """How much one run does. Everything is optional; a wrong key gives Dagster's own readable error.

    Example:
        >>> StreamConfig(max_records=1000).limits(Limits()).max_records
        1000
    """

    max_records: int | None = Field(default=None, gt=0, description="The most messages in one micro-batch.")
    max_bytes: int | None = Field(default=None, gt=0, description="The most payload bytes in one micro-batch.")
    max_batches: int | None = Field(
        default=None, gt=0, description="Stop after this many micro-batches; without it the run drains to its end."
    )

    def limits(self, default: Limits) -> Limits:
        """The limits of a batch in this run."""
        return Limits(self.max_records or default.max_records, self.max_bytes or default.max_bytes)
