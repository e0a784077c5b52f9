"""A write that fails tells what is wrong, where, and what to do; in classic sessions and over Spark Connect."""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, NumberFormatException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.connect.session import SparkSession as RemoteSession

from spark_jobs import redaction
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.reading.rejection import REJECTED
from spark_jobs.table_location import sql_name
from spark_jobs.writing.delta_table import DeltaWriter, is_conflict
from spark_jobs.writing.failures import (
    COMPARING,
    FailedRowError,
    UnexplainedError,
    UnfinishedReadError,
    catalog_unavailable,
    cause_of,
    explain,
    explain_failed_read,
)
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerUnavailableError,
    CatalogUnavailableError,
    ConstraintViolatedError,
    MissingDependencyError,
    SchemaMismatchError,
    StreamAssetsError,
    Terminal,
    TransformError,
    Transient,
    UnsafeStorageError,
    UnsupportedError,
    WriteError,
)

COLUMNS = "id BIGINT, user STRING, place STRUCT<zip: INT>"


class Sessions:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._remote: Any = None

    def get(self, kind: str) -> Any:
        if kind == "classic":
            return self._request.getfixturevalue("spark")
        if self._remote is None:
            # Beside the classic session of the other tests, which getOrCreate() would refuse.
            self._remote = RemoteSession.builder.remote(self._request.getfixturevalue("server")).create()
        return self._remote


CONNECT = pytest.param("connect", marks=[pytest.mark.slow, pytest.mark.xdist_group("server")])


@pytest.fixture(scope="module", params=["classic", CONNECT])
def session(request: pytest.FixtureRequest) -> Any:
    return Sessions(request).get(request.param)


def fail(spark: SparkSession, table: Path | str, rows: str, change: str = "") -> StreamAssetsError:
    """Make a table, change it, and write one row that does not go in."""
    ledger = Ledger(Ingestion(group="g", table=str(table)).ledger().log, group="g", member="main")
    sink = DeltaWriter(str(table))
    if change.startswith("ALTER"):
        spark.createDataFrame([], COLUMNS).write.format("delta").save(str(table))
    if change:
        spark.sql(change.format(sql_name(str(table))))
    entry = ledger.entry("batch", LedgerState(-1))
    with pytest.raises(StreamAssetsError) as caught:
        sink.commit(spark.sql(f"SELECT {rows}"), entry, ledger=ledger)
    error = caught.value
    assert str(table) in error.what
    assert "An error occurred while calling" not in str(error)
    assert "\n" not in str(error)
    assert "\tat " not in str(error)
    return error


ROW = "CAST({} AS BIGINT) id, 'u' user, named_struct('zip', {}) place"


@pytest.mark.spark
def test_a_check_constraint_is_known_and_values_are_only_in_the_detail(session: SparkSession, folder: Path) -> None:
    error = fail(session, folder / "t", ROW.format(-1, 1), "ALTER TABLE {} ADD CONSTRAINT positive CHECK (id > 0)")
    assert isinstance(error, ConstraintViolatedError)
    assert isinstance(error, Terminal)
    assert "DELTA_VIOLATE_CONSTRAINT_WITH_VALUES" in error.what
    assert "violated by row" not in str(error)
    assert "CHECK constraint positive (id > 0) violated by row with values: - id : -1" in error.detail
    assert "ALTER TABLE" in error.remedy


@pytest.mark.spark
def test_a_not_null_constraint_names_the_column(session: SparkSession, folder: Path) -> None:
    change = "CREATE TABLE {} (id BIGINT NOT NULL, user STRING, place STRUCT<zip: INT>) USING delta"
    error = fail(session, folder / "t", ROW.format("NULL", 1), change)
    assert isinstance(error, ConstraintViolatedError)
    assert "NOT NULL constraint violated for column: id" in error.detail


@pytest.mark.spark
@pytest.mark.parametrize(
    ("rows", "told"),
    [("CAST(1 AS BIGINT) id, 'u' user, 2 extra", "extra"), ("array(1) id, 'u' user", "id")],
    ids=["new column", "other type"],
)
def test_a_schema_that_does_not_fit_names_the_columns(
    session: SparkSession, folder: Path, rows: str, told: str
) -> None:
    error = fail(session, folder / "t", rows, "ALTER TABLE {} SET TBLPROPERTIES ('made' = 'yes')")
    assert isinstance(error, SchemaMismatchError)
    assert told in error.what


