"""The tree of the tests: what two test modules need is in ``tests.support``, under a name."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.settings import ROOT


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_is_imported_from_a_test() -> None:
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    found = {path.name: {n for n in imported(path) if n.startswith("tests.") and ".test_" in n} for path in modules}
    assert not {name: tests for name, tests in found.items() if tests}, "move this to a module of tests.support"
