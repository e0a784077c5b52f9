"""Reads a Delta log without a JVM: versions, transactions, commits one by one."""

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
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.table_expressions import DEFAULT, GENERATED, check_checksum, check_expressions, read_strictly
from spark_jobs.redaction import redacted
from spark_jobs.table_location import reader_options
from stream_consumers.errors import (
    LedgerUnreadableError,
    StorageMismatchError,
    StreamAssetsError,
    TableUnreadableError,
    UnsupportedError,
    UnsupportedVersionError,
)

KEPT_COMMITS = 10_000
TORN_REMEDY = (
    "A power cut, or a full or broken disk, leaves such files. If it is the newest version, move this file and the "
    ".crc file of the version out of the folder: the log before it is whole, and what the batch read is read again. "
    "Otherwise restore the file from a backup."
)
_STORAGE_REMEDY = "Check the path, its permissions and the storage options."
RESTORE_REMEDY = "Restore again, to a version number: RESTORE TABLE … TO VERSION AS OF n."
_ACTION = re.compile(r'\s*\{\s*"(commitInfo|txn)"')
_FILE_ACTION = re.compile(r'\s*\{\s*"(add|remove)"')
_DATA_CHANGE = re.compile(r'"dataChange"\s*:\s*true')
_COMMIT_FILE = re.compile(r"([0-9]{20})\.json")
_CHECKPOINT_FILE = re.compile(r"[0-9]{20}\.checkpoint\..*parquet")
_METADATA = frozenset({"metaData", "protocol"})
# Stands in each line that has one of these actions, whose name may have escapes.
_METADATA_MARKS = ('metaData"', 'protocol"', "\\u")
# How far an identity column has counted: each commit changes this part of the metadata of a column.
_IDENTITY_COUNTER = "delta.identity.highWaterMark"
_Parsed = TypeVar("_Parsed")
# What the reader says of the table feature catalogManaged, and of its preview.
_CATALOG_MANAGED = "catalog-managed table"
MOST_CHARACTERS = 500
# What others may say of their commits: the digits of a number, the characters of a moment, and the last millisecond of
# the year 9999.
_DIGITS = re.compile(r"[0-9]{1,19}")
_LONGEST_NUMBER, _LONGEST_MOMENT, _LAST_MS = 100, 100, 253_402_300_799_999
_FILE_URI = re.compile(r"^file:(//)?/")
_COLORS = re.compile(r"\x1b\[[0-9;]*m|↳")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified (bucket|container) does not exist")
_AWAY = re.compile(
    r"error sending request|max_retries|retry_timeout|timed? ?out|connection (refused|reset|closed)"
    r"|status code\D{1,20}(50[0234]|429)|SlowDown|dns error",
    re.IGNORECASE,
)


def one_line(text: str) -> str:
    r"""The text of an error, without colours, in one line.

    Example:
        >>> one_line("it failed\n   \x1b[31m↳\x1b[0m because the server did not answer")
        'it failed because the server did not answer'
    """
    said = " ".join(_COLORS.sub("", text).split())
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]} …"


def unreadable(
    log: DeltaLog,
    error: BaseException,
    *,
    what: str,
    remedy: str,
    kind: type[StreamAssetsError] = TableUnreadableError,
) -> StreamAssetsError:
    """Map an error of delta-rs to a :class:`StreamAssetsError`, to be raised ``from None``: see :meth:`DeltaLog.said`.

    Args:
        log: of the table.
        error: what was raised.
        what: cannot be read, for an error that stays.
        remedy: of an error that stays.
        kind: of an error that stays.

    Example:
        >>> type(unreadable(DeltaLog("s3://lake/t"), OSError("error sending request"), what="", remedy="")).__name__
        'LedgerUnreadableError'
    """
    raw, said = one_line(str(error)), log.said(error)
    if _NO_BUCKET.search(raw):
        return TableUnreadableError(
            f"there is no bucket or container of {log.path}", remedy="Make it, or correct the address or the endpoint."
        )
    if _AWAY.search(raw):
        return LedgerUnreadableError(
            f"the storage of {log.path} does not answer ({said})",
            remedy="Check the address, the endpoint and the network.",
        )
    # The texts of other errors, like that of a key that is missing, say too little.
    name = "" if isinstance(error, (DeltaError, OSError, ValueError)) else f"{type(error).__name__}: "
    return kind(f"{what} ({name}{said})", remedy=remedy)


