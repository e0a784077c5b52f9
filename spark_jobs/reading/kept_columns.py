"""The columns beside those of the payload: the key of a message, as it is or decoded, and its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, StringType, StructField

from spark_jobs.decoding.decoders import Decoder, header_columns, is_one_column, key_columns
from spark_jobs.decoding.json_types import Column
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


def decode_kept(messages: pa.RecordBatch, decoder: Decoder, kept: pa.Schema) -> tuple[list[Column], Column]:
    """The columns of :func:`kept_fields`, and per row why one of them could not be made (null: they could).

    Args:
        messages: as splits yield them.
        decoder: with what it asks for.
        kept: the columns.
    """
    columns: list[Column] = []
    errors: Column = pa.nulls(len(messages), pa.string())
    if isinstance(decoder.key, str):
        columns += [messages.column("key")] if decoder.key else []
    elif decoder.key:
        column, errors = _key(messages.column("key"), decoder.key, kept.field(0).type)
        columns.append(column)
    headers = messages.column("headers")
    if isinstance(decoder.headers, Mapping):
        for name in decoder.headers.values():
            column, wrong = _header(headers, name)
            columns.append(column)
            errors = pc.coalesce(errors, wrong)
    elif decoder.headers:
        columns.append(headers)
    return columns, errors


def _key(keys: Column, decoder: Decoder, kind: pa.DataType) -> tuple[Column, Column]:
    fields = list(kind) if isinstance(kind, pa.StructType) and not is_one_column(decoder) else None
    decoded = decoder.decode(keys, pa.schema(fields or [pa.field("key", kind)]))
    told: Any = pa.scalar("the key: ")
    errors: Column = pc.binary_join_element_wise(told, decoded.errors, "")
    # A message without a key has none to complain about, and the fields of none are none.
    is_none = keys.is_null()
    errors = pc.if_else(is_none, pa.scalar(None, pa.string()), errors)
    if fields is None:
        return decoded.columns[0], errors
    return pa.StructArray.from_arrays(list(decoded.columns), fields=fields, mask=is_none), errors


def _header(headers: Column, name: str) -> tuple[Column, Column]:
    """The text of the last header of a name, as Kafka's own clients give it, and why it is no text."""
    pairs: Any = pc.list_flatten(headers)
    names, values = pairs.field("name"), pairs.field("value")
    is_it = np.asarray(pc.equal(names, pa.scalar(name)).fill_null(False))
    last = np.full(len(headers), -1, np.int64)
    # Of several assignments to one place numpy keeps the last.
    last[np.asarray(pc.list_parent_indices(headers))[is_it]] = np.flatnonzero(is_it)
    places = pa.array(last, mask=last < 0)
    own = values.take(places)
    try:
        return own.cast(pa.string()), pa.nulls(len(headers), pa.string())
    except pa.ArrowInvalid:
        pass
    errors: list[str | None] = [None] * len(headers)
    texts: list[str | None] = [None] * len(headers)
    for row, value in enumerate(own.to_pylist()):
        try:
            texts[row] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            errors[row] = f"the header {name!r} is not UTF-8: {error.reason} at byte {error.start}"
    return pa.array(texts, pa.string()), pa.array(errors, pa.string())
