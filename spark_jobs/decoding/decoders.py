"""Decoders turn payloads into typed Arrow columns, a record batch at a time: the protocol, ``Text`` and ``Raw``.

A payload that cannot be decoded becomes a row of nulls with the reason, and later a dead letter. It never affects other
rows: :func:`decode_rows` decodes payloads one by one with a :class:`RowReader`, which each such format implements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeAlias, cast, runtime_checkable

import pyarrow as pa

from stream_consumers.errors import MissingDependencyError

Column: TypeAlias = "pa.Array[Any]"
RESCUED = "_rescued"
"""The STRING column with a JSON object of the fields that have no column of their own."""
UNNAMED = "payload"
"""The column of a value that has no name."""
MAX_REASON_LENGTH = 300
# Matches where a value may begin in the text of an error of Arrow.
_VALUE = re.compile(r":|(?= ['\"])")


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Columns of the decoded payloads.

    Args:
        columns: the columns of the decoder.
        errors: for each row the reason why it could not be decoded; null if it could.
        undeclared: for each row a JSON object of the fields that the schema does not name; ``None`` if no row has any.
    """

    columns: Sequence[Column]
    errors: Column
    undeclared: Column | None = None


class Decoder(Protocol):
    """Decodes payloads into columns. It must be picklable, because executors use it."""

    @property
    def key(self) -> Key:
        """The BINARY column for the message key, or a decoder of the key; ``None`` leaves it out."""
        ...

    @property
    def headers(self) -> Headers:
        """The column for all headers, or for each column the name of its header; ``None`` leaves them out."""
        ...

    def ddl(self) -> str:
        """Return the columns as Spark DDL."""
        ...

    def check(self, schema: pa.Schema) -> None:
        """Check that this decoder can decode into these columns.

        Raises:
            SchemaMismatchError: it cannot; the error names the column and the types that can be used.
        """
        ...

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """Decode binary ``payloads`` (null is a tombstone) into the columns of ``schema``; a VARIANT is JSON text."""
        ...


Key: TypeAlias = "str | Decoder | None"
"""A column for the undecoded message key, or a decoder of the key."""
Headers: TypeAlias = "str | Mapping[str, str] | None"
"""A column for all headers, or for each column the name of its header."""


@runtime_checkable
class StoredDecoder(Decoder, Protocol):
    """A decoder whose schema is stored elsewhere, as in a schema registry, and is looked up before a batch is read."""

    @property
    def is_resolved(self) -> bool:
        """Whether the schema has been looked up, so that the columns are known and executors can use it."""
        ...

    def resolved(self) -> Decoder:
        """Return the decoder with the current schema.

        Raises:
            StreamAssetsError: the schema cannot be looked up; a :class:`stream_consumers.errors.Transient` one if a
                retry may succeed.
        """
        ...


def is_resolved(decoder: Decoder) -> bool:
    """Return whether the columns of a decoder, and of the decoder of its key, are known without a look-up."""
    parts = [part for part in (decoder, decoder.key) if isinstance(part, StoredDecoder)]
    return all(part.is_resolved for part in parts)


def resolved(decoder: Decoder) -> Decoder:
    """Look up the schemas of a decoder once for a batch, so that all executors have the same columns.

    Raises:
        StreamAssetsError: see :meth:`StoredDecoder.resolved`.
    """
    found = decoder.resolved() if isinstance(decoder, StoredDecoder) else decoder
    if isinstance(found.key, StoredDecoder) and not found.key.is_resolved:
        return cast(Decoder, replace(cast(Any, found), key=found.key.resolved()))
    return found


def key_columns(decoder: Decoder) -> tuple[str, ...]:
    """Return the name of the column for the key, if there is one.

    A decoder of the key returns one column. If it decodes one value, this is the column, called ``key`` unless it has a
    name. Otherwise the column is a STRUCT called ``key``.

    Example:
        >>> key_columns(Text(key=Text("user"))), key_columns(Text(key=Raw())), key_columns(Raw(key=None))
        (('user',), ('key',), ())
    """
    if decoder.key is None or isinstance(decoder.key, str):
        return (decoder.key,) if decoder.key else ()
    name = getattr(decoder.key, "column", None)
    return ("key" if name in (None, UNNAMED) else str(name),)


def header_columns(decoder: Decoder) -> tuple[str, ...]:
    """Return the names of the columns for headers."""
    if isinstance(decoder.headers, Mapping):
        return tuple(decoder.headers)
    return (decoder.headers,) if decoder.headers else ()


def is_one_column(decoder: Decoder) -> bool:
    """Return whether a decoder has one column for the whole value, instead of one for each field."""
    return bool(getattr(decoder, "is_one_column", False))


def rows_where(decoder: Decoder) -> str | None:
    """The SQL condition of the decoded rows that are written, from an attribute of the decoder; ``None`` for all.

    The others are of messages that make no row, such as heartbeats. They count as messages that were read.

    Example:
        >>> rows_where(Text()) is None
        True
    """
    condition: str | None = getattr(decoder, "rows_where", None)
    return condition


