"""Maps errors of Spark to errors that name the cause, which Spark hides in a page of Java frames.

Texts of Spark, of Delta and of users' functions may hold values of rows. Our errors repeat only what cannot hold one:
types, conditions, and messages of a storage about its files. The rest of the text goes into their ``detail``.

The unredacted text decides the kind of an error, because a secret may also be a word in the name of a class; only what
is repeated is redacted. Failures of rows are recognized first, because only their texts hold values, and by what comes
before any value: the condition, the class of a Java error, the first traceback of a Python worker. Text after the first
possible value decides nothing, and is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
    PySparkException,
    PythonException,
)

from spark_jobs.reading.rejection import REJECTED
from spark_jobs.reading.spark_types import NOT_STORED
from spark_jobs.redaction import redacted
from spark_jobs.table_location import MAX_NAME_BYTES
from stream_consumers import errors
from stream_consumers.errors import (
    AccessDeniedError,
    CatalogUnavailableError,
    ConstraintViolatedError,
    InvalidOptionError,
    KeyConflictError,
    MissingDependencyError,
    SchemaMismatchError,
    StreamAssetsError,
    TransformError,
    Transient,
    UnsafeStorageError,
    UnsupportedError,
    WriteError,
)

MAX_ERROR_CHARACTERS = 1500
FOREIGN_PLACE = "there is no message of this batch at"
KEY_IN_TWO_SHARDS = "a key has changes in two shards:"
BELOW_FLOOR = "a change of a key that the table lacks is older than deleted rows that were purged:"
NO_VALUE = "a change of a key that the table lacks does not have the value of the column"
NOT_THERE = "a change lacks the value of a column that the transform leaves out, renames or derives others from:"
NO_KEY = "a change lacks its key, or the value that orders it:"
KEY_TWICE = "two rows of one message have the same key:"
CHANGED_VALUE = "Delta would change the value of a partition column"
OTHERS_WROTE = "another writer has added or removed rows while the table was made anew"
ROWS_CHANGED = "rows that this batch replaces have changed since it was planned"
_OF_A_READ = ("stream_consumers.errors.", "spark_jobs.reading.source.SplitMismatchError: ")
_GONE = ", and the JVM of Spark does not answer any more"
_READ_AGAIN = "Nothing of the batch was written; it is read again."
_MISSING_MODULE = "ModuleNotFoundError: No module named "
# Matches only at the beginning of an error or of a cause: elsewhere it may be in a value.
_OF_HIVE = re.compile(r"(?:\([\w.$]+\) |(?:\w+\.)+\w+: )?(?:\w+\.)*(?:HiveException: |MetaException\()")
_NO_METASTORE = re.compile(
    r"Unable to instantiate \S*SessionHiveMetaStoreClient|Could not connect to meta store"
    r"|(TTransport|java\.net\.\w+)Exception"
)
_DERBY_LOCK = re.compile(r"Another instance of Derby may have already booted the database (\S+?)\.?\s")
# The SQL states of bad values, of failed functions of the user, and of raise_error(). The errors of reflect() and
# xpath() are those of any Java method, and may look like an error of a file or a connection.
_OF_A_VALUE = re.compile(
    r"SQLSTATE: (22\w{3}|39000|P0001)\b"
    r"|\bat org\.apache\.spark\.sql\.catalyst\.expressions\.(?:CallMethodViaReflection|xml)\."
)
# Further conditions of bad values, whose SQL states are shared with errors of other kinds.
_OF_VALUES = frozenset({
    "COLLECTION_SIZE_LIMIT_EXCEEDED", "DUPLICATED_MAP_KEY", "EXCEED_LIMIT_LENGTH", "MALFORMED_CSV_RECORD",
    "MALFORMED_PROTOBUF_MESSAGE",
})  # fmt: skip
# Spark and Delta begin a message like this, before any value.
_CONDITION = re.compile(r"^(?:\([\w.$]+\) |(?:\w+\.)+[\w$]+: )?\[([A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)*)\] ?")
# Errors that hold no value of a row, but a cause or a message of a storage that explains the failure.
_OF_SYSTEM = re.compile(
    r"\(?(?:java\.(?:io|nio|net|security|util\.concurrent|lang\.reflect)|javax\.net\.ssl|software\.amazon"
    r"|com\.(?:amazonaws|google|microsoft)|io\.delta|org\.apache\.(?:hadoop|parquet|spark)|org\.sparkproject)\."
    r"|java\.lang\.IllegalArgumentException: Self-suppression not permitted$|Job aborted"
)
_JAVA_ERROR = re.compile(r"\(?((?:\w+\.)+[A-Z][\w$]*)(?:\) |: |$)(.*)")
_LOST_TASK = re.compile(r".*?Job aborted due to stage failure: .*? \(TID \d+\) \([^)]*\): ")
_PYTHON = "org.apache.spark.api.python.PythonException: "
# The conditions of errors that hold no value of a row, but a cause that explains the failure.
_WRAPPERS = re.compile(r"(?:TASK_WRITE_FAILED|FAILED_READ_FILE|INTERNAL_ERROR(?:_[A-Z]+)*)(?:\.|$)")
_CAUSED_BY = "Caused by: "
# The frames of a traceback and the error. PySpark wraps the traceback of a failed unpickling in another error. Frames
# without an error are matched as well, so that no line is read again for each traceback that begins within them.
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n((?:[ \t].*\n)+)"
    r"((?!pyspark\.serializers\.SerializationError: Caused by Traceback)\S.*)?"
)
# Errors of files and connections. A function of the transform may raise them, too, with values of rows.
_OF_STORAGE = re.compile(
    r"java\.io\.|java\.nio\.file\.|java\.net\.\w*(Connect|Socket|Host|Route)|org\.apache\.hadoop\.(?!hive)|software\.amazon\."
)
# The name of a folder of a partition, in which Spark escapes "/", ":" and "=".
_VALUE_OF_FOLDER = re.compile(r"(?<=\w)=(?:(?! \(exists=)[^/:\n])*")
# Frames of the code that loads a function; code that was compiled from text, or is frozen, has no file.
_OF_LOADER = re.compile(r"/pyspark/|/importlib/|^<")
_IMPORT = re.compile(r"\n    (?:import|from) [^\n]*\n(?:    [ ~^]+\n)?\Z")
_HANDLED = "\nDuring handling of the above exception, another exception occurred:\n"
# The frame of the function that reads a split, in the process of an executor.
_READING = "stream_assets_splits"
# The parameters of the messages of Spark and Delta that are names of columns and functions, and types.
_NAMES = frozenset({
    "columnList", "columnName", "columnPath", "currentDataType", "currentField", "currentName", "dataType",
    "dataTypeList", "existingColumns", "fieldName", "fromType", "functionName", "inputType", "invalidColumnNames",
    "name", "objectName", "proposal", "referenceNames", "relationName", "requiredType", "routineName", "schemaName",
    "sourceType", "srcType", "suggestion", "tableName", "targetType", "toType", "type", "updateDataType", "updateField",
})  # fmt: skip
# This condition has no parameters: its text lists how the columns of the rows and of the table differ.
_OF_COLUMNS = "DELTA_METADATA_MISMATCH"
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_EXPRESSION_ERRORS = (ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException, NumberFormatException)


class UnfinishedReadError(WriteError):
    """The messages could not be read during the write, or the read did not match the plan."""


class UnexplainedError(WriteError):
    """Spark failed for an unrecognized reason: a payload may have crashed a Python worker."""


class RejectedRowError(WriteError):
    """The transform rejects a row of a batch that is read and written in one pass."""


class FailedRowError(TransformError):
    """A function or an expression of the transform failed, perhaps for one row only."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What was done when Spark failed, for the words of the error.

    Args:
        verb: what Spark could not do, before the name of the table.
        during: the same, of a function of the transform that failed meanwhile.
        remedy: what to do if the reason is unknown.
        remedy_of_rows: what to do if the transform fails for some rows only.
    """

    verb: str
    during: str
    remedy: str
    remedy_of_rows: str


WRITING = Activity(
    "write to",
    "writing",
    "Nothing of the batch was written; the next run reads it again.",
    "If only some rows cause it, reject() them, or set on_bad_rows='dead_letter' to find them; their messages become "
    "dead letters. The next run reads the batch again.",
)
COMPARING = Activity(
    "compare",
    "comparing",
    "Nothing was changed; run it again.",
    "Or pass the decoder and the transform that made the rows.",
)


@dataclass(frozen=True, slots=True)
class _FailureKind:
    """A reason why Spark fails, recognized by its text.

    ``what`` is the start of the message. Without a ``remedy``, that of the activity is used.
    """

    pattern: re.Pattern[str]
    error: type[StreamAssetsError]
    what: str
    remedy: str


_CONSTRAINT = _FailureKind(
    re.compile(
        r"\[DELTA_(VIOLATE_CONSTRAINT|NOT_NULL_CONSTRAINT|MISSING_NOT_NULL|NOT_NULL_COLUMN|EXCEED_CHAR_VARCHAR_LIMIT"
        r"|REPLACE_WHERE_MISMATCH)\w*\]"
    ),
    ConstraintViolatedError,
    "a row breaks a constraint of the table {table}",
    "Let the transform correct or reject() such rows; or set on_bad_rows='dead_letter' to make dead letters of their "
    "messages; or change the constraint with ALTER TABLE. The next run reads the batch again.",
)
# The errors of changes of keys that cannot be merged, by the start of their texts, each with its remedy.
_OF_CHANGES: Mapping[str, tuple[type[StreamAssetsError], str]] = {
    KEY_IN_TWO_SHARDS: (
        KeyConflictError,
        "Positions do not order changes of two shards: let the changes of a key go to one shard, or set sequence_by.",
    ),
    KEY_TWICE: (
        KeyConflictError,
        "Let the transform make one row per message and key, or add the columns in which the rows differ to the key.",
    ),
    NO_VALUE: (
        KeyConflictError,
        "Begin with a snapshot of the source. If a change gave the row a new key, update the column of this row there, "
        "so that a batch has the value, too; set REPLICA IDENTITY FULL for later changes.",
    ),
    NOT_THERE: (
        SchemaMismatchError,
        "The row would lose its value: keep the names of the decoder's columns in the transform, and leave columns out "
        "with except_columns. If a column that the transform makes is NULL without the value, let the transform add "
        "its name to _unavailable, and the row keeps what it has; or make another value than NULL.",
    ),
    BELOW_FLOOR: (
        KeyConflictError,
        "A newer change may have deleted the key. Let such messages become dead letters, with "
        "on_bad_rows='dead_letter'. To have such a row, send it again with a newer value of sequence_by; a rebuild of "
        "the table brings back all that was purged.",
    ),
    OTHERS_WROTE: (InvalidOptionError, "Stop that writer, and run the rebuild again, which continues."),
    NO_KEY: (ConstraintViolatedError, _CONSTRAINT.remedy),
    CHANGED_VALUE: (
        ConstraintViolatedError,
        "Let the transform correct or reject() such rows; or set on_bad_rows='dead_letter' to make dead letters of "
        "their messages. The next run reads the batch again.",
    ),
}
# Hadoop reports no reason for a folder that it cannot create; no name may contain NUL.
_FOLDER = _FailureKind(
    re.compile(
        r"File name too long|PathComponentTooLong|Nul character not allowed"
        r"|Mkdirs failed to create (?:(?! \(exists=|Mkdirs )[^\n])*?"
        rf"(?:\0|/(?:(?! \(exists=)[^/\n]){{{MAX_NAME_BYTES + 1}}})"
    ),
    ConstraintViolatedError,
    "a value of a row cannot be the name of a folder of the table {table}",
    f"The folder name, column=value of a partition column, may have at most {MAX_NAME_BYTES} bytes. Let the transform "
    "shorten or reject() such values; or set on_bad_rows='dead_letter' to make dead letters of their messages. The "
    "next run reads the batch again.",
)
_SCHEMA = _FailureKind(
    re.compile(r"\[DELTA_(?=\w*\])(METADATA_MISMATCH|\w*SCHEMA\w*|FAILED_TO_MERGE\w*|\w*DATA_?TYPES?\w*)\]"),
    SchemaMismatchError,
    "the rows do not fit the table {table}",
    "Change the transform or the schema; schema_changes='add_columns' adds new columns and fields to the table.",
)
_NO_SPACE = _FailureKind(
    re.compile(r"No space left on device|[Qq]uota exceeded|QuotaExceeded"),
    WriteError,
    "there is no space left to {verb} {table}",
    "Free space there, or where Spark keeps its scratch files (spark.local.dir), and run again.",
)
_DENIED = _FailureKind(
    re.compile(
        r"Permission denied|Operation not permitted|Read-only file system|Access ?Denied|AccessControlException"
        r"|Forbidden|[Ss]tatus [Cc]ode: 403|AuthorizationPermission|Mkdirs failed|\[DELTA_CANNOT_CREATE_LOG_PATH\]"
    ),
    AccessDeniedError,
    "Spark has no permission to {verb} {table}",
    "Grant it to the user or the credentials of Spark (on a cluster and with Spark Connect: the server's); "
    "or use another table.",
)
_NO_LINKS = _FailureKind(
    re.compile("no hard link could be made"),
    UnsafeStorageError,
    "the file system of {table} has no hard links, which create a commit only if it is absent",
    "Move the table to another file system; or set spark.delta.logStore.file.impl=io.delta.storage.HDFSLogStore and "
    "single_writer=True, and never let two drivers write it at the same time.",
)
_NOT_FORCED = _FailureKind(
    re.compile("the disk did not take "),
    WriteError,
    "the file system of {table} did not force a file to the disk",
    "Look for disk errors in the kernel log. A file system that cannot force files or folders needs the Spark setting "
    "spark.stream_assets.fsync=false; a power cut can then lose committed batches.",
)
_APPEND_ONLY = _FailureKind(
    re.compile(r"\[DELTA_CANNOT_MODIFY_APPEND_ONLY\]"),
    UnsupportedError,
    "the table {table} is append-only, and this batch replaces rows",
    "Allow it with ALTER TABLE … SET TBLPROPERTIES (delta.appendOnly = false), or replay with on_replay='append'.",
)
_OTHER = _FailureKind(
    re.compile(""),
    UnexplainedError,
    "Spark could not {verb} {table}",
    "",
)
_KINDS = (_CONSTRAINT, _SCHEMA, _NO_SPACE, _FOLDER, _DENIED, _NO_LINKS, _NOT_FORCED, _APPEND_ONLY)


def explain(error: Exception, *, table: str, activity: Activity = WRITING) -> StreamAssetsError:
    """Map an error of Spark to a :class:`StreamAssetsError`; after a failed write, the table has no rows of the batch.

    Args:
        error: the error of a classic or a Connect session.
        table: the table, for the message.
        activity: what failed.
    """
    if isinstance(error, StreamAssetsError):
        return error
    failure = _explained(error, activity, table=table)
    failure.detail = failure.detail or cause_of(error)
    return failure


@contextmanager
def translating_spark_errors(table: str, activity: Activity = WRITING) -> Iterator[None]:
    """Translate the errors of Spark into ours, because their texts may hold values of rows.

    Raises:
        StreamAssetsError: Spark raised an error; see :func:`explain`.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        # A classic session raises errors of Java as they are.
        raise explain(error, table=table, activity=activity) from None


