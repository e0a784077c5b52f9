"""Names of a package that are imported from their modules when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

GetAttribute = Callable[[str], object]
ListNames = Callable[[], list[str]]


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]) -> tuple[GetAttribute, ListNames]:
    """``__getattr__`` and ``__dir__`` of a package, so that importing it imports none of its modules.

    Type checkers and editors read the names in the stub ``__init__.pyi`` beside the package's ``__init__.py``.

    Args:
        package: its name.
        exports: for each module, the names that the package offers of it.

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
