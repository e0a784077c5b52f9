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