def _explained(error: Exception, activity: Activity, *, table: str) -> StreamAssetsError:
    said = public_text(error, table=table)
    if ours := _raised_by_us(error, table=table):
        return ours
    raised, frames = _raised_in_python(error)
    if (_is_of_read(frames) or _is_import(frames, text_of(error))) and (
        unread := _failed_read(raised, activity, table=table)
    ):
        return unread
    if failed := _failed_row(error, activity, table=table):
        return failed
    # File systems count bytes, so each byte becomes a character.
    lines = "\n".join(_deciding(line) for line in first_lines(error)).encode(errors="replace").decode("latin-1")
    octets = _VALUE_OF_FOLDER.sub(_masked, lines)
    is_schema = isinstance(error, AnalysisException) and "schema" in text_of(error).lower()
    known = next((kind for kind in _KINDS if kind.pattern.search(octets)), _SCHEMA if is_schema else _OTHER)
    if known.error is not ConstraintViolatedError and (away := catalog_unavailable(error)):
        return away
    what = known.what.format(table=table, verb=activity.verb)
    return known.error(f"{what}: {said}", remedy=known.remedy or activity.remedy)


def _is_of_read(frames: str) -> bool:
    """Return whether an executor failed while it read a split or loaded code, and not in a function of the transform.

    Such a function may raise the same errors, or handle them, for one row only.
    """
    called = [name for path, _, name in _FRAME.findall(frames) if not _OF_LOADER.search(path)]
    return not called or called[-1] == "<module>" or _READING in called


