"""Whatever a user imports from ``stream_consumers`` explains itself, with an example that runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import pytest

# The modules that users import; the others are what these are made of.
MODULES = (
    "ack_window",
    "async_consumer",
    "commits",
    "connect",
    "consumer",
    "error_observer",
    "errors",
    "event_codec",
    "event_messages",
    "file_consumer",
    "file_producer",
    "kafka_consumer",
    "kafka_producer",
    "kafka_transactions",
    "livelock",
    "memory",
    "memory_backend",
    "messages",
    "options",
    "received_message",
    "redis_backend",
    "redis_consumer",
    "redis_entry_consumer",
    "redis_group_consumer",
    "redis_producer",
    "retry_policy",
    "sharders",
    "shared_groups",
    "stdio_consumer",
    "stdio_producer",
    "stdio_spool",
    "stream_backend",
    "streamer",
    "streamer_producer",
    "subscription",
    "subscription_config",
    "tracked_consumer",
    "tracking_options",
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
    "Delivery of kafka_producer",
    "Envelope of event_codec",
    "GroupKey of shared_groups",
    "GroupReading of shared_groups",
    "MemorySplit of memory",
    "ObserverThread of error_observer",
    "SharedGroup of shared_groups",
    "check_client of connect",
    "check_protocol of connect",
    "removed of event_codec",
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
