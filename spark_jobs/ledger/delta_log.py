"""Reads a Delta log without a JVM: its versions, transactions and commits."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.table_expressions import (
    DEFAULT,
    GENERATED,
    check_checksum,
    check_last_checkpoint,
    check_metadata,
    foreign_options,
    read_strictly,
)
from spark_jobs.redaction import redacted
from spark_jobs.table_location import reader_options
from stream_consumers.errors import (
    LedgerUnreadableError,
    RestoreTargetError,
    StorageMismatchError,
    StreamAssetsError,
    TableUnreadableError,
    UnsupportedError,
    UnsupportedVersionError,
)

KEPT_COMMITS = 10_000
"""The most parsed commits that are cached."""
TORN_REMEDY = (
    "A power cut, or a full or broken disk, leaves such files. If it is the newest version, move this file and the "
    ".crc file of the version out of the folder: the log before it is intact, and the next run reads the messages of "
    "the batch again. Otherwise restore the file from a backup."
)
_STORAGE_REMEDY = "Check the path, its permissions and the storage options."
_PARTITION_REMEDY = (
    "If the type of a partition column was changed, undo that with Spark: RESTORE TABLE … TO VERSION AS OF the version "
    "before it. The next run reads the messages of later batches again."
)
RESTORE_REMEDY = "Restore again, to a version number: RESTORE TABLE … TO VERSION AS OF n."
_ACTION = re.compile(r'\s*\{\s*"(commitInfo|txn)"')
_FILE_ACTION = re.compile(r'\s*\{\s*"(add|remove)"')
_DATA_CHANGE = re.compile(r'"dataChange"\s*:\s*true')
_COMMIT_FILE = re.compile(r"([0-9]{20})\.json")
_CHECKPOINT = re.compile(r"/([0-9]{20})\.checkpoint\.[^/]*(parquet|json)$")
_CHECKPOINT_FILE = re.compile(r"[0-9]{20}\.checkpoint\..*parquet")
_LAST_CHECKPOINT = "_delta_log/_last_checkpoint"
_METADATA = frozenset({"metaData", "protocol"})
# A line with one of these actions has one of these texts, because its name may be written with escapes.
_METADATA_MARKS = ('metaData"', 'protocol"', "\\u")
# The counter of an identity column, in the metadata of the column. Each commit changes it.
_IDENTITY_COUNTER = "delta.identity.highWaterMark"
_Parsed = TypeVar("_Parsed")
# The error text of delta-rs for the table feature catalogManaged, and for its preview.
_CATALOG_MANAGED = "catalog-managed table"
_VECTORS, _WIDENING = "deletionVectors", "typeWidening"
MAX_LINE_CHARACTERS = 500
# The limits of what other programs may write into their commits: the digits of a number, the characters of a number and
# of a time, and the last millisecond of the year 9999.
_DIGITS = re.compile(r"[0-9]{1,19}")
_MAX_NUMBER_DIGITS, _MAX_MOMENT_CHARACTERS, _LAST_MS = 100, 100, 253_402_300_799_999
_FILE_URI = re.compile(r"^file:(//)?/")
_COLORS = re.compile(r"\x1b\[[0-9;]*m|↳")
_UNPARSED_PARTITION = "Failed to parse value "
# After these words delta-rs and Arrow repeat a value that they could not convert.
_BEFORE_VALUE = re.compile(
    rf"({_UNPARSED_PARTITION}|(?:Cast|Parser|Json|Compute|Invalid argument|Arithmetic overflow) error: ).*", re.DOTALL
)
# The name of the folder of a partition, in which writers escape quotes, ":" and "?".
_VALUE_OF_FOLDER = re.compile(r"""(?<![^/\s'"])([^/=?&\s'"]+=)[^/:?'"\n]*(?=/)""")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified (bucket|container) does not exist")
_UNAVAILABLE = re.compile(
    r"error sending request|max_retries|retry_timeout|timed? ?out|connection (refused|reset|closed)"
    r"|status code\D{1,20}(50[0234]|429)|SlowDown|dns error",
    re.IGNORECASE,
)


def one_line(text: str) -> str:
    r"""Return the text of an error in one line, without colours.

    Example:
        >>> one_line("it failed\n   \x1b[31m↳\x1b[0m because the server did not answer")
        'it failed because the server did not answer'
    """
    line = " ".join(_COLORS.sub("", text).split())
    return line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:MAX_LINE_CHARACTERS]} …"


def without_values(text: str) -> str:
    """Return the text of an error or a path without values of rows.

    Example:
        >>> without_values("Kernel error: Failed to parse value '1.50' as 'decimal(14,4)'")
        'Kernel error: Failed to parse value …'
        >>> without_values("no file day=2026-11-17/country=CH/part-0.parquet")
        'no file day=…/country=…/part-0.parquet'
    """
    return _VALUE_OF_FOLDER.sub(r"\1…", _BEFORE_VALUE.sub(r"\1…", text))


def unreadable(
    log: DeltaLog,
    error: BaseException,
    *,
    what: str,
    remedy: str,
    kind: type[StreamAssetsError] = TableUnreadableError,
) -> StreamAssetsError:
    """Map an error of delta-rs to a :class:`StreamAssetsError`, which has to be raised ``from None``.

    See :meth:`DeltaLog.redacted_text` for the reason.

    Args:
        log: the log of the table.
        error: the error of delta-rs.
        what: the message, unless the error is a temporary one of the storage.
        remedy: the remedy that belongs to ``what``.
        kind: the class that belongs to ``what``.

    Example:
        >>> type(unreadable(DeltaLog("s3://lake/t"), OSError("error sending request"), what="", remedy="")).__name__
        'LedgerUnreadableError'
    """
    raw, text = one_line(without_values(str(error))), log.redacted_text(error)
    if _NO_BUCKET.search(raw):
        return TableUnreadableError(
            f"the bucket or container of {log.path} does not exist", remedy="Create it, or correct the path."
        )
    if _UNAVAILABLE.search(raw):
        return LedgerUnreadableError(
            f"the storage of {log.path} does not answer ({text})",
            remedy="Check the address, the endpoint and the network.",
        )
    if _UNPARSED_PARTITION in raw:
        return TableUnreadableError(
            f"{what} (a value of a partition column does not have the type of the column)", remedy=_PARTITION_REMEDY
        )
    # The texts of other errors, such as a KeyError, say too little without the class.
    name = "" if isinstance(error, (DeltaError, OSError, ValueError)) else f"{type(error).__name__}: "
    return kind(f"{what} ({name}{text})", remedy=remedy)


@contextmanager
def reading(
    log: DeltaLog, *, what: str, remedy: str, kind: type[StreamAssetsError] = TableUnreadableError
) -> Iterator[None]:
    """Map every error of a read of a table's storage to a :class:`StreamAssetsError`.

    Every use of delta-rs and of :meth:`DeltaLog.files` runs inside this context, or handles the error without
    repeating its text. See :meth:`DeltaLog.redacted_text` for the reason.

    Args:
        log: the log of the table.
        what: see :func:`unreadable`.
        remedy: see :func:`unreadable`.
        kind: see :func:`unreadable`.

    Raises:
        LedgerUnreadableError: the storage does not answer.
        TableUnreadableError: or ``kind``; for any other error that is not a :class:`StreamAssetsError`.
    """
    try:
        yield
    except StreamAssetsError:
        raise
    except Exception as error:  # noqa: BLE001 - any program may have written what is read
        raise unreadable(log, error, what=what, remedy=remedy, kind=kind) from None


def catalog_managed_error(path: str, why: str) -> UnsupportedError:
    """Return the error for a table whose newest commits may not be files.

    Args:
        path: the path of the table.
        why: the sign that a catalog decides on its commits.
    """
    return UnsupportedError(
        f"a catalog decides on the commits of {path} ({why}). The newest commits may not be files yet, so that "
        "the log does not show the position of a group",
        remedy="Use a table whose commits become files at once: an external table without that property or feature.",
    )


class MergedRows(NamedTuple):
    """The numbers of rows that a MERGE has changed."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the table.

    Args:
        version: the number of the version.
        operation: WRITE, RESTORE, DELETE, …
        transactions: app ids and versions recorded in it.
        entry: our batch metadata; ``None`` if another program wrote the commit.
        restore_target: the version or the time that a RESTORE restored; ``None`` for other commits.
        output_rows: rows written, as the writer counted them, without those that a replace copied unchanged.
        deleted_rows: rows that a replace deleted; ``None`` if the writer did not record it, see
            :meth:`DeltaLog.deleted_rows`.
        merged: the rows that a MERGE inserted, updated and deleted; ``None`` for other commits.
        user_metadata: the commit's ``userMetadata``, if it is a JSON object and not our entry.
        predicate: the condition of a DELETE.
        timestamp_ms: the time of the commit that the writer recorded; ``None`` if it did not.
        output_bytes: bytes of the files written, as the writer counted them.
        changes_rows: whether it adds or removes rows, and does not only move them to other files.
        by: the user or the engine that the writer recorded.
        has_format_options: whether its metadata have options of the format; ``None`` if it sets no metadata.
    """

    version: int
    operation: str
    transactions: Mapping[str, int] = field(default_factory=dict)
    entry: LedgerEntry | None = None
    restore_target: int | str | None = None
    output_rows: int | None = None
    deleted_rows: int | None = 0
    merged: MergedRows | None = None
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    predicate: str = ""
    timestamp_ms: int | None = None
    output_bytes: int = 0
    changes_rows: bool = False
    by: str = ""
    has_format_options: bool | None = None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of a table.

    Args:
        path: relative to the folder of the table, or a URI.
        partition: the values of the partition columns as text, by their names in the files. The file itself does not
            have these columns.
    """

    path: str
    partition: Mapping[str, str | None] = field(default_factory=dict)


class TableSnapshot:
    """One version of a table: its number and the last transaction version of any app id."""

    def __init__(self, log: DeltaLog, table: DeltaTable) -> None:
        self._log = log
        self._table = table
        self.version: int = table.version()
        self.table_id = str(table.metadata().id)

    def last_number(self, app: str) -> int:
        """Return the last transaction version of ``app``; 0 if there is none."""
        with self._log.reading():
            return self._table.transaction_version(app) or 0

    def may_hold(self, streams: Iterable[str]) -> bool:
        """Return whether there may be rows of one of these streams, by the statistics of the files."""
        with self._log.reading():
            files = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        for file in files:
            least, most = file.get("min._stream"), file.get("max._stream")
            if file.get("num_records") == 0:
                continue
            if least is None or most is None or any(least <= stream <= most for stream in streams):
                return True
        return False

    @property
    def has_rows(self) -> bool:
        """Whether there may be rows, by the statistics of the files."""
        with self._log.reading():
            counts = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return any(file.get("num_records") != 0 for file in counts)

    @property
    def created_ms(self) -> int:
        """When the table was created, in milliseconds since 1970; 0 if it is unknown."""
        return self._table.metadata().created_time or 0

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The partition columns."""
        return tuple(self._table.metadata().partition_columns)

    @property
    def computed_columns(self) -> frozenset[str]:
        """The columns whose values Delta computes: generated columns and identity columns."""
        marks = (GENERATED, "delta.identity.start")
        return frozenset(c.name for c in self._table.schema().fields if any(mark in c.metadata for mark in marks))

    @property
    def default_columns(self) -> frozenset[str]:
        """The columns that have a default value."""
        return frozenset(c.name for c in self._table.schema().fields if DEFAULT in c.metadata)

    @property
    def settable_columns(self) -> Mapping[str, str]:
        """The columns that a write sets, and the SQL of the value that Delta inserts in rows that lack one."""
        found = {column.name: str(column.metadata.get(DEFAULT, "NULL")) for column in self._table.schema().fields}
        return {name: value for name, value in found.items() if name not in self.computed_columns}

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table properties."""
        return self._table.metadata().configuration

    @property
    def texts(self) -> tuple[str, ...]:
        """The name, the description and the partition columns."""
        found = self._table.metadata()
        return (found.name or "", found.description or "", *found.partition_columns)

    @cached_property
    def schema_json(self) -> str:
        """The schema in the JSON of the log."""
        return self._table.schema().to_json()

    @cached_property
    def columns(self) -> Sequence[Mapping[str, Any]]:
        """The columns in the format of the log, each with its ``metadata``."""
        with self._log.reading():
            fields: Sequence[Mapping[str, Any]] = json.loads(self.schema_json)["fields"]
        return fields

    @cached_property
    def schema(self) -> str:
        """A text that changes when the columns do, but not when an identity column is incremented."""
        columns = [{**one, "metadata": {**one.get("metadata", {}), _IDENTITY_COUNTER: None}} for one in self.columns]
        # delta-rs returns the metadata in any order.
        return json.dumps(columns, sort_keys=True)


@dataclass(frozen=True, slots=True)
class _CommitFile:
    """A commit that was read, and the identity of its file at that time; see :meth:`DeltaLog._commit_file`."""

    commit: Commit
    file: tuple[int, int, int] | None


class DeltaLog:
    """The log of the table at ``path``.

    Args:
        path: a local path or a URI that delta-rs understands.
        storage_options: credentials and settings for object stores; never logged.
        is_own_folder: whether no other program puts files there, so that files without a log come from a killed write.
    """

    def __init__(
        self, path: str, *, storage_options: Mapping[str, str] | None = None, is_own_folder: bool = False
    ) -> None:
        self.path = path
        self._is_own_folder = is_own_folder
        self.storage_options = reader_options(path, storage_options or {})
        self._files: pyarrow.fs.PyFileSystem | None = None
        self._commits: dict[int, Commit] = {}
        self._restored_versions: dict[int, tuple[int, ...]] = {}
        self._checked: tuple[Mapping[str, str], str, tuple[str, ...]] | None = None
        # The texts of other files with metadata for Spark, by their checks.
        self._checked_texts: dict[Callable[[str, str], None], str] = {}
        self._newest_read: _CommitFile | None = None
        # The newest version without options of the format.
        self._format_checked = -1
        self._table_id: str | None = None
        self._apps: tuple[tuple[str, int], frozenset[str] | None] | None = None
        # The text of the commit that was opened last: after a search for a batch, its files are often needed next.
        self._opened: tuple[int, str] | None = None

    def snapshot(self) -> TableSnapshot | None:
        """Open the newest version; return ``None`` if there is no table yet.

        Raises:
            TableUnreadableError: the path is not a readable Delta table, or the bucket does not exist.
            UnsupportedError: a catalog decides on its commits, or an expression or a name in its metadata may run code.
            LedgerUnreadableError: the storage does not answer, or a file of the log is torn.
            StorageMismatchError: a copy replaced the table since this object last read its log.
        """
        self._check_path()
        self._status(_LAST_CHECKPOINT)
        try:
            snapshot = TableSnapshot(self, DeltaTable(self.path, storage_options=self.storage_options))
        except TableNotFoundError:
            self._forget()
            return None
        except Exception as error:  # noqa: BLE001 - any program may have written the log
            if _CATALOG_MANAGED in str(error):
                raise catalog_managed_error(self.path, "it is a catalog-managed table") from None
            unread = self._unreadable(error)
            if isinstance(unread, TableUnreadableError):
                self._check_log()
            raise unread from None
        self._check_metadata(snapshot)
        self._check_same(snapshot)
        return snapshot

    def check_version(self, version: int | None = None) -> None:
        """Refuse a version whose metadata may let Spark run code, the newest by default. Call it before Spark reads.

        Raises:
            TableUnreadableError, UnsupportedError, LedgerUnreadableError, StorageMismatchError: see :meth:`snapshot`.
        """
        if version is None:
            snapshot = self.snapshot()
        else:
            snapshot = TableSnapshot(self, self.open(version))
            self._check_metadata(snapshot)
        if snapshot is not None:
            self.check_format(snapshot.version)

    def _check_metadata(self, snapshot: TableSnapshot) -> None:
        # The check takes 5 ms for a table with 1,000 columns, so it is skipped while the metadata stay the same.
        metadata = snapshot.configuration, snapshot.schema_json, snapshot.texts
        if metadata != self._checked:
            check_metadata(self.path, snapshot.configuration, snapshot.columns, others=snapshot.texts)
            self._checked = metadata
        self._check_file(f"_delta_log/{snapshot.version:020d}.crc", check_checksum)
        self._check_file(_LAST_CHECKPOINT, check_last_checkpoint)

    def check_format(self, version: int) -> None:
        """Refuse options of the format in the metadata of a version, which delta-rs does not return.

        It opens only the commits after the version that was checked before. Call it before each write of Spark.

        Raises:
            UnsupportedError: there are such options.
            TableUnreadableError, LedgerUnreadableError: see :meth:`commit`, or the checkpoint cannot be read.
        """
        checked, at, has_options = self._format_checked, version, None
        end, checkpoint = (checked, ()) if 0 <= checked <= version else self._newest_checkpoint(version)
        while at > end and has_options is None and (commit := self.commit(at)) is not None:
            has_options, at = commit.has_format_options, at - 1
        if has_options is None and at != checked:
            with self.reading():
                checkpoint = checkpoint or self._newest_checkpoint(version)[1]
                has_options = any(map(self._has_format_options, checkpoint))
        if has_options:
            raise foreign_options(self.path)
        self._format_checked = max(checked, version)

    def _newest_checkpoint(self, version: int) -> tuple[int, Sequence[str]]:
        """Return version and files of the newest checkpoint up to a version; -1 and no file without one."""
        # On an object store a long log takes minutes to list, so there the newest checkpoint is the one that it names.
        if "://" in self.path:
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
                hint = json.loads(self._read(_LAST_CHECKPOINT))
                names = self._checkpoint_names(hint)
                found = self.files().get_file_info(names)
                is_there = all(one.type is pyarrow.fs.FileType.File for one in found)
                if names and int(hint["version"]) <= version and is_there:
                    return int(hint["version"]), names
        with self.reading():
            listed = [one.path for one in self.files().get_file_info(pyarrow.fs.FileSelector("_delta_log"))]
        numbers = {name: int(match[1]) for name in listed if (match := _CHECKPOINT.search(name)) is not None}
        newest = max((number for number in numbers.values() if number <= version), default=-1)
        return newest, [name for name, number in numbers.items() if number == newest]

    def _has_format_options(self, checkpoint: str) -> bool:
        self._status(checkpoint)
        if checkpoint.endswith(".json"):
            return bool(parse_commit(0, self._read(checkpoint)).has_format_options)
        with self.files().open_input_file(checkpoint) as file:
            found = pq.ParquetFile(file).read(columns=["metaData.format"])
        actions = found.column("metaData").to_pylist() if found.num_columns else []
        return any(action is not None and (action["format"] or {}).get("options") for action in actions)

    def _check_same(self, snapshot: TableSnapshot) -> None:
        """Clear the caches if the table was created again, and refuse a copy that replaced the table.

        A table that was dropped and created again has another id. A copy has the same id, and may have other commits
        under the same versions. So the newest commit that was read still has to exist.

        Raises:
            StorageMismatchError: it is a copy with other commits; the caches are cleared.
        """
        read, known_id, self._table_id = self._newest_read, self._table_id, snapshot.table_id
        if known_id != snapshot.table_id:
            self._forget()
        elif read is not None and self._commit_file(read.commit.version) != read.file:
            known = self._commits, self._restored_versions, self._apps
            self._forget()
            found = self.commit(read.commit.version)
            if found == read.commit:
                # A copy with the same commits, or a file system that has changed the numbers of its files.
                self._commits, self._restored_versions, self._apps = known
            elif found is not None or read.commit.version > snapshot.version:
                raise StorageMismatchError(
                    f"{self.path} was replaced by a copy while it was in use: version {read.commit.version} "
                    f"is {'another commit' if found else 'missing'}",
                    remedy="Run again, to read messages that the copy lacks again. Stop all runs before you replace a "
                    "table by a copy. If a run was writing at that moment, search for missing rows with "
                    "stream-assets verify.",
                    version=read.commit.version,
                )

    def _commit_file(self, version: int) -> tuple[int, int, int] | None:
        """Return the identity of the file of a commit: size, time and number; ``None`` if it was cleaned from the log.

        Raises:
            TableUnreadableError, LedgerUnreadableError: see :func:`reading`.
        """
        name = f"_delta_log/{version:020d}.json"
        with self.reading():
            if "://" not in self.path:
                with suppress(FileNotFoundError):
                    found = os.stat(Path(self.path) / name)
                    return found.st_size, found.st_mtime_ns, found.st_ino
                return None
            info = self.files().get_file_info(name)
        return None if info.type is pyarrow.fs.FileType.NotFound else (info.size, info.mtime_ns or 0, 0)

    def _check_file(self, name: str, check: Callable[[str, str], None]) -> None:
        """Check a file that Spark reads metadata from, and delta-rs may not; the table does not need it."""
        self._status(name)
        try:
            text = self._read(name)
            # Read it each time, because it may be written later than its version.
            if text != self._checked_texts.get(check):
                check(self.path, text)
                self._checked_texts[check] = text
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable(error) from None
        except ValueError as error:
            raise LedgerUnreadableError(
                f"the file {name} of {self.path} cannot be read: {self.redacted_text(error)}",
                remedy="Move it out of the folder; the table does not need it.",
            ) from None

    def open(self, version: int | None = None) -> DeltaTable:
        """Open a version with delta-rs, the newest by default.

        Raises:
            TableUnreadableError: there is no table, or it cannot be read.
            LedgerUnreadableError: the storage does not answer.
        """
        self._status(_LAST_CHECKPOINT)
        with self.reading():
            try:
                return DeltaTable(self.path, version=version, storage_options=self.storage_options)
            except TableNotFoundError:
                remedy = "Run the job that creates it, or correct the path."
                raise TableUnreadableError(f"there is no Delta table at {self.path}", remedy=remedy) from None

    def reading(self) -> AbstractContextManager[None]:
        """Return the context for uses of an opened version, in which delta-rs may read the storage again."""
        return reading(self, what=f"the Delta table at {self.path} cannot be read", remedy=_STORAGE_REMEDY)

    def redacted_text(self, error: BaseException) -> str:
        """Return the text of an error of delta-rs in one line, without values of the storage options and of rows.

        delta-rs and the storage may repeat these values in their errors. Dagster stores the causes of errors, so that
        an error of theirs must never be the cause of one of ours.
        """
        return one_line(redacted(without_values(str(error)), self.storage_options))

    def _unreadable(self, error: BaseException) -> StreamAssetsError:
        return unreadable(self, error, what=f"the Delta table at {self.path} cannot be read", remedy=_STORAGE_REMEDY)

    def _forget(self) -> None:
        self._commits = {}
        self._restored_versions = {}
        self._newest_read = self._apps = self._opened = None
        self._format_checked = -1

    def transactions(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        """Return the app ids of all transactions up to a version, from the newest checkpoint and the commits after it.

        Args:
            snapshot: the version.

        Returns:
            ``None`` if the checkpoint that the log names cannot be read: then only the whole log has all of them.
        """
        key = (snapshot.table_id, snapshot.version)
        if self._apps is None or self._apps[0] != key:
            self._apps = key, self._find_transactions(snapshot)
        return self._apps[1]

    def _find_transactions(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        try:
            hint = json.loads(self._read(_LAST_CHECKPOINT))
        except FileNotFoundError:
            hint = {"version": -1}
        except (OSError, ValueError, RecursionError):
            return None
        try:
            found = set(self._checkpoint_transactions(hint))
            for version in range(snapshot.version, int(hint["version"]), -1):
                commit = self.commit(version)
                if commit is None:
                    return None
                found.update(commit.transactions)
        except StreamAssetsError:
            raise
        except Exception:  # noqa: BLE001 - any program may have written it
            return None
        return frozenset(found)

    @staticmethod
    def _checkpoint_names(hint: Mapping[str, Any]) -> list[str]:
        """Return the files of the checkpoint in ``_last_checkpoint``: one file, several parts, or version 2."""
        version, parts = int(hint["version"]), int(hint.get("parts") or 1)
        if version < 0:
            return []
        stem = f"_delta_log/{version:020d}.checkpoint"
        if "v2Checkpoint" in hint:
            return [f"_delta_log/{hint['v2Checkpoint']['path']}"]
        if parts == 1:
            return [f"{stem}.parquet"]
        return [f"{stem}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)]

    def _checkpoint_transactions(self, hint: Mapping[str, Any]) -> Iterator[str]:
        for name in self._checkpoint_names(hint):
            self._status(name)
            if name.endswith(".json"):
                yield from parse_commit(int(hint["version"]), self._read(name)).transactions
                continue
            with self.files().open_input_file(name) as file:
                table = pq.read_table(file, columns=["txn"])
            if "txn" in table.column_names:
                apps = pc.struct_field(table.column("txn"), "appId").drop_null()
                yield from map(str, apps.to_pylist())

    def newest_versions(self, *, after: int = -1) -> range:
        """Return the versions after ``after``, newest first."""
        snapshot = self.snapshot()
        return range(snapshot.version if snapshot else -1, after, -1)

    def readable(self) -> Iterator[Commit]:
        """Yield the commits from the newest one back to where the log was cleaned."""
        for version in self.newest_versions():
            commit = self.commit(version)
            if commit is None:
                return
            yield commit

    def find(self, is_match: Callable[[Commit], bool], *, after: int) -> Commit | None:
        """Find the newest matching commit after version ``after``; return ``None`` if no commit matches.

        Raises:
            LedgerUnreadableError: a commit that may match is missing, so nothing may be acknowledged.
        """
        for version in self.newest_versions(after=after):
            commit = self.commit(version)
            if commit is None:
                raise LedgerUnreadableError(
                    f"version {version} of {self.path} is missing from its log",
                    remedy="Run again: the next run reads the positions from the log.",
                )
            if is_match(commit):
                return commit
        return None

    def _check_path(self) -> None:
        path = Path(self.path)
        if "://" in self.path or not path.exists():
            return
        if not path.is_dir():
            raise TableUnreadableError(
                f"{path} is a file, not a table", remedy="Use the path of a Delta table, or of a folder to create."
            )
        if self._is_own_folder or (path / "_delta_log").is_dir():
            return
        if not all(_is_left_over(file) for file in path.iterdir()):
            raise TableUnreadableError(
                f"{path} holds files but no Delta table", remedy="Use the path of a table, or of an empty folder."
            )

    def row_count(self, *, version: int | None = None) -> int | None:
        """Count the rows of a version, the newest by default.

        Returns:
            ``None`` if a file has no statistics in the log, or delta-rs cannot read its deletion vectors.
        """
        if self.snapshot() is None:
            return None
        with self.reading():
            table = self.open(version)
            counts = pa.table(table.get_add_actions(flatten=True)).column("num_records")
            features = table.protocol().reader_features or ()
            # delta-rs reads no deletion vectors of a table with type widening.
            if counts.null_count or {_VECTORS, _WIDENING}.issubset(features):
                return None
            found = table.deletion_vectors() if _VECTORS in features else ()
            vectors = [pa.record_batch(batch).column("selection_vector") for batch in found]
        hidden = sum(int(pc.sum(pc.invert(pc.list_flatten(vector))).as_py() or 0) for vector in vectors)
        return int(pc.sum(counts).as_py() or 0) - hidden

    def deleted_rows(self, commit: Commit) -> int | None:
        """Return the number of rows that a replace deleted, or ``None`` if the log does not show it.

        Delta does not record it if the replace only removed whole files; it then follows from the statistics.
        """
        if commit.deleted_rows is not None or commit.output_rows != 0:
            return commit.deleted_rows
        before, after = (self.row_count(version=version) for version in (commit.version - 1, commit.version))
        return None if before is None or after is None else before - after

    def _check_log(self) -> None:
        """Read the commits and the newest checkpoint, to name the file that makes the log unreadable.

        Raises:
            LedgerUnreadableError: a file of the log is torn.
        """
        try:
            found = self.files().get_file_info(pyarrow.fs.FileSelector("_delta_log"))
        except OSError:
            return
        for file in sorted(found, key=lambda file: file.base_name, reverse=True):
            if commit := _COMMIT_FILE.fullmatch(file.base_name):
                self.commit(int(commit[1]))
            elif _CHECKPOINT_FILE.fullmatch(file.base_name):
                self._check_checkpoint(file)
                # delta-rs does not read older files.
                return

    def _check_checkpoint(self, file: pyarrow.fs.FileInfo) -> None:
        try:
            with self.files().open_input_file(file.path) as opened:
                pq.read_metadata(opened)
        except (OSError, pa.ArrowInvalid) as error:
            raise LedgerUnreadableError(
                f"the checkpoint {self.path}/_delta_log/{file.base_name} is torn: it has {file.size:,} bytes "
                f"({self.redacted_text(error)})",
                remedy="Delete it and the file _last_checkpoint in the same folder: the log before it is intact.",
            ) from None

    def torn_files(self, version: int | None = None) -> list[str]:
        """List the data files of a version that are shorter than in the log; none if the log cannot be read.

        It only checks local tables.

        Args:
            version: the version of the table, the newest by default.

        Raises:
            LedgerUnreadableError: a path in the log is not that of a data file, see :meth:`check_files`.
        """
        if "://" in self.path:
            return []
        try:
            actions = pa.table(DeltaTable(self.path, version=version).get_add_actions(flatten=True))
        except Exception:  # noqa: BLE001 - any program may have written the log
            return []
        torn = []
        for added in actions.select(["path", "size_bytes"]).to_pylist():
            path, size = unquote(added["path"]), added["size_bytes"]
            status = self._status(path)
            if status is not None and status.st_size < size:
                torn.append(f"{Path(self.path) / without_values(path)} has {status.st_size:,} of {size:,} bytes")
        return torn

    def check_files(self, paths: Iterable[str]) -> None:
        """Refuse to open paths that are not data files, such as a FIFO, which has no end. It only checks local tables.

        Args:
            paths: the unescaped paths in actions of the log. Those of a shallow clone are absolute paths, or URIs.

        Raises:
            LedgerUnreadableError: a path leads out of the folder with ``..``, is not valid, or is not a regular file.
        """
        if "://" not in self.path:
            for path in paths:
                self._status(path)

    def _status(self, path: str) -> os.stat_result | None:
        """Return the status of a file that the log names; ``None`` if it is missing, or the table is not local."""
        if "://" in self.path:
            return None
        why = "it leads out of the folder of the table"
        found = None
        if ".." not in path.split("/"):
            try:
                found = os.stat(os.path.join(self.path, _FILE_URI.sub("/", path)))
                why = "" if stat.S_ISREG(found.st_mode) else "it is not a regular file"
            except (FileNotFoundError, NotADirectoryError):
                why = ""
            except (OSError, ValueError) as error:
                why = self.redacted_text(error)
        if why:
            shown = without_values(path)[:MAX_LINE_CHARACTERS]
            raise LedgerUnreadableError(
                f"the log of {self.path} names {shown!a}, which is not opened: {why}",
                remedy="Undo it with RESTORE TABLE … TO VERSION AS OF a version before the one that added it.",
            )
        return found

    def missing_files(self, version: int) -> list[str]:
        """List the files that a commit adds and that are not in the folder of the table. It only checks local tables.

        Raises:
            LedgerUnreadableError: a path in the commit is not that of a data file, see :meth:`check_files`.
        """
        if "://" in self.path:
            return []
        # A file that only got a deletion vector existed before, and in a clone it belongs to the other table.
        paths = [unquote(path) for path, vector in self._file_changes(version).added if not vector]
        return sorted(path for path in paths if self._status(path) is None)

    def commit(self, version: int) -> Commit | None:
        """Return one commit; ``None`` if its file was cleaned from the log.

        Raises:
            LedgerUnreadableError: its file cannot be read, or the commit was planned from another table.
            UnsupportedVersionError: a newer release has written it.
            UnsupportedError: it sets the metadata of the table more than once.
        """
        commit = self._commits.get(version)
        if commit is None:
            is_newest = self._newest_read is None or version > self._newest_read.commit.version
            # Look before the read, to notice a file that is replaced during the read.
            file = self._commit_file(version) if is_newest else None
            try:
                commit = self._parsed(version, lambda text: parse_commit(version, text))
            except FileNotFoundError:
                return None
            except (UnsupportedError, UnsupportedVersionError) as error:
                what = f"version {version} of {self.path}: {error.what}"
                raise type(error)(what, remedy=error.remedy) from error
            if commit.entry is not None and commit.entry.base >= version:
                raise LedgerUnreadableError(
                    f"version {version} of {self.path} was planned from version {commit.entry.base}: meanwhile the "
                    "table was replaced by an older copy, which lacks rows that the positions cover",
                    remedy="Put back the table that the copy replaced. Or, if it is the newest version, move "
                    f"_delta_log/{version:020d}.json and the .crc file of the version out of the folder: the next run "
                    "reads messages that the copy lacks again. Otherwise ingest into a new table, with a new group "
                    "name.",
                    version=version,
                    base=commit.entry.base,
                )
            if is_newest:
                self._newest_read = _CommitFile(commit, file)
            self._commits[version] = commit
            if len(self._commits) > KEPT_COMMITS:
                # A job may run for days.
                self._commits.pop(next(iter(self._commits)), None)
        return commit

    def restored_versions(self, commit: Commit) -> tuple[int, ...]:
        """Return the versions that a RESTORE may have restored, newest first.

        A RESTORE to a time names it in the time zone of its session, which is not in the log. So the files decide: a
        version is possible if it has exactly the files that the RESTORE left. Several versions have the same files if
        the commits between them added no rows.

        Args:
            commit: the RESTORE.

        Raises:
            RestoreTargetError: no version has these files, or only one that was cleaned from the log may have them.
        """
        if isinstance(commit.restore_target, int):
            return (commit.restore_target,)
        if commit.version not in self._restored_versions:
            self._restored_versions[commit.version] = self._find_restored_versions(commit)
        return self._restored_versions[commit.version]

    def _find_restored_versions(self, restore: Commit) -> tuple[int, ...]:
        change = self._file_changes(restore.version)
        # The files of the RESTORE that a version lacks, and the files that it has in addition.
        missing, surplus = change.added, change.removed
        found = []
        for version in range(restore.version - 1, -1, -1):
            commit = self.commit(version)
            if commit is None:
                raise self._unknown_target(restore, f"version {version} was cleaned from the log, and may be it")
            if not missing and not surplus:
                found.append(version)
            change = self._file_changes(version)
            if commit.restore_target is None and change.added - surplus:
                # It wrote one of the files, so that no earlier version has it. Only a RESTORE adds a file again.
                break
            missing, surplus = (
                (missing - change.removed) | (change.added - surplus),
                (surplus - change.added) | (change.removed - missing),
            )
        if not found:
            raise self._unknown_target(restore, "no version has the files that the RESTORE left")
        return tuple(found)

    def added_files(self, version: int) -> list[DataFile]:
        """Return the data files that a commit wrote, without those that only got another deletion vector.

        Raises:
            LedgerUnreadableError: the commit cannot be read.
        """
        changes = self._file_changes(version)
        return changes.files(path for path, vector in changes.added if not vector)

    def removed_files(self, version: int) -> list[DataFile]:
        """Return the data files that a commit removed from the table, or of which it removed some rows.

        Raises:
            LedgerUnreadableError: the commit cannot be read.
        """
        changes = self._file_changes(version)
        return changes.files(path for path, _ in changes.removed)

    def files(self) -> pyarrow.fs.FileSystem:
        """Return the file system whose root is the folder of the table."""
        if "://" not in self.path:
            return pyarrow.fs.SubTreeFileSystem(str(Path(self.path).absolute()), pyarrow.fs.LocalFileSystem())
        if self._files is None:
            self._files = pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.path, self.storage_options))
        return self._files

    def _file_changes(self, version: int) -> _FileChanges:
        try:
            return self._parsed(version, _file_changes)
        except FileNotFoundError as error:
            raise self._unreadable_version(version, error) from None

    def _parsed(self, version: int, parse: Callable[[str], _Parsed]) -> _Parsed:
        """Parse the text of a commit.

        Raises:
            FileNotFoundError: it was cleaned from the log.
            LedgerUnreadableError: the storage cannot be read, or the file is torn.
        """
        try:
            return parse(self._text(version))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreadable_version(version, error) from None
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - any program may have written it
            name = f"_delta_log/{version:020d}.json"
            with self.reading():
                size = self.files().get_file_info(name).size
            raise LedgerUnreadableError(
                f"version {version} of {self.path} is torn: {name} has {size or 0:,} bytes "
                f"({self.redacted_text(error)})",
                remedy=TORN_REMEDY,
            ) from None

    def _unreadable_version(self, version: int, error: OSError) -> LedgerUnreadableError:
        return LedgerUnreadableError(
            f"version {version} of {self.path} cannot be read ({self.redacted_text(error)})", remedy="Run again."
        )

    def _unknown_target(self, restore: Commit, why: str) -> RestoreTargetError:
        return RestoreTargetError(
            f"{self.path} was restored to {restore.restore_target!r} (version {restore.version}), but it is unknown "
            f"which version that is: {why}",
            remedy=RESTORE_REMEDY,
        )

    def _text(self, version: int) -> str:
        opened = self._opened
        if opened is None or opened[0] != version:
            name = f"_delta_log/{version:020d}.json"
            self._status(name)
            opened = self._opened = version, self._read(name)
        return opened[1]

    def _read(self, name: str) -> str:
        if "://" not in self.path:
            return (Path(self.path) / name).read_bytes().decode()
        with self.files().open_input_file(name) as file:
            return bytes(file.read()).decode()


def _is_left_over(file: Path) -> bool:
    """Return whether a killed first commit may have left this file, so that there is no table yet."""
    if file.name.endswith(".crc") or file.name in ("_temporary", "_delta_log"):
        return True
    try:
        return file.suffix == ".parquet" and pq.read_metadata(file).num_rows == 0
    except (OSError, pa.ArrowInvalid):
        return file.name.startswith("part-")


def parse_commit(version: int, text: str) -> Commit:
    """Parse the ``commitInfo`` and the transactions of one commit file.

    Delta lets a writer put anything into ``commitInfo``. Values of an unexpected type or size are ignored.

    Raises:
        ValueError: the text is not a whole commit file.
        UnsupportedError: the commit sets the metadata of the table more than once.
    """
    _check_whole(text)
    metadata_of_table = _metadata_of(text)
    info: Mapping[str, Any] = {}
    transactions: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold other line separators.
    for line in text.split("\n"):
        # Other actions, such as those of the many files of a batch, are not parsed.
        kind = _ACTION.match(line)
        if kind:
            action = _json_of_line(line).get(kind[1], {})
            if not isinstance(action, dict):
                raise ValueError(f"its {kind[1]} is not an object")
            if kind[1] == "commitInfo":
                info = action
            elif isinstance(action.get("appId"), str) and isinstance(action.get("version"), int):
                transactions[action["appId"]] = action["version"]
    parameters, metrics = _object(info.get("operationParameters")), _object(info.get("operationMetrics"))
    restore_target: int | str | None = None
    if info.get("operation") == "RESTORE":
        target = _whole_number(parameters.get("version"), most=version - 1)
        moment = parameters.get("timestamp") or parameters.get("datetime")
        restore_target = str(moment)[:_MAX_MOMENT_CHARACTERS] if target is None else target
    rows = metrics.get("numOutputRows", 0 if metrics.get("numFiles") == "0" else None)
    deleted = metrics.get("numDeletedRows", 0 if metrics.get("numRemovedFiles", "0") == "0" else None)
    merged = None
    if info.get("operation") == "MERGE":
        kinds = ("Inserted", "Updated", "Deleted")
        merged = MergedRows(*(_whole_number(metrics.get(f"numTargetRows{kind}")) or 0 for kind in kinds))
        rows, deleted = merged.inserted + merged.updated, merged.updated + merged.deleted
    written, exact = _whole_number(rows), _whole_number(info.get("inCommitTimestamp"), most=_LAST_MS)
    # Auto compaction after a MERGE takes over the metadata of its session, but writes no batch.
    metadata = {} if info.get("operation") == "OPTIMIZE" else _json_object(info.get("userMetadata"))
    entry = LedgerEntry.from_json(metadata)
    return Commit(
        version,
        str(info.get("operation", "")),
        transactions,
        entry,
        restore_target,
        None if written is None else written - (_whole_number(metrics.get("numCopiedRows")) or 0),
        _whole_number(deleted),
        merged,
        metadata if entry is None else {},
        str(parameters.get("predicate", "")),
        _whole_number(info.get("timestamp"), most=_LAST_MS) if exact is None else exact,
        _whole_number(metrics.get("numOutputBytes", metrics.get("numAddedBytes"))) or 0,
        _DATA_CHANGE.search(text) is not None,
        str(info.get("userName") or info.get("engineInfo") or ""),
        None if metadata_of_table is None else bool(_object(metadata_of_table.get("format")).get("options")),
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole_number(value: object, *, most: int = 2**63 - 1) -> int | None:
    """Return a number from 0 to ``most``, also if Delta wrote it as text; ``None`` for anything else.

    Example:
        >>> _whole_number("12"), _whole_number(12), _whole_number("1e400"), _whole_number(10**30), _whole_number(True)
        (12, 12, None, None, None)
    """
    if type(value) is int or (isinstance(value, str) and _DIGITS.fullmatch(value)):
        number = int(value)
        return number if 0 <= number <= most else None
    return None


def _json_of_line(line: str) -> Mapping[str, Any]:
    """Return the object in a line of a commit; an empty one if it is nested too deeply to be parsed.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return _object(_DECODER.decode(line))
    except RecursionError:
        return {}


def _number_of(digits: str) -> int | str:
    """Return the number, or its text if it has too many digits for Python."""
    return int(digits) if len(digits) < _MAX_NUMBER_DIGITS else digits


_DECODER = json.JSONDecoder(parse_int=_number_of)


def _check_whole(text: str) -> None:
    """Detect a file of which blocks did not reach the disk, without parsing each action.

    Raises:
        ValueError: it is empty or cut, or has blocks of zeros.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError("it has no action")
    if "\0" in text or not all(line.lstrip().startswith("{") for line in lines):
        raise ValueError("it has lines that are not JSON objects")
    _json_of_line(lines[-1])


def _metadata_of(text: str) -> Mapping[str, Any] | None:
    """Return the metadata that a commit sets; ``None`` if it sets none.

    A commit with two metadata actions is refused: delta-rs, and so our checks, and Spark may use different ones.

    Raises:
        ValueError: a line is not JSON, or has a name twice.
        UnsupportedError: the commit has a ``metaData`` or ``protocol`` twice, or another action in the line of one.
    """
    found: list[str] = []
    metadata = None
    for line in text.split("\n"):
        if any(mark in line for mark in _METADATA_MARKS):
            actions = {name: action for name, action in read_strictly(line).items() if action is not None}
            if not _METADATA.isdisjoint(actions):
                found += actions
                metadata = actions.get("metaData", metadata)
    if sorted(found) != sorted(_METADATA.intersection(found)):
        raise UnsupportedError(
            "the commit has more than one metaData or protocol, or another action in the line of one, so that readers "
            "of the table may use different metadata",
            remedy="Undo it: move the .json and .crc files of this version and of later versions out of _delta_log. If "
            "you do not know which program wrote it, find out who can write there.",
        )
    return None if metadata is None else _object(metadata)


@dataclass(frozen=True, slots=True)
class _FileChanges:
    """The data files that a commit added and removed, with their deletion vectors, and the partition of each file."""

    added: frozenset[tuple[str, str]] = frozenset()
    removed: frozenset[tuple[str, str]] = frozenset()
    partitions: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    def files(self, paths: Iterable[str]) -> list[DataFile]:
        return [DataFile(unquote(path), self.partitions[path]) for path in sorted(paths)]


def _file_changes(text: str) -> _FileChanges:
    found: dict[str, set[tuple[str, str]]] = {"add": set(), "remove": set()}
    partitions: dict[str, Mapping[str, str | None]] = {}
    is_data_changed = False
    for line in text.split("\n"):
        kind = _FILE_ACTION.match(line)
        if kind:
            action = json.loads(line)[kind[1]]
            vector = action.get("deletionVector")
            found[kind[1]].add((action["path"], json.dumps(vector, sort_keys=True) if vector else ""))
            partitions[action["path"]] = action.get("partitionValues") or partitions.get(action["path"], {})
            is_data_changed |= bool(action.get("dataChange", True))
    if not is_data_changed and not found["remove"]:
        # Files of the table that were added once more with other statistics.
        return _FileChanges()
    return _FileChanges(frozenset(found["add"]), frozenset(found["remove"]), partitions)


def _json_object(text: object) -> Mapping[str, object]:
    try:
        return _object(json.loads(text)) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return {}
