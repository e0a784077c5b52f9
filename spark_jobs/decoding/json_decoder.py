"""``Json``: payloads that are JSON become columns with the names and types of a DDL schema, or one VARIANT."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from spark_jobs.decoding.ddl import declared_types
from spark_jobs.decoding.decoders import RESCUED, UNNAMED, DecodedColumns, Headers, Key
from spark_jobs.decoding.json_decode import Careful, decode_json
from spark_jobs.decoding.json_documents import decode_block, decode_values
from spark_jobs.decoding.json_rescue import rescued
from spark_jobs.decoding.json_types import Column, check_json_type
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_switch, choose_fields


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
    ``lenient``, the default, takes into a STRING whatever is there, as it is written, and into a TIMESTAMP also names
    of zones and whole numbers of seconds. ``strict`` takes only what is written as the type is.

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
        if self.rescue and self.schema is not None:
            declared = schema.remove(schema.get_field_index(RESCUED))
            columns, errors = self._decoded(payloads, declared)
            return DecodedColumns([*columns, rescued(payloads, declared)], errors)
        return DecodedColumns(*self._decoded(payloads, schema))

    def _decoded(self, payloads: Column, schema: pa.Schema) -> tuple[list[Column], Column]:
        by_fields: Careful = partial(decode_block, is_lenient=self.mode is JsonMode.LENIENT)
        return decode_json(payloads, schema, decode_values if self.schema is None else by_fields)

    def rescuing(self) -> Json:
        """The same with ``rescue``; without a schema nothing is left out."""
        return replace(self, rescue=True) if self.schema is not None else self
