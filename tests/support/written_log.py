"""Writes Delta logs by hand: only what a reader of versions, transactions and metadata needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry

FIRST_MS = 1_700_000_000_000
STEP_MS = 60_000
_FIELD = {"name": "id", "type": "long", "nullable": True, "metadata": {}}


def made_entry(number: int, base: int, *, member: str = "main", group: str = "g", **details: Any) -> LedgerEntry:
    """A batch of the member, or an entry of another kind, with a batch id of its number."""
    fields = {"kind": "batch", "bid": f"{member}{number}", **details}
    return LedgerEntry(group=group, app=f"{group}/{member}", number=number, by=member, base=base, **fields)


class WrittenLog:
    """A table at ``path`` whose commits are written one after the other, a minute apart."""

    def __init__(
        self,
        path: Path,
        *,
        table_id: str = "table",
        properties: Mapping[str, str] | None = None,
        features: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.next = 0
        # The data files of each version.
        self._files: list[frozenset[str]] = []
        self._table_id = table_id
        self._protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
        if features:
            named = {"readerFeatures": [*features], "writerFeatures": [*features]}
            self._protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **named}
        self._properties = dict(properties or {})

    def log(self) -> DeltaLog:
        return DeltaLog(str(self.path))

    def file(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020d}.json"

    def ours(self, entry: LedgerEntry, **details: Any) -> int:
        """A commit of ours; a batch with a range adds a file."""
        has_rows = any(part.start < part.end for part in entry.ranges.values())
        files = self.files | {f"part-{self.next}.parquet"} if has_rows else self.files
        return self.commit(
            metadata=entry.to_json(), transactions={entry.app: entry.number}, **{"files": files, **details}
        )

    def restore(self, *, back_to: int | None = None, **target: object) -> int:
        """A RESTORE with these parameters, which leaves the files of version ``back_to`` behind."""
        return self.commit("RESTORE", parameters=target, files=self.files if back_to is None else self._files[back_to])

    @property
    def files(self) -> frozenset[str]:
        """The data files of the newest version."""
        return self._files[-1] if self._files else frozenset()

    def commit(
        self,
        operation: str = "WRITE",
        *,
        parameters: Mapping[str, object] | None = None,
        metadata: str | None = None,
        transactions: Mapping[str, int] | None = None,
        timestamp_ms: int | None = None,
        in_commit_timestamp_ms: int | None = None,
        files: frozenset[str] | None = None,
    ) -> int:
        version, self.next = self.next, self.next + 1
        info: dict[str, Any] = {
            "timestamp": FIRST_MS + STEP_MS * version if timestamp_ms is None else timestamp_ms,
            "operation": operation,
            "operationParameters": dict(parameters or {}),
        }
        if metadata is not None:
            info["userMetadata"] = metadata
        if in_commit_timestamp_ms is not None:
            info["inCommitTimestamp"] = in_commit_timestamp_ms
        actions: list[dict[str, Any]] = [{"commitInfo": info}]
        actions += [{"txn": {"appId": app, "version": number}} for app, number in (transactions or {}).items()]
        before, after = self.files, self.files if files is None else files
        actions += [{"add": self._file(name, size=1, modificationTime=FIRST_MS)} for name in sorted(after - before)]
        actions += [{"remove": self._file(name, deletionTimestamp=FIRST_MS)} for name in sorted(before - after)]
        self._files.append(after)
        if version == 0:
            actions += [{"protocol": self._protocol}, {"metaData": self._metadata()}]
        self.write(version, "".join(json.dumps(a, separators=(",", ":"), ensure_ascii=False) + "\n" for a in actions))
        return version

    def _file(self, name: str, **details: object) -> dict[str, Any]:
        return {"path": name, "partitionValues": {}, "dataChange": True, **details}

    def write(self, version: int, text: str) -> None:
        self.file(version).parent.mkdir(parents=True, exist_ok=True)
        self.file(version).write_text(text, encoding="utf-8")

    def clean_before(self, version: int) -> None:
        """Remove the commit files below ``version``, as log cleanup does behind a checkpoint."""
        for cleaned in range(version):
            self.file(cleaned).unlink(missing_ok=True)

    def _metadata(self) -> dict[str, Any]:
        return {
            "id": self._table_id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": [_FIELD]}),
            "partitionColumns": [],
            "configuration": self._properties,
            "createdTime": FIRST_MS,
        }