def _is_import(frames: str, text: str) -> bool:
    """Return whether an ``import`` statement failed, and the function did not handle that."""
    return bool(_IMPORT.search(frames)) and _HANDLED not in text


def _failed_read(raised: str, activity: Activity, *, table: str) -> StreamAssetsError | None:
    kind = raised_on_executor(raised)
    if kind is MissingDependencyError or (kind is not WriteError and issubclass(kind, Transient)):
        # An immediate second read would wait just as long for the same broker, without a log line.
        return explain_read(raised, what=f"the messages for {table}", remedy=activity.remedy)
    if raised.startswith(_OF_A_READ):
        return UnfinishedReadError(
            f"the messages for {table} could not be read as planned: {redacted(raised.partition(': ')[2])}",
            remedy=activity.remedy,
        )
    return None


def _deciding(line: str) -> str:
    """Return the part of a first line that may decide the kind of failure; the rest may hold values."""
    if condition := _condition(line):
        return f"[{condition}]"
    return line if _OF_SYSTEM.match(line) else ""


def _masked(value: re.Match[str]) -> str:
    """Mask a value, which must not decide the kind of failure; keep its length and NUL, which may."""
    return re.sub(r"[^\0]", "=", value[0])


def catalog_unavailable(error: Exception) -> CatalogUnavailableError | None:
    """Return an error if Spark cannot reach its Hive metastore, which it reports as if a statement were wrong.

    Args:
        error: the error of a classic or a Connect session.
    """
    heads = first_lines(error)
    if not (any(map(_OF_HIVE.match, heads)) and any(map(_NO_METASTORE.search, heads))):
        return None
    ask = getattr(error, "getStackTrace", None)
    # A classic session has the causes only in its stack trace.
    causes = str((ask() if ask else getattr(error, "_stackTrace", None)) or "")
    if lock := _DERBY_LOCK.search(causes):
        return CatalogUnavailableError(
            f"the Hive metastore of this Spark is a Derby database that another process has open: {redacted(lock[1])}",
            remedy="Only one Spark can open it at a time: end the other one, or run a metastore server for both.",
        )
    reasons = re.findall(r"java\.net\.\w+: (.*)", "\n".join([*heads, causes]))
    said = redacted(reasons[-1].strip()) if reasons else cause_of(error)
    return CatalogUnavailableError(
        f"the Hive metastore of this Spark does not answer: {said}",
        remedy="Check hive.metastore.uris, and that the server runs; only one Spark at a time can open a Derby "
        "database.",
    )


