"""Payloads that a library decodes one by one, into Arrow columns a block at a time.

What fails is a row of nulls with the reason, and never hurts its neighbours: a payload that cannot be read, and a value
that its column cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from spark_jobs.decoding.json_types import Column

LONGEST_REASON = 300
# Where a value may begin in what Arrow says.
_VALUE = re.compile(r":|(?= ['\"])")


class RowReader(Protocol):
    """Reads payloads of one schema."""

    def read(self, payload: bytes) -> Any:
        """The value of one payload, other than ``None``; whatever it raises is the reason of a dead letter."""
        ...

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """The columns of these values; ``None`` is a row of nulls. It raises if one of them fits into no column."""
        ...


def decode_rows(reader: RowReader, payloads: Column) -> tuple[list[Column], Column]:
    """Decode payloads one by one.

    Args:
        reader: of their schema.
        payloads: binary; null is a tombstone.

    Returns:
        The columns, and per row why it could not be decoded (null: it could).

    Raises:
        MemoryError: the rows take too much together, which is the fault of none of them: fewer are to be decoded.
    """
    read = reader.read
    values: list[Any] = []
    errors: list[str | None] = [None] * len(payloads)
    for row, payload in enumerate(payloads.to_pylist()):
        try:
            values.append(None if payload is None else read(payload))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged bytes make a library raise whatever comes
            values.append(None)
            errors[row] = reason(error)
    columns = _built(reader.columns, values, errors, start=0)
    return columns, pa.array(errors, pa.string())


def _built(
    build: Callable[[Sequence[Any]], list[Column]], values: list[Any], errors: list[str | None], start: int
) -> list[Column]:
    """The columns of these values, without those that are alone to blame for a failure."""
    try:
        return build(values)
    except MemoryError:
        raise
    except Exception as error:
        if len(values) == 1:
            # Nothing is to blame but the reader, then.
            if values[0] is None:
                raise
            errors[start] = reason(error)
            return build([None])
    half = len(values) // 2
    parts = [_built(build, values[:half], errors, start), _built(build, values[half:], errors, start + half)]
    return joined(parts)


class Texts:
    """Reads UTF-8 into one column of text."""

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
    """The text of UTF-8, and per row why it is none; see :func:`decode_rows`."""
    try:
        return [payloads.cast(pa.string())], pa.nulls(len(payloads), pa.string())
    except pa.ArrowInvalid:
        return decode_rows(Texts(), payloads)


def columns_of(built: Column, *, is_one: bool) -> list[Column]:
    """What was built of values: one column as it is, or those of its fields.

    Rows without a value are null in each field, too.
    """
    if is_one:
        return [built]
    assert isinstance(built, pa.StructArray)
    return built.flatten()


def joined(parts: Sequence[Sequence[Column]]) -> list[Column]:
    """The columns of several blocks, one behind the other."""
    return list(parts[0]) if len(parts) == 1 else [pa.concat_arrays(list(chunks)) for chunks in zip(*parts)]


def reason(error: Exception) -> str:
    """What an error says, in one line of bounded length, with values in quotes; Arrow escapes none of its own.

    Example:
        >>> reason(EOFError()), reason(ValueError("field 'id' is no number"))
        ('EOFError', "field 'id' is no number")
        >>> print(reason(pa.ArrowInvalid("Failed to parse string: 'it's 7' as a scalar of type date")))
        Failed to parse string: "'it's 7' as a scalar of type date"
    """
    said = shortened(str(error)).removeprefix("JSON parse error: ").removesuffix(" in row 0")
    if isinstance(error, pa.ArrowException) and (found := _VALUE.search(said)):
        said = f"{said[: found.start()]}: {said[found.end() :].strip()!r}"
    return said or type(error).__name__


def shortened(text: str) -> str:
    r"""The first line of a text, of bounded length; half a surrogate pair is escaped, since no column takes it.

    Example:
        >>> shortened("no such file\nTraceback")
        'no such file'
    """
    said = text.partition("\n")[0].strip().encode(errors="backslashreplace").decode()
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]} …"
