"""What the arguments of everything that a user may call have in common."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator

import stream_consumers

DURATION = re.compile(r"(timeout|interval|delay|backoff|idle|linger|patience|wait|period)\Z")


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every public function, constructor and method of the consumer library, once, where it is written."""
    for info in pkgutil.walk_packages(stream_consumers.__path__, "stream_consumers."):
        module = importlib.import_module(info.name)
        for thing in vars(module).values():
            is_code = inspect.isclass(thing) or inspect.isfunction(thing)
            if not is_code or thing.__module__ != info.name or thing.__name__.startswith("_"):
                continue
            members = vars(thing).values() if inspect.isclass(thing) else [thing]
            for member in members:
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and re.match(r"[a-z]|__init__\Z", function.__name__):
                    yield f"{info.name}.{function.__qualname__}", function


FUNCTIONS = dict(functions())


def test_durations_are_named_with_their_unit() -> None:
    unclear = {
        f"{name}({word})"
        for name, function in FUNCTIONS.items()
        for word, parameter in inspect.signature(function).parameters.items()
        if DURATION.search(word) and parameter.annotation != "bool"
    }
    # The beacons of a file are so many bytes apart: the name is that of its format.
    unclear = {name for name in unclear if not name.endswith(("(interval)", "(beacon_interval)"))}
    assert not unclear, "name them with their unit, like timeout_seconds"


def test_whoever_takes_a_url_takes_text() -> None:
    offered = [getattr(stream_consumers, name) for name in dir(stream_consumers) if not name.startswith("_")]
    # A backend is given what was parsed.
    offered = [thing for thing in offered if thing not in (stream_consumers.Backend, stream_consumers.StreamUrl)]
    takers = [thing.__init__ if inspect.isclass(thing) else thing for thing in offered]
    found = {
        f"{function.__qualname__}({word})": str(parameter.annotation)
        for function in filter(inspect.isfunction, takers)
        for word, parameter in inspect.signature(function).parameters.items()
        if "StreamUrl" in str(parameter.annotation) or word == "url"
    }
    assert len(found) > 20
    assert {name: kind for name, kind in found.items() if not kind.startswith(("str", "str | StreamUrl"))} == {}


def test_a_url_that_was_parsed_is_as_good_as_text() -> None:
    text = "memory://text-or-url/orders"
    parsed = stream_consumers.StreamUrl.parse(text)
    assert stream_consumers.StreamUrl.parse(parsed) is parsed
    assert stream_consumers.StreamSource(text) == stream_consumers.StreamSource(parsed)
    with stream_consumers.MemoryProducer(text) as producer:
        producer.send(b"{}")
    for url in (text, parsed):
        with stream_consumers.MemoryConsumer(url, live=False) as consumer:
            assert [message.payload for message in consumer] == [b"{}"]
        assert stream_consumers.create_committer(url, "billing").committed() == {}
    stream_consumers.forget_memory_broker(text)
