"""Names and types as Spark's SQL parses them."""

from __future__ import annotations

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType


def quoted(name: str) -> str:
    """A name, whatever characters it has.

    Example:
        >>> quoted("first `name`")
        '`first ``name```'
    """
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def text(value: str) -> str:
    r"""A literal.

    Example:
        >>> print(text("the customer's"))
        'the customer\'s'
    """
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def ddl(kind: DataType) -> str:
    """The type as Spark parses it, whatever its fields are called.

    Example:
        >>> from pyspark.sql.types import StringType
        >>> ddl(StructType().add("first name", "string").add("tags", ArrayType(StringType())))
        'STRUCT<`first name`: string, `tags`: ARRAY<string>>'
    """
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quoted(field.name)}: {ddl(field.dataType)}' for field in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{ddl(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{ddl(kind.keyType)}, {ddl(kind.valueType)}>"
    return kind.simpleString()


def column_ddl(column: StructField) -> str:
    """A column of a new table.

    Example:
        >>> from pyspark.sql.types import LongType
        >>> column_ddl(StructField("id", LongType(), metadata={"comment": "of the customer"}))
        "`id` bigint COMMENT 'of the customer'"
    """
    comment = column.metadata.get("comment")
    return f"{quoted(column.name)} {ddl(column.dataType)}" + (f" COMMENT {text(str(comment))}" if comment else "")
