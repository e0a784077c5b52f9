"""``Json``: payloads that are JSON objects become columns with the names and types of a DDL schema."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from spark_jobs.decoding.decoders import DecodedColumns, Headers, Key
from spark_jobs.decoding.json_decode import Column, check_json_type, decode_json
from stream_consumers.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class Json:
    """Payloads are JSON objects; the DDL schema names and types the columns.

    Fields that the schema does not name are ignored, missing ones and ``null`` become null. A value that does not
    convert without loss, a missing ``NOT NULL`` field, or something that is no object makes a dead letter.
    Text without a zone is read as UTC; dates and times are of the years 1 to 9999. Numbers with more decimal places
    than a DECIMAL has are rounded half up; they may have up to 38 digits, as a number or as text. FLOAT and DOUBLE take
    the nearest number that they have, and none that is beyond their largest. A tombstone (a message without a payload)
    is a row of nulls.

    Args:
        schema: Spark DDL of BIGINT, INT, SMALLINT, TINYINT, DOUBLE, FLOAT, DECIMAL, STRING, BOOLEAN, DATE, TIMESTAMP,
            and of STRUCT and ARRAY of them.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Example:
        >>> Json("id BIGINT, user STRING").ddl()
        'id BIGINT, user STRING'
    """

    schema: str
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.schema, str) or not self.schema.strip():
            raise InvalidOptionError(
                f"schema={self.schema!r} has no columns, so that nothing of a message would be kept",
                remedy="Write it like 'id BIGINT, user STRING'; for payloads as they are, take Raw() or Text().",
            )

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        return self.schema

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`."""
        for column in schema:
            check_json_type(column.name, column.type)

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        self.check(schema)
        columns, errors = decode_json(payloads, schema)
        return DecodedColumns(columns, errors)
