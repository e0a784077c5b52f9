"""The error tree: what a runner decides by, and what a reader is told."""

from __future__ import annotations

import ast
import pickle
import re

import pytest

from stream_consumers import errors
from stream_consumers.errors import StreamAssetsError, Terminal, Transient
from tests.support.settings import ROOT

PACKAGES = ("stream_consumers", "spark_jobs", "sensors", "stream_assets")
LOGS = ("_log.", "logger.", "context.log.", "run.log.", "self._run.log.")
LEAVES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StreamAssetsError) and kind is not StreamAssetsError
]


@pytest.mark.parametrize("kind", LEAVES)
def test_says_whether_trying_again_can_help(kind: type[StreamAssetsError]) -> None:
    assert issubclass(kind, Terminal) != issubclass(kind, Transient)
    assert (kind.__doc__ or "").strip()


@pytest.mark.parametrize("kind", [StreamAssetsError, *LEAVES])
def test_pickles_with_its_facts(kind: type[StreamAssetsError]) -> None:
    error = kind("orders.ss is odd", remedy="Look at it.", offset=12, path="a b")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.remedy, again.facts) == ("orders.ss is odd", "Look at it.", {"offset": 12, "path": "a b"})
    assert str(again) == str(error) == "orders.ss is odd (offset=12, path=a b). Look at it."


def test_texts_from_outside_are_bounded_and_obeyed_by_no_terminal() -> None:
    hostile = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e"
    error = StreamAssetsError(f"the registry says {hostile}", remedy=f"Ask {hostile}.", subject=hostile)
    error.detail = f"{hostile}\nline 2"
    for one in (error, error.revealed(), pickle.loads(pickle.dumps(error))):
        assert all(line.isprintable() for line in str(one).split("\n"))
        assert str(one).count("pwned") >= 3
    endless = "x" * 3_000_000
    assert len(str(StreamAssetsError(endless, remedy=endless, fact=endless))) < 20_000


def shown_by_repr(node: ast.AST) -> list[ast.expr]:
    """The values that an expression writes into a text by repr()."""
    match node:
        case ast.FormattedValue(value, 114) | ast.Call(ast.Name("repr"), [value]):
            return [value]
        case ast.Call(_, [ast.Constant(str(form)), *values]):
            return [value for kind, value in zip(re.findall(r"%[-.\d]*(\w)", form), values) if kind == "r"]
    return []


def test_no_text_has_the_repr_of_an_error_which_may_hold_a_payload() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{value.lineno}": ast.unparse(value)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for value in shown_by_repr(node)
    }
    names = re.compile(r"(.*[._])?(error|exc|exception|failure)")
    assert not {place: name for place, name in found.items() if names.fullmatch(name)}


def logs_of_own_text(handler: ast.ExceptHandler) -> list[ast.Call]:
    """The log calls of a handler of any error that write the error's text."""
    caught = ast.unparse(handler.type) if handler.type else "Exception"
    if caught not in {"Exception", "BaseException"}:
        return []
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call)]
    described = [call for call in calls if ast.unparse(call.func) in {"log_text", "described", "type"}]
    safe = {id(node) for call in described for node in ast.walk(call)}
    return [
        call
        for call in calls
        if ast.unparse(call).startswith(LOGS)
        if ast.unparse(call.func).endswith(".exception")
        or any(keyword.arg == "exc_info" for keyword in call.keywords)
        or any(isinstance(n, ast.Name) and n.id == handler.name and id(n) not in safe for n in ast.walk(call))
    ]


def test_no_log_has_the_text_of_any_error_which_may_hold_a_payload() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}": ast.unparse(call)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        for call in logs_of_own_text(node)
    }
    assert found == {}
