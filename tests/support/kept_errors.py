"""What Dagster keeps of an error."""

from __future__ import annotations

from traceback import TracebackException

from dagster_shared.error import SerializableErrorInfo


def kept(error: BaseException) -> str:
    """The messages of an error, of its causes and of its contexts, as Dagster's event log has them."""
    found = SerializableErrorInfo.from_traceback(TracebackException.from_exception(error))
    said = []
    waiting = [found]
    while waiting:
        one = waiting.pop()
        said.append(one.message)
        waiting += [other for other in (one.cause, one.context) if other is not None]
    return "\n".join(said)