def _failed_row(error: Exception, activity: Activity, *, table: str) -> FailedRowError | None:
    """Return the failure of the transform, or ``None`` if something else failed."""
    raised, frames = _raised_in_python(error)
    if raised:
        kind, _, said = redacted(raised).partition(": ")
        failed = FailedRowError(
            f"a function of the transform raised {kind.rpartition('.')[2]}{_place(frames)} while "
            f"{activity.during} {table}",
            remedy=f"Correct it, or let it return null. {activity.remedy_of_rows}",
        )
        failed.detail = said
        return failed
    conditions = {_condition(line).partition(".")[0] for line in first_lines(error)}
    if isinstance(error, _EXPRESSION_ERRORS) or conditions & _OF_VALUES or _OF_A_VALUE.search(text_of(error)):
        return FailedRowError(
            f"an expression of the transform failed while {activity.during} {table}: {public_text(error, table=table)}",
            remedy="Correct it: try_cast and try_divide return null, and so do all casts and divisions with the "
            f"setting spark.sql.ansi.enabled=false. {activity.remedy_of_rows}",
        )
    return None


def explain_failed_read(error: Exception, *, what: str) -> StreamAssetsError:
    """Map the error of a failed read to a :class:`StreamAssetsError`; nothing of the batch was written.

    Args:
        error: the error of a classic or a Connect session.
        what: the name of what was read, for the message.
    """
    if isinstance(error, StreamAssetsError):
        return error
    raised, _ = _raised_in_python(error)
    if raised:
        return explain_read(raised, what=what)
    failure = UnexplainedError(f"{what} could not be read: {public_text(error)}", remedy=_READ_AGAIN)
    failure.detail = cause_of(error)
    return failure