@pytest.mark.spark
def test_a_place_where_spark_may_not_write_is_told(session: SparkSession) -> None:
    # Nobody may make folders there, not even root.
    error = fail(session, "/proc/nowhere/orders", ROW.format(1, 1))
    assert isinstance(error, AccessDeniedError)
    assert isinstance(error, Terminal)
    assert "[DELTA_CANNOT_CREATE_LOG_PATH]" in error.what
    assert "Cannot create file:/proc/nowhere/orders/_delta_log" in error.detail


@pytest.mark.spark
def test_an_expression_that_fails_is_the_transforms(session: SparkSession, folder: Path) -> None:
    error = fail(
        session, folder / "t", ROW.format("1 / (length('u') - 1)", 1), "ALTER TABLE {} SET TBLPROPERTIES (a = 1)"
    )
    assert isinstance(error, TransformError)
    assert "[DIVIDE_BY_ZERO]" in error.what
    assert "Division by zero" in error.detail


# As they were raised by a file system of 600 KiB that was full.
FULL_CLASSIC = """An error occurred while calling o252.save.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/lake/t. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(QueryExecutionErrors.scala:1)
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
\tat org.apache.hadoop.fs.RawLocalFileSystem$LocalFSFileOutputStream.write(RawLocalFileSystem.java:1)
\t\tCaused by: java.io.IOException: No space left on device
"""
FULL_CONNECT = """[TASK_WRITE_FAILED] Task failed while writing rows to file:/lake/t. SQLSTATE: 58030

JVM stacktrace:
org.apache.spark.SparkException
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(QueryExecutionErrors.scala:1)
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
Caused by: java.io.IOException: No space left on device
"""


@pytest.mark.parametrize("text", [FULL_CLASSIC, FULL_CONNECT], ids=["classic", "connect"])
def test_a_full_disk_is_told_and_may_be_empty_at_the_next_run(text: str) -> None:
    error = explain(Py4JError(text), table="/lake/t")
    assert isinstance(error, WriteError)
    assert isinstance(error, Transient)
    assert error.what.endswith("/lake/t: [TASK_WRITE_FAILED]; caused by IOException")
    assert "Task failed while writing rows" in error.detail
    assert "spark.local.dir" in error.remedy


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("java.io.FileNotFoundException: /lake/t/part-0.parquet (Permission denied)", AccessDeniedError),
        ("java.nio.file.AccessDeniedException: /lake/t/_delta_log/.0.json.tmp", AccessDeniedError),
        ("java.nio.file.FileSystemException: /lake/t: Read-only file system", AccessDeniedError),
        ("org.apache.hadoop.security.AccessControlException: Permission denied: user=me", AccessDeniedError),
        ("software.amazon.awssdk.S3Exception: Access Denied (Service: S3, Status Code: 403)", AccessDeniedError),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException: The DiskSpace quota", WriteError),
        ("java.io.IOException: Disk quota exceeded", WriteError),
        ("java.io.IOException: no hard link could be made for /lake/t: Not supported", UnsafeStorageError),
        ("java.net.ConnectException: Connection refused", UnexplainedError),
    ],
)
@pytest.mark.parametrize("depth", ["first", "deepest"])
def test_causes_are_known_wherever_they_stand(text: str, kind: type[StreamAssetsError], depth: str) -> None:
    raised = text if depth == "first" else f"org.apache.spark.SparkException: Job aborted.\n\tat a.b\nCaused by: {text}"
    error = explain(
        Py4JError(f"An error occurred while calling o9.save.\n: {raised}\n\tat java.lang.Thread"), table="/lake/t"
    )
    assert type(error) is kind
    said = re.sub(r"^[\w.]+: ", "", text)
    # A function of the transform may raise the same, with a value of a row.
    assert (said in error.what) == ("/lake/t" in said)
    assert said in error.detail


