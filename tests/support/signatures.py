"""Every public function and constructor of the project, and which of its parameters take a member of an enumeration."""

from __future__ import annotations

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
