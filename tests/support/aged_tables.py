"""A Delta table as it would be some days later."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

DAY_MS = 86_400_000
_TIMES = {"commitInfo": "timestamp", "add": "modificationTime", "remove": "deletionTimestamp"}


def aged(table: str, into: Path, *, days: float) -> str:
    """Copy a table to a folder, so that Spark knows nothing of it, and let all that is in it have happened earlier."""
    shutil.copytree(table, into)
    for file in (into / "_delta_log").iterdir():
        # Checksums and checkpoints of what is changed here; Delta does without.
        if file.suffix == ".crc" or "checkpoint" in file.name:
            file.unlink()
        elif file.suffix == ".json":
            file.write_text("".join(f"{_earlier(line, days)}\n" for line in file.read_text().splitlines()))
    earlier = time.time() - days * DAY_MS / 1000
    for file in into.rglob("*"):
        os.utime(file, (earlier, earlier))
    return str(into)


def _earlier(line: str, days: float) -> str:
    action: dict[str, Any] = json.loads(line)
    for kind, name in _TIMES.items():
        if name in action.get(kind, {}):
            action[kind][name] -= int(days * DAY_MS)
    return json.dumps(action)