@pytest.mark.parametrize(
    "wrapper",
    [
        "org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file a.parquet.",
        "org.apache.spark.SparkException: [INTERNAL_ERROR_STORAGE] It failed.",
        "java.lang.IllegalArgumentException: Self-suppression not permitted",
        "java.security.PrivilegedActionException: null",
        "javax.net.ssl.SSLException: closed",
        "org.apache.parquet.io.ParquetEncodingException: cannot write",
    ],
)
def test_an_error_of_the_storage_is_known_behind_those_of_spark_and_java(wrapper: str) -> None:
    raised = f"org.apache.spark.SparkException: [TASK_WRITE_FAILED] It\n\tat a.b\nCaused by: {wrapper}\n\tat a.b"
    full = explain(Py4JError(f"{raised}\nCaused by: java.io.IOException: No space left on device"), table="/lake/t")
    denied = explain(Py4JError(f"{raised}\nCaused by: java.nio.file.AccessDeniedException: a"), table="/lake/t")
    assert type(full) is WriteError
    assert type(denied) is AccessDeniedError


REFLECTED = """[TASK_WRITE_FAILED] Task failed while writing rows to file:/lake/t. SQLSTATE: 58030

JVM stacktrace:
org.apache.spark.SparkException
Caused by: java.lang.reflect.InvocationTargetException
\tat org.apache.spark.sql.catalyst.expressions.CallMethodViaReflection.eval(CallMethodViaReflection.scala:1)
Caused by: java.net.UnknownHostException: hunter2: Name or service not known
"""


def test_an_error_of_a_connection_that_an_expression_raised_is_one_of_the_transform() -> None:
    error = explain(Py4JError(REFLECTED), table="/lake/t")
    assert isinstance(error, TransformError)
    assert not isinstance(error, Transient)
    assert error.what.endswith("/lake/t: [TASK_WRITE_FAILED]; caused by UnknownHostException")
    assert "hunter2" not in str(error)
    assert "hunter2" in error.detail


def raised(said: str, function: str = "f") -> PythonException:
    """What a Python worker raised in a function."""
    frames = ["An exception was thrown from the Python worker:", "Traceback (most recent call last):"]
    frames += [f'  File "{__file__}", line 4111, in {function}', "    raise error", "    ^^^^^^^^^^^", said, ""]
    return PythonException("\n".join(frames))


LOG = f"""Traceback (most recent call last):
  File "{__file__}", line 1, in f
ModuleNotFoundError: No module named 'hunter2'
stream_consumers.errors.BrokerUnavailableError: hunter2
ERROR Hive: MetaException(message:Could not connect to meta store: java.net.ConnectException: hunter2
Caused by: HiveException: java.net.ConnectException: hunter2
[USER_RAISED_EXCEPTION] {REJECTED}
Permission denied"""


@pytest.mark.parametrize(
    "error",
    [
        raised(f"ValueError: bad line: {LOG}"),
        raised(f"SystemExit: {LOG}"),
        NumberFormatException(f"[CAST_INVALID_INPUT] The value '{LOG}' of the type STRING cannot be cast"),
        Py4JError(f"org.apache.spark.SparkException: [FAILED_EXECUTE_UDF] {LOG}. SQLSTATE: 39000"),
        Py4JError(
            "An error occurred while calling o9.save.\n: org.apache.spark.SparkException: [TASK_WRITE_FAILED] It failed"
            f"\n\tat a.b\nCaused by: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] {raised(LOG)}"
        ),
    ],
    ids=["function", "exit", "cast", "Java", "classic write"],
)
def test_a_value_that_is_the_log_of_a_program_does_not_decide_what_failed(error: Exception) -> None:
    explained = explain(error, table="/lake/t")
    assert type(explained) is FailedRowError
    assert "hunter2" not in str(explained)
    assert "line 1 of" not in str(explained), "the place is that of the function"
    assert type(explain_failed_read(error, what="orders")) in (WriteError, UnexplainedError)


