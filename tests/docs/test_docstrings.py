"""Whatever a user imports from ``stream_consumers`` explains itself, with an example that runs."""

from __future__ import annotations

import inspect

import pytest

import stream_consumers

# They talk to a broker when they are made: their example is a block that does not run.
NEEDS_A_BROKER = {
    "AsyncEntryConsumer",
    "EntryConsumer",
    "GroupEntryConsumer",
    "KafkaCommitter",
    "KafkaConsumer",
    "KafkaProducer",
    "KafkaTransactions",
    "RedisBackend",
    "RedisCommitter",
    "RedisConsumer",
    "RedisGroupCommitter",
    "RedisGroupConsumer",
    "RedisProducer",
    "create_entry_consumer",
}
PUBLIC = {name: getattr(stream_consumers, name) for name in dir(stream_consumers) if not name.startswith("_")}
PUBLIC = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
# What a backend implements is shown by the contract suite, which our own backends run.
SEAMS = {name for name, thing in PUBLIC.items() if thing.__module__ == "stream_consumers.batches"}
ERRORS = {name for name, thing in PUBLIC.items() if inspect.isclass(thing) and issubclass(thing, BaseException)}


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_a_docstring_with_an_example(name: str) -> None:
    text = PUBLIC[name].__doc__ or ""
    assert text.strip(), f"{name} has no docstring"
    if name in NEEDS_A_BROKER:
        assert "Example::" in text
    elif name not in ERRORS | SEAMS:
        assert ">>>" in text, f"{name} shows no example that runs"


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if inspect.isclass(thing)])
def test_its_methods_have_docstrings(name: str) -> None:
    for word, member in vars(PUBLIC[name]).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and not word.startswith("_"):
            assert (function.__doc__ or "").strip(), f"{name} has an undocumented {word}"


def parameters(thing: object) -> list[str]:
    """What it is made or called with, but what only this project fills in."""
    if inspect.isclass(thing) and (
        "__init__" not in vars(thing) or getattr(thing, "_is_protocol", False) or issubclass(thing, BaseException)
    ):
        return []
    found = inspect.signature(thing).parameters  # type: ignore[arg-type]
    return [name for name in found if not name.startswith("_")]


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ERRORS])
def test_its_arguments_are_described(name: str) -> None:
    names = parameters(PUBLIC[name])
    text = PUBLIC[name].__doc__ or ""
    if len(names) > 1:
        missing = [word for word in names if f"{word}:" not in text]
        assert not missing, f"{name} does not describe {', '.join(missing)}"


def test_the_exceptions_are_there() -> None:
    assert PUBLIC.keys() >= NEEDS_A_BROKER
