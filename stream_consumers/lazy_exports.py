"""Lazy exports: a package imports each name from its module on first access."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

GetAttribute = Callable[[str], object]
ListNames = Callable[[], list[str]]


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]) -> tuple[GetAttribute, ListNames]:
    """Return ``__getattr__`` and ``__dir__`` for a package, so that importing it imports none of its modules.

    Type checkers and editors read the names from the stub ``__init__.pyi`` of the package.

    Args:
        package: the name of the package.
        exports: the exported names of each module.

    Example:
        >>> import stream_consumers
        >>> stream_consumers.ConsumerMode("resumable").name
        'RESUMABLE'
        >>> "connect" in dir(stream_consumers)
        True
    """
    modules = {name: module for module, names in exports.items() for name in names}

    def get_attribute(name: str) -> object:
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute, lambda: sorted({*vars(sys.modules[package]), *modules})
