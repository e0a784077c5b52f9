"""What a failed write means: Spark hides the cause in a page of Java frames, and a Connect server in another place.

The texts of Spark, of Delta and of users' functions may hold values of rows. An error of ours names what cannot: types,
conditions, and what a storage says of its files. The rest is its ``detail``.

What kind of error it is, the text decides as Spark wrote it. Only what is repeated of it is redacted: a secret may be a
word that stands in the name of a class, too. Failures of rows are known first, because only their texts hold values,
and by what comes before any value: the condition, the class of a Java error, the first traceback of a Python worker.
What follows the first text that may hold a value decides nothing, and is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from spark_jobs.redaction import redacted
from spark_jobs.table_location import MAX_NAME_BYTES
from stream_consumers import errors
from stream_consumers.errors import (
    AccessDeniedError,
    CatalogUnavailableError,
    ConstraintViolatedError,
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
_OF_A_READ = ("stream_consumers.errors.", "spark_jobs.reading.source.SplitMismatchError: ")
_GONE = ", and the JVM of Spark does not answer any more"
_READ_AGAIN = "Nothing of the batch was written; it is read again."
_MISSING_MODULE = "ModuleNotFoundError: No module named "
# At the beginning of an error, or of a cause: elsewhere it may be in a value.
_OF_HIVE = re.compile(r"(?:\([\w.$]+\) |(?:\w+\.)+\w+: )?(?:\w+\.)*(?:HiveException: |MetaException\()")
_NO_METASTORE = re.compile(
    r"Unable to instantiate \S*SessionHiveMetaStoreClient|Could not connect to meta store"
    r"|(TTransport|java\.net\.\w+)Exception"
)
_DERBY_LOCK = re.compile(r"Another instance of Derby may have already booted the database (\S+?)\.?\s")
# The state that Spark gives to what is wrong with a value, to a function of the user's, and to what raise_error() says;
# reflect() raises what the method does, which may be an error of a file or a connection, and xpath() what Java does.
_OF_A_VALUE = re.compile(
    r"SQLSTATE: (22\w{3}|39000|P0001)\b"
    r"|\bat org\.apache\.spark\.sql\.catalyst\.expressions\.(?:CallMethodViaReflection|xml)\."
)
# What else is wrong with a value, under states that errors of other kinds have, too.
_OF_VALUES = frozenset({
    "COLLECTION_SIZE_LIMIT_EXCEEDED", "DUPLICATED_MAP_KEY", "EXCEED_LIMIT_LENGTH", "MALFORMED_CSV_RECORD",
    "MALFORMED_PROTOBUF_MESSAGE",
})  # fmt: skip
# As Spark and Delta begin a message, before any value.
_CONDITION = re.compile(r"^(?:\([\w.$]+\) |(?:\w+\.)+[\w$]+: )?\[([A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)*)\] ?")
# Errors that hold no value of a row, but have a cause, or the words of a storage, that say what failed.
_OF_SYSTEM = re.compile(
    r"\(?(?:java\.(?:io|nio|net|security|util\.concurrent|lang\.reflect)|javax\.net\.ssl|software\.amazon"
    r"|com\.(?:amazonaws|google|microsoft)|io\.delta|org\.apache\.(?:hadoop|parquet|spark)|org\.sparkproject)\."
    r"|java\.lang\.IllegalArgumentException: Self-suppression not permitted$|Job aborted"
)
_JAVA_ERROR = re.compile(r"\(?((?:\w+\.)+[A-Z][\w$]*)(?:\) |: |$)(.*)")
_LOST_TASK = re.compile(r".*?Job aborted due to stage failure: .*? \(TID \d+\) \([^)]*\): ")
_PYTHON = "org.apache.spark.api.python.PythonException: "
# The conditions of errors that hold no value of a row, but have a cause that says what failed.
_WRAPPERS = re.compile(r"(?:TASK_WRITE_FAILED|FAILED_READ_FILE|INTERNAL_ERROR(?:_[A-Z]+)*)(?:\.|$)")
_CAUSED_BY = "Caused by: "
# The frames of a traceback, and what was raised. That a worker cannot unpickle something is in another error.
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n((?:[ \t].*\n)+)"
    r"(?!pyspark\.serializers\.SerializationError: Caused by Traceback)(\S.*)"
)
# Errors of files and connections. A function of the transform may raise them, too, with values of rows.
_OF_STORAGE = re.compile(
    r"java\.io\.|java\.nio\.file\.|java\.net\.\w*(Connect|Socket|Host|Route)|org\.apache\.hadoop\.(?!hive)|software\.amazon\."
)
# The name of a folder of a partition, in which Spark escapes "/", ":" and "=".
_VALUE_OF_FOLDER = re.compile(r"(?<=\w)=(?:(?! \(exists=)[^/:\n])*")
# The frames of what loads a function; code that was compiled from text, or is frozen, has no file.
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
# This one has no parameters: its text says how the columns of the rows and those of the table differ.
_OF_COLUMNS = "DELTA_METADATA_MISMATCH"
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_EXPRESSION_ERRORS = (ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException, NumberFormatException)


class UnfinishedReadError(WriteError):
    """What was to be written could not be read while it was, or not as it was planned."""


class UnexplainedError(WriteError):
    """Spark failed for no reason known here: a payload may have crashed a Python worker."""


class RejectedRowError(WriteError):
    """A row that was to be written while it was read is rejected by the transform."""


class FailedRowError(TransformError):
    """A function or an expression of the transform failed, perhaps for one row only."""


@dataclass(frozen=True, slots=True)
class _FailureKind:
    """A reason why a write fails, known by its text; ``what`` is said before the text, of the table."""

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
    "Let the transform correct or reject() such rows; or let on_bad_rows='dead_letter' make dead letters of their "
    "messages; or change the constraint with ALTER TABLE. The batch is read again at the next run.",
)
# Hadoop says nothing else of a folder that cannot be made; NUL is in no name.
_FOLDER = _FailureKind(
    re.compile(
        r"File name too long|PathComponentTooLong|Nul character not allowed"
        r"|Mkdirs failed to create (?:(?! \(exists=|Mkdirs )[^\n])*?"
        rf"(?:\0|/(?:(?! \(exists=)[^/\n]){{{MAX_NAME_BYTES + 1}}})"
    ),
    ConstraintViolatedError,
    "a value of a row cannot be the name of a folder of the table {table}",
    f"A folder is called like a column that the table is partitioned by, and its value, in at most {MAX_NAME_BYTES} "
    "bytes. Let the transform shorten or reject() such rows; or let on_bad_rows='dead_letter' make dead letters of "
    "their messages. The batch is read again at the next run.",
)
_SCHEMA = _FailureKind(
    re.compile(r"\[DELTA_(METADATA_MISMATCH|\w*SCHEMA\w*|FAILED_TO_MERGE\w*|\w*DATA_?TYPES?\w*)\]"),
    SchemaMismatchError,
    "the rows do not fit the table {table}",
    "Change the transform or the schema; schema_changes='add_columns' lets new columns and fields in.",
)
_NO_SPACE = _FailureKind(
    re.compile(r"No space left on device|[Qq]uota exceeded|QuotaExceeded"),
    WriteError,
    "there is no space left to write {table}",
    "Free space there, or where Spark keeps its scratch files (spark.local.dir), and run again.",
)
_DENIED = _FailureKind(
    re.compile(
        r"Permission denied|Operation not permitted|Read-only file system|Access ?Denied|AccessControlException"
        r"|Forbidden|[Ss]tatus [Cc]ode: 403|AuthorizationPermission|Mkdirs failed|\[DELTA_CANNOT_CREATE_LOG_PATH\]"
    ),
    AccessDeniedError,
    "Spark may not write {table}",
    "Give the right to write there to the user, or the credentials, that Spark has (on a cluster and with Spark "
    "Connect: the server's); or give another table.",
)
_NO_LINKS = _FailureKind(
    re.compile("no hard link could be made"),
    UnsafeStorageError,
    "the file system of {table} has no hard links, by which a commit is put only if it is absent",
    "Put the table elsewhere; or set spark.delta.logStore.file.impl=io.delta.storage.HDFSLogStore and "
    "single_writer=True, and never let two drivers write it at the same time.",
)
_NOT_FORCED = _FailureKind(
    re.compile("the disk did not take "),
    WriteError,
    "the file system of {table} did not force a file to the disk",
    "Look for errors of the disk in the log of the kernel. A file system that cannot force files or folders needs the "
    "Spark setting spark.stream_assets.fsync=false: then a power cut can lose batches that were committed.",
)
_APPEND_ONLY = _FailureKind(
    re.compile(r"\[DELTA_CANNOT_MODIFY_APPEND_ONLY\]"),
    UnsupportedError,
    "the table {table} takes appends only, and rows of it are to be replaced",
    "Allow it with ALTER TABLE … SET TBLPROPERTIES (delta.appendOnly = false), or replay with on_replay='append'.",
)
_OTHER = _FailureKind(
    re.compile(""),
    UnexplainedError,
    "Spark could not write to {table}",
    "Nothing of the batch was written; it is read again at the next run.",
)
_ONE_ROW = (
    "If it is because of some rows only, reject() them, or let on_bad_rows='dead_letter' find them; their messages "
    "become dead letters. The batch is read again at the next run."
)
_KINDS = (_CONSTRAINT, _SCHEMA, _NO_SPACE, _FOLDER, _DENIED, _NO_LINKS, _NOT_FORCED, _APPEND_ONLY)


def explain(error: Exception, *, table: str) -> StreamAssetsError:
    """Map the error of a failed write to a :class:`StreamAssetsError`; nothing of the batch is in the table.

    Args:
        error: what Spark raised, in a classic or in a Connect session.
        table: for the message.
    """
    if isinstance(error, StreamAssetsError):
        return error
    failure = _explained(error, table=table)
    failure.detail = failure.detail or cause_of(error)
    return failure


@contextmanager
def explained(table: str) -> Iterator[None]:
    """Let no error of Spark pass with its text.

    Raises:
        StreamAssetsError: see :func:`explain`.
    """
    try:
        yield
    except PySparkException as error:
        raise explain(error, table=table) from None


def _explained(error: Exception, *, table: str) -> StreamAssetsError:
    said = public_text(error, table=table)
    if ours := _raised_by_us(error, table=table):
        return ours
    raised, frames = _raised_in_python(error)
    if (_is_of_read(frames) or _is_import(frames, text_of(error))) and (unread := _failed_read(raised, table=table)):
        return unread
    if failed := _failed_row(error, table=table):
        return failed
    # File systems count bytes: here each is a character.
    lines = "\n".join(_deciding(line) for line in first_lines(error)).encode(errors="replace").decode("latin-1")
    octets = _VALUE_OF_FOLDER.sub(_masked, lines)
    is_schema = isinstance(error, AnalysisException) and "schema" in text_of(error).lower()
    known = next((kind for kind in _KINDS if kind.pattern.search(octets)), _SCHEMA if is_schema else _OTHER)
    if known.error is not ConstraintViolatedError and (away := catalog_unavailable(error)):
        return away
    return known.error(f"{known.what.format(table=table)}: {said}", remedy=known.remedy)


def _is_of_read(frames: str) -> bool:
    """Whether the process of an executor failed while it read a split, or loaded what it was to run.

    A function of the transform may raise the same errors, or handle them, for one row only.
    """
    called = [name for path, _, name in _FRAME.findall(frames) if not _OF_LOADER.search(path)]
    return not called or called[-1] == "<module>" or _READING in called


def _is_import(frames: str, text: str) -> bool:
    """Whether an ``import`` statement failed, whose name is no value, and the function did not handle that."""
    return bool(_IMPORT.search(frames)) and _HANDLED not in text


def _failed_read(raised: str, *, table: str) -> StreamAssetsError | None:
    kind = raised_on_executor(raised)
    if kind is MissingDependencyError or (kind is not WriteError and issubclass(kind, Transient)):
        # To read it once more at once would wait for the same broker as long again, without a word.
        return explain_read(raised, what=f"the messages for {table}")
    if raised.startswith(_OF_A_READ):
        return UnfinishedReadError(
            f"the messages for {table} could not be read as planned: {redacted(raised.partition(': ')[2])}",
            remedy="Nothing of the batch was written; it is read again at the next run.",
        )
    return None


def _deciding(line: str) -> str:
    """What of a first line may decide what failed: after a condition, and in errors of others, there may be values."""
    if condition := _condition(line):
        return f"[{condition}]"
    return line if _OF_SYSTEM.match(line) else ""


def _masked(value: re.Match[str]) -> str:
    """Replace the words of a value, which must not decide what failed; its length and NUL may."""
    return re.sub(r"[^\0]", "=", value[0])


def catalog_unavailable(error: Exception) -> CatalogUnavailableError | None:
    """The error of a Hive metastore that Spark cannot reach, which it raises as if a statement were wrong.

    Args:
        error: what Spark raised, in a classic or in a Connect session.
    """
    heads = first_lines(error)
    if not (any(map(_OF_HIVE.match, heads)) and any(map(_NO_METASTORE.search, heads))):
        return None
    ask = getattr(error, "getStackTrace", None)
    # A classic session has the causes nowhere else.
    causes = str((ask() if ask else getattr(error, "_stackTrace", None)) or "")
    if lock := _DERBY_LOCK.search(causes):
        return CatalogUnavailableError(
            f"the Hive metastore of this Spark is a Derby database that another process has open: {redacted(lock[1])}",
            remedy="One Spark at a time can have it: end the other one, or run a metastore server for both.",
        )
    reasons = re.findall(r"java\.net\.\w+: (.*)", "\n".join([*heads, causes]))
    said = redacted(reasons[-1].strip()) if reasons else cause_of(error)
    return CatalogUnavailableError(
        f"the Hive metastore of this Spark does not answer: {said}",
        remedy="Check hive.metastore.uris, and that it runs; one in a Derby database is for one Spark at a time.",
    )


def _failed_row(error: Exception, *, table: str) -> FailedRowError | None:
    """What failed in the transform; ``None`` if nothing did."""
    raised, frames = _raised_in_python(error)
    if raised:
        kind, _, said = redacted(raised).partition(": ")
        failed = FailedRowError(
            f"a function of the transform raised {kind.rpartition('.')[2]}{_place(frames)} while writing {table}",
            remedy=f"Correct it, or let it return null. {_ONE_ROW}",
        )
        failed.detail = said
        return failed
    conditions = {_condition(line).partition(".")[0] for line in first_lines(error)}
    if isinstance(error, _EXPRESSION_ERRORS) or conditions & _OF_VALUES or _OF_A_VALUE.search(text_of(error)):
        return FailedRowError(
            f"an expression of the transform failed while writing {table}: {public_text(error, table=table)}",
            remedy="Correct it: try_cast and try_divide give null, and so do all casts and divisions with the setting "
            f"spark.sql.ansi.enabled=false. {_ONE_ROW}",
        )
    return None


def explain_failed_read(error: Exception, *, what: str) -> StreamAssetsError:
    """Map the error of a failed read to a :class:`StreamAssetsError`; nothing of the batch was written.

    Args:
        error: what Spark raised, in a classic or in a Connect session.
        what: was to be read.
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
    """The first line of what a Python worker raised, and the frames of its traceback; empty if none raised anything.

    What was raised may hold a value, and a value may be the log of a program, with tracebacks in it.
    """
    text = text_of(error)
    heads = first_lines(error)
    is_python = any(_condition(head) == "PYTHON_EXCEPTION" or head.startswith(_PYTHON) for head in heads)
    if not (is_python or isinstance(error, PythonException)):
        return "", ""
    found = _TRACEBACK.search(text)
    return (found[2], found[1]) if found else (public_text(error), "")


