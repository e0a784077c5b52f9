"""What a decorated function is: the transform of each batch, or the body of the asset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg

from spark_jobs.batches.ingestion import Transform
from stream_assets.materializations import Context
from stream_assets.stream_run import StreamRun
from stream_consumers.errors import InvalidOptionError

CONTEXT = "context"
_OF_ONE_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class AssetFunction:
    """A decorated function, with what it asks for by the names of its parameters.

    Args:
        function: as it was written.
        run: the parameter that takes a ``StreamRun``: then it is the body of the asset. Otherwise it is the transform,
            and its first parameter but ``context`` takes the rows.
        rows: the parameter that takes the rows, if it is the transform.
        takes_context: whether it has a parameter ``context``.
        resources: the other parameters, each the key of a resource.
    """

    function: Callable[..., Any]
    run: str | None
    rows: str | None
    takes_context: bool
    resources: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> AssetFunction:
        """Look at its parameters. One with a default is left to the function.

        Raises:
            InvalidOptionError: it yields, as a body does, but takes no ``StreamRun``.

        Example:
            >>> def orders(context, batch, settings):
            ...     return batch
            >>> AssetFunction.of(orders).resources
            ('settings',)
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            # Some callables of C have no signature.
            return cls(function, None, None, takes_context=False, resources=())
        run = next((p.name for p in parameters if _is_run(p.annotation)), None)
        if run is None and inspect.isgeneratorfunction(function):
            raise InvalidOptionError(
                f"{getattr(function, '__name__', function)!r} yields, but it takes no StreamRun",
                remedy="Write the body of an asset as (context, stream: StreamRun), and a transform with return.",
            )
        asked = [p.name for p in parameters if p.kind in _OF_ONE_NAME and p.default is p.empty and p.name != CONTEXT]
        rows = asked[0] if asked and run is None else None
        others = tuple(name for name in asked if name not in (run, rows))
        return cls(function, run, rows, any(p.name == CONTEXT for p in parameters), others)

    @property
    def plain_transform(self) -> Transform | None:
        """The function if it is a transform that takes the rows and nothing else."""
        return None if self.run or self.takes_context or self.resources else self.function

    def events(self, context: Context, stream: StreamRun) -> Iterator[Any]:
        """Run the body, or that of every asset whose function is a transform."""
        given = {name: getattr(context.resources, name) for name in self.resources}
        if self.takes_context:
            given[CONTEXT] = context
        if self.run is not None:
            told = self.function(**given, **{self.run: stream})
            # A result of Dagster's is a tuple of its fields.
            if not isinstance(told, Iterable) or isinstance(told, dg.MaterializeResult):
                raise InvalidOptionError(
                    f"the body {getattr(self.function, '__name__', self.function)!r} returned {told!r}, but a body "
                    "yields what Dagster is told, and a stream that nobody iterates over is not read",
                    remedy=f"Write in it: yield from {self.run}.run(context)",
                )
            yield from told
        else:
            yield from stream.run(context, transform=self._transform(given))

    def _transform(self, given: dict[str, Any]) -> Transform:
        first = self.rows
        if not given or first is None:
            return self.function

        # The log of the table names the transform.
        @functools.wraps(self.function)
        def transform(rows: Any) -> Any:
            return self.function(**{first: rows}, **given)

        return transform


def _is_run(annotation: object) -> bool:
    """Whether a parameter is annotated with the class, also as text."""
    return annotation is StreamRun or str(annotation).strip("'\"").rpartition(".")[2] == StreamRun.__name__
