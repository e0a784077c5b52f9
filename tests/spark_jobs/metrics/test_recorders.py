"""What recorders are told, what they write, and that nobody who did not ask for one has one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from spark_jobs.batches.ingestion import Ingestion, ignore_steps
from spark_jobs.batches.telemetry import BatchTelemetry
from spark_jobs.metrics import prometheus
from spark_jobs.metrics.opentelemetry import OpenTelemetryRecorder
from spark_jobs.metrics.prometheus import TextfileRecorder
from spark_jobs.metrics.recorders import BatchLabels, BatchNumbers, Recorders, _otlp_secrets, recorders
from stream_consumers.client_config import HIDDEN, redact_options
from stream_consumers.errors import UntrustedFileError
from tests.support.batch_reports import ZERO, report
from tests.support.python_programs import run_python

LABELS = BatchLabels("lakehouse", "/lake/orders", "batch")
NUMBERS = BatchNumbers(messages=10, rows=9, bytes=2048, dead_letters=1, seconds=0.7, lag={"orders": 90, "returns": 4})
WRITTEN = {
    "stream_assets_batches_total": 1,
    "stream_assets_messages_total": 10,
    "stream_assets_rows_total": 9,
    "stream_assets_bytes_total": 2048,
    "stream_assets_dead_letters_total": 1,
}
PROGRAM = """\
from spark_jobs.metrics.recorders import BatchLabels, BatchNumbers
from spark_jobs.metrics.recorders import recorders
recorders().batch(BatchLabels("lakehouse", "/lake/orders", "batch"), BatchNumbers(10, 9, 2048, 1, 0.7, {"orders": 90}))
"""
VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "STREAM_ASSETS_PROMETHEUS_TEXTFILES")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nobody has asked for metrics; what a test sets is looked at anew."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    recorders.cache_clear()
    yield monkeypatch
    recorders.cache_clear()


def scraped(folder: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """The numbers in the file, by the values of their labels that tell them apart."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((folder / "stream_assets.prom").read_text()):
        for sample in family.samples:
            names = sorted(sample.labels.keys() - {"group", "table", "kind"})
            found.setdefault(sample.name, {})[tuple(sample.labels[name] for name in names)] = sample.value
    return found


def test_the_textfile_has_a_batch_and_its_steps(folder: Path) -> None:
    recorder = TextfileRecorder(folder / "textfiles")
    recorder.step(LABELS, "rows written", 0.3)
    recorder.batch(LABELS, NUMBERS)
    found = scraped(folder / "textfiles")
    assert {name: found[name][()] for name in WRITTEN} == WRITTEN
    assert found["stream_assets_lag"] == {("orders",): 90, ("returns",): 4}
    assert found["stream_assets_step_seconds_sum"] == {("rows written",): 0.3}
    assert found["stream_assets_step_seconds_bucket"]["0.25", "rows written"] == 0
    assert found["stream_assets_step_seconds_bucket"]["0.5", "rows written"] == 1
    assert found["stream_assets_batch_seconds_bucket"]["+Inf",] == 1
    assert 'kind="batch"' in (folder / "textfiles" / "stream_assets.prom").read_text()


def test_runs_add_to_what_earlier_runs_and_others_at_the_same_time_have_counted(folder: Path) -> None:
    def run() -> None:
        # Each run has a recorder of its own.
        recorder = TextfileRecorder(folder)
        for lag in (3, 0):
            recorder.step(LABELS, "planned", 0.1)
            numbers = BatchNumbers(5, 5, 100, 0, 0.2, {"orders": lag})
            recorder.batch(LABELS, numbers)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run) for _ in range(8)]:
            future.result()
    found = scraped(folder)
    assert found["stream_assets_batches_total"][()] == 16
    assert found["stream_assets_rows_total"][()] == 80
    assert found["stream_assets_step_seconds_count"]["planned",] == 16
    assert found["stream_assets_lag"]["orders",] == 0, "lag is what it is now, not a sum"
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["stream_assets.lock", "stream_assets.prom"]