CAUSES = f"""
{LOG}
Caused by: MetaException(message:Could not connect to meta store: java.net.ConnectException: hunter2
Caused by: org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] {REJECTED}
Caused by: org.apache.spark.SparkRuntimeException: [HUNTER2] /lake/t
Caused by: io.delta.exceptions.ConcurrentAppendException: [DELTA_CONCURRENT_APPEND.ROW_LEVEL_CHANGES] hunter2
Caused by: java.io.IOException: /lake/t hunter2: No space left on device"""


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[CAST_INVALID_INPUT] The value '{}' of the type STRING cannot be cast. SQLSTATE: 22018", FailedRowError),
        ("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] violated by row with values: - id : {}", ConstraintViolatedError),
        ("org.apache.spark.SparkException: [FAILED_EXECUTE_UDF] {}. SQLSTATE: 39000", FailedRowError),
        (str(raised("ValueError: {}")), FailedRowError),
    ],
)
@pytest.mark.parametrize("depth", ["first", "cause"])
def test_causes_within_a_value_decide_nothing_and_are_not_shown(
    said: str, kind: type[StreamAssetsError], depth: str
) -> None:
    text = said.format(CAUSES)
    if "Python" in text:
        text = f"org.apache.spark.api.python.PythonException: {text}"
    if depth == "cause":
        text = f"org.apache.spark.SparkException: [TASK_WRITE_FAILED] It failed\n\tat a.b\nCaused by: {text}"
    explained = explain(Py4JError(f"An error occurred while calling o9.save.\n: {text}"), table="/lake/t")
    assert type(explained) is kind
    assert "hunter2" not in str(explained).lower()
    assert not is_conflict(Py4JError(text))


def parse_handled(line: str) -> str:
    try:
        import hunter2  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        return str(int(line))
    return line


def test_a_function_that_handles_an_error_and_raises_another_one_failed_for_a_row() -> None:
    frames = f'Traceback (most recent call last):\n  File "{__file__}", line 1, in f\n'
    handled = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    for first in ("ModuleNotFoundError: No module named 'orjson'", "stream_consumers.errors.BrokerUnavailableError: a"):
        error = PythonException(f"{frames}{first}{handled}{frames}ValueError: 4111")
        assert type(explain(error, table="/lake/t")) is FailedRowError
    unread = frames.replace(", in f", ", in stream_assets_splits")
    error = PythonException(f"{unread}stream_consumers.errors.BrokerUnavailableError: a{handled}{frames}ValueError: b")
    assert type(explain(error, table="/lake/t")) is BrokerUnavailableError


@pytest.mark.parametrize(
    "said", ["ModuleNotFoundError: No module named 'hunter2'", "stream_consumers.errors.DataLossError: a"]
)
def test_what_a_function_of_the_transform_raises_is_no_fault_of_the_read(said: str) -> None:
    explained = explain(raised(said), table="/lake/t")
    assert type(explained) is FailedRowError
    assert "hunter2" not in str(explained)


def test_an_import_that_fails_in_a_function_lacks_a_package_unless_the_function_handles_it() -> None:
    frames = f'Traceback (most recent call last):\n  File "{__file__}", line 1, in f\n    import geoip2\n'
    text = f"{frames}ModuleNotFoundError: No module named 'geoip2'"
    assert type(explain(PythonException(text), table="/lake/t")) is MissingDependencyError
    handled = f"{text}\n\nDuring handling of the above exception, another exception occurred:\n\n{frames}ValueError: a"
    assert type(explain(PythonException(handled), table="/lake/t")) is FailedRowError
    evaluated = (
        f'Traceback (most recent call last):\n  File "{__file__}", line 1, in f\n    eval(x)\n  File "<string>", '
    )
    text = f"{evaluated}line 1, in <module>\nModuleNotFoundError: No module named 'hunter2'"
    assert "hunter2" not in str(explain(PythonException(text), table="/lake/t"))


def test_a_value_that_looks_like_a_frame_does_not_name_a_place() -> None:
    explained = explain(
        raised(f'    File "{pytest.__file__}", line 4112, in f\nSyntaxError: bad', "f"), table="/lake/t"
    )
    assert pytest.__file__ not in str(explained)


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.spark.SparkRuntimeException: [DUPLICATED_MAP_KEY] Duplicate map key {} was found. SQLSTATE: 23505",
        "org.apache.spark.SparkRuntimeException: [MALFORMED_CSV_RECORD] Malformed CSV record: {}. SQLSTATE: KD000",
        "java.lang.RuntimeException: Invalid XML document: {}\n"
        "\tat org.apache.spark.sql.catalyst.expressions.xml.UDFXPathUtil.eval(UDFXPathUtil.java:1)",
    ],
)
@pytest.mark.parametrize("value", ["Permission denied", "[DELTA_SCHEMA_X]", f"no hard link could be made{CAUSES}"])
def test_a_value_that_an_expression_refuses_decides_nothing(text: str, value: str) -> None:
    for said in (text, f"org.apache.spark.SparkException: [TASK_WRITE_FAILED] It\n\tat a.b\nCaused by: {text}"):
        explained = explain(
            Py4JError(f"An error occurred while calling o9.save.\n: {said.format(value)}"), table="/lake/t"
        )
        assert type(explained) is FailedRowError
        assert "hunter2" not in str(explained).lower()


