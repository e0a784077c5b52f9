"""The largest row that Spark can store: the JVM has several copies of a row at once, and ends if it has no room."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

ROWS_IN_HEAP = 128
"""A row may take this part of the heap of the JVM, because some tasks hold 16 rows at once, with copies."""
MAX_ROW_BYTES = 2 * 1024**3 // ROWS_IN_HEAP
"""The most bytes of a row with the default heap of 2 GB."""
_TEXT_BYTES = 64
"""What a text or bytes count beside their length: the JVM may have an object for each, and more for a VARIANT."""


def has_large_row(rows: pa.RecordBatch, max_row_bytes: int = MAX_ROW_BYTES) -> bool:
    """Return whether Spark needs more than this for one of the rows."""
    left = [rows]
    while left:
        part = left.pop()
        if sum(map(spark_bytes, part.columns)) > max_row_bytes:
            if part.num_rows == 1:
                return True
            half = part.num_rows // 2
            left += [part.slice(half), part.slice(0, half)]
    return False


def spark_bytes(column: Any) -> int:
    """Return about how many bytes Spark's rows need for the values of an array of Arrow.

    A number has 8 bytes, a text :data:`_TEXT_BYTES` more than its length, and each STRUCT and ARRAY a header. So an
    array of empty objects or of short texts has a multiple of the bytes of its JSON, and of its bytes in Arrow.

    Example:
        >>> column = pa.array([[{"a": None}] * 100], pa.list_(pa.struct([("a", pa.bool_())])))
        >>> spark_bytes(column), column.nbytes
        (2450, 30)
    """
    kind = column.type
    if isinstance(kind, pa.StructType):
        return len(column) * 8 * (1 + (kind.num_fields + 63) // 64) + sum(map(spark_bytes, column.flatten()))
    if isinstance(kind, pa.ListType):
        return len(column) * 24 + spark_bytes(column.flatten())
    if isinstance(column, pa.MapArray):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return len(column) * 48 + sum(
            spark_bytes(each.slice(first, last - first)) for each in (column.keys, column.items)
        )
    return len(column) * (8 if pa.types.is_primitive(kind) else _TEXT_BYTES) + int(column.nbytes)