def _raised_by_us(error: Exception, *, table: str) -> StreamAssetsError | None:
    """What a row is refused for by a condition of ours, which raises an error that has no value in it."""
    said = [_CONDITION.sub("", head) for head in first_lines(error) if _condition(head) == "USER_RAISED_EXCEPTION"]
    if any(one.startswith(REJECTED) for one in said):
        return RejectedRowError(f"{REJECTED}, for {table}", remedy="It is read and counted first.")
    if any(one.startswith(FOREIGN_PLACE) for one in said):
        return TransformError(
            f"the transform changes the columns that identify the message of a row of {table}",
            remedy="Keep _stream, _shard and _sequence of each row as they are; the batch is read again at the next "
            "run.",
        )
    return None


def explain_read(raised: str, *, what: str) -> StreamAssetsError:
    """Map what a Python worker raised while it read to a :class:`StreamAssetsError`; nothing of the batch was written.

    Args:
        raised: the class and the text.
        what: was to be read.

    Example:
        >>> explain_read("ModuleNotFoundError: No module named 'redis'", what="orders").what
        "orders could not be read: executors lack a Python package: No module named 'redis'"
    """
    kind = raised_on_executor(raised)
    name, _, said = redacted(raised).partition(": ")
    if kind is WriteError:
        failure = kind(f"{what} could not be read: {name}", remedy=_READ_AGAIN)
        failure.detail = said
        return failure
    if kind is MissingDependencyError:
        return kind(
            f"{what} could not be read: executors lack a Python package: {said}",
            remedy="Install it in the Python of the executors, or send it to them (spark.submit.pyFiles, "
            "spark.archives).",
        )
    return kind(f"{what} could not be read: {said}", remedy=_READ_AGAIN)


