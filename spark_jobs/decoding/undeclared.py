"""Fields of JSON that nobody has declared, found while the messages are read, so that columns can be made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.decoders import RESCUED, DecodedColumns, Decoder, Headers, Key
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_documents import read_object
from spark_jobs.decoding.json_inference import Seen
from spark_jobs.decoding.json_rescue import Path, rescued
from spark_jobs.decoding.json_types import Column

UNDECLARED = "fields that nobody has declared: "
"""So begins the error of a document that has some; behind it they are a JSON object, with NaN as it is written."""
# What is deeper may be too deep to be read again.
_MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Watching:
    """Decodes JSON, and tells documents with fields that the schema does not name by their errors.

    Fields with nothing in them (null, empty objects and arrays) are left out: they have no type yet.

    Args:
        decoder: with a schema.
        known: paths of fields that are to be left out, too, with what is in them.

    Example:
        >>> watching = Watching(Json("id BIGINT"))
        >>> documents = pa.array([b'{"id": 1}', b'{"id": 2, "color": "red", "empty": {}}'])
        >>> watching.decode(documents, pa.schema({"id": pa.int64()})).errors.to_pylist()
        [None, 'fields that nobody has declared: {"color": "red"}']
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
        declared = schema.remove(schema.get_field_index(RESCUED)) if self.decoder.rescue else schema
        found = rescued(payloads, declared, self._is_wanted, constants=True)
        if found.null_count == len(found):
            return decoded
        told = [None if fields is None else f"{UNDECLARED}{fields}" for fields in found.to_pylist()]
        return DecodedColumns(decoded.columns, pc.coalesce(decoded.errors, pa.array(told, pa.string())))

    def _is_wanted(self, path: Path, value: Any) -> bool:
        is_known = any(path[:length] in self.known for length in range(1, len(path) + 1))
        return not is_known and has_content(value)


def watching(decoder: Decoder) -> Watching | None:
    """The decoder that finds fields which nobody has declared; ``None`` if it leaves none out, or cannot tell."""
    return Watching(decoder) if isinstance(decoder, Json) and decoder.schema is not None else None


def has_content(value: Any) -> bool:
    """Whether there is anything in a parsed value but null, and empty objects and arrays; not below 100 levels.

    Example:
        >>> has_content({"a": [None, {}]}), has_content({"a": [0]})
        (False, True)
    """
    left = [(value, 0)]
    while left:
        one, level = left.pop()
        if isinstance(one, (dict, list)):
            parts = one.values() if isinstance(one, dict) else one
            left.extend((part, level + 1) for part in parts if level < _MOST_LEVELS)
        elif one is not None:
            return True
    return False


def seen_in(errors: Iterable[str]) -> Seen:
    """The values of undeclared fields.

    Args:
        errors: of :class:`Watching`; those of other kinds are passed over.
    """
    seen = Seen()
    for error in errors:
        if error.startswith(UNDECLARED):
            seen.add(read_object(error[len(UNDECLARED) :]))
    return seen
