"""The SQL expressions in the metadata of a Delta table: Spark evaluates them whenever rows are written.

Who can write the table's log chooses their text. Delta lets a user define no subquery and no call of Java in them, but
does not look again at what a log has, and Spark would run both with the rights of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stream_consumers.errors import UnsupportedError
from stream_consumers.readable import printable, shortened

CHECK = "delta.constraints."
GENERATED = "delta.generationExpression"
DEFAULT = "CURRENT_DEFAULT"
_INVARIANT = "delta.invariants"
_KEYS = (GENERATED, DEFAULT, "EXISTS_DEFAULT", _INVARIANT)
_WORDS = r"(?:REFLECT|JAVA_METHOD|\b(?:IDENTIFIER|FROM|TABLE|WITH|MAP|REDUCE)\b)"
_COMMENT = r"(?:/\*|--)"
# Calls of Java, IDENTIFIER, which makes a name of a text, what a query begins with, and a script; a comment may hide
# each of them. Words in a text are refused as well: to tell them apart needs all of Spark's lexer.
_UNSAFE = re.compile(
    r"(?:REFLECT|JAVA_METHOD|\bIDENTIFIER)[^\w(]*\(|\bSELECT\b|\b(?:MAP|REDUCE)\b.*\bUSING\b"
    r"|(?:^|\()[^\w`'\"(]*(?:FROM|TABLE|WITH)\b"
    rf"|{_COMMENT}.*{_WORDS}|{_WORDS}.*{_COMMENT}",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SHOWN = 200


def check_expression(text: str, *, where: str) -> None:
    """Refuse an expression that may read other tables or files, or run code.

    Args:
        text: SQL.
        where: it stands, for the error.

    Raises:
        UnsupportedError: it has a subquery, a call of Java, a name made of a text, or a comment beside one of them.

    Example:
        >>> check_expression("amount > 0 AND extract(YEAR FROM at) > 1999", where="the constraint x")
        >>> check_expression("reflect('java.lang.Runtime', 'getRuntime') IS NULL", where="the constraint x")
        Traceback (most recent call last):
            ...
        stream_consumers.errors.UnsupportedError: the constraint x may run code or read other tables: ...
    """
    # The lexer of Spark compares in upper case, and finds functions in lower case.
    if _UNSAFE.search(text.upper()) or _UNSAFE.search(text.lower().upper()):
        raise UnsupportedError(
            f"{where} may run code or read other tables: {shortened(printable(text), _SHOWN)}",
            remedy="It has a subquery, reflect(), java_method(), IDENTIFIER or a comment. If it is not of an attacker, "
            "write it without these.",
        )


def check_expressions(path: str, configuration: Mapping[str, str], schema: str) -> None:
    """Refuse a table with such an expression.

    Args:
        path: of the table.
        configuration: the table properties.
        schema: the columns as the log has them, as JSON.

    Raises:
        UnsupportedError: naming the constraint, or the column.
    """
    for name, text in configuration.items():
        if name.lower().startswith(CHECK):
            check_expression(text, where=f"the CHECK constraint {printable(name[len(CHECK) :])} of {path}")
    if any(key in schema for key in _KEYS):
        for name, text in _of_columns(json.loads(schema)["fields"]):
            check_expression(text, where=f"an expression of the column {printable(name)} of {path}")


def _of_columns(fields: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    left: list[tuple[str, Any]] = [(field["name"], field) for field in fields]
    while left:
        name, part = left.pop()
        if isinstance(part, Mapping):
            metadata = part.get("metadata") or {}
            yield from ((name, str(metadata[key])) for key in _KEYS if key in metadata)
            if _INVARIANT in metadata:
                # Delta reads it as JSON, whose texts may be written with escapes.
                yield name, _ESCAPE.sub(_unescaped, str(metadata[_INVARIANT]))
            left += [(name, inner) for key, inner in part.items() if key != "metadata"]
        elif isinstance(part, list):
            left += [(name, inner) for inner in part]


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else code if code == "/" else " "