@contextmanager
def reading(
    log: DeltaLog, *, what: str, remedy: str, kind: type[StreamAssetsError] = TableUnreadableError
) -> Iterator[None]:
    """Map each error of a read of a table's storage to a :class:`StreamAssetsError`: see :meth:`DeltaLog.said`.

    Every use of delta-rs and of :meth:`DeltaLog.files` is inside of one, or handles the error without repeating it.

    Args:
        log: of the table.
        what: cannot be read, for an error that stays.
        remedy: of an error that stays.
        kind: of an error that stays.

    Raises:
        LedgerUnreadableError: the storage does not answer.
        TableUnreadableError: or the kind that is given; something else was raised that is none of ours.
    """
    try:
        yield
    except StreamAssetsError:
        raise
    except Exception as error:  # noqa: BLE001 - anybody may have written what is read
        raise unreadable(log, error, what=what, remedy=remedy, kind=kind) from None


def catalog_managed_error(path: str, why: str) -> UnsupportedError:
    """The error of a table whose files are not its whole state.

    Args:
        path: of the table.
        why: this is known.
    """
    return UnsupportedError(
        f"a catalog decides on the commits of {path} ({why}), and the newest ones may not be files yet, so that "
        "the log does not show the position of a group",
        remedy="Use a table whose commits are files at once: an external one, without that property or feature.",
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the table.

    Args:
        version: its number.
        operation: WRITE, RESTORE, DELETE, …
        transactions: app ids and versions recorded in it.
        entry: our batch metadata; ``None`` if another writer made the commit.
        restored: for a RESTORE, the version or the time it went back to.
        output_rows: rows written, as the writer counted them, without those that a replace copied unchanged.
        deleted_rows: rows that a replace deleted; ``None`` if the writer does not say, see
            :meth:`DeltaLog.deleted_rows`.
        user_metadata: the commit's ``userMetadata``, if it is a JSON object and not our entry.
        predicate: the condition of a DELETE.
        timestamp_ms: when it was made, as the writer says; ``None`` if it does not.
        output_bytes: of the files written, as the writer counted them.
        changes_rows: whether rows come or go, and are not only put into other files.
        by: who made it: the user, or the engine, as the writer says.
    """

    version: int
    operation: str
    transactions: Mapping[str, int] = field(default_factory=dict)
    entry: LedgerEntry | None = None
    restored: int | str | None = None
    output_rows: int | None = None
    deleted_rows: int | None = 0
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    predicate: str = ""
    timestamp_ms: int | None = None
    output_bytes: int = 0
    changes_rows: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of a table.

    Args:
        path: from the folder of the table, or a URI.
        partition: what the columns hold that the table is partitioned by, as text, by their names in the files; they
            are not in the file itself.
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
        """The last transaction version of ``app``; 0 if there is none."""
        with self._log.reading():
            return self._table.transaction_version(app) or 0

    def may_hold(self, streams: Iterable[str]) -> bool:
        """Whether there may be rows of one of these streams, by the statistics of the files."""
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
    def partition_columns(self) -> tuple[str, ...]:
        """The columns whose values have folders of their own."""
        return tuple(self._table.metadata().partition_columns)

    @property
    def computed_columns(self) -> frozenset[str]:
        """The columns whose values Delta makes: generated ones, and identities."""
        marks = (GENERATED, "delta.identity.start")
        return frozenset(c.name for c in self._table.schema().fields if any(mark in c.metadata for mark in marks))

    @property
    def default_columns(self) -> frozenset[str]:
        """The columns that have a value of their own where rows lack them."""
        return frozenset(c.name for c in self._table.schema().fields if DEFAULT in c.metadata)

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table properties."""
        return self._table.metadata().configuration

    @cached_property
    def schema_json(self) -> str:
        """The schema as the log has it."""
        return self._table.schema().to_json()

    @cached_property
    def columns(self) -> Sequence[Mapping[str, Any]]:
        """The columns as the log has them, with what Delta keeps about each in ``metadata``."""
        with self._log.reading():
            fields: Sequence[Mapping[str, Any]] = json.loads(self.schema_json)["fields"]
        return fields

    @cached_property
    def schema(self) -> str:
        """A text that changes when the columns do, and not when identity columns count on."""
        columns = [{**one, "metadata": {**one.get("metadata", {}), _IDENTITY_COUNTER: None}} for one in self.columns]
        # The reader gives metadata in any order.
        return json.dumps(columns, sort_keys=True)


@dataclass(frozen=True, slots=True)
class _CommitFile:
    """A commit that was read, and what its file was then; see :meth:`DeltaLog._commit_file`."""

    commit: Commit
    file: tuple[int, int, int] | None


class DeltaLog:
    """The log of the table at ``path``.

    Args:
        path: a local path or a URI that delta-rs understands.
        storage_options: credentials and settings for object stores; never logged.
        is_own_folder: no other program puts files there, so that files without a log are left over from a killed write.
    """

    def __init__(
        self, path: str, *, storage_options: Mapping[str, str] | None = None, is_own_folder: bool = False
    ) -> None:
        self.path = path
        self._is_own_folder = is_own_folder
        self.storage_options = reader_options(path, storage_options or {})
        self._files: pyarrow.fs.PyFileSystem | None = None
        self._commits: dict[int, Commit] = {}
        self._restored: dict[int, tuple[int, ...]] = {}
        self._checked: tuple[Mapping[str, str], str] | None = None
        self._checksum = ""
        self._newest_read: _CommitFile | None = None
        self._table_id: str | None = None
        self._apps: tuple[tuple[str, int], frozenset[str] | None] | None = None
        # The commit that was opened last: who has just looked for a batch asks for its files next.
        self._opened: tuple[int, str] | None = None

    def snapshot(self) -> TableSnapshot | None:
        """The newest version; ``None`` if there is no table yet.

        Raises:
            TableUnreadableError: something is there, but no Delta table that can be read; or there is no bucket.
            UnsupportedError: a catalog decides on its commits, or an expression in its metadata may run code.
            LedgerUnreadableError: the storage does not answer, or a file of the log is torn.
            StorageMismatchError: a copy was put in the place of the table since its log was read here.
        """
        self._check_path()
        try:
            snapshot = TableSnapshot(self, DeltaTable(self.path, storage_options=self.storage_options))
        except TableNotFoundError:
            self._forget()
            return None
        except Exception as error:  # noqa: BLE001 - whatever the log says
            if _CATALOG_MANAGED in str(error):
                raise catalog_managed_error(self.path, "it is a catalog-managed table") from None
            unread = self._unreadable(error)
            if isinstance(unread, TableUnreadableError):
                self._check_log()
            raise unread from None
        # Of a table with 1,000 columns it takes 5 ms; of a version that was written anew, the metadata are other ones.
        metadata = snapshot.configuration, snapshot.schema_json
        if metadata != self._checked:
            check_expressions(self.path, snapshot.configuration, snapshot.columns)
            self._checked = metadata
        self._check_checksum(snapshot.version)
        self._check_same(snapshot)
        return snapshot

    def _check_same(self, snapshot: TableSnapshot) -> None:
        """Forget what was read of another table, and refuse a copy that was put in the place of the one that was read.

        A table that was dropped and created again has another id. A copy has the same one, and may have other commits
        under the same versions; so the newest commit that was read has to be there still.

        Raises:
            StorageMismatchError: it is a copy with other commits; what was read is forgotten.
        """
        read, known_id, self._table_id = self._newest_read, self._table_id, snapshot.table_id
        if known_id != snapshot.table_id:
            self._forget()
        elif read is not None and self._commit_file(read.commit.version) != read.file:
            known = self._commits, self._restored, self._apps
            self._forget()
            found = self.commit(read.commit.version)
            if found == read.commit:
                # A copy of the same commits, or a file system that numbers its files anew.
                self._commits, self._restored, self._apps = known
            elif found is not None or read.commit.version > snapshot.version:
                raise StorageMismatchError(
                    f"a copy was put in the place of {self.path} while it was in use: version {read.commit.version} "
                    f"is {'another commit' if found else 'not there any more'}",
                    remedy="Run again: what the copy lacks is read again. Stop all runs before you put a copy in the "
                    "place of a table; if one wrote at that moment, look for missing rows with stream-assets verify.",
                    version=read.commit.version,
                )

    def _commit_file(self, version: int) -> tuple[int, int, int] | None:
        """What distinguishes the file of a commit from another of its name; ``None`` if it was cleaned from the log.

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

    def _check_checksum(self, version: int) -> None:
        name = f"_delta_log/{version:020d}.crc"
        self._status(name)
        try:
            text = self._read(name)
            # Each time: it may be put there later than its version.
            if text != self._checksum:
                check_checksum(self.path, text)
                self._checksum = text
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable(error) from None
        except ValueError as error:
            raise LedgerUnreadableError(
                f"the checksum file {name} of {self.path} cannot be read: {self.said(error)}",
                remedy="Move it out of the folder; the table is whole without it.",
            ) from None

    def open(self, version: int | None = None) -> DeltaTable:
        """A version for delta-rs, the newest by default.

        Raises:
            TableUnreadableError: there is no table, or it cannot be read.
            LedgerUnreadableError: the storage does not answer.
        """
        with self.reading():
            try:
                return DeltaTable(self.path, version=version, storage_options=self.storage_options)
            except TableNotFoundError:
                remedy = "Run the job that makes it, or correct the path."
                raise TableUnreadableError(f"there is no Delta table at {self.path}", remedy=remedy) from None

    def reading(self) -> AbstractContextManager[None]:
        """Around a use of a version that was opened: delta-rs may read the storage again."""
        return reading(self, what=f"the Delta table at {self.path} cannot be read", remedy=_STORAGE_REMEDY)

    def said(self, error: BaseException) -> str:
        """The text of an error of delta-rs in one line, without the values of the storage options.

        The storage, and delta-rs, repeat them; for that no error of theirs is the cause of one of ours, since Dagster
        keeps causes.
        """
        return one_line(redacted(str(error), self.storage_options))

    def _unreadable(self, error: BaseException) -> StreamAssetsError:
        return unreadable(
            self,
            error,
            what=f"the Delta table at {self.path} cannot be read",
            remedy=_STORAGE_REMEDY,
        )

    def _forget(self) -> None:
        self._commits = {}
        self._restored = {}
        self._newest_read = self._apps = self._opened = None

    def transactions(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        """The app ids of all transactions up to a version, from the newest checkpoint and the commits after it.

        Args:
            snapshot: the version.

        Returns:
            ``None`` if the checkpoint that the log names cannot be read: then only the whole log says.
        """
        place = (snapshot.table_id, snapshot.version)
        if self._apps is None or self._apps[0] != place:
            self._apps = place, self._find_transactions(snapshot)
        return self._apps[1]

    def _find_transactions(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        try:
            hint = json.loads(self._read("_delta_log/_last_checkpoint"))
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
        except Exception:  # noqa: BLE001 - anybody may have written it
            return None
        return frozenset(found)

    def _checkpoint_transactions(self, hint: Mapping[str, Any]) -> Iterator[str]:
        """The app ids in the checkpoint of ``_last_checkpoint``: of one file, of several parts, or of version 2."""
        version, parts = int(hint["version"]), int(hint.get("parts") or 1)
        if version < 0:
            return
        stem = f"{version:020d}.checkpoint"
        names: Iterable[str] = (f"{stem}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1))
        if "v2Checkpoint" in hint:
            names = [str(hint["v2Checkpoint"]["path"])]
        elif parts == 1:
            names = [f"{stem}.parquet"]
        for name in names:
            self._status(f"_delta_log/{name}")
            if name.endswith(".json"):
                yield from parse_commit(version, self._read(f"_delta_log/{name}")).transactions
                continue
            with self.files().open_input_file(f"_delta_log/{name}") as file:
                table = pq.read_table(file, columns=["txn"])
            if "txn" in table.column_names:
                apps = pc.struct_field(table.column("txn"), "appId").drop_null()
                yield from map(str, apps.to_pylist())

    def newest_versions(self, *, after: int = -1) -> range:
        """The versions behind ``after``, the newest first."""
        snapshot = self.snapshot()
        return range(snapshot.version if snapshot else -1, after, -1)

    def readable(self) -> Iterator[Commit]:
        """The commits from the newest one back to where the log was cleaned."""
        for version in self.newest_versions():
            commit = self.commit(version)
            if commit is None:
                return
            yield commit

    def find(self, is_match: Callable[[Commit], bool], *, after: int) -> Commit | None:
        """The newest commit behind version ``after`` that matches; ``None`` if there is none.

        Raises:
            LedgerUnreadableError: it is unknown, so nothing may be acknowledged.
        """
        for version in self.newest_versions(after=after):
            commit = self.commit(version)
            if commit is None:
                raise LedgerUnreadableError(
                    f"version {version} of {self.path} is missing from its log",
                    remedy="Run again; the positions are read anew.",
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
                f"{path} is a file, not a table", remedy="Give the path of a Delta table, or of a folder to create."
            )
        if self._is_own_folder or (path / "_delta_log").is_dir():
            return
        if not all(_is_left_over(file) for file in path.iterdir()):
            raise TableUnreadableError(
                f"{path} holds files but no Delta table", remedy="Give the path of a table, or of an empty folder."
            )

    def row_count(self, *, version: int | None = None) -> int | None:
        """Rows in a version, the newest by default, by the statistics in the log; ``None`` if these lack it."""
        if self.snapshot() is None:
            return None
        with self.reading():
            actions = pa.table(self.open(version).get_add_actions(flatten=True))
        vectors = any(name.startswith("deletion_vector") for name in actions.column_names)
        counts = actions.column("num_records")
        return None if vectors or counts.null_count else int(pc.sum(counts).as_py() or 0)

    def deleted_rows(self, commit: Commit) -> int | None:
        """Rows that a replace deleted, whether the writer says so or not; ``None`` if it is unknown.

        Delta says nothing where whole files went and none came.
        """
        if commit.deleted_rows is not None or commit.output_rows != 0:
            return commit.deleted_rows
        before, after = (self.row_count(version=version) for version in (commit.version - 1, commit.version))
        return None if before is None or after is None else before - after

    def _check_log(self) -> None:
        """Look for what makes a log unreadable.

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
                # What is older is not read.
                return

    def _check_checkpoint(self, file: pyarrow.fs.FileInfo) -> None:
        try:
            with self.files().open_input_file(file.path) as opened:
                pq.read_metadata(opened)
        except (OSError, pa.ArrowInvalid) as error:
            raise LedgerUnreadableError(
                f"the checkpoint {self.path}/_delta_log/{file.base_name} is torn: it has {file.size:,} bytes "
                f"({self.said(error)})",
                remedy="Delete it and the file _last_checkpoint beside it: the log before it is whole.",
            ) from None

    def torn_files(self, version: int | None = None) -> list[str]:
        """The data files of a version that are shorter than their commits say; none if the log cannot be read.

        Only local tables are looked at.

        Args:
            version: of the table, the newest by default.

        Raises:
            LedgerUnreadableError: what the log names is no data file, see :meth:`check_files`.
        """
        if "://" in self.path:
            return []
        try:
            actions = pa.table(DeltaTable(self.path, version=version).get_add_actions(flatten=True))
        except Exception:  # noqa: BLE001 - whatever the log says
            return []
        torn = []
        for added in actions.select(["path", "size_bytes"]).to_pylist():
            path, size = unquote(added["path"]), added["size_bytes"]
            there = self._status(path)
            if there is not None and there.st_size < size:
                torn.append(f"{Path(self.path) / path} has {there.st_size:,} of {size:,} bytes")
        return torn

    def check_files(self, paths: Iterable[str]) -> None:
        """Refuse to open what is no data file: a FIFO has no end. Only local tables are looked at.

        Args:
            paths: as actions of the log have them, unescaped. Those of a shallow clone are whole paths, or URIs.

        Raises:
            LedgerUnreadableError: one leads out of the folder with ``..``, cannot be a name, or is no regular file.
        """
        if "://" not in self.path:
            for path in paths:
                self._status(path)

    def _status(self, path: str) -> os.stat_result | None:
        """What the disk says of a file that the log names; ``None`` where it is gone, or the table is not local."""
        if "://" in self.path:
            return None
        why = "it leads out of the folder of the table"
        found = None
        if ".." not in path.split("/"):
            try:
                found = os.stat(os.path.join(self.path, _FILE_URI.sub("/", path)))
                why = "" if stat.S_ISREG(found.st_mode) else "it is no regular file"
            except (FileNotFoundError, NotADirectoryError):
                why = ""
            except (OSError, ValueError) as error:
                why = self.said(error)
        if why:
            raise LedgerUnreadableError(
                f"the log of {self.path} names {path[:MOST_CHARACTERS]!a}, which is not opened: {why}",
                remedy="Go back with RESTORE TABLE … TO VERSION AS OF a version before the one that names it.",
            )
        return found

    def missing_files(self, version: int) -> list[str]:
        """The files that a commit adds and that are not in the folder of the table; only asked of local tables.

        Raises:
            LedgerUnreadableError: what it names is no data file, see :meth:`check_files`.
        """
        if "://" in self.path:
            return []
        # What only got a deletion vector was there before, and in a clone is a file of the other table.
        paths = [unquote(path) for path, vector in self._file_changes(version).added if not vector]
        return sorted(path for path in paths if self._status(path) is None)

    def commit(self, version: int) -> Commit | None:
        """One commit; ``None`` if its file was cleaned away.

        Raises:
            LedgerUnreadableError: it is there but cannot be read, or was planned from another table.
            UnsupportedVersionError: a newer release has written it.
            UnsupportedError: it sets the metadata of the table more than once.
        """
        commit = self._commits.get(version)
        if commit is None:
            is_newest = self._newest_read is None or version > self._newest_read.commit.version
            # Before it is read: a file that is replaced meanwhile is noticed.
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
                    f"version {version} of {self.path} was planned from version {commit.entry.base}: an older copy was "
                    "put in the place of the table meanwhile, which lacks what the positions say",
                    remedy="Put back the table that the copy replaced. Or, if it is the newest version, move "
                    f"_delta_log/{version:020d}.json and the .crc file of the version out of the folder: what the copy "
                    "lacks is read again. Otherwise read into a new table, as a new group.",
                    version=version,
                    base=commit.entry.base,
                )
            if is_newest:
                self._newest_read = _CommitFile(commit, file)
            self._commits[version] = commit
            if len(self._commits) > KEPT_COMMITS:
                # A job may stay for days.
                self._commits.pop(next(iter(self._commits)), None)
        return commit

    def restored_versions(self, commit: Commit) -> tuple[int, ...]:
        """The versions that a RESTORE may have gone back to, the newest first.

        A RESTORE to a time names it in the time zone of its session, which is not in the log. So the files decide:
        each version that has exactly the files that the RESTORE left. Several have where commits added no rows.

        Args:
            commit: the RESTORE.

        Raises:
            LedgerUnreadableError: no version has these files, or one that was cleaned from the log may have them.
        """
        if isinstance(commit.restored, int):
            return (commit.restored,)
        if commit.version not in self._restored:
            self._restored[commit.version] = self._find_restored(commit)
        return self._restored[commit.version]

    def _find_restored(self, restore: Commit) -> tuple[int, ...]:
        change = self._file_changes(restore.version)
        # What a version lacks of the files that the RESTORE left, and what it has besides.
        missing, surplus = change.added, change.removed
        found = []
        for version in range(restore.version - 1, -1, -1):
            commit = self.commit(version)
            if commit is None:
                raise self._not_certain(restore, f"version {version} was cleaned from the log, and may be the one")
            if not missing and not surplus:
                found.append(version)
            change = self._file_changes(version)
            if commit.restored is None and change.added - surplus:
                # It wrote one of the files: no earlier version has it. Only a RESTORE adds a file again.
                break
            missing, surplus = (
                (missing - change.removed) | (change.added - surplus),
                (surplus - change.added) | (change.removed - missing),
            )
        if not found:
            raise self._not_certain(restore, "no version has the files that the RESTORE left")
        return tuple(found)

    def added_files(self, version: int) -> list[DataFile]:
        """The data files that a commit wrote.

        Files that only got another deletion vector are not among them.

        Raises:
            LedgerUnreadableError: the commit cannot be read.
        """
        changes = self._file_changes(version)
        return changes.files(path for path, vector in changes.added if not vector)

    def removed_files(self, version: int) -> list[DataFile]:
        """The data files that a commit took out of the table, or some rows of them.

        Raises:
            LedgerUnreadableError: the commit cannot be read.
        """
        changes = self._file_changes(version)
        return changes.files(path for path, _ in changes.removed)

    def files(self) -> pyarrow.fs.FileSystem:
        """The file system whose root is the folder of the table."""
        if "://" not in self.path:
            return pyarrow.fs.SubTreeFileSystem(str(Path(self.path).absolute()), pyarrow.fs.LocalFileSystem())
        if self._files is None:
            self._files = pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.path, self.storage_options))
        return self._files

    def _file_changes(self, version: int) -> _FileChanges:
        try:
            return self._parsed(version, _file_changes)
        except FileNotFoundError as error:
            raise self._away(version, error) from None

    def _parsed(self, version: int, parse: Callable[[str], _Parsed]) -> _Parsed:
        """What a commit says.

        Raises:
            FileNotFoundError: it was cleaned from the log.
            LedgerUnreadableError: the storage does not give it, or it is torn.
        """
        try:
            return parse(self._text(version))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._away(version, error) from None
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - anybody may have written it
            name = f"_delta_log/{version:020d}.json"
            with self.reading():
                size = self.files().get_file_info(name).size
            raise LedgerUnreadableError(
                f"version {version} of {self.path} is torn: {name} has {size or 0:,} bytes ({self.said(error)})",
                remedy=TORN_REMEDY,
            ) from None

    def _away(self, version: int, error: OSError) -> LedgerUnreadableError:
        return LedgerUnreadableError(
            f"version {version} of {self.path} cannot be read ({self.said(error)})", remedy="Run again."
        )

    def _not_certain(self, restore: Commit, why: str) -> LedgerUnreadableError:
        return LedgerUnreadableError(
            f"{self.path} was restored to {restore.restored!r} (version {restore.version}), and which version that was "
            f"is unknown: {why}",
            remedy=RESTORE_REMEDY,
        )

    def _text(self, version: int) -> str:
        opened = self._opened
        if opened is None or opened[0] != version:
            opened = self._opened = version, self._read(f"_delta_log/{version:020d}.json")
        return opened[1]

    def _read(self, name: str) -> str:
        if "://" not in self.path:
            return (Path(self.path) / name).read_bytes().decode()
        with self.files().open_input_file(name) as file:
            return bytes(file.read()).decode()