@dataclass(frozen=True, slots=True)
class Text:
    """Decodes payloads of UTF-8 text into one STRING column; a tombstone is null.

    Args:
        column: the name of the column.
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
    """Keeps the bytes of key, payload and headers; no message is ever malformed.

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


class RowReader(Protocol):
    """Reads payloads of one schema, one by one."""

    def read(self, payload: bytes) -> Any:
        """Return the value of a payload, never ``None``; the text of an error is the reason of a dead letter."""
        ...

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """Make columns of values; ``None`` is a row of nulls. It raises an error if a value fits into no column."""
        ...


def decode_rows(reader: RowReader, payloads: Column) -> tuple[list[Column], Column]:
    """Decode payloads one by one.

    Args:
        reader: reads payloads of their schema.
        payloads: binary; null is a tombstone.

    Returns:
        The columns, and for each row the reason why it could not be decoded (null if it could).

    Raises:
        MemoryError: all rows together need too much memory, so that fewer rows have to be decoded at once.
    """
    read = reader.read
    values: list[Any] = []
    errors: list[str | None] = [None] * len(payloads)
    for row, payload in enumerate(payloads.to_pylist()):
        try:
            values.append(None if payload is None else read(payload))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - for damaged bytes a library may raise anything
            values.append(None)
            errors[row] = reason(error)
    columns = _built(reader.columns, values, errors, start=0)
    return columns, pa.array(errors, pa.string())


def _built(
    build: Callable[[Sequence[Any]], list[Column]], values: list[Any], errors: list[str | None], start: int
) -> list[Column]:
    """Build the columns of these values, with null and an error for each value that fails on its own."""
    try:
        return build(values)
    except MemoryError:
        raise
    except Exception as error:
        if len(values) == 1:
            # A row of nulls fails only because of the reader.
            if values[0] is None:
                raise
            errors[start] = reason(error)
            return build([None])
    half = len(values) // 2
    parts = [_built(build, values[:half], errors, start), _built(build, values[half:], errors, start + half)]
    return joined(parts)


class TextReader:
    """Reads UTF-8 into one STRING column."""

    def read(self, payload: bytes) -> str:
        """See :meth:`RowReader.read`."""
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`RowReader.columns`."""
        return [pa.array(values, pa.string())]


def decode_texts(payloads: Column) -> tuple[list[Column], Column]:
    """Decode UTF-8 into one STRING column; see :func:`decode_rows`."""
    try:
        return [payloads.cast(pa.string())], pa.nulls(len(payloads), pa.string())
    except pa.ArrowInvalid:
        return decode_rows(TextReader(), payloads)


def columns_of(built: Column, *, is_one: bool) -> list[Column]:
    """Return the column of whole values itself, or the columns of its fields, which are null where the value is."""
    if is_one:
        return [built]
    assert isinstance(built, pa.StructArray)
    return built.flatten()


def joined(parts: Sequence[Sequence[Column]]) -> list[Column]:
    """Concatenate the columns of several blocks."""
    return list(parts[0]) if len(parts) == 1 else [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def reason(error: Exception) -> str:
    """Return the text of an error in one line of bounded length, with values quoted that Arrow does not quote reliably.

    Example:
        >>> reason(EOFError()), reason(ValueError("field 'id' is not a number"))
        ('EOFError', "field 'id' is not a number")
        >>> print(reason(pa.ArrowInvalid("Failed to parse string: 'it's 7' as a scalar of type date")))
        Failed to parse string: "'it's 7' as a scalar of type date"
    """
    said = shortened(str(error)).removeprefix("JSON parse error: ").removesuffix(" in row 0")
    if isinstance(error, pa.ArrowException) and (found := _VALUE.search(said)):
        said = f"{said[: found.start()]}: {said[found.end() :].strip()!r}"
    return said or type(error).__name__


def shortened(text: str) -> str:
    r"""Return the first line of a text, of bounded length, with half a surrogate pair escaped, which no column accepts.

    Example:
        >>> shortened("no such file\nTraceback")
        'no such file'
    """
    said = text.partition("\n")[0].strip().encode(errors="backslashreplace").decode()
    return said if len(said) <= MAX_REASON_LENGTH else f"{said[:MAX_REASON_LENGTH]} …"


def import_library(module: str, *, extra: str) -> Any:
    """Import a library that only some decoders need.

    Args:
        module: the name of the module.
        extra: the extra of this package that installs it.

    Raises:
        MissingDependencyError: it is not installed.

    Example:
        >>> import_library("json", extra="avro").dumps([1])
        '[1]'
        >>> import_library("no_such_library", extra="avro")
        Traceback (most recent call last):
        stream_consumers.errors.MissingDependencyError: the Python package no_such_library is not installed. \
Install it here and where executors run: pip install 'stream-assets[avro]'.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise MissingDependencyError(
            f"the Python package {missing} is not installed",
            remedy=f"Install it here and where executors run: pip install 'stream-assets[{extra}]'.",
        ) from error
