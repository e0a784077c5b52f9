"""A package's front door: names that are imported from their modules when somebody first asks for them."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module

GetAttribute = Callable[[str], object]
ListNames = Callable[[], list[str]]


def front_door(package: str) -> tuple[GetAttribute, ListNames]:
    """``__getattr__`` and ``__dir__`` of a package whose stub ``__init__.pyi`` lists its names.

    The stub is the only list: type checkers and editors read it, and so does this, at the first name that is asked
    for. A module behind the door is imported with the first of its names, so that importing the package costs nothing.

    Args:
        package: its name; ``from package.module import Name as Name`` in its stub offers ``Name``.

    Example:
        >>> import stream_consumers
        >>> stream_consumers.ConsumerMode("resumable").name
        'RESUMABLE'
        >>> "connect" in dir(stream_consumers)
        True
    """

    @cache
    def homes() -> dict[str, str]:
        statements = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"").body
        imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
        return {alias.name: str(statement.module) for statement in imports for alias in statement.names}

    def get_attribute(name: str) -> object:
        if name == "__all__":
            return sorted(homes())
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute, lambda: sorted({*vars(sys.modules[package]), *homes()})
