"""The columns beside those of the payload: what they are for the key of a message and its headers."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import BinaryType, DataType, StringType, StructField

from spark_jobs.decoding.decoders import Decoder, header_columns, is_one_column, key_columns
from spark_jobs.reading.spark_types import arrow_schema, declared_columns, struct_type
from spark_jobs.reading.variants import has_variant
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from stream_consumers.options import check_name

HEADERS_DDL = "ARRAY<STRUCT<name: STRING, value: BINARY>>"


def kept_fields(decoder: Decoder) -> list[StructField]:
    """The columns for key and headers that a decoder asks for; see :func:`key_columns`.

    Raises:
        InvalidOptionError: names that are none.
        SchemaMismatchError: the columns of the key cannot be used.
    """
    kinds: list[DataType] = []
    if decoder.key:
        kinds.append(BinaryType() if isinstance(decoder.key, str) else _type_of_key(decoder.key))
    if isinstance(decoder.headers, Mapping):
        for column, name in decoder.headers.items():
            check_name("the column of a header", column)
            check_name("the name of a header", name)
        kinds += [StringType()] * len(decoder.headers)
    elif decoder.headers:
        kinds.append(struct_type(f"headers {HEADERS_DDL}").fields[0].dataType)
    names = [*key_columns(decoder), *header_columns(decoder)]
    return [StructField(name, kind) for name, kind in zip(names, kinds, strict=True)]


def _type_of_key(key: Decoder) -> DataType:
    if isinstance(key, type) or not callable(getattr(key, "ddl", None)):
        raise InvalidOptionError(f"key={key!r} decodes nothing", remedy="Give the name of a column, or a decoder.")
    columns = declared_columns(key.ddl())
    if has_variant(columns):
        raise SchemaMismatchError(
            f"the columns of the key, {key.ddl()!r}, have a VARIANT, which only those of the payload may have",
            remedy="Make it STRING, and take parse_json in the transform.",
        )
    key.check(arrow_schema(columns))
    return columns.fields[0].dataType if is_one_column(key) else columns