def test_opentelemetry_is_told_of_a_batch_and_its_steps() -> None:
    reader = InMemoryMetricReader()
    recorder = OpenTelemetryRecorder(MeterProvider([reader]).get_meter("test"))
    recorder.step(LABELS, "rows written", 0.3)
    recorder.batch(LABELS, NUMBERS)
    data: Any = reader.get_metrics_data()
    metrics = json.loads(data.to_json())["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    points = {metric["name"]: metric["data"]["data_points"] for metric in metrics}
    attributes = {"group": "lakehouse", "table": "/lake/orders"}
    counted = {name: points[name][0]["value"] for name in points if "value" in points[name][0] and "lag" not in name}
    assert counted == {
        "stream_assets.batches": 1,
        "stream_assets.messages": 10,
        "stream_assets.rows": 9,
        "stream_assets.bytes": 2048,
        "stream_assets.dead_letters": 1,
    }
    assert points["stream_assets.rows"][0]["attributes"] == {**attributes, "kind": "batch"}
    lag = {point["attributes"]["stream"]: point["value"] for point in points["stream_assets.lag"]}
    assert lag == {"orders": 90, "returns": 4}
    (step,) = points["stream_assets.step.duration"]
    assert (step["attributes"]["step"], step["sum"], step["count"]) == ("rows written", 0.3, 1)


class Receiver(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.bodies.append((self.path, self.rfile.read(size)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nothing is printed."""


def test_a_process_that_ends_has_exported_what_its_environment_asks_for() -> None:
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        more = {"OTEL_EXPORTER_OTLP_COMPRESSION": "none", "OTEL_SERVICE_NAME": "orders"}
        done = run_python(PROGRAM, **{VARIABLES[0]: endpoint, **more})
        server.shutdown()
        thread.join()
    assert (done.returncode, done.stderr) == (0, "")
    paths, bodies = zip(*Receiver.bodies)
    assert set(paths) == {"/v1/metrics"}
    sent = ExportMetricsServiceRequest.FromString(bodies[-1]).resource_metrics[0]
    assert "orders" in str(sent.resource)
    rows = next(m for m in sent.scope_metrics[0].metrics if m.name == "stream_assets.rows")
    assert rows.sum.data_points[0].as_int == 9


@pytest.mark.usefixtures("unset")
def test_without_the_packages_nothing_is_told_and_a_variable_is_warned_of(folder: Path) -> None:
    program = f'import sys\nsys.modules.update({{"opentelemetry": None, "prometheus_client": None}})\n{PROGRAM}'
    silent = run_python(program)
    warned = run_python(program, **{VARIABLES[0]: "http://127.0.0.1:1", VARIABLES[1]: str(folder)})
    assert (silent.returncode, silent.stderr) == (0, "")
    assert warned.returncode == 0
    assert "install stream-assets[opentelemetry]" in warned.stderr
    assert "install stream-assets[prometheus]" in warned.stderr
    assert not list(folder.iterdir())


def test_a_recorder_that_cannot_be_set_up_is_warned_of_and_the_others_are_told(folder: Path) -> None:
    # OpenTelemetry takes no interval of 0.
    refused = {VARIABLES[0]: "http://127.0.0.1:1", "OTEL_METRIC_EXPORT_INTERVAL": "0"}
    done = run_python(PROGRAM, **refused, **{VARIABLES[1]: str(folder)})
    assert (done.returncode, "opentelemetry: ValueError" in done.stderr) == (0, True)
    assert scraped(folder)["stream_assets_rows_total"] == {(): 9}


@pytest.mark.parametrize(
    ("variable", "headers", "logger"),
    [
        # It is not written as name=value.
        ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization: Bearer hunter2", "opentelemetry.util.re"),
        # A line break, as base64 adds it to a long token.
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "authorization=Basic%20hunter2%0Abcd", "opentelemetry.exporter."),
    ],
)
def test_a_header_that_opentelemetry_refuses_is_logged_without_its_value(
    variable: str, headers: str, logger: str
) -> None:
    export = "from opentelemetry import metrics\nmetrics.get_meter_provider().force_flush()\nimport os\nos._exit(0)\n"
    program = f"import logging\nlogging.basicConfig()\n{PROGRAM}{export}"
    done = run_python(program, **{VARIABLES[0]: "http://127.0.0.1:1", variable: headers})
    lines = [line for line in done.stderr.splitlines() if logger in line]
    assert [line for line in lines if HIDDEN in line], done.stderr
    assert "hunter2" not in done.stderr
    assert "bcd" not in done.stderr


@pytest.mark.parametrize("headers", ["k=a1b/c2d", "x-team=lake,x-api-key = a1b/c2d ", "k=e3f:g4h,k=a1b/c2d"])
def test_a_header_is_hidden_as_a_whole_if_its_parts_are_short(headers: str, unset: pytest.MonkeyPatch) -> None:
    unset.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    assert redact_options("no key a1b/c2d or a1b%2Fc2d", _otlp_secrets()) == f"no key {HIDDEN} or {HIDDEN}"


@pytest.mark.parametrize("place", ["v1/metrics?api-key=hunter2", "hunter2/v1/metrics"])
def test_an_address_is_logged_without_what_follows_its_host(place: str, unset: pytest.MonkeyPatch) -> None:
    unset.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://collector:1/{place}")
    shown = redact_options(f"failed at collector:1 with url: /{place}", _otlp_secrets())
    assert shown.startswith(f"failed at collector:1 with url: /{HIDDEN}")
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        # Clients take the beginning of such a password for a port, or a user for a host.
        (VARIABLES[0], "http://me:hunter2#the-lake@127.0.0.1:1"),
        (VARIABLES[0], "http://me:p@hunter2?x@127.0.0.1:1"),
        (VARIABLES[0], "http://me:hun[ter2@127.0.0.1:1"),
        (VARIABLES[0], "http://hunter2-of%40127.0.0.1:1"),
        (VARIABLES[0], "http://Hunter2/x@127.0.0.1:1"),
        (VARIABLES[0], "http://127.0.0.1:1/hunter2%2bx/y"),
        (VARIABLES[0], "http://127.0.0.1:1/x/../hunter2/y"),
        (VARIABLES[0], "http://127.0.0.1:1:hunter2-of"),
        (VARIABLES[0], "127.0.0.1:1/x@hunter2"),
        (VARIABLES[0], "me:hunter2://the-lake@127.0.0.1:1"),
        ("HTTP_PROXY", "http://me:hunter2/x@127.0.0.1:1"),
        ("HTTP_PROXY", "http://127.0.0.1:1:me:hunter2-of"),
        ("HTTP_PROXY", "http://me:hunter2-of/127.0.0.1:1"),
    ],
)
def test_an_export_that_fails_shows_nothing_of_an_address_but_its_host(variable: str, address: str) -> None:
    export = "from opentelemetry import metrics\nmetrics.get_meter_provider().force_flush()\nimport os\nos._exit(0)\n"
    program = f"import logging\nlogging.basicConfig(level='DEBUG')\n{PROGRAM}{export}"
    names = {VARIABLES[0]: "http://127.0.0.2:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1", variable: address}
    done = run_python(program, **names)
    assert done.returncode == 0
    assert "opentelemetry.exporter." in done.stderr
    assert "Traceback" not in done.stderr
    assert [part for part in ("hunter2", "hun[", "ter2", "the-lake") if part in done.stderr.lower()] == []


def test_a_record_without_a_name_can_be_created(unset: pytest.MonkeyPatch) -> None:
    recorders()
    assert logging.makeLogRecord({"name": "dagster", "msg": "started"}).getMessage() == "started"


def test_the_traceback_of_an_export_that_failed_has_no_header(
    unset: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unset.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2%20of%20the%20lake")
    recorders()
    try:
        raise ValueError("hunter2 of the lake")
    except ValueError:
        logging.getLogger("opentelemetry.a.later.module").exception("failed with %s", "hunter2 of the lake")
    [record] = caplog.records
    shown = logging.Formatter().format(record)
    assert shown.startswith(f"failed with {HIDDEN}")
    assert shown.endswith(f"ValueError: {HIDDEN}")
    assert "hunter2" not in shown


def test_what_a_replay_has_left_is_no_lag_of_the_group(folder: Path, unset: pytest.MonkeyPatch) -> None:
    unset.setenv("STREAM_ASSETS_PROMETHEUS_TEXTFILES", str(folder))
    telemetry = BatchTelemetry(Ingestion("lakehouse", str(folder / "t")), ignore_steps)
    ingested = report(30)
    telemetry.reported(ingested)
    entry = replace(ingested.entry, kind="replay")
    telemetry.reported(replace(ingested, entry=entry, lag={ZERO: 4}))
    found = scraped(folder)
    assert found["stream_assets_lag"] == {("orders",): 70}
    assert found["stream_assets_rows_total"] == {(): 9}


def test_what_a_recorder_raises_is_logged_once_and_disturbs_no_batch(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "stream_assets.prom").write_text("not a metric {")
    (folder / "stream_assets.prom").chmod(0o644)
    told = Recorders([TextfileRecorder(folder)])
    told.batch(LABELS, NUMBERS)
    told.batch(LABELS, NUMBERS)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "TextfileRecorder" in caplog.text


def writable_by_all(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def of_another_user(path: Path) -> None:
    path.touch()
    try:
        os.chown(path, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give a file to another user")


@pytest.mark.parametrize("name", ["stream_assets.prom", "stream_assets.lock"])
@pytest.mark.parametrize("trap", [os.mkfifo, writable_by_all, of_another_user])
def test_a_file_of_another_user_in_the_folder_is_neither_read_nor_waited_for(
    folder: Path, name: str, trap: Callable[[Path], None]
) -> None:
    trap(folder / name)
    with pytest.raises(UntrustedFileError):
        TextfileRecorder(folder).batch(LABELS, NUMBERS)


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "LOCK_SECONDS", 0.1)
    with os.fdopen(os.open(folder / "stream_assets.lock", os.O_CREAT | os.O_RDWR, 0o600)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            TextfileRecorder(folder).batch(LABELS, NUMBERS)
    TextfileRecorder(folder).batch(LABELS, NUMBERS)


def test_a_link_of_another_user_in_the_folder_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = folder.parent / "victim"
    victim.write_text("important")
    victim.chmod(0o600)
    (folder / "stream_assets.lock").symlink_to(victim)
    with pytest.raises(OSError, match=r"stream_assets\.lock"):
        TextfileRecorder(folder).batch(LABELS, NUMBERS)
    (folder / "stream_assets.lock").unlink()

    def swap(registry: Collector) -> bytes:
        (new,) = folder.glob("*.new")
        new.unlink()
        new.symlink_to(victim)
        return generate_latest(registry)

    monkeypatch.setattr(prometheus, "generate_latest", swap)
    TextfileRecorder(folder).batch(LABELS, NUMBERS)
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("important", 0o600)