def _raised_in_python(error: Exception) -> tuple[str, str]:
    """Return the first line of the error of a Python worker, and its frames; both empty if none raised an error.

    The error may hold a value, and a value may be the log of a program, with tracebacks in it.
    """
    text = text_of(error)
    heads = first_lines(error)
    is_python = any(_condition(head) == "PYTHON_EXCEPTION" or head.startswith(_PYTHON) for head in heads)
    if not (is_python or isinstance(error, PythonException)):
        return "", ""
    found = next((found for found in _TRACEBACK.finditer(text) if found[2]), None)
    return (found[2], found[1]) if found else (public_text(error), "")


def said_by_raise_error(error: BaseException) -> list[str]:
    """Return the texts of ``raise_error()`` in an error."""
    raised = (head for head in first_lines(error) if _condition(head) == "USER_RAISED_EXCEPTION")
    return [_CONDITION.sub("", head).partition(" SQLSTATE: ")[0] for head in raised]


def _raised_by_us(error: Exception, *, table: str) -> StreamAssetsError | None:
    """Return the error of our own ``raise_error()`` conditions, which hold no value of a row, or ``None``."""
    said = said_by_raise_error(error)
    if any(one.startswith((REJECTED, NOT_STORED)) for one in said):
        return RejectedRowError(f"{REJECTED}, for {table}", remedy="The batch is read and counted first.")
    if any(one.startswith(FOREIGN_PLACE) for one in said):
        return TransformError(
            f"the transform changes the columns that identify the message of a row of {table}",
            remedy="Keep _stream, _shard and _sequence of each row unchanged; the next run reads the batch again.",
        )
    for what, (kind, remedy) in _OF_CHANGES.items():
        if found := next((one for one in said if one.startswith(what)), None):
            return kind(f"{found}; {table} is unchanged", remedy=remedy)
    return None


