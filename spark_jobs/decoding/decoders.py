"""How payloads become columns: ``Json`` with a DDL schema, ``Text``, ``Raw``.

Decoding happens where the messages are read, a record batch at a time, into typed Arrow columns. A payload that
cannot be decoded is a dead letter with the reason; its neighbours are not affected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from spark_jobs.decoding.json_decode import Column, check_json_type, decode_json
from stream_consumers.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Columns of the decoded payloads, and per row why it could not be decoded (null: it could)."""

    columns: Sequence[Column]
    errors: Column


class Decoder(Protocol):
    """Turns payloads into columns; picklable, since executors use it."""

    @property
    def key(self) -> str | None:
        """The column for the message key (BINARY); ``None``: leave it out."""
        ...

    @property
    def headers(self) -> str | None:
        """The column for the headers (ARRAY<STRUCT<name, value>>); ``None``: leave them out."""
        ...

    def ddl(self) -> str:
        """The columns as a Spark DDL string."""
        ...

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that cannot be decoded into.

        Raises:
            SchemaMismatchError: naming the column and what there is instead.
        """
        ...

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """Decode binary ``payloads`` (null for a tombstone) into the columns of ``schema``."""
        ...


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
        key: a column for the message key, as BINARY.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>.

    Example:
        >>> Json("id BIGINT, user STRING").ddl()
        'id BIGINT, user STRING'
    """

    schema: str
    key: str | None = field(default=None, kw_only=True)
    headers: str | None = field(default=None, kw_only=True)

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


@dataclass(frozen=True, slots=True)
class Text:
    """Payloads are UTF-8 text, as one STRING column; a tombstone is null.

    Args:
        column: its name.
        key: a column for the message key, as BINARY.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>.
    """

    column: str = "payload"
    key: str | None = field(default=None, kw_only=True)
    headers: str | None = field(default=None, kw_only=True)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        return f"`{self.column}` STRING"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its one column always can."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        try:
            return DecodedColumns([payloads.cast(pa.string())], pa.nulls(len(payloads), pa.string()))
        except pa.ArrowInvalid:
            pass
        texts: list[str | None] = []
        errors: list[str | None] = []
        for payload in payloads.to_pylist():
            try:
                texts.append(None if payload is None else payload.decode())
                errors.append(None)
            except UnicodeDecodeError as error:
                texts.append(None)
                errors.append(f"not UTF-8: {error.reason} at byte {error.start}")
        return DecodedColumns([pa.array(texts, pa.string())], pa.array(errors, pa.string()))


@dataclass(frozen=True, slots=True)
class Raw:
    """Messages stay as they are: key, payload and headers; nothing is ever malformed.

    Args:
        column: the name of the payload's column, BINARY; null for a tombstone.
        key: a column for the message key, as BINARY; ``None`` leaves it out.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; ``None`` leaves them out.
    """

    column: str = "payload"
    key: str | None = field(default="key", kw_only=True)
    headers: str | None = field(default="headers", kw_only=True)

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        return f"`{self.column}` BINARY"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its one column always can."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        return DecodedColumns([payloads], pa.nulls(len(payloads), pa.string()))
