"""How payloads become columns: what a decoder is, and the plain ones, ``Text`` and ``Raw``.

Decoding happens where the messages are read, a record batch at a time, into typed Arrow columns. A payload that
cannot be decoded is a dead letter with the reason; its neighbours are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias, cast, runtime_checkable

import pyarrow as pa

from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import decode_texts

RESCUED = "_rescued"
"""The column, of text, for a JSON object of what has no column of its own."""
UNNAMED = "payload"
"""The column of a value that has no name of its own."""


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Columns of the decoded payloads.

    Args:
        columns: those of the decoder.
        errors: per row why it could not be decoded; null where it could.
        undeclared: per row a JSON object of the fields that the schema does not name; ``None`` if no row has any.
    """

    columns: Sequence[Column]
    errors: Column
    undeclared: Column | None = None


class Decoder(Protocol):
    """Turns payloads into columns; picklable, since executors use it."""

    @property
    def key(self) -> Key:
        """The column for the message key (BINARY), or the decoder of the key; ``None``: leave it out."""
        ...

    @property
    def headers(self) -> Headers:
        """The column for the headers (ARRAY<STRUCT<name, value>>), or columns by names; ``None``: leave them out."""
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
        """Decode binary ``payloads`` (null for a tombstone) into the columns of ``schema``; a VARIANT is JSON text."""
        ...


Key: TypeAlias = "str | Decoder | None"
"""A column for the message key as it is, or a decoder of it."""
Headers: TypeAlias = "str | Mapping[str, str] | None"
"""A column for all headers, or for each column the name of its header."""


@runtime_checkable
class StoredDecoder(Decoder, Protocol):
    """A decoder whose schema is somewhere else, as in a schema registry, and is looked up before a batch is read."""

    @property
    def is_resolved(self) -> bool:
        """Whether nothing is left to look up: its columns are known, and executors can use it."""
        ...

    def resolved(self) -> Decoder:
        """The decoder with what is there now.

        Raises:
            StreamAssetsError: it cannot be looked up; :class:`stream_consumers.errors.Transient` if that may be gone
                soon.
        """
        ...


def is_resolved(decoder: Decoder) -> bool:
    """Whether the columns of a decoder, and of that of its key, are known without a look elsewhere."""
    parts = [part for part in (decoder, decoder.key) if isinstance(part, StoredDecoder)]
    return all(part.is_resolved for part in parts)


def resolved(decoder: Decoder) -> Decoder:
    """The decoder for a batch: all executors have the same columns.

    Raises:
        StreamAssetsError: see :meth:`StoredDecoder.resolved`.
    """
    found = decoder.resolved() if isinstance(decoder, StoredDecoder) else decoder
    if isinstance(found.key, StoredDecoder) and not found.key.is_resolved:
        return cast(Decoder, replace(cast(Any, found), key=found.key.resolved()))
    return found


def key_columns(decoder: Decoder) -> tuple[str, ...]:
    """The name of the column for the key, if there is one.

    A decoder of the key makes one column: its own if it has but one, called ``key`` unless it was given a name,
    otherwise a STRUCT called ``key``.

    Example:
        >>> key_columns(Text(key=Text("user"))), key_columns(Text(key=Raw())), key_columns(Raw(key=None))
        (('user',), ('key',), ())
    """
    if decoder.key is None or isinstance(decoder.key, str):
        return (decoder.key,) if decoder.key else ()
    name = getattr(decoder.key, "column", None)
    return ("key" if name in (None, UNNAMED) else str(name),)


def header_columns(decoder: Decoder) -> tuple[str, ...]:
    """The names of the columns for headers."""
    if isinstance(decoder.headers, Mapping):
        return tuple(decoder.headers)
    return (decoder.headers,) if decoder.headers else ()


def is_one_column(decoder: Decoder) -> bool:
    """Whether what it decodes is one value, and not one a field."""
    return bool(getattr(decoder, "is_one_column", False))


@dataclass(frozen=True, slots=True)
class Text:
    """Payloads are UTF-8 text, as one STRING column; a tombstone is null.

    Args:
        column: its name.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.
    """

    column: str = UNNAMED
    key: Key = field(default=None, kw_only=True)
    headers: Headers = field(default=None, kw_only=True)
    is_one_column: ClassVar[bool] = True

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        return f"`{self.column}` STRING"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its one column always can."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        return DecodedColumns(*decode_texts(payloads))


@dataclass(frozen=True, slots=True)
class Raw:
    """Messages stay as they are: key, payload and headers; nothing is ever malformed.

    Args:
        column: the name of the payload's column, BINARY; null for a tombstone.
        key: a column for the message key, as BINARY; or a decoder of it; ``None`` leaves it out.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header; ``None`` leaves them out.
    """

    column: str = UNNAMED
    key: Key = field(default="key", kw_only=True)
    headers: Headers = field(default="headers", kw_only=True)
    is_one_column: ClassVar[bool] = True

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`."""
        return f"`{self.column}` BINARY"

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its one column always can."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        return DecodedColumns([payloads], pa.nulls(len(payloads), pa.string()))
