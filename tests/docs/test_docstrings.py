"""Whatever a user imports from ``stream_consumers`` explains itself, with an example that runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import pytest

# The modules that users import; the others are what these are made of.
MODULES = (
    "tracking.ack_window",
    "async_consumer",
    "tracking.committers",
    "create",
    "consumer",
    "subscription.error_observer",
    "errors",
    "subscription.codec",
    "subscription.messages",
    "file.consumer",
    "file.producer",
    "kafka.consumer",
    "kafka.producer",
    "kafka.transactions",
    "tracking.livelock",
    "memory",
    "subscription.memory_backend",
    "messages",
    "options",
    "subscription.received_message",
    "subscription.redis_backend",
    "redis.consumer",
    "redis.entry_consumer",
    "redis.group_consumer",
    "redis.producer",
    "streamer.sharders",
    "in_process_groups",
    "stdio.consumer",
    "stdio.producer",
    "stdio.spool",
    "subscription.backend",
    "streamer.streamer",
    "streamer.producer",
    "subscription.subscription",
    "subscription.config",
    "tracking.consumer",
    "tracking.options",
    "urls",
)
# They talk to a broker when they are made: their example is a block that does not run.
NEEDS_A_BROKER = {
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
# Users get these from others, and never make them.
INTERNAL = {
    "Delivery of kafka.producer",
    "Envelope of subscription.codec",
    "GroupKey of in_process_groups",
    "GroupReading of in_process_groups",
    "MemoryGroup of memory",
    "MemorySplit of memory",
    "PendingEntry of memory",
    "ObserverThread of subscription.error_observer",
    "SharedGroup of in_process_groups",
    "check_client of create",
    "check_protocol of create",
    "removed of subscription.codec",
}


def public() -> Iterator[tuple[str, object]]:
    """The classes and functions that the modules define, by ``name of module``."""
    for name in MODULES:
        module = importlib.import_module(f"stream_consumers.{name}")
        for word, thing in vars(module).items():
            is_defined = inspect.isclass(thing) or inspect.isfunction(thing)
            if is_defined and thing.__module__ == module.__name__ and not word.startswith("_"):
                yield f"{word} of {name}", thing


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_a_docstring_with_an_example(name: str) -> None:
    text, word = PUBLIC[name].__doc__ or "", name.partition(" ")[0]
    assert text.strip(), f"{name} has no docstring"
    is_error = name.endswith(" of errors") and ">>>" not in text
    if word in NEEDS_A_BROKER:
        assert "Example::" in text
    elif name not in INTERNAL and not is_error:
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


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in INTERNAL and not name.endswith("errors")])
def test_its_arguments_are_described(name: str) -> None:
    names = parameters(PUBLIC[name])
    text = PUBLIC[name].__doc__ or ""
    if len(names) > 1:
        missing = [word for word in names if f"{word}:" not in text]
        assert not missing, f"{name} does not describe {', '.join(missing)}"


def test_the_exceptions_are_there() -> None:
    words = {name.partition(" ")[0] for name in PUBLIC}
    assert words >= NEEDS_A_BROKER
    assert PUBLIC.keys() >= INTERNAL
