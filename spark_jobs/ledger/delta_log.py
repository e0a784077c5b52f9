"""Reads a Delta log without a JVM: versions, transactions, commits one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
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
from spark_jobs.ledger.storage_errors import one_line, unreadable
from spark_jobs.table_location import reader_options
from stream_consumers.errors import (
    LedgerUnreadableError,
    TableUnreadableError,
    UnsupportedError,
    UnsupportedVersionError,
)

DEFAULT = "CURRENT_DEFAULT"
"""Where Delta keeps the value that a column has in rows which lack it."""
KEPT_COMMITS = 10_000
TORN_REMEDY = (
    "A power cut, or a full or broken disk, leaves such files. If it is the newest version, move this file and the "
    ".crc file of the version out of the folder: the log before it is whole, and what the batch read is read again. "
    "Otherwise restore the file from a backup."
)
RESTORE_REMEDY = "Restore again, to a version number: RESTORE TABLE … TO VERSION AS OF n."
# Delta goes by the times of the files, which are written after the times in them.
LATE_FILE_MS = 60_000
SKEW_MS = 3_600_000
# No clock is set further from UTC, nor by less than a quarter of an hour.
ZONE_OFFSETS_MS = range(-18 * 3_600_000, 18 * 3_600_000 + 1, 900_000)
_ACTION = re.compile(r'\s*\{\s*"(commitInfo|txn)"')
_FILE_ACTION = re.compile(r'\s*\{\s*"(add|remove)"')
_DATA_CHANGE = re.compile(r'"dataChange"\s*:\s*true')
_COMMIT_FILE = re.compile(r"([0-9]{20})\.json")
_CHECKPOINT_FILE = re.compile(r"[0-9]{20}\.checkpoint\..*parquet")
_FRACTION = re.compile(r"\.([0-9]{1,6})[0-9]*")
# How far an identity column has counted: part of a table's schema.
_IDENTITIES = re.compile(r'"delta\.identity\.highWaterMark":"?-?[0-9]+"?')
_Parsed = TypeVar("_Parsed")
# What the reader says of the table feature catalogManaged, and of its preview.
_CATALOG_MANAGED = "catalog-managed table"


def catalog_decides(path: str, why: str) -> UnsupportedError:
    """The error of a table that its files do not tell all of.

    Args:
        path: of the table.
        why: this is known.
    """
    return UnsupportedError(
        f"a catalog decides on the commits of {path} ({why}), and the newest ones may not be files yet, so that "
        "the log does not tell where a group is",
        remedy="Use a table whose commits are files at once: an external one, without that property or feature.",
    )


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the table.

    Args:
        version: its number.
        operation: WRITE, RESTORE, DELETE, …
        transactions: app ids and versions recorded in it.
        entry: our batch metadata; ``None`` if somebody else wrote it.
        restored: for a RESTORE, the version or the time it went back to.
        output_rows: rows written, as the writer counted them, without those that a replace copied unchanged.
        deleted_rows: rows that a replace deleted; ``None`` if the writer does not say, see
            :meth:`DeltaLog.deleted_rows`.
        user_metadata: the commit's ``userMetadata``, if it is a JSON object and not our entry.
        predicate: the condition of a DELETE.
        timestamp_ms: when it was made, as the writer says; ``None`` if it does not.
        is_exact_time: whether time travel goes by just this time (in-commit timestamps).
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
    is_exact_time: bool = False
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

    def __init__(self, table: DeltaTable) -> None:
        self._table = table
        self.version: int = table.version()
        self.table_id = str(table.metadata().id)

    def last_number(self, app: str) -> int:
        """The last transaction version of ``app``; 0 if there is none."""
        return self._table.transaction_version(app) or 0

    def may_hold(self, streams: Iterable[str]) -> bool:
        """Whether there may be rows of one of these streams, as the statistics of the files tell."""
        for file in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
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
        marks = ("delta.generationExpression", "delta.identity.start")
        return frozenset(c.name for c in self._table.schema().fields if any(mark in c.metadata for mark in marks))

    @property
    def default_columns(self) -> frozenset[str]:
        """The columns that have a value of their own where rows lack them."""
        return frozenset(c.name for c in self._table.schema().fields if DEFAULT in c.metadata)

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table properties."""
        return self._table.metadata().configuration

    @property
    def schema(self) -> str:
        """The columns as the log has them, as JSON; without how far their identities are, which each commit changes."""
        return _IDENTITIES.sub("", self._table.schema().to_json())

    @property
    def columns(self) -> Sequence[Mapping[str, Any]]:
        """The columns as the log has them, with what Delta keeps about each in ``metadata``."""
        fields: Sequence[Mapping[str, Any]] = json.loads(self._table.schema().to_json())["fields"]
        return fields


