"""Commands that start another Python, which imports nothing from the working folder unless this process does.

``python -m`` and ``python -c`` look into the working folder first, and whoever may write there would choose what runs.
"""

from __future__ import annotations

import sys
from pathlib import Path


def imports_from_here() -> bool:
    """Whether this process looks into its working folder for modules."""
    return Path.cwd() in [Path(folder).resolve() for folder in sys.path]


def own_python(statement: str) -> list[str]:
    """The command of a Python that imports what this process can.

    Args:
        statement: what it runs; ``sys`` is imported.
    """
    return _command(sys.executable, repr([str(folder) for folder in sys.path]), statement)


def worker_python(python: str, statement: str) -> list[str]:
    """The command of a Python that Spark starts, which imports what its ``PYTHONPATH`` and its packages have.

    It looks into the working folder of this process, too, if this process does.

    Args:
        python: the interpreter; it may have other packages than this one.
        statement: what it runs; ``sys`` is imported.
    """
    here = [str(Path.cwd())] if imports_from_here() else []
    # The empty name is the working folder, which -c puts there.
    return _command(python, f"{here!r} + [folder for folder in sys.path if folder]", statement)


def _command(python: str, path: str, statement: str) -> list[str]:
    # The module sys is part of the interpreter: nothing is looked for before the path is set.
    return [python, "-c", f"import sys; sys.path[:] = {path}; {statement}"]
