"""The types that JSON payloads are decoded into, as Arrow has them."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow as pa

from stream_consumers.errors import SchemaMismatchError

Column: TypeAlias = "pa.Array[Any]"

VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
"""As PySpark says that a column is a VARIANT. Decoders give its JSON text."""
_TYPES = (
    "BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BINARY, BOOLEAN, DATE, TIMESTAMP, VARIANT, and "
    "STRUCT, ARRAY and MAP of them"
)


def check_json_type(name: str, kind: pa.DataType) -> None:
    """Refuse types that JSON is not decoded into.

    Raises:
        SchemaMismatchError: naming the column, its type, and the ones there are.
    """
    if is_variant(kind):
        return
    if isinstance(kind, pa.StructType):
        for field in kind:
            check_json_type(f"{name}.{field.name}", field.type)
    elif isinstance(kind, pa.ListType):
        check_json_type(f"{name}[]", kind.value_type)
    elif isinstance(kind, pa.MapType):
        if not pa.types.is_string(kind.key_type):
            raise SchemaMismatchError(
                f"column {name} is a MAP with keys that are {kind.key_type}, but those of JSON are text",
                remedy="Write it like MAP<STRING, BIGINT>.",
            )
        check_json_type(f"{name}{{}}", kind.item_type)
    elif not (
        pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
    ):
        raise SchemaMismatchError(
            f"column {name} is {kind}, which JSON payloads are not decoded into",
            remedy=f"Use one of {_TYPES}; or decode=Text() and from_json in the transform.",
        )


def is_variant(kind: pa.DataType) -> bool:
    """Whether PySpark means a VARIANT.

    Example:
        >>> is_variant(VARIANT), is_variant(pa.struct([("value", pa.binary()), ("metadata", pa.binary())]))
        (True, False)
    """
    return isinstance(kind, pa.StructType) and any((field.metadata or {}).get(b"variant") == b"true" for field in kind)


def has_own_way(kind: pa.DataType) -> bool:
    """Whether there are parts of the type that Arrow does not parse: VARIANT and MAP."""
    if is_variant(kind) or isinstance(kind, pa.MapType):
        return True
    if isinstance(kind, pa.StructType):
        return any(has_own_way(field.type) for field in kind)
    return isinstance(kind, pa.ListType) and has_own_way(kind.value_type)


def is_parsed(schema: pa.Schema) -> bool:
    """Whether Arrow parses all of these columns."""
    return not any(has_own_way(field.type) for field in schema)


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """The type of a decoded column: text for a VARIANT, everything else as it is."""
    if not has_own_way(kind):
        return kind
    if is_variant(kind):
        return pa.string()
    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(decoded_type(field.type)) for field in kind])
    if isinstance(kind, pa.MapType):
        item: Any = kind.item_field.with_type(decoded_type(kind.item_type))
        found: pa.DataType = pa.map_(kind.key_type, item)
        return found
    assert isinstance(kind, pa.ListType)
    return pa.list_(kind.value_field.with_type(decoded_type(kind.value_type)))
