"""The rows of a Delta table, read without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.dataset
from deltalake import DeltaTable
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem


def open_dataset(
    path: str, *, version: int | None = None, storage_options: Mapping[str, str] | None = None
) -> pyarrow.dataset.Dataset:
    """One version of a table, the newest by default.

    Local files are opened by Arrow itself. delta-rs would have them opened by Python: Arrow's threads then need the
    interpreter to close them, and where it is gone by then, the process ends with "terminate called".

    Args:
        path: a local path or a URI that delta-rs understands.
        version: of the table.
        storage_options: credentials and settings for object stores.
    """
    table = DeltaTable(path, version=version, storage_options=dict(storage_options or {}))
    root = str(Path(path).absolute())
    # Names that the log escapes, and files of other folders, are for delta-rs to find.
    is_plain = "://" not in path and all(uri.startswith(f"{root}/") and "%" not in uri for uri in table.file_uris())
    return table.to_pyarrow_dataset(filesystem=SubTreeFileSystem(root, LocalFileSystem()) if is_plain else None)
