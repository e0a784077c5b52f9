"""Hides secrets in what client libraries log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from stream_consumers.client_config import redact_options

Secrets = Callable[[], Mapping[str, object]]

LIBRARIES = (
    "opentelemetry", "requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2", "redis", "push_response",
)  # fmt: skip
"""The topmost loggers of libraries that log addresses, and what a server or a proxy answers; the last is redis-py's."""
NOT_SHOWN = "this record is not shown, because its secrets could not be hidden"
_sources: list[Secrets] = []


def redact_logs(secrets: Secrets) -> None:
    """Redact all records that :data:`LIBRARIES` log from now on.

    Args:
        secrets: returns the current options for :func:`redact_options`. If it fails, a record is not shown.
    """
    if secrets not in _sources:
        _sources.append(secrets)
    _redact_new_records()


@cache
def _redact_new_records() -> None:
    # A filter of a logger does not see the records of the loggers below it, so a record is redacted when it is created.
    create = logging.getLogRecordFactory()

    def create_redacted(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = create(*arguments, **more)
        # A record that logging.makeLogRecord creates, as Dagster's loggers do, has no name yet.
        if record.name is not None and record.name.partition(".")[0] in LIBRARIES:
            _redact(record)
        return record

    logging.setLogRecordFactory(create_redacted)


def _redact(record: logging.LogRecord) -> None:
    try:
        message = _redacted(record.getMessage())
        raised = _redacted(logging.Formatter().formatException(record.exc_info)) if record.exc_info else None
    except Exception:  # noqa: BLE001 - a log call must not raise
        message, raised = NOT_SHOWN, None
    record.msg, record.args, record.exc_info, record.exc_text = message, (), None, raised


def _redacted(text: str) -> str:
    # All at once, because a secret that begins like another one would leave the end of that.
    options = [(f"{place} {name}", value) for place, of in enumerate(_sources) for name, value in of().items()]
    return redact_options(text, dict(options))
