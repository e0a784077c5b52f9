"""Spark DDL out of names and types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from stream_consumers.errors import SchemaMismatchError

MOST_TYPES = 10_000
DEEPEST_TYPES = 100
LONGEST_COLUMN_NAME = 1000
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quoted(name: str) -> str:
    """A name as DDL takes it, whatever is in it.

    Example:
        >>> quoted("a`b")
        '`a``b`'
    """
    return f"`{name.replace('`', '``')}`"


def name_ddl(name: str) -> str:
    """A name in DDL, in back quotes only if it needs them: a shell takes those for something else.

    Example:
        >>> name_ddl("user_id"), name_ddl("user-id")
        ('user_id', '`user-id`')
    """
    return name if _PLAIN_NAME.fullmatch(name) else quoted(name)


def column_ddl(name: str, kind: str) -> str:
    """A column."""
    return f"{quoted(name)} {kind}"


def struct_ddl(fields: Iterable[tuple[str, str]]) -> str:
    """A STRUCT of these names and types.

    Example:
        >>> struct_ddl([("id", "BIGINT"), ("name", "STRING")])
        'STRUCT<`id`: BIGINT, `name`: STRING>'
    """
    return f"STRUCT<{', '.join(f'{quoted(name)}: {kind}' for name, kind in fields)}>"


def check_distinct(names: Sequence[str], path: str) -> None:
    """Refuse fields that Spark would not tell apart, and names that are longer than :data:`LONGEST_COLUMN_NAME`.

    Args:
        names: of the fields of a STRUCT, or of columns.
        path: where they are, for the error.

    Raises:
        SchemaMismatchError: naming one of them.

    Example:
        >>> check_distinct(["id", "user", "ID"], "shop.Order")
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: shop.Order has the field 'ID' twice, whether in upper or lower \
case. Spark does not tell them apart: read with a schema that has one of them.
    """
    longest = max(map(len, names), default=0)
    if longest > LONGEST_COLUMN_NAME:
        raise SchemaMismatchError(
            f"a field in the schema has a name of {longest} characters",
            remedy=f"Names of up to {LONGEST_COLUMN_NAME} are read.",
        )
    if twice := first_twice(names):
        raise SchemaMismatchError(
            f"{path} has the field {twice!r} twice, whether in upper or lower case",
            remedy="Spark does not tell them apart: read with a schema that has one of them.",
        )


def first_twice(names: Iterable[str]) -> str | None:
    """The first name that was there before, in upper or lower case: neither Spark nor Delta tells these apart.

    Example:
        >>> first_twice(["id", "user", "ID"])
        'ID'
    """
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


class TypeBudget:
    """Limits the types that columns are made of, and how deep they nest: a short schema can name types without end.

    It is entered for each type, around the types within.

    Args:
        form: of the schema, for errors.

    Raises:
        SchemaMismatchError: when it is entered, if there are more than :data:`MOST_TYPES`, or more than
            :data:`DEEPEST_TYPES` within each other.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._count = 0
        self._depth = 0

    def __enter__(self) -> None:
        self._count += 1
        self._depth += 1
        if self._count > MOST_TYPES or self._depth > DEEPEST_TYPES:
            raise SchemaMismatchError(
                f"the {self._form} schema is made of more than {MOST_TYPES} types, or nests more than {DEEPEST_TYPES}",
                remedy="Give a smaller one: a schema to read with need not have all fields.",
            )

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
