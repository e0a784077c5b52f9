"""The tree of the tests: what two test modules need is in ``tests.support``, under a name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.settings import ROOT

MODULES = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_nothing_is_imported_from_a_test(path: Path) -> None:
    tests = {name for name in imported(path) if name.startswith("tests.") and ".test_" in name}
    assert not tests, f"move what {path.name} needs of {tests} to a module of tests.support"
