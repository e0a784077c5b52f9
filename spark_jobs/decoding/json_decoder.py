"""``Json``: payloads that are JSON become columns with the names and types of a DDL schema, or one VARIANT."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.ddl import declared_types
from spark_jobs.decoding.decoders import RESCUED, UNNAMED, DecodedColumns, Decoder, Headers, Key
from spark_jobs.decoding.json_documents import decode_json, decode_values
from spark_jobs.decoding.json_rescue import Path, rescued
from spark_jobs.decoding.json_types import Column, check_json_type
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch, choose_fields

_UNDECLARED = "it has fields that nobody has declared"


class JsonMode(str, enum.Enum):
    """Which values of JSON a column takes.

    ``lenient``: also those that are written in another way than the type is. ``strict``: only those written so.

    Example:
        >>> JsonMode("strict") is JsonMode.STRICT
        True
    """

    LENIENT = "lenient"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Json:
    """Payloads are JSON objects; the DDL schema names and types the columns.

    Fields that the schema does not name are ignored, missing ones and ``null`` become null. A value that does not fit
    its column, a missing ``NOT NULL`` field, or something that is no object makes a dead letter. Text without a zone is
    read as UTC; dates and times are of the years 1 to 9999. A tombstone (a message without a payload) is a row of
    nulls.

    A column gets the value that the message says, in each ``mode``: nothing is rounded or cut to fit, except that
    DOUBLE and FLOAT have the nearest number to one with a point or an exponent. The table is in docs/payloads.md.
    ``lenient``, the default, takes into a STRING whatever is there, with numbers as they are written, and into a
    TIMESTAMP also names of zones and whole numbers of seconds. ``strict`` takes only what is written as the type is.

    Args:
        schema: Spark DDL of BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BINARY (of base64),
            BOOLEAN, DATE, TIMESTAMP, VARIANT, and of STRUCT, ARRAY and MAP of them. Without one there is one column, a
            VARIANT of the whole payload, which then may be any JSON.
        mode: a :class:`JsonMode`, or its name.
        column: the name of the VARIANT where there is no schema.
        rescue: put the fields that the schema does not name into a column ``_rescued``, as a JSON object; they are
            ignored by default. ``schema_changes="rescue"`` of an asset does so, too.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        SchemaMismatchError: the schema is not DDL; it names what is wrong, and where.
        InvalidOptionError: the schema has no columns, or an INTERVAL.

    Example:
        >>> Json("id BIGINT, user STRING").ddl()
        'id BIGINT, user STRING'
        >>> Json().ddl()
        '`payload` VARIANT'
    """

    schema: str | None = None
    mode: JsonMode | str = field(default=JsonMode.LENIENT, kw_only=True)
    column: str = field(default=UNNAMED, kw_only=True)
    rescue: bool = field(default=False, kw_only=True)
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        choose_fields(self, mode=JsonMode)
        check_switch("rescue", self.rescue)
        if self.schema is None:
            return
        if not isinstance(self.schema, str) or not self.schema.strip():
            raise InvalidOptionError(
                f"schema={self.schema!r} has no columns, so that nothing of a message would be kept",
                remedy="Write it like 'id BIGINT, user STRING'; leave it out for one VARIANT of the whole payload; or "
                "take Raw() or Text() for payloads as they are.",
            )
        if "interval" in declared_types(self.schema):
            raise InvalidOptionError(
                f"the schema {self.schema!r} has the type INTERVAL, but Delta tables have no intervals",
                remedy="Make it STRING, and compute with CAST(… AS INTERVAL …) in the transform.",
            )

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        if self.schema is not None:
            return f"{self.schema}, {RESCUED} STRING" if self.rescue else self.schema
        escaped = self.column.replace("`", "``")
        return f"`{escaped}` VARIANT"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        for column in schema:
            check_json_type(column.name, column.type)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        self.check(schema)
        if self.schema is None:
            return DecodedColumns(*decode_values(payloads))
        declared = self.declared(schema)
        columns, errors = decode_json(payloads, declared, is_lenient=self.mode is JsonMode.LENIENT)
        if not self.rescue:
            return DecodedColumns(columns, errors)
        found = rescued(payloads, declared)
        return DecodedColumns([*columns, found.fields], pc.coalesce(errors, found.errors))

    def declared(self, schema: pa.Schema) -> pa.Schema:
        """The columns of ``schema`` that the DDL names."""
        return schema.remove(schema.get_field_index(RESCUED)) if self.rescue else schema


def rescuing(decoder: Decoder) -> Decoder:
    """The decoder with ``rescue``, if it is one that leaves fields out."""
    return replace(decoder, rescue=True) if isinstance(decoder, Json) and decoder.schema is not None else decoder


@dataclass(frozen=True, slots=True)
class Watching:
    """Decodes JSON, and finds documents with fields that the schema does not name; they have an error, too.

    Fields with nothing in them (null, empty objects and arrays) are left out: they have no type yet.

    Args:
        decoder: with a schema.
        known: paths of fields that are to be left out, too, with what is in them.

    Example:
        >>> watching = Watching(Json("id BIGINT"))
        >>> documents = pa.array([b'{"id": 1}', b'{"id": 2, "color": "red", "empty": {}}'])
        >>> watching.decode(documents, pa.schema({"id": pa.int64()})).undeclared.to_pylist()
        [None, '{"color": "red"}']
    """

    decoder: Json
    known: frozenset[Path] = frozenset()

    @property
    def key(self) -> Key:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.key

    @property
    def headers(self) -> Headers:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.headers

    def ddl(self) -> str:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        return self.decoder.ddl()

    def check(self, schema: pa.Schema) -> None:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        self.decoder.check(schema)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :class:`spark_jobs.decoding.decoders.Decoder`."""
        decoded = self.decoder.decode(payloads, schema)
        fields, twice = rescued(payloads, self.decoder.declared(schema), self.known)
        # Until they have columns, such a document must not be written.
        unwritten = pc.if_else(fields.is_valid(), pa.scalar(_UNDECLARED), pa.scalar(None, pa.string()))
        undeclared = None if fields.null_count == len(fields) else fields
        return DecodedColumns(decoded.columns, pc.coalesce(decoded.errors, twice, unwritten), undeclared)


def watching(decoder: Decoder) -> Watching | None:
    """The decoder that finds fields which are not declared; ``None`` if it leaves none out, or cannot tell."""
    return Watching(decoder) if isinstance(decoder, Json) and decoder.schema is not None else None