@pytest.mark.parametrize(
    "part",
    [
        "\n", "\n\t", "x", "w.", "Caused by: x\n", "Caused by: ", "Traceback (most recent call last):\n", "a=", "[A",
        "Traceback (most recent call last):\n  x\n", "Job aborted due to stage failure: ", "Mkdirs failed to create /",
        "To enable schema migration ", "(TID 1) ", '  File "x", line 1, in ', "-ex", "SCHEMA",
        " Traceback (most recent call last):\n",
    ],
)  # fmt: skip
def test_a_long_value_takes_no_long_time(part: str) -> None:
    value = part * (500_000 // len(part))
    for error in (
        NumberFormatException(f"[CAST_INVALID_INPUT] The value '{value}' of the type STRING cannot be cast"),
        raised(f"ValueError: {value}"),
        Py4JError(f"An error occurred while calling o9.save.\n: java.io.IOException: {value}"),
        Py4JError(f"An error occurred while calling o9.save.\n: java.io.IOException: [DELTA_{value}"),
        PythonException(value),
        Py4JError(value),
    ):
        began = time.process_time()
        explain(error, table="/lake/t")
        is_conflict(error)
        assert time.process_time() - began < 5


@pytest.mark.spark
def test_what_a_real_worker_raised_is_known(session: SparkSession, folder: Path) -> None:
    handles = f.udf(parse_handled, useArrow=False)
    session.udf.register("parse_handled", handles)
    error = fail(session, folder / "t", "CAST(1 AS BIGINT) id, parse_handled('u') user, named_struct('zip', 1) place")
    assert type(error) is FailedRowError
    assert error.what.startswith("a function of the transform raised ValueError in line")


def test_a_package_that_a_worker_lacks_is_named() -> None:
    for error in (
        raised("ModuleNotFoundError: No module named 'redis'", "<module>"),
        # As its deserializer wraps it, where all frames are those of PySpark, or some are not.
        raised(
            "pyspark.serializers.SerializationError: Caused by Traceback (most recent call last):\n"
            "  File \"/x/pyspark/serializers.py\", line 1, in loads\nModuleNotFoundError: No module named 'redis'"
        ),
    ):
        assert type(explain(error, table="/lake/t")) is MissingDependencyError
        assert "'redis'" in str(explain_failed_read(error, what="orders"))


class DeltaError(AnalysisException):
    """As a session raises it."""

    def __init__(self, condition: str, **parameters: str) -> None:
        super().__init__(condition)
        self._condition, self._parameters = condition, parameters

    def __str__(self) -> str:
        return f"[{self._condition}] {' '.join(self._parameters.values())}"

    def getCondition(self) -> str:  # noqa: N802 - Spark's name
        return self._condition

    def getMessageParameters(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return self._parameters


def test_a_constraint_that_a_row_breaks_in_a_replay_is_known_and_no_value_is_shown() -> None:
    said = f"[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint positive (id > 0) violated: - user : {LOG}"
    error = explain(DeltaError("DELTA_REPLACE_WHERE_MISMATCH", replaceWhere="_sequence < 9", message=said), table="t")
    assert type(error) is ConstraintViolatedError
    assert "hunter2" not in str(error)
    cast = DeltaError("DELTA_PARTITION_COLUMN_CAST_FAILED", value="hunter2", dataType="INT", columnName="day")
    error = explain(cast, table="t")
    assert "columnName: day" in str(error)
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"user={'é' * 126}", ConstraintViolatedError),
        ("user=a\0b", ConstraintViolatedError),
        (f"user={'x' * 250}", AccessDeniedError),
        ("user=No space left on device", AccessDeniedError),
        ("user=File name too long", AccessDeniedError),
    ],
    ids=["long", "NUL", "allowed", "says no space", "says too long"],
)
def test_a_folder_that_cannot_have_its_name_is_the_fault_of_a_row(name: str, kind: type[StreamAssetsError]) -> None:
    made = f"java.io.IOException: Mkdirs failed to create file:/lake/t/{name} (exists=false, cwd=file:/work)"
    error = explain(
        Py4JError(f"org.apache.spark.SparkException: [TASK_WRITE_FAILED] It\n\tat a.b\nCaused by: {made}"),
        table="/lake/t",
    )
    assert type(error) is kind
    assert name.partition("=")[2] not in str(error), "it is a value of the row"


