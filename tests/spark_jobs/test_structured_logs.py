"""Log lines as JSON objects."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest

from spark_jobs.batches.job import drain_batches
from spark_jobs.structured_logs import FIELDS, JsonFormatter, about
from stream_consumers import library_logs
from stream_consumers.library_logs import redact_logs
from tests.support.scripted_jobs import ScriptedJob

DAGSTER_YAML = """\
python_logs:
  managed_python_loggers: [spark_jobs]
  python_log_level: INFO
  dagster_handler_config:
    handlers:
      json_lines:
        class: logging.FileHandler
        filename: {file}
        level: INFO
        formatter: json_lines
    formatters:
      json_lines:
        class: spark_jobs.structured_logs.JsonFormatter
"""
log = logging.getLogger("spark_jobs.of_a_test")
library = logging.getLogger("redis.of_a_test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, as JSON."""
    # Another test may have ended within a batch.
    about({})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for logger in (log, library):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield stream
    for logger in (log, library):
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    about({})


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_has_the_batch_it_is_about_and_its_own_fields(lines: io.StringIO) -> None:
    log.info("before")
    about({"batch": "5f2c", "batch_number": 7})
    log.info('%d messages, named ünder "quotes"\nand on two lines', 3, extra={FIELDS: {"messages": 3}})
    about({})
    log.warning("behind")
    before, within, behind = parsed(lines.getvalue())
    assert "batch" not in before
    assert within["message"] == '3 messages, named ünder "quotes"\nand on two lines'
    assert (within["batch"], within["batch_number"], within["messages"]) == ("5f2c", 7, 3)
    assert (behind["level"], behind["logger"]) == ("WARNING", "spark_jobs.of_a_test")
    assert behind.keys() == {"time", "level", "logger", "message"}


def test_threads_that_write_batches_at_the_same_time_do_not_mix_them_up(lines: io.StringIO) -> None:
    def write(batch: str) -> None:
        about({"batch": batch})
        log.info("in %s", batch)

    for batch in ("a", "b"):
        thread = Thread(target=write, args=(batch,))
        thread.start()
        thread.join()
    log.info("in none")
    assert [(line["message"], line.get("batch")) for line in parsed(lines.getvalue())] == [
        ("in a", "a"),
        ("in b", "b"),
        ("in none", None),
    ]


def test_what_is_logged_behind_the_last_batch_is_about_none(lines: io.StringIO) -> None:
    class Job(ScriptedJob):
        def next(self) -> str:
            return "5f2c"

        def put(self, value: str) -> str:
            about({"batch": value})
            return value

    batches = drain_batches(Job())
    next(batches)
    log.info("with its report")
    batches.close()
    log.info("behind")
    assert [line.get("batch") for line in parsed(lines.getvalue())] == ["5f2c", None]


def test_an_exception_is_told_in_the_same_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("the disk is full")
    except ValueError:
        log.exception("it failed")
    (line,) = parsed(lines.getvalue())
    assert line["message"] == "it failed"
    assert line["error"].endswith("ValueError: the disk is full")


def test_the_traceback_of_a_redacted_record_is_told_without_the_secret(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_logs, "_sources", [])
    redact_logs(lambda: {"password": "hunter2-of-the-lake"})
    try:
        raise ValueError("no user hunter2-of-the-lake")
    except ValueError:
        library.exception("it failed")
    (line,) = parsed(lines.getvalue())
    assert line["message"] == "it failed"
    assert line["error"].endswith("ValueError: no user [hidden]")
    assert "hunter2" not in line["error"]


# Dagster says so of each handler that a dagster.yaml configures.
@pytest.mark.filterwarnings("ignore:.*yaml-defined logging:dagster.BetaWarning")
def test_a_dagster_yaml_writes_them_with_the_run(folder: Path) -> None:
    @dg.asset
    def orders(context) -> None:  # type: ignore[no-untyped-def]  # Dagster does not read annotations that are text
        about({"batch": "5f2c"})
        log.info("a batch is in the table", extra={FIELDS: {"rows": 9}})
        context.log.info("told by the asset")
        about({})

    (folder / "dagster.yaml").write_text(DAGSTER_YAML.format(file=folder / "log.json"))
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        run = dg.materialize([orders], instance=instance).run_id
    found = {line["message"]: line for line in parsed((folder / "log.json").read_text())}
    batch = found["a batch is in the table"]
    assert (batch["run"], batch["step"], batch["batch"], batch["rows"]) == (run, "orders", "5f2c", 9)
    assert found["told by the asset"]["batch"] == "5f2c"
