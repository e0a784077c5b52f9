"""Commands that start another Python, which imports nothing from the working folder unless this process does.

``python -m`` and ``python -c`` look into the working folder first, so a user who may write there chooses what runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
_OF_WORKERS = "stream-assets"
"""The value that says that the variable is for the workers only; any value does for Python."""


def imports_from_here() -> bool:
    """Whether this process looks into its working folder for modules, or has loaded one from there.

    Dagster looks there only while it loads the definitions, and a worker has to import their functions.
    """
    return _is_here_in(sys.path) or _has_loaded_from_here()


def _has_loaded_from_here() -> bool:
    return _is_here_in(_folders_of_modules())


def _is_here_in(folders: Iterable[str | Path]) -> bool:
    return Path.cwd() in [Path(folder).resolve() for folder in folders]


def _folders_of_modules() -> set[Path]:
    """The folders that the loaded modules are in, without the file that Python was started with."""
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
    """The command of a Python that imports what this process can, or could when its modules were loaded.

    Args:
        statement: what it runs; ``sys`` is imported.
    """
    here = [str(Path.cwd())] if not _is_here_in(sys.path) and _has_loaded_from_here() else []
    return _command(sys.executable, repr(here + [str(folder) for folder in sys.path]), statement)


def worker_python(python: str, statement: str) -> list[str]:
    """The command of a Python that Spark starts, which imports what its ``PYTHONPATH`` and its packages have.

    It looks into the working folder of this process, too, if this process imports from there.

    Args:
        python: the interpreter; it may have other packages than this one.
        statement: what it runs; ``sys`` is imported.
    """
    here = [str(Path.cwd())] if imports_from_here() else []
    # The empty name is the working folder, which -c puts there.
    return _command(python, f"{here!r} + [folder for folder in sys.path if folder]", statement)


def worker_variables() -> dict[str, str]:
    """The variables of a Python that is started with ``-m``, so that it looks where :func:`worker_python` does.

    Python 3.10 does not know them.
    """
    if imports_from_here() or os.environ.get(SAFE_PATH_VARIABLE):
        return {}
    return {SAFE_PATH_VARIABLE: _OF_WORKERS}


def forget_worker_variables() -> None:
    """Let what a worker starts import as ever: ``python tool.py`` has to find the modules beside ``tool.py``."""
    if os.environ.get(SAFE_PATH_VARIABLE) == _OF_WORKERS:
        del os.environ[SAFE_PATH_VARIABLE]


def _command(python: str, path: str, statement: str) -> list[str]:
    # The module sys is part of the interpreter: nothing is looked for before the path is set.
    return [python, "-c", f"import sys; sys.path[:] = {path}; {statement}"]