def test_python_errors_stay_the_transforms_and_what_is_unlike_anything_is_told_as_it_is() -> None:
    assert isinstance(explain(raised("OSError: [Errno 28] No space left on device"), table="t"), TransformError)
    only = explain(RuntimeError("[DELTA_CANNOT_MODIFY_APPEND_ONLY] This table only allows appends."), table="t")
    assert isinstance(only, UnsupportedError), "tried again, it fails again"
    assert "on_replay='append'" in only.remedy
    unknown = explain(RuntimeError("lost"), table="t")
    assert (unknown.what, unknown.detail) == ("Spark could not write to t: RuntimeError", "lost")
    assert pickle.loads(pickle.dumps(unknown)).detail == "", "a pickle may be kept on a disk"
    assert isinstance(explain(AnalysisException("A schema mismatch detected"), table="t"), SchemaMismatchError)
    known = WriteError("known", remedy="None.")
    assert explain(known, table="t") is known


def test_a_failed_comparison_is_no_failed_write() -> None:
    failures = [
        RuntimeError("lost"),
        raised("ValueError: lost"),
        raised("ValueError: lost", "stream_assets_splits"),
        raised("stream_consumers.errors.DataLossError: lost", "stream_assets_splits"),
        raised("stream_consumers.errors.BrokerUnavailableError: lost", "stream_assets_splits"),
        RuntimeError("[DIVIDE_BY_ZERO] lost. SQLSTATE: 22012"),
        Py4JError("java.io.IOException: /lake/t: Permission denied"),
        Py4JError("java.io.IOException: /lake/t: No space left on device"),
    ]
    for failure in failures:
        told, of_write = explain(failure, table="/lake/t", activity=COMPARING), explain(failure, table="/lake/t")
        assert type(told) is type(of_write)
        words = [str(one).replace(__file__, "") for one in (told, of_write)]
        assert ["writ" in word for word in words] == [False, True]


def test_causes_are_bounded() -> None:
    assert cause_of(RuntimeError("")) == "RuntimeError"
    assert len(cause_of(RuntimeError("x" * 10_000))) < 2000


def test_a_broker_that_does_not_answer_is_waited_for_and_the_messages_are_not_read_once_more_at_once() -> None:
    reads = {
        "BrokerUnavailableError: nothing came from kafka://a for 60 s": BrokerUnavailableError,
        "DataLossError: orders/0 ends before the planned end": UnfinishedReadError,
        "StreamRemovedError: orders/0 is gone": UnfinishedReadError,
    }
    for text, kind in reads.items():
        error = explain(raised(f"stream_consumers.errors.{text}", "stream_assets_splits"), table="/lake/t")
        assert type(error) is kind
        assert text.partition(": ")[2] in str(error)
        assert "Nothing of the batch was written" in str(error)


def test_an_error_of_a_jvm_that_has_ended_is_told_too() -> None:
    class GoneError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    error = explain(GoneError(), table="/lake/t")
    assert isinstance(error, WriteError)
    assert error.what.startswith("Spark could not write to /lake/t: GoneError, and the JVM of Spark does not answer")
    assert not is_conflict(GoneError())


