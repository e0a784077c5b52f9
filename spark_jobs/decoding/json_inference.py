"""A schema for JSON payloads, made of a sample of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from spark_jobs.decoding.ddl import name_ddl
from spark_jobs.decoding.isolation import decode_isolated
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_documents import object_text, read_object, why
from spark_jobs.decoding.json_values import Constant, Integer, Number
from spark_jobs.decoding.times import read_day, read_moment
from stream_consumers.wording import counted

MOST_LEVELS = 20
"""What is in more objects and arrays than these is a VARIANT: Spark Connect takes types of some 30 levels."""
MOST_NAMES = 200
"""An object with more different names is a MAP: names like these are ids, and not columns."""
NO_DELTA_NAME = re.compile(r"[ ,;{}()\n\t=]")
"""What a name has in it that Delta takes with ``delta.columnMapping.mode=name`` only."""
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}.*")
# A DOUBLE holds each whole number of so few digits.
_SURELY_DOUBLE = 15
_NUMBERS, _TIMES, _PARTS = {"whole number", "number"}, {"date", "time"}, {"object", "array"}


@dataclass(frozen=True, slots=True)
class InferredField:
    """A column.

    Args:
        name: of the field.
        ddl: its type.
        messages: how many messages have it, with a value other than null.
        remarks: what does not agree about it.
    """

    name: str
    ddl: str
    messages: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InferredSchema:
    """What a sample of payloads tells.

    Args:
        messages: how many payloads there were, without tombstones.
        fields: the columns, in the order in which they came up.
        refused: why payloads are no objects, and how many of them.
        remarks: what is no column, and why.
    """

    messages: int
    fields: Sequence[InferredField]
    refused: Mapping[str, int] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def ddl(self) -> str:
        """The schema for ``Json``."""
        return ", ".join(f"{name_ddl(field.name)} {field.ddl}" for field in self.fields)


def infer(payloads: Iterable[bytes | None], *, taken: Collection[str] = ()) -> InferredSchema:
    """Find the columns of payloads that are JSON objects.

    Whole numbers are BIGINT, other ones DOUBLE; ISO 8601 is TIMESTAMP and DATE. What is not of one type is STRING, or
    VARIANT if objects or arrays are among it.

    Args:
        payloads: ``None`` is a tombstone, and tells nothing.
        taken: names that no column may have.

    Example:
        >>> found = infer([b'{"id": 1, "at": "2024-02-29T12:00:00Z"}', b'{"id": 2.5, "tags": ["a"]}'])
        >>> found.ddl()
        'id DOUBLE, at TIMESTAMP, tags ARRAY<STRING>'
        >>> [column.messages for column in found.fields]
        [2, 1, 1]
    """
    seen, refused, messages = Seen(), Counter[str](), 0
    for payload in payloads:
        if payload is None:
            continue
        messages += 1
        try:
            seen.add(read_object(object_text(payload)))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it is told
            refused[why(error)] += 1
    remarks: list[str] = []
    known = _distinct(seen.fields, "", remarks)
    fields = []
    for name, inner in known.items():
        if name.lower() in {one.lower() for one in taken}:
            remarks.append(f"{name!r} is a name of stream-assets")
            continue
        own: list[str] = []
        kind = _type_of(inner, name, 1, own)
        fields.append(InferredField(name, kind, inner.count, tuple(own)))
    return InferredSchema(messages, fields, refused, remarks)


def fitted(
    found: InferredSchema, payloads: Sequence[bytes | None], known: Mapping[str, tuple[pa.Field[Any], str]]
) -> InferredSchema:
    """The schema with the types of a table, where the payloads fit them.

    Args:
        found: what :func:`infer` made of the payloads.
        payloads: the same.
        known: by its name in lower case, each column of the table, and its type as DDL.
    """
    fields = []
    for one in found.fields:
        column, kind = known.get(one.name.lower(), (None, ""))
        if column is None:
            fields.append(replace(one, remarks=(*one.remarks, "not in the table")))
            continue
        decode = _Errors(
            Json(f"{name_ddl(one.name)} {kind}"), pa.schema([column.with_name(one.name).with_nullable(True)])
        )
        block = pa.record_batch({"payload": pa.array(payloads, pa.binary())})
        parts = [part.column("error") for part in decode_isolated([block], decode, _error)]
        misfits = sum(len(part) - part.null_count for part in parts) - sum(found.refused.values())
        if misfits:
            told = f"{kind} in the table, which {misfits} of the messages do not fit"
            fields.append(replace(one, remarks=(*one.remarks, told)))
        else:
            fields.append(replace(one, ddl=kind, remarks=()))
    there = {one.name.lower() for one in found.fields}
    missing = [
        f"{column.name!r} of the table is in no message" for name, (column, _) in known.items() if name not in there
    ]
    return replace(found, fields=fields, remarks=[*found.remarks, *missing])


@dataclass(frozen=True, slots=True)
class _Errors:
    """Why payloads cannot be decoded."""

    decoder: Json
    schema: pa.Schema

    def __call__(self, block: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"error": self.decoder.decode(block.column("payload"), self.schema).errors})


def _error(block: pa.RecordBatch, reason: str) -> pa.RecordBatch:
    return pa.record_batch({"error": [reason]})


def is_name(name: str) -> bool:
    r"""Whether a column may have this name: some text that can be shown, and that readers of Arrow take.

    Example:
        >>> is_name("straße 😀"), is_name(""), is_name("a\0b"), is_name("\ud800")
        (True, False, False, False)
    """
    return bool(name) and name.isprintable()


class Seen:
    """The values that a field had, and those in them.

    Attributes:
        kinds: how often it had a value of each kind.
        fields: of its objects.
        items: of its arrays.
        digits: of its longest whole number.
        is_wide: whether a whole number is beyond 64 bits.
        text: the first one that is no time.
    """

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.fields: dict[str, Seen] = {}
        self.items: Seen | None = None
        self.digits = 0
        self.is_wide = False
        self.text = ""

    @property
    def count(self) -> int:
        """How many of them are not null."""
        return self.kinds.total() - self.kinds["null"]

    def has_content(self) -> bool:
        """Whether there was anything but null, and empty objects and arrays."""
        left = [self]
        while left:
            seen = left.pop()
            if set(seen.kinds) - {"null", *_PARTS}:
                return True
            left += [*seen.fields.values(), *([seen.items] if seen.items is not None else [])]
        return False

    def only(self, name: str) -> Seen:
        """The same with one of its fields."""
        seen = Seen()
        seen.fields = {name: self.fields[name]}
        return seen

    def add(self, value: Any) -> None:
        """Look at a value as :func:`spark_jobs.decoding.json_documents.read_object` reads it."""
        left: list[tuple[Seen, Any]] = [(self, value)]
        while left:
            seen, one = left.pop()
            left.extend(seen._note(one))

    def _note(self, value: Any) -> list[tuple[Seen, Any]]:
        """Count a value, and say what is in it."""
        kind = _kind_of(value)
        self.kinds[kind] += 1
        if kind == "whole number":
            self.digits = max(self.digits, len(value.lstrip("-")))
            self.is_wide = self.is_wide or len(value) > 20 or not -(2**63) <= int(value) < 2**63
        elif kind == "text":
            self.text = self.text or value
        elif kind == "object":
            return [(self.fields.setdefault(name, Seen()), inner) for name, inner in value.items()][::-1]
        elif kind == "array":
            self.items = self.items or Seen()
            return [(self.items, inner) for inner in value]
        return []


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


def _type_of(seen: Seen, path: str, level: int, remarks: list[str]) -> str:
    kinds = set(seen.kinds) - {"null"}
    if level > MOST_LEVELS:
        remarks.append(f"{path} is deeper than {MOST_LEVELS} levels")
        return "VARIANT"
    if not kinds:
        remarks.append(f"{path} is always null")
        return "STRING"
    if len(kinds) == 1 and kinds <= _PARTS:
        return _type_of_parts(seen, path, level, remarks)
    if kinds == {"whole number"} and seen.is_wide:
        remarks.append(f"{path} has numbers of {seen.digits} digits")
        return "DECIMAL(38,0)" if seen.digits <= 38 else "STRING"
    if kinds == _NUMBERS and seen.digits > _SURELY_DOUBLE:
        remarks.append(f"{path} has whole numbers of {seen.digits} digits beside others")
        return "STRING"
    found = next((kind for kind, among in _SCALARS if kinds <= among), None)
    if found is None:
        found = "VARIANT" if kinds & _PARTS else "STRING"
        remarks.append(f"{path} is {_told(seen)}")
    elif found == "STRING" and kinds & _TIMES:
        remarks.append(f"{path} is {_told(seen)}, like {seen.text[:40]!r}")
    return found


_SCALARS = (
    ("BIGINT", {"whole number"}),
    ("DOUBLE", _NUMBERS),
    ("BOOLEAN", {"true or false"}),
    ("DATE", {"date"}),
    ("TIMESTAMP", _TIMES),
    ("STRING", {"text", *_TIMES}),
)


def _type_of_parts(seen: Seen, path: str, level: int, remarks: list[str]) -> str:
    if seen.items is not None:
        if not seen.items.kinds:
            remarks.append(f"{path} is always empty")
            return "ARRAY<STRING>"
        return f"ARRAY<{_type_of(seen.items, f'{path}[]', level + 1, remarks)}>"
    if not seen.fields:
        remarks.append(f"{path} is always empty")
        return "VARIANT"
    if len(seen.fields) > MOST_NAMES:
        remarks.append(f"{path} has {len(seen.fields)} different names, which look like ids")
        return f"MAP<STRING, {_type_of(together(seen.fields.values()), f'{path}{{}}', level + 1, remarks)}>"
    known = _distinct(seen.fields, f"{path}.", remarks)
    inner = [f"{name_ddl(n)}: {_type_of(one, f'{path}.{n}', level + 1, remarks)}" for n, one in known.items()]
    return f"STRUCT<{', '.join(inner)}>"


def _told(seen: Seen) -> str:
    return " and ".join(
        f"{kind} {counted(count, 'time')}" for kind, count in seen.kinds.most_common() if kind != "null"
    )


def together(parts: Iterable[Seen]) -> Seen:
    """All of these values as those of one field; the parts are used up."""
    whole = Seen()
    for part in parts:
        whole.kinds += part.kinds
        whole.digits, whole.text = max(whole.digits, part.digits), whole.text or part.text
        whole.is_wide = whole.is_wide or part.is_wide
        for name, inner in part.fields.items():
            whole.fields[name] = together([whole.fields[name], inner]) if name in whole.fields else inner
        if part.items is not None:
            whole.items = together([whole.items, part.items]) if whole.items is not None else part.items
    return whole


def _distinct(fields: Mapping[str, Seen], prefix: str, remarks: list[str]) -> dict[str, Seen]:
    """The fields that can be columns: Spark does not tell names apart by upper and lower case."""
    best: dict[str, str] = {}
    for name in fields:
        other = best.setdefault(name.lower(), name)
        if other != name:
            less = min((other, name), key=lambda one: fields[one].count)
            best[name.lower()] = name if less == other else other
            remarks.append(f"{prefix}{less!r} differs from {best[name.lower()]!r} only in upper and lower case")
    kept = {name: fields[name] for name in fields if best[name.lower()] == name and is_name(name)}
    remarks.extend(f"{prefix}{name!a} is no name of a column" for name in fields if not is_name(name))
    remarks.extend(
        f"{prefix}{name!r}: Delta takes this name with delta.columnMapping.mode=name only"
        for name in kept
        if NO_DELTA_NAME.search(name)
    )
    return kept