def text_of(error: BaseException) -> str:
    """The text of an error, with its secrets; that of a Java error is asked of the JVM, which may have ended."""
    try:
        return str(error)
    except Exception as gone:  # noqa: BLE001 - py4j raises what comes
        return f"{type(error).__name__}{_GONE} ({type(gone).__name__})"


def public_text(error: BaseException, *, table: str = "") -> str:
    """What an error of Spark says that holds no value of a row: its condition, and what the storage says of a table.

    Of an error of the analysis of a query also the names and types that it is about.

    Args:
        error: what Spark raised, in a classic or in a Connect session.
        table: the absolute path or the URI of a table that was written. What an error of a file or a connection says
            is repeated only if it names it: a function of the transform may have raised it, with a value.

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
    """The first line of a Java error, that of what failed in its task, and that of each of its causes.

    The last one is the first that may hold a value, which may have lines that look like causes.
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
    """The cause that a line of a Java stack trace names; empty if it names none."""
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
    # A token may look like the name of a class, and its last part alone is not known as one.
    name = redacted(found[1]).rpartition(".")[2]
    if table and table in found[2] and _OF_STORAGE.match(found[1]):
        # The name of a folder may be a value of a row.
        return f"{name}: {redacted(_VALUE_OF_FOLDER.sub('=…', found[2]))}"
    return name


