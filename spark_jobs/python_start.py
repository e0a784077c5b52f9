"""Builds commands that start another Python, which imports from the working folder only if this process does.

``python -m`` and ``python -c`` search the working folder first, so a user with write access there could inject code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
_OF_WORKERS = "stream-assets"
"""The value that marks the variable as set for the workers only; Python accepts any value."""


def imports_from_here() -> bool:
    """Return whether this process searches its working folder for modules, or has loaded one from there.

    Dagster searches it only while it loads the definitions, and a worker has to import their functions.
    """
    return _is_here_in(sys.path) or _has_loaded_from_here()


def _has_loaded_from_here() -> bool:
    return _is_here_in(_folders_of_modules())


def _is_here_in(folders: Iterable[str | Path]) -> bool:
    return Path.cwd() in [Path(folder).resolve() for folder in folders]


def _folders_of_modules() -> set[Path]:
    """Return the folders of the loaded modules, without that of the file that Python was started with."""
    places: set[Path] = set()
    for name, module in tuple(sys.modules.items()):
        found = getattr(module, "__spec__", None)
        if "." in name or name == "__main__" or not isinstance(found, ModuleSpec):
            continue
        if found.submodule_search_locations:
            places.update(Path(place).parent for place in found.submodule_search_locations)
        elif found.has_location and found.origin:
            places.add(Path(found.origin).parent)
    return places


def own_python(statement: str) -> list[str]:
    """Return the command of a Python with the import path of this process, also as it was when modules were loaded.

    Args:
        statement: the statement to run; ``sys`` is imported.
    """
    here = [str(Path.cwd())] if not _is_here_in(sys.path) and _has_loaded_from_here() else []
    return _command(sys.executable, repr(here + [str(folder) for folder in sys.path]), statement)


def worker_python(python: str, statement: str) -> list[str]:
    """Return the command of a Python that Spark starts, which imports from its ``PYTHONPATH`` and its packages.

    It also searches the working folder of this process, if this process imports from there.

    Args:
        python: the interpreter; it may have other packages than this one.
        statement: the statement to run; ``sys`` is imported.
    """
    here = [str(Path.cwd())] if imports_from_here() else []
    # The empty name, which -c adds, is the working folder.
    return _command(python, f"{here!r} + [folder for folder in sys.path if folder]", statement)


def worker_variables() -> dict[str, str]:
    """Return variables that let a Python that is started with ``-m`` search the same folders as :func:`worker_python`.

    Python 3.10 ignores them.
    """
    if imports_from_here() or os.environ.get(SAFE_PATH_VARIABLE):
        return {}
    return {SAFE_PATH_VARIABLE: _OF_WORKERS}


def forget_worker_variables() -> None:
    """Restore the usual import path for processes that a worker starts: ``python tool.py`` needs modules beside it."""
    if os.environ.get(SAFE_PATH_VARIABLE) == _OF_WORKERS:
        del os.environ[SAFE_PATH_VARIABLE]


def _command(python: str, path: str, statement: str) -> list[str]:
    # The module sys is part of the interpreter, so no folder is searched before the path is set.
    return [python, "-c", f"import sys; sys.path[:] = {path}; {statement}"]