def explain_read(raised: str, *, what: str, remedy: str = _READ_AGAIN) -> StreamAssetsError:
    """Map the error of a Python worker that read to a :class:`StreamAssetsError`; nothing of the batch was written.

    Args:
        raised: the class and the text of the error.
        what: the name of what was read, for the message.
        remedy: what to do, unless the error says it.

    Example:
        >>> explain_read("ModuleNotFoundError: No module named 'redis'", what="orders").what
        "orders could not be read: executors lack a Python package: No module named 'redis'"
    """
    kind = raised_on_executor(raised)
    name, _, said = redacted(raised).partition(": ")
    if kind is WriteError:
        failure = kind(f"{what} could not be read: {name}", remedy=remedy)
        failure.detail = said
        return failure
    if kind is MissingDependencyError:
        return kind(
            f"{what} could not be read: executors lack a Python package: {said}",
            remedy="Install it in the Python of the executors, or send it to them (spark.submit.pyFiles, "
            "spark.archives).",
        )
    return kind(f"{what} could not be read: {said}", remedy=remedy)


def text_of(error: BaseException) -> str:
    """Return the unredacted text of an error; for that of a Java error, py4j asks the JVM, which may have ended."""
    try:
        return str(error)
    except Exception as gone:  # noqa: BLE001 - py4j raises errors of any type
        return f"{type(error).__name__}{_GONE} ({type(gone).__name__})"


def public_text(error: BaseException, *, table: str = "") -> str:
    """Return the parts of an error of Spark that hold no value of a row.

    These are its condition, the message of the storage about the table, and names and types of an analysis error.

    Args:
        error: the error of a classic or a Connect session.
        table: the absolute path or the URI of the table that was written. The text of an error of a file or a
            connection is repeated only if it has this path: a function of the transform may have raised others.

    Example:
        >>> text = "org.apache.spark.SparkRuntimeException: [CAST_INVALID_INPUT] The value '4111' cannot be cast"
        >>> public_text(RuntimeError(f"Job aborted{chr(10)}Caused by: {text}"))
        'RuntimeError; caused by [CAST_INVALID_INPUT]'
    """
    if isinstance(error, AnalysisException) and (condition := error.getCondition()):
        if condition == _OF_COLUMNS:
            return cause_of(error)
        given = error.getMessageParameters() or {}
        named = ", ".join(f"{name}: {value}" for name, value in sorted(given.items()) if name in _NAMES)
        return f"[{condition}]{f' {redacted(named)}' if named else ''}"
    first, *causes = [_public(line, table) for line in first_lines(error)]
    said = first or type(error).__name__
    caused = next((cause for cause in reversed(causes) if cause and cause != first), "")
    return f"{said}; caused by {caused}" if caused else said


def first_lines(error: BaseException) -> list[str]:
    """Return the first lines of a Java error, of the failure in its task, and of each of its causes.

    The list ends with the first line that may hold a value, because a value may have lines that look like causes.
    """
    own, *lines = re.sub(r"^An error occurred while calling \S+\n: ", "", text_of(error).lstrip()).split("\n")
    task = _LOST_TASK.match(own[:MAX_ERROR_CHARACTERS])
    found = [own, own[task.end() :]] if task else [own]
    found += [cause for line in lines if (cause := _cause(line))]
    valued = (at for at, line in enumerate(found) if _may_hold_value(line))
    return found[: next(valued, len(found)) + 1]


