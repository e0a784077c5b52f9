"""Reads a Delta log without a JVM: versions, transactions, commits one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from spark_jobs.ledger_entries import Entry
from stream_consumers.errors import LedgerUnreadableError, TableUnreadableError

AMBIGUOUS_MS = 1000


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the table.

    Args:
        version: its number.
        operation: WRITE, RESTORE, DELETE, …
        transactions: app ids and versions recorded in it.
        entry: our own account of it; ``None`` if somebody else wrote it.
        restored: for a RESTORE, the version or the ISO time it went back to.
        output_rows: rows written, as the writer counted them.
        account: the commit's ``userMetadata``, if it is a JSON object.
        predicate: the condition of a DELETE.
    """

    version: int
    operation: str
    transactions: Mapping[str, int] = field(default_factory=dict)
    entry: Entry | None = None
    restored: int | str | None = None
    output_rows: int | None = None
    account: Mapping[str, object] = field(default_factory=dict)
    predicate: str = ""


class TableSnapshot:
    """One version of a table: its number and the last transaction version of any app id."""

    def __init__(self, table: DeltaTable) -> None:
        self._table = table
        self.version: int = table.version()

    def last_number(self, app: str) -> int:
        """The last transaction version of ``app``; 0 if there is none."""
        return self._table.transaction_version(app) or 0

    @property
    def column_types(self) -> Mapping[str, str]:
        """Column names and their Delta types."""
        return {column.name: str(column.type) for column in self._table.schema().fields}

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table properties."""
        return self._table.metadata().configuration


class DeltaLog:
    """The log of the table at ``path``.

    Args:
        path: a local path or a URI that delta-rs understands.
        storage_options: credentials and settings for object stores; never logged.
    """

    def __init__(self, path: str, *, storage_options: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._options = dict(storage_options or {})
        self._files: pyarrow.fs.PyFileSystem | None = None
        self._commits: dict[int, Commit] = {}

    def snapshot(self) -> TableSnapshot | None:
        """The newest version; ``None`` if there is no table yet.

        Raises:
            TableUnreadableError: something is there, but no Delta table that can be read.
        """
        self._check_path()
        try:
            return TableSnapshot(DeltaTable(self.path, storage_options=self._options))
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise TableUnreadableError(
                f"the Delta table at {self.path} cannot be read ({error})",
                remedy="Check the path, its permissions and the storage options.",
            ) from error

    def _check_path(self) -> None:
        path = Path(self.path)
        if "://" in self.path or not path.exists():
            return
        if not path.is_dir():
            raise TableUnreadableError(
                f"{path} is a file, not a table", remedy="Give the path of a Delta table, or of a folder to create."
            )
        if not (path / "_delta_log").is_dir() and any(path.iterdir()):
            raise TableUnreadableError(
                f"{path} holds files but no Delta table", remedy="Give the path of a table, or of an empty folder."
            )

    def row_count(self) -> int | None:
        """Rows in the newest version, from the statistics in the log; ``None`` if they do not tell."""
        if self.snapshot() is None:
            return None
        table = DeltaTable(self.path, storage_options=self._options)
        actions = pa.table(table.get_add_actions(flatten=True))
        vectors = any(name.startswith("deletion_vector") for name in actions.column_names)
        counts = actions.column("num_records")
        return None if vectors or counts.null_count else int(pc.sum(counts).as_py() or 0)

    def commit(self, version: int) -> Commit | None:
        """One commit; ``None`` if its file was cleaned away.

        Raises:
            LedgerUnreadableError: it is there but cannot be read.
        """
        if version not in self._commits:
            try:
                text = self._read(f"_delta_log/{version:020d}.json")
            except FileNotFoundError:
                return None
            except OSError as error:
                raise LedgerUnreadableError(
                    f"version {version} of {self.path} cannot be read ({error})", remedy="Run again."
                ) from error
            self._commits[version] = parse_commit(version, text)
        return self._commits[version]

    def version_at(self, moment: str) -> int:
        """The version that a RESTORE to this time went back to.

        Raises:
            LedgerUnreadableError: two versions are so close to that time that it is not certain.
        """
        when = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        aware = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        table = DeltaTable(self.path, storage_options=self._options)
        table.load_as_version(aware)
        version = table.version()
        table.load_as_version(version)
        nearby = [c["timestamp"] for c in table.history() if c.get("version") in (version, version + 1)]
        target = aware.timestamp() * 1000
        if any(abs(stamp - target) < AMBIGUOUS_MS and stamp != target for stamp in nearby):
            raise LedgerUnreadableError(
                f"{self.path} was restored to {moment}, which is too close to two versions to tell them apart",
                remedy="Restore again to a version number: RESTORE TABLE … TO VERSION AS OF n.",
                version=version,
            )
        return version

    def _read(self, name: str) -> str:
        if "://" not in self.path:
            return (Path(self.path) / name).read_text()
        if self._files is None:
            self._files = pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.path, self._options))
        with self._files.open_input_file(name) as file:
            return bytes(file.read()).decode()


def parse_commit(version: int, text: str) -> Commit:
    """Read the actions of one commit file that matter here."""
    info: dict[str, Any] = {}
    transactions: dict[str, int] = {}
    for line in text.splitlines():
        # Files of a batch can be many; only two kinds of action are of interest.
        if line.startswith('{"commitInfo"'):
            info = json.loads(line)["commitInfo"]
        elif line.startswith('{"txn"'):
            action = json.loads(line)["txn"]
            transactions[action["appId"]] = action["version"]
    parameters, metrics = info.get("operationParameters") or {}, info.get("operationMetrics") or {}
    restored: int | str | None = None
    if info.get("operation") == "RESTORE":
        target = parameters.get("version")
        restored = int(target) if target not in (None, "", "null") else str(parameters.get("timestamp"))
    rows = metrics.get("numOutputRows")
    return Commit(
        version,
        info.get("operation", ""),
        transactions,
        Entry.from_json(info.get("userMetadata")),
        restored,
        int(rows) if rows is not None else None,
        _json_object(info.get("userMetadata")),
        str(parameters.get("predicate", "")),
    )


def _json_object(text: str | None) -> Mapping[str, object]:
    try:
        document = json.loads(text or "")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
