"""Names and types as Spark's SQL parses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from spark_jobs.decoding.ddl import quoted


def text(value: str) -> str:
    r"""A literal.

    Example:
        >>> print(text("the customer's"))
        'the customer\'s'
    """
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def properties(values: Mapping[str, str]) -> str:
    r"""Table properties, in parentheses.

    Example:
        >>> print(properties({"a": "1' = '2"}))
        ('a' = '1\' = \'2')
    """
    return f"({', '.join(f'{text(name)} = {text(value)}' for name, value in values.items())})"


def ddl(kind: DataType, *, declared: bool = False, quote: Callable[[str], str] = quoted) -> str:
    """The type as Spark parses it, whatever its fields are called.

    Args:
        kind: the type.
        declared: also which fields are NOT NULL, and their comments.
        quote: writes the name of a field.

    Example:
        >>> from pyspark.sql.types import StringType
        >>> ddl(StructType().add("first name", "string").add("tags", ArrayType(StringType())))
        'STRUCT<`first name`: string, `tags`: ARRAY<string>>'
    """

    def inner(part: DataType) -> str:
        return ddl(part, declared=declared, quote=quote)

    if isinstance(kind, StructType):
        fields = [f"{quote(f.name)}: {inner(f.dataType)}" for f in kind.fields]
        rest = [_not_null(f) + _comment(f) if declared else "" for f in kind.fields]
        return f"STRUCT<{', '.join(map(''.join, zip(fields, rest)))}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{inner(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{inner(kind.keyType)}, {inner(kind.valueType)}>"
    return kind.simpleString()


def column_ddl(column: StructField, *, declared: bool = False) -> str:
    """A column of a new table, or as it is declared.

    Args:
        column: its name, type and comment.
        declared: also what is NOT NULL, and the comments within it.

    Example:
        >>> from pyspark.sql.types import LongType
        >>> column_ddl(StructField("id", LongType(), metadata={"comment": "of the customer"}))
        "`id` bigint COMMENT 'of the customer'"
        >>> column_ddl(StructField("id", LongType(), nullable=False), declared=True)
        '`id` bigint NOT NULL'
    """
    not_null = _not_null(column) if declared else ""
    return f"{quoted(column.name)} {ddl(column.dataType, declared=declared)}{not_null}{_comment(column)}"


def _not_null(field: StructField) -> str:
    return "" if field.nullable else " NOT NULL"


def _comment(field: StructField) -> str:
    comment = field.metadata.get("comment")
    return f" COMMENT {text(str(comment))}" if comment else ""