def _place(frames: str) -> str:
    """Where a Python function raised."""
    # A function may have compiled code under a name that holds a value.
    places = [one for one in _FRAME.findall(frames) if "/pyspark/" not in one[0] and Path(one[0]).is_file()]
    return f" in line {places[-1][1]} of {redacted(places[-1][0])}" if places else ""


def cause_of(error: BaseException) -> str:
    """What an error of Spark says, and what its deepest cause says, in one line and without Java frames.

    Example:
        >>> lines = ["An error occurred while calling o1.save.", ": org.A: it failed", "Caused by: java.B: disk full"]
        >>> cause_of(RuntimeError(chr(10).join(lines)))
        'it failed; caused by: disk full'
    """
    text = text_of(error)
    said = re.split(r"\n[ \t]*at |\n[ \t]*JVM stacktrace:|\nCaused by:", text)[0]
    said = re.sub(r"^An error occurred while calling \S+\n: ", "", said)
    # Delta's advice on how to let columns in is not ours, and longer than what is wrong.
    said = said.replace(_between(said, "To enable schema migration", "for details."), "")
    # The class of a Java error, before its text.
    said = re.sub(r"^(\((\w+\.)+[\w$]+\) |(\w+\.)+[\w$]+: )", "", said.strip())
    # A secret that is cut may not be known as one.
    shown = redacted(" ".join(said.split())) or type(error).__name__
    shown = shown if len(shown) <= MAX_ERROR_CHARACTERS else f"{shown[:MAX_ERROR_CHARACTERS]} …"
    causes = [re.sub(r"^(\w+\.)+[\w$]+: ", "", cause) for line in text.split("\n") if (cause := _cause(line))]
    cause = redacted(causes[-1].strip()) if causes else ""
    return shown if cause in shown else f"{shown}; caused by: {cause}"


def _between(text: str, first: str, last: str) -> str:
    """The part of a text from the one word to the other, with them; empty if it has none."""
    _, found, rest = text.partition(first)
    inner, end, _ = rest.partition(last)
    return f"{found}{inner}{end}" if end else ""


def raised_on_executor(reason: str) -> type[StreamAssetsError]:
    """The type of the error that a Python worker raised; :class:`WriteError` if it is none of ours.

    Args:
        reason: the class and the text.

    Example:
        >>> raised_on_executor("stream_consumers.errors.StreamNotFoundError: there is no file orders.ss").__name__
        'StreamNotFoundError'
    """
    if reason.startswith(_MISSING_MODULE):
        return MissingDependencyError
    named = re.match(r"stream_consumers\.errors\.(\w+): ", reason)
    kind = vars(errors).get(named[1]) if named else None
    return kind if isinstance(kind, type) and issubclass(kind, StreamAssetsError) else WriteError