class DeltaLog:
    """The log of the table at ``path``.

    Args:
        path: a local path or a URI that delta-rs understands.
        storage_options: credentials and settings for object stores; never logged.
        is_own_folder: nobody else puts files there, so that files without a log are left over from a killed write.
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
        self._seen: tuple[str, int] | None = None
        self._apps: tuple[tuple[str, int], frozenset[str] | None] | None = None
        # The commit that was opened last: who has just looked for a batch asks for its files next.
        self._opened: tuple[int, str] | None = None

    def snapshot(self) -> TableSnapshot | None:
        """The newest version; ``None`` if there is no table yet.

        Raises:
            TableUnreadableError: something is there, but no Delta table that can be read; or there is no bucket.
            UnsupportedError: a catalog decides on its commits.
            LedgerUnreadableError: the storage does not answer, or a file of the log is torn.
        """
        self._check_path()
        try:
            snapshot = TableSnapshot(DeltaTable(self.path, storage_options=self.storage_options))
        except TableNotFoundError:
            self._forget()
            return None
        except (DeltaError, OSError) as error:
            if _CATALOG_MANAGED in str(error):
                raise catalog_decides(self.path, "it is a catalog-managed table") from error
            unread = unreadable(
                self.path,
                error,
                what=f"the Delta table at {self.path} cannot be read",
                remedy="Check the path, its permissions and the storage options.",
            )
            if isinstance(unread, TableUnreadableError):
                self._check_log()
            raise unread from error
        # A table that was dropped and created again has other commits under the same versions.
        if self._seen and (snapshot.table_id != self._seen[0] or snapshot.version < self._seen[1]):
            self._forget()
        self._seen = (snapshot.table_id, snapshot.version)
        return snapshot

    def _forget(self) -> None:
        self._commits.clear()
        self._restored.clear()
        self._opened = None

    def transactions(self, snapshot: TableSnapshot) -> frozenset[str] | None:
        """The app ids of all transactions up to a version, from the newest checkpoint and the commits after it.

        Args:
            snapshot: the version.

        Returns:
            ``None`` if the checkpoint that the log names cannot be read: then only the whole log tells.
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
        except (OSError, ValueError):
            return None
        try:
            found = set(self._checkpoint_transactions(hint))
            for version in range(snapshot.version, int(hint["version"]), -1):
                commit = self.commit(version)
                if commit is None:
                    return None
                found.update(commit.transactions)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
            return None
        return frozenset(found)

    def _checkpoint_transactions(self, hint: Mapping[str, Any]) -> Iterator[str]:
        """The app ids in the checkpoint of ``_last_checkpoint``: of one file, of several parts, or of version 2."""
        version, parts = int(hint["version"]), int(hint.get("parts") or 1)
        if version < 0:
            return
        stem = f"{version:020d}.checkpoint"
        names = [f"{stem}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)]
        names = names if parts > 1 else [f"{stem}.parquet"]
        if "v2Checkpoint" in hint:
            names = [str(hint["v2Checkpoint"]["path"])]
        for name in names:
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
            LedgerUnreadableError: it cannot be told, so nothing may be acknowledged.
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
        """Rows in a version, the newest by default, from the statistics in the log; ``None`` if they do not tell."""
        if self.snapshot() is None:
            return None
        table = DeltaTable(self.path, version=version, storage_options=self.storage_options)
        actions = pa.table(table.get_add_actions(flatten=True))
        vectors = any(name.startswith("deletion_vector") for name in actions.column_names)
        counts = actions.column("num_records")
        return None if vectors or counts.null_count else int(pc.sum(counts).as_py() or 0)

    def deleted_rows(self, commit: Commit) -> int | None:
        """Rows that a replace deleted, whether the writer says so or not; ``None`` if it cannot be told.

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
                f"({one_line(error)})",
                remedy="Delete it and the file _last_checkpoint beside it: the log before it is whole.",
            ) from error

    def torn_files(self, version: int | None = None) -> list[str]:
        """The data files of a version that are shorter than their commits say; none if the log cannot be read.

        Only local tables are looked at.

        Args:
            version: of the table, the newest by default.
        """
        if "://" in self.path:
            return []
        try:
            actions = pa.table(DeltaTable(self.path, version=version).get_add_actions(flatten=True))
        except (DeltaError, OSError):
            return []
        torn = []
        for added in actions.select(["path", "size_bytes"]).to_pylist():
            file, size = Path(self.path) / unquote(added["path"]), added["size_bytes"]
            if file.is_file() and (there := file.stat().st_size) < size:
                torn.append(f"{file} has {there:,} of {size:,} bytes")
        return torn

    def missing_files(self, version: int) -> list[str]:
        """The files that a commit adds and that are not in the folder of the table; only asked of local tables."""
        if "://" in self.path:
            return []
        # What only got a deletion vector was there before, and in a clone is a file of the other table.
        paths = [unquote(path) for path, vector in self._file_changes(version).added if not vector]
        return sorted(path for path in paths if not (Path(self.path) / path).exists())

    def commit(self, version: int) -> Commit | None:
        """One commit; ``None`` if its file was cleaned away.

        Raises:
            LedgerUnreadableError: it is there but cannot be read.
            UnsupportedVersionError: a newer release has written it.
        """
        commit = self._commits.get(version)
        if commit is None:
            try:
                commit = self._parsed(version, lambda text: parse_commit(version, text))
            except FileNotFoundError:
                return None
            except UnsupportedVersionError as error:
                what = f"version {version} of {self.path}: {error.what}"
                raise UnsupportedVersionError(what, remedy=error.remedy) from error
            self._commits[version] = commit
            if len(self._commits) > KEPT_COMMITS:
                # A job may stay for days.
                self._commits.pop(next(iter(self._commits)), None)
        return commit

    def restored_versions(self, commit: Commit) -> tuple[int, ...]:
        """The versions that a RESTORE may have gone back to, the newest first.

        A RESTORE to a time names it in the time zone of its session, which the log does not tell. So the files decide:
        the version is one that has just the files that the RESTORE left behind. Where commits without rows lie between,
        several have; the time rules out those that it means in no zone.

        Args:
            commit: the RESTORE.

        Raises:
            LedgerUnreadableError: no version fits, or one that was cleaned from the log may.
        """
        if isinstance(commit.restored, int):
            return (commit.restored,)
        if commit.version not in self._restored:
            self._restored[commit.version] = self._find_restored(commit, str(commit.restored))
        return self._restored[commit.version]

    def _find_restored(self, restore: Commit, moment: str) -> tuple[int, ...]:
        instants = _instants(moment)
        scanned: list[tuple[Commit, bool]] = []
        change = self._file_changes(restore.version)
        missing, surplus = change.added, change.removed
        for version in range(restore.version - 1, -1, -1):
            commit = self.commit(version)
            if commit is None:
                raise self._not_certain(restore, f"version {version} was cleaned from the log, and may be the one")
            scanned.append((commit, not missing and not surplus))
            if instants and commit.timestamp_ms is not None and min(instants) - commit.timestamp_ms > SKEW_MS:
                break
            # What the version before lacks of the files that the RESTORE left behind, and what it has besides.
            change = self._file_changes(version)
            missing, surplus = (
                (missing - change.removed) | (change.added - surplus),
                (surplus - change.added) | (change.removed - missing),
            )
        found, latest = [], 0
        times = [commit.timestamp_ms for commit, _ in scanned]
        for (commit, is_same), ends in reversed([*zip(scanned, [None, *times])]):
            # Where clocks ran backwards, Delta lets a version begin when the one before did.
            latest = max(latest, commit.timestamp_ms or 0, ends or 0)
            if is_same and _is_within(instants, commit, None if ends is None else latest):
                found.append(commit.version)
        if not found:
            raise self._not_certain(restore, "no version is as old and has the files that the RESTORE left behind")
        return tuple(reversed(found))

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
            raise self._away(version, error) from error

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
            raise self._away(version, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            name = f"_delta_log/{version:020d}.json"
            size = self.files().get_file_info(name).size
            raise LedgerUnreadableError(
                f"version {version} of {self.path} is torn: {name} has {size or 0:,} bytes ({one_line(error)})",
                remedy=TORN_REMEDY,
            ) from error

    def _away(self, version: int, error: OSError) -> LedgerUnreadableError:
        return LedgerUnreadableError(
            f"version {version} of {self.path} cannot be read ({one_line(error)})", remedy="Run again."
        )

    def _not_certain(self, restore: Commit, why: str) -> LedgerUnreadableError:
        return LedgerUnreadableError(
            f"{self.path} was restored to {restore.restored!r} (version {restore.version}), and which version that was "
            f"cannot be told: {why}",
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

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not the whole file of a commit.
    """
    _check_whole(text)
    info: dict[str, Any] = {}
    transactions: dict[str, int] = {}
    # Not splitlines(): JSON may hold other line separators in its texts.
    for line in text.split("\n"):
        # Files of a batch can be many; only two kinds of action are of interest.
        kind = _ACTION.match(line)
        if kind:
            action = json.loads(line)[kind[1]]
            if kind[1] == "commitInfo":
                info = action
            else:
                transactions[action["appId"]] = action["version"]
    parameters, metrics = info.get("operationParameters") or {}, info.get("operationMetrics") or {}
    restored: int | str | None = None
    if info.get("operation") == "RESTORE":
        target = parameters.get("version")
        moment = parameters.get("timestamp") or parameters.get("datetime")
        restored = int(target) if target not in (None, "", "null") else str(moment)
    rows = metrics.get("numOutputRows", 0 if metrics.get("numFiles") == "0" else None)
    deleted = metrics.get("numDeletedRows", 0 if metrics.get("numRemovedFiles", "0") == "0" else None)
    stamp, exact = info.get("timestamp"), info.get("inCommitTimestamp")
    metadata = _json_object(info.get("userMetadata"))
    entry = LedgerEntry.from_document(metadata)
    return Commit(
        version,
        info.get("operation", ""),
        transactions,
        entry,
        restored,
        int(rows) - int(metrics.get("numCopiedRows", 0)) if rows is not None else None,
        int(deleted) if deleted is not None else None,
        metadata if entry is None else {},
        str(parameters.get("predicate", "")),
        stamp if exact is None else exact,
        exact is not None,
        int(metrics.get("numOutputBytes", metrics.get("numAddedBytes", 0))),
        _DATA_CHANGE.search(text) is not None,
        str(info.get("userName") or info.get("engineInfo") or ""),
    )


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
    json.loads(lines[-1])


def _instants(moment: str) -> list[int]:
    """The times in milliseconds that a RESTORE may name; none if it is no time.

    delta-rs writes milliseconds, Spark ``2026-01-31 12:00:00.5`` in the time zone of its session, whatever that was.
    """
    if moment.isdigit():
        return [int(moment)]
    digits = _FRACTION.sub(lambda fraction: f".{fraction[1]:0<6}", moment)
    try:
        when = datetime.fromisoformat(digits.replace("Z", "+00:00"))
        if when.tzinfo:
            return [int(when.timestamp() * 1000)]
        local = int(when.replace(tzinfo=timezone.utc).timestamp() * 1000)
    except (ValueError, OverflowError):
        return []
    return [local - offset for offset in ZONE_OFFSETS_MS]


def _is_within(instants: list[int], commit: Commit, ends: int | None) -> bool:
    """Whether one of the times lies between this version and the next."""
    if not instants or commit.timestamp_ms is None:
        return True
    slack = 0 if commit.is_exact_time else LATE_FILE_MS
    begins = commit.timestamp_ms
    return any(begins - slack <= instant and (ends is None or instant < ends + slack) for instant in instants)


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


def _json_object(text: str | None) -> Mapping[str, object]:
    try:
        document = json.loads(text or "")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