BAD_REQUEST = "org.apache.hadoop.fs.s3a.AWSBadRequestException: PUT /lake/t: invalid region for spark"


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The values that are hidden; none when the test begins."""
    values: dict[str, str] = {}
    monkeypatch.setattr(redaction, "_hidden", values)
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.hadoop.fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"},
        {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=/lake/spark/log4j2.properties -Dregion=invalid"},
        {"spark.driver.extraJavaOptions": "-Dnote='region -Dx=spark"},
    ],
)
def test_settings_that_are_no_secrets_are_shown(hidden: dict[str, str], settings: dict[str, str]) -> None:
    redaction.hide({}, settings, None)
    said = f"{BAD_REQUEST}; {' '.join(settings.values())}"
    assert redaction.redacted(said) == said
    assert hidden == {}


@pytest.mark.parametrize(
    ("options", "secrets"),
    [
        ("-Dfile=spark -Djavax.net.ssl.trustStorePassword=hunter2", ["hunter2"]),
        ("-Ddb.pass='to hunter2'", ["'to", "to hunter2"]),
        ("-Ddb.pass='hunter2", ["'hunter2"]),
        ("-javaagent:/opt/agent.jar=port=1,apikey=hunter2", ["hunter2"]),
        ("-Ddb.url=jdbc:postgresql://db/hive?password=hunter2", ["hunter2"]),
    ],
)
def test_options_of_java_that_may_be_secrets_are_hidden(
    hidden: dict[str, str], options: str, secrets: list[str]
) -> None:
    redaction.hide({}, {"spark.driver.extraJavaOptions": options}, None)
    assert list(hidden.values()) == secrets
    assert "hunter2" not in redaction.redacted(f"spark file: {options}, hunter2")
    assert redaction.redacted("spark file") == "spark file"


@pytest.mark.parametrize("word", ["io", "delta", "exceptions", "io.delta.exceptions.ConcurrentAppendException"])
def test_a_lost_race_is_known_whatever_is_secret(hidden: dict[str, str], word: str) -> None:
    hidden["password"] = word
    raised = Py4JError(
        f"An error occurred while calling o9.save.\n: io.delta.exceptions.ConcurrentAppendException: {word}"
    )
    assert is_conflict(raised)
    assert "ConcurrentAppendException" not in word or "Concurrent" not in str(explain(raised, table="t").revealed())


@pytest.mark.parametrize("word", ["org", "apache", "org.apache.hadoop.fs.s3a.Simple"])
def test_the_name_of_a_java_error_is_shown_whatever_is_secret(hidden: dict[str, str], word: str) -> None:
    hidden["password"] = word
    error = explain(Py4JError(f"An error occurred while calling o9.save.\n: {BAD_REQUEST} {word}"), table="/lake/t")
    assert "AWSBadRequestException: PUT /lake/t: invalid region for spark [hidden]" in error.what
    assert word not in error.detail


def test_errors_are_classified_whatever_is_secret_and_repeat_no_secret(hidden: dict[str, str]) -> None:
    words = ["Permission", "DELTA", "stream_consumers", "BrokerUnavailableError", "HiveException", "DIVIDE", "hunter2"]
    hidden.update({f"password {word}": word for word in words})
    hidden["token"] = "eyJ0.eyJ1.Hunter2"
    denied = explain(Py4JError("java.io.IOException: /lake/t hunter2: Permission denied"), table="/lake/t")
    constraint = explain(RuntimeError("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] hunter2"), table="/lake/t")
    no_broker = "stream_consumers.errors.BrokerUnavailableError: no kafka://a for hunter2"
    away = explain(raised(no_broker, "stream_assets_splits"), table="/lake/t")
    unread = explain_failed_read(raised("ValueError: hunter2"), what="orders")
    row = explain(raised("ValueError: hunter2"), table="/lake/t")
    divided = explain(RuntimeError("[DIVIDE_BY_ZERO] hunter2. SQLSTATE: 22012"), table="/lake/t")
    hive = catalog_unavailable(
        RuntimeError("HiveException: Could not connect to meta store: java.net.SocketException: hunter2")
    )
    token = explain(RuntimeError("org.apache.spark.SparkException: no\nCaused by: eyJ0.eyJ1.Hunter2"), table="/lake/t")
    long = explain(RuntimeError(f"{'x ' * 748}hunter2"), table="/lake/t")
    assert hive is not None
    errors = [denied, constraint, away, unread, row, divided, hive, token, long]
    assert [type(error) for error in errors] == [
        AccessDeniedError,
        ConstraintViolatedError,
        BrokerUnavailableError,
        WriteError,
        FailedRowError,
        FailedRowError,
        CatalogUnavailableError,
        UnexplainedError,
        UnexplainedError,
    ]
    assert [error for error in errors if "hunt" in str(error.revealed()).lower()] == []