def _may_hold_value(line: str) -> bool:
    condition = _condition(line)
    passes = _WRAPPERS.match(condition) if condition else _OF_SYSTEM.match(line)
    return not passes or line.startswith(_PYTHON)


def _cause(line: str) -> str:
    """Return the cause that a line of a Java stack trace names, or ``""``."""
    return line.lstrip()[len(_CAUSED_BY) :] if line.lstrip().startswith(_CAUSED_BY) else ""


def _condition(head: str) -> str:
    found = _CONDITION.match(head)
    return found[1] if found else ""


def _public(line: str, table: str) -> str:
    if condition := _condition(line):
        return f"[{redacted(condition)}]"
    if _GONE in line:
        return line.partition(_GONE)[0] + _GONE
    found = _JAVA_ERROR.match(line)
    if not found:
        return ""
    # A token may look like the name of a class, and the redaction does not recognize its last part alone.
    name = redacted(found[1]).rpartition(".")[2]
    if table and table in found[2] and _OF_STORAGE.match(found[1]):
        # The name of a folder may be a value of a row.
        return f"{name}: {redacted(_VALUE_OF_FOLDER.sub('=…', found[2]))}"
    return name


def _place(frames: str) -> str:
    """Return the line and file in which a Python function raised, for a message."""
    # A function may have compiled code under a name that holds a value.
    places = [one for one in _FRAME.findall(frames) if "/pyspark/" not in one[0] and Path(one[0]).is_file()]
    return f" in line {places[-1][1]} of {redacted(places[-1][0])}" if places else ""


def cause_of(error: BaseException) -> str:
    """Return the messages of an error of Spark and of its deepest cause, in one line and without Java frames.

    Example:
        >>> lines = ["An error occurred while calling o1.save.", ": org.A: it failed", "Caused by: java.B: disk full"]
        >>> cause_of(RuntimeError(chr(10).join(lines)))
        'it failed; caused by: disk full'
    """
    text = text_of(error)
    said = re.split(r"\n[ \t]*at |\n[ \t]*JVM stacktrace:|\nCaused by:", text)[0]
    said = re.sub(r"^An error occurred while calling \S+\n: ", "", said)
    # Delta's advice on schema migration differs from ours, and is longer than the problem.
    said = said.replace(_between(said, "To enable schema migration", "for details."), "")
    # Remove the class of a Java error, before its text.
    said = re.sub(r"^(\((\w+\.)+[\w$]+\) |(\w+\.)+[\w$]+: )", "", said.strip())
    # Redact before the text is cut: the redaction may not recognize a part of a secret.
    shown = redacted(" ".join(said.split())) or type(error).__name__
    shown = shown if len(shown) <= MAX_ERROR_CHARACTERS else f"{shown[:MAX_ERROR_CHARACTERS]} …"
    causes = [re.sub(r"^(\w+\.)+[\w$]+: ", "", cause) for line in text.split("\n") if (cause := _cause(line))]
    cause = redacted(causes[-1].strip()) if causes else ""
    return shown if cause in shown else f"{shown}; caused by: {cause}"


def _between(text: str, first: str, last: str) -> str:
    """Return the part of a text from the words ``first`` to the words ``last``, inclusive, or ``""``."""
    _, found, rest = text.partition(first)
    inner, end, _ = rest.partition(last)
    return f"{found}{inner}{end}" if end else ""


def raised_on_executor(reason: str) -> type[StreamAssetsError]:
    """Return the type of the error that a Python worker raised; :class:`WriteError` for errors of other libraries.

    Args:
        reason: the class and the text of the error.

    Example:
        >>> raised_on_executor("stream_consumers.errors.StreamNotFoundError: there is no file orders.ss").__name__
        'StreamNotFoundError'
    """
    if reason.startswith(_MISSING_MODULE):
        return MissingDependencyError
    named = re.match(r"stream_consumers\.errors\.(\w+): ", reason)
    kind = vars(errors).get(named[1]) if named else None
    return kind if isinstance(kind, type) and issubclass(kind, StreamAssetsError) else WriteError