def _is_left_over(file: Path) -> bool:
    """Whether a first, empty commit that was killed left this behind: then there is no table yet."""
    if file.name.endswith(".crc") or file.name in ("_temporary", "_delta_log"):
        return True
    try:
        return file.suffix == ".parquet" and pq.read_metadata(file).num_rows == 0
    except (OSError, pa.ArrowInvalid):
        return file.name.startswith("part-")


def parse_commit(version: int, text: str) -> Commit:
    """Read the actions of one commit file that matter here.

    Delta lets a writer say of a commit what it likes. What is of another type or size than expected is left out.

    Raises:
        ValueError: it is not the whole file of a commit.
        UnsupportedError: it sets the metadata of the table more than once.
    """
    _check_whole(text)
    _check_metadata(text)
    info: Mapping[str, Any] = {}
    transactions: dict[str, int] = {}
    # Not splitlines(): JSON may hold other line separators in its texts.
    for line in text.split("\n"):
        # Files of a batch can be many; only two kinds of action are of interest.
        kind = _ACTION.match(line)
        if kind:
            action = _json_of_line(line).get(kind[1], {})
            if not isinstance(action, dict):
                raise ValueError(f"its {kind[1]} is no object")
            if kind[1] == "commitInfo":
                info = action
            elif isinstance(action.get("appId"), str) and isinstance(action.get("version"), int):
                transactions[action["appId"]] = action["version"]
    parameters, metrics = _object(info.get("operationParameters")), _object(info.get("operationMetrics"))
    restored: int | str | None = None
    if info.get("operation") == "RESTORE":
        target = _whole_number(parameters.get("version"), most=version - 1)
        moment = parameters.get("timestamp") or parameters.get("datetime")
        restored = str(moment)[:_LONGEST_MOMENT] if target is None else target
    rows = metrics.get("numOutputRows", 0 if metrics.get("numFiles") == "0" else None)
    deleted = metrics.get("numDeletedRows", 0 if metrics.get("numRemovedFiles", "0") == "0" else None)
    written, exact = _whole_number(rows), _whole_number(info.get("inCommitTimestamp"), most=_LAST_MS)
    metadata = _json_object(info.get("userMetadata"))
    entry = LedgerEntry.from_json(metadata)
    return Commit(
        version,
        str(info.get("operation", "")),
        transactions,
        entry,
        restored,
        None if written is None else written - (_whole_number(metrics.get("numCopiedRows")) or 0),
        _whole_number(deleted),
        metadata if entry is None else {},
        str(parameters.get("predicate", "")),
        _whole_number(info.get("timestamp"), most=_LAST_MS) if exact is None else exact,
        _whole_number(metrics.get("numOutputBytes", metrics.get("numAddedBytes"))) or 0,
        _DATA_CHANGE.search(text) is not None,
        str(info.get("userName") or info.get("engineInfo") or ""),
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole_number(value: object, *, most: int = 2**63 - 1) -> int | None:
    """A number from 0 to ``most``, also as text, which Delta writes of numbers; ``None`` for anything else.

    Example:
        >>> _whole_number("12"), _whole_number(12), _whole_number("1e400"), _whole_number(10**30), _whole_number(True)
        (12, 12, None, None, None)
    """
    if type(value) is int or (isinstance(value, str) and _DIGITS.fullmatch(value)):
        number = int(value)
        return number if 0 <= number <= most else None
    return None


def _json_of_line(line: str) -> Mapping[str, Any]:
    """The object in a line of a commit; empty if it is nested too deeply to be read.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return _object(_DECODER.decode(line))
    except RecursionError:
        return {}


def _number_of(digits: str) -> int | str:
    """The number; where Python takes it for too long, its text."""
    return int(digits) if len(digits) < _LONGEST_NUMBER else digits


_DECODER = json.JSONDecoder(parse_int=_number_of)


def _check_whole(text: str) -> None:
    """Look for what is left of a file whose blocks did not reach the disk, without parsing each action.

    Raises:
        ValueError: it is empty or cut, or has blocks of zeros.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError("there is no action in it")
    if "\0" in text or not all(line.lstrip().startswith("{") for line in lines):
        raise ValueError("it has lines that are not JSON objects")
    _json_of_line(lines[-1])


def _check_metadata(text: str) -> None:
    """Refuse a commit with two metadata: delta-rs, which gives what is checked here, takes others of them than Spark.

    Raises:
        ValueError: a line is not JSON, or has a name twice.
        UnsupportedError: the commit has a ``metaData`` or ``protocol`` twice, or another action in the line of one.
    """
    found: list[str] = []
    for line in text.split("\n"):
        if any(mark in line for mark in _METADATA_MARKS):
            actions = [name for name, action in read_strictly(line).items() if action is not None]
            if not _METADATA.isdisjoint(actions):
                found += actions
    if sorted(found) != sorted(_METADATA.intersection(found)):
        raise UnsupportedError(
            "the commit has more than one metaData or protocol, or another action in the line of one, so that readers "
            "of the table may take different metadata from it",
            remedy="Go back to the version before it: move the .json and .crc files of this version and of the later "
            "ones out of _delta_log. If you do not know what wrote it, find out who can write there.",
        )


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
        # Files that are there already, added once more with other statistics.
        return _FileChanges()
    return _FileChanges(frozenset(found["add"]), frozenset(found["remove"]), partitions)


def _json_object(text: object) -> Mapping[str, object]:
    try:
        return _object(json.loads(text)) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return {}
