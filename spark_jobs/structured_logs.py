"""Log lines as JSON objects, each with the batch that it is about; never with a payload or a setting of a client.

A caller that logs need not name the batch. The code that writes a batch sets it once (:func:`about`), and every line of
the same thread, from any library, carries it until the next call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType

FIELDS = "stream_assets"
"""The name in ``extra`` under which a line has fields of its own: ``log.info(…, extra={FIELDS: {"rows": 3}})``."""
_NOTHING: Mapping[str, object] = MappingProxyType({})
_about: ContextVar[Mapping[str, object]] = ContextVar("stream_assets_batch", default=_NOTHING)


def about(batch: Mapping[str, object]) -> None:
    """From here on, the log lines of this thread are about this batch; about none, if it is empty.

    Args:
        batch: fields of the lines, like ``{"batch": "5f2c…", "batch_number": 7}``.
    """
    _about.set(batch)


class JsonFormatter(logging.Formatter):
    """Formats a log line as a JSON object, for ``logging`` and for the handlers in a ``dagster.yaml``.

    Its fields are ``time`` (UTC), ``level``, ``logger`` and ``message``; ``batch``, ``batch_number``, ``batch_kind``,
    ``group`` and ``table`` while a batch is written; the numbers of a batch that is in the table; ``run``, ``job`` and
    ``step`` in a run of Dagster; and ``error`` with the traceback of an exception.

    Example:
        >>> about({"batch": "5f2c", "batch_number": 7})
        >>> line = logging.LogRecord("spark_jobs", logging.INFO, "", 0, "%d messages", (3,), None)
        >>> json.loads(JsonFormatter().format(line))["batch_number"]
        7
        >>> about({})
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get(),
            **getattr(record, FIELDS, {}),
        }
        run = getattr(record, "dagster_meta", None)
        if isinstance(run, Mapping):
            named = {"run": run.get("run_id"), "job": run.get("job_name"), "step": run.get("step_key")}
            # Dagster puts the name of the run and the step before the message.
            text = {"message": run.get("orig_message")}
            line.update({name: value for name, value in {**named, **text}.items() if value})
        # A redacted record has only the text of its traceback.
        if error := record.exc_text or (record.exc_info and self.formatException(record.exc_info)):
            line["error"] = error
        return json.dumps(line, default=str, ensure_ascii=False)
