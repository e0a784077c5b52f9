"""Counts which kinds of values JSON fields have over many documents, to choose types for their columns."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from spark_jobs.decoding.ddl import MAX_COLUMN_NAME_LENGTH, is_safe_name
from spark_jobs.decoding.json_values import Constant, Integer, Number, read_day, read_moment

MAX_LEVELS = 20
"""Deeper objects and arrays are kept as JSON, because Spark Connect accepts types of about 30 levels."""
MAX_COUNTED_LEVELS = 100
"""Values on deeper levels are not counted, so that no payload exceeds the recursion limit of the driver."""
MAX_FIELD_NAMES = 200
"""An object with more different names becomes a MAP, because so many names are ids and not columns."""
NEEDS_MAPPING = re.compile(r"[ ,;{}()\n\t=]")
"""Characters in names that Delta accepts only with ``delta.columnMapping.mode=name``."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}.*")
_NO_TYPES: Mapping[str, pa.DataType] = {}


def is_name(name: str) -> bool:
    r"""Return whether a column may have this name of a field: not too long, printable, and safe in Spark.

    Example:
        >>> is_name("straße 😀"), is_name(""), is_name("a\0b"), is_name('a"b')
        (True, False, False, False)
    """
    return 0 < len(name) <= MAX_COLUMN_NAME_LENGTH and name.isprintable() and is_safe_name(name)


class FieldStats:
    """The kinds of values that a field had, and recursively those of its parts.

    Attributes:
        kinds: the number of values of each kind.
        fields: the fields of its objects by name.
        values: the values of all fields together, instead of ``fields``, if its objects are maps or have more than
            :data:`MAX_FIELD_NAMES` names.
        items: the items of its arrays.
        digits: the number of digits of its longest whole number.
        is_wide: whether one of its whole numbers has more than 64 bits.
    """

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.fields: dict[str, FieldStats] = {}
        self.values: FieldStats | None = None
        self.items: FieldStats | None = None
        self.digits = 0
        self.is_wide = False
        # The types of the declared fields.
        self._types: Mapping[str, pa.DataType] = _NO_TYPES

    @property
    def count(self) -> int:
        """The number of values that are not null."""
        return self.kinds.total() - self.kinds["null"]

    def has_content(self) -> bool:
        """Return whether any value was more than null, an empty object or an empty array."""
        left = [self]
        while left:
            seen = left.pop()
            if set(seen.kinds) - {"null", "object", "array"}:
                return True
            left += seen._parts()
        return False

    def size(self) -> int:
        """Return the number of fields at all levels."""
        left, count = [self], 0
        while left:
            parts = left.pop()._parts()
            count += len(parts)
            left += parts
        return count

    def _parts(self) -> list[FieldStats]:
        return [*self.fields.values(), *(part for part in (self.values, self.items) if part is not None)]

    def only(self, name: str) -> FieldStats:
        """Return a copy with only one of its fields."""
        seen = FieldStats()
        seen.fields = {name: self.fields[name]}
        return seen

    def add(self, value: Any, declared: pa.DataType | None = None) -> None:
        """Count a value that :func:`spark_jobs.decoding.json_documents.read_object` has parsed.

        Args:
            value: the value of the field.
            declared: its declared type, if any; the names of a declared STRUCT never make it a map.
        """
        left: list[tuple[int, tuple[FieldStats, Any, pa.DataType | None]]] = [(0, (self, value, declared))]
        while left:
            level, (seen, one, kind) = left.pop()
            parts = seen._note(one, kind)
            left.extend((level + 1, part) for part in parts if level < MAX_COUNTED_LEVELS)

    def _note(self, value: Any, declared: pa.DataType | None) -> list[tuple[FieldStats, Any, pa.DataType | None]]:
        """Count a value, and return its parts."""
        kind = _kind_of(value)
        self.kinds[kind] += 1
        if kind == "whole number":
            self.digits = max(self.digits, len(value.lstrip("-")))
            self.is_wide = self.is_wide or len(value) > 20 or not -(2**63) <= int(value) < 2**63
        elif kind == "object":
            return self._note_object(value, declared)
        elif kind == "array":
            self.items = self.items or FieldStats()
            item = declared.value_type if isinstance(declared, pa.ListType) else None
            return [(self.items, inner, item) for inner in value]
        return []

    def _note_object(
        self, value: Mapping[str, Any], declared: pa.DataType | None
    ) -> list[tuple[FieldStats, Any, pa.DataType | None]]:
        if self.values is None and self._is_map(value, declared):
            self.merge_fields()
        if self.values is not None:
            item = declared.item_type if isinstance(declared, pa.MapType) else None
            return [(self.values, inner, item) for inner in value.values()]
        if isinstance(declared, pa.StructType) and not self._types:
            self._types = {column.name: column.type for column in declared}
        types = self._types
        return [(self.fields.setdefault(n, FieldStats()), inner, types.get(n)) for n, inner in value.items()][::-1]

    def _is_map(self, value: Mapping[str, Any], declared: pa.DataType | None) -> bool:
        if isinstance(declared, pa.StructType | pa.MapType):
            return isinstance(declared, pa.MapType)
        return len(self.fields) + len(value) > MAX_FIELD_NAMES and len({*self.fields, *value}) > MAX_FIELD_NAMES

    def merge_fields(self) -> None:
        """Merge the values of all fields into ``values``."""
        self.values = merge([*self.fields.values(), *([self.values] if self.values is not None else [])])
        self.fields = {}


def _kind_of(value: Any) -> str:
    kinds = {type(None): "null", bool: "true or false", Integer: "whole number", dict: "object", list: "array"}
    if (kind := kinds.get(type(value))) is not None:
        return kind
    if isinstance(value, Number):
        return "text" if isinstance(value, Constant) or math.isinf(float(value)) else "number"
    for pattern, read, name in ((_DAY, read_day, "date"), (_TIME, read_moment, "time")):
        if pattern.fullmatch(value):
            try:
                read(value)
            except (ValueError, OverflowError):
                return "text"
            return name
    return "text"


def merge(parts: Iterable[FieldStats]) -> FieldStats:
    """Merge the values of several fields; the parts must not be used afterwards."""
    whole = FieldStats()
    for part in parts:
        whole.kinds += part.kinds
        whole.digits = max(whole.digits, part.digits)
        whole.is_wide = whole.is_wide or part.is_wide
        for name, inner in part.fields.items():
            whole.fields[name] = merge([whole.fields[name], inner]) if name in whole.fields else inner
        whole.values = _merge_optional(whole.values, part.values)
        whole.items = _merge_optional(whole.items, part.items)
        if whole.values is not None or len(whole.fields) > MAX_FIELD_NAMES:
            whole.merge_fields()
    return whole


def _merge_optional(one: FieldStats | None, other: FieldStats | None) -> FieldStats | None:
    return merge([one, other]) if one is not None and other is not None else one or other
