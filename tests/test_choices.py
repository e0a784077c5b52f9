"""Where one of several choices is taken, text is as good as the member, and a word that is no choice is refused."""

from __future__ import annotations

import asyncio
import enum
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from confluent_kafka import IsolationLevel

import stream_consumers.options as options
from stream_assets.asset import stream_asset
from stream_consumers.errors import InvalidOptionError
from stream_consumers.tracking.options import Activity

URL = "memory://walk/orders"
PACKAGES = ("stream_consumers", "spark_jobs", "sensors", "stream_assets")


@dataclass(frozen=True)
class Parameter:
    """A parameter that takes a member of an enumeration.

    Args:
        place: the dotted name of the function, or of the class whose constructor it is.
        name: of the parameter.
        kind: the enumeration.
        hint: the type that it is declared with.
        function: what is called.
        is_method: its first parameter is the object.
    """

    place: str
    name: str
    kind: type[enum.Enum]
    hint: Any
    function: Callable[..., Any]
    is_method: bool

    def __str__(self) -> str:
        return f"{self.place}({self.name})"

    def call(self, value: object) -> Any:
        """Call it with this value; everything else that it needs is a stand-in."""
        origin = typing.get_origin(self.hint)
        shaped = {value: "-r"} if origin is Mapping else (value,) if origin is tuple else value
        found = inspect.signature(self.function).parameters
        positional = [MagicMock(url=URL, _url_of=lambda streams: URL)] if self.is_method else []
        needed = {
            name: URL if name == "url" else 1 if str(parameter.annotation) in ("int", "float") else MagicMock()
            for name, parameter in list(found.items())[len(positional) :]
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        }
        return self.function(*positional, **{**needed, self.name: shaped})


def modules() -> Iterator[ModuleType]:
    """Every module of the project."""
    for name in PACKAGES:
        package = import_module(name)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            yield import_module(found.name)


def enumerations(hint: Any) -> Iterator[type[enum.Enum]]:
    """The enumerations that a type takes members of."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield hint
    elif typing.get_origin(hint) is not Callable:
        for argument in typing.get_args(hint):
            yield from enumerations(argument)


def parameters() -> list[Parameter]:
    """Every public parameter that takes a member of an enumeration; protocols and abstract methods have no code."""
    found: list[Parameter] = []
    for module in modules():
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            place = f"{module.__name__}.{name}"
            if inspect.isfunction(thing):
                found += _of(place, thing, thing, module, is_method=False)
            elif inspect.isclass(thing) and not getattr(thing, "_is_protocol", False):
                for attribute, member in vars(thing).items():
                    function = member.__func__ if isinstance(member, classmethod) else member
                    is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
                    if not is_own or getattr(function, "__isabstractmethod__", False):
                        continue
                    if attribute == "__init__":
                        found += _of(place, function, thing, module, is_method=False)
                    elif not attribute.startswith("_") or attribute == "__call__":
                        found += _of(f"{place}.{attribute}", function, function, module, is_method=True)
    return found


def _of(
    place: str, annotated: FunctionType, called: Callable[..., Any], module: ModuleType, *, is_method: bool
) -> Iterator[Parameter]:
    for name, annotation in annotated.__annotations__.items():
        if name == "return" or not _words(annotation) & _enumeration_names():
            continue
        hint = eval(annotation, vars(module)) if isinstance(annotation, str) else annotation
        for kind in dict.fromkeys(enumerations(hint)):
            yield Parameter(place, name, kind, hint, called, is_method)


def _words(annotation: object) -> set[str]:
    return set(re.findall(r"\w+", annotation if isinstance(annotation, str) else str(annotation)))


@cache
def _enumeration_names() -> frozenset[str]:
    return frozenset(
        name
        for module in [*modules(), import_module("dagster")]
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, enum.Enum)
    )


NOT_A_CHOICE = {
    "ignore_steps": "an observer: it is told",
    "KillSwitch.__call__": "an observer: it is told",
    "BatchTelemetry.__call__": "an observer: it is told",
    "Modes.group": "asks Modes.check",
    "RowConversion": "made from options of the command line, which are choices",
    "FrameScanner": "opened by producers and sources of files, which know what to do at a jump",
    "SharedGroupConsumer": "opened by backends, with what create_consumer has checked",
    "Pipeline.opened": "called by commands, and hands the mode to a StreamSource",
    "Backend.check_batches": "called with the mode of a StreamSource",
    "Backend.open_batch_source": "called with the mode of a StreamSource",
    "FileStreams.open_batch_source": "called with the mode of a StreamSource",
    "MemoryStreams.open_batch_source": "called with the mode of a StreamSource",
}
# A set of flags, and an enumeration of the Kafka client that its client options name.
NO_CHOICES = (Activity, IsolationLevel)
FOUND = [
    parameter
    for parameter in parameters()
    if parameter.kind not in NO_CHOICES and not parameter.place.endswith(tuple(NOT_A_CHOICE))
]


class SettledError(Exception):
    """Text was made a member; what comes after is not of interest here."""


def call(parameter: Parameter, value: object) -> Any:
    found = parameter.call(value)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def test_the_walk_sees_all_kinds_of_places() -> None:
    seen = {str(parameter) for parameter in FOUND}
    assert {
        "stream_consumers.create.create_consumer(mode)",
        "stream_consumers.redis.group_consumer.RedisGroupConsumer(reset)",
        "stream_consumers.async_consumer.AsyncConsumer.rewind(to)",
        "stream_consumers.subscription.config.SubscriptionConfig(ack_mode)",
        "spark_jobs.batches.replay.Replay(on_replay)",
        "sensors.lag_sensor.LagPolicy(status)",
    } <= seen


@pytest.mark.parametrize("parameter", FOUND, ids=str)
@pytest.mark.parametrize("nonsense", ["nonsense", 3.7])
def test_nonsense_is_refused_with_the_choices(parameter: Parameter, nonsense: object) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        call(parameter, nonsense)
    assert repr(nonsense) in str(refused.value)
    for member in parameter.kind:
        assert str(member.value) in refused.value.remedy


@pytest.mark.parametrize("parameter", FOUND, ids=str)
def test_text_becomes_the_member(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    member: enum.Enum = list(parameter.kind)[-1]
    choice, settled = options.choice, []

    def watched(kind: Any, value: Any, **names: Any) -> Any:
        found = choice(kind, value, **names)
        if type(value) is str and value == member.value:
            settled.append(found)
            raise SettledError
        return found

    for module in modules():
        if getattr(module, "choice", None) is choice:
            monkeypatch.setattr(module, "choice", watched)
    with pytest.raises(SettledError):
        call(parameter, member.value)
    assert settled == [member]


@pytest.mark.parametrize("option", ["mode", "start"])
def test_an_asset_refuses_it_where_it_is_declared(option: str) -> None:
    words: dict[str, Any] = {option: "nonsense"}
    with pytest.raises(InvalidOptionError):
        stream_asset(source="memory://shop/orders", table="lake/orders", **words)


def test_a_member_of_another_enumeration_is_no_text() -> None:
    with pytest.raises(InvalidOptionError):
        options.choice(options.AutoCommit, options.ConsumerMode.RESUMABLE, option="auto_commit")

    class Elsewhere(str, enum.Enum):
        NEVER = "never"

    with pytest.raises(InvalidOptionError):
        options.FileProducerOptions(creation=Elsewhere.NEVER)  # type: ignore[arg-type]
