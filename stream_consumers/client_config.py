"""Configuration that is passed on to a broker's own client, with secrets that are named, not written down."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from urllib.parse import quote

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import is_plain_text

Scalar = str | int | float | bool
HIDDEN = "[hidden]"
"""Stands in the text of a client or a server for the value of an option."""
# Options whose values are shown, unless they hold credentials of a URL; all others may be secrets.
_SHOWN = re.compile(
    r"(?<!user)(name|url(_s3)?|uri|endpoint|region|location|servers?|host|address|protocol|mechanisms?|service|field)$",
    re.IGNORECASE,
)
_SECRET = re.compile(r"pass|secret|token|key|user|auth|credential|account(?!_name)|proxy", re.IGNORECASE)
_NO_SECRET = re.compile(r"true|false|none|required|optional|\d+(\.\d+)?\w{0,2}|.{0,3}", re.IGNORECASE | re.DOTALL)
_BETWEEN_PARTS = re.compile(r"[\s:@/?#&,;=\"'{}\\]+")
_NO_PARTS = frozenset({"http", "https", "socks5", "socks5h"})
_LEAST_PART = 4
# A client or a server may cut what it repeats: so much of a value is taken for it.
_LEAST_BEGINNING = 12


@runtime_checkable
class Deferred(Protocol):
    """A value that is looked up when the client is made; ``dagster.EnvVar`` is one."""

    def get_value(self) -> Scalar | None:
        """The value now; ``None`` if it is not set."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """A value that stays in the environment until the client is made, so that it shows up nowhere.

    Args:
        name: of the variable.

    Example:
        >>> EnvironmentVariable("KAFKA_PASSWORD")
        EnvironmentVariable(name='KAFKA_PASSWORD')
    """

    name: str

    def get_value(self) -> str | None:
        """What the variable holds."""
        return os.environ.get(self.name)


ClientConfig = Mapping[str, "Scalar | Deferred"]


def resolve(config: ClientConfig) -> dict[str, Scalar]:
    """The configuration with every deferred value looked up.

    Raises:
        InvalidOptionError: a variable is not set, a value is no text, number or truth value, or text has a NUL or a
            lone surrogate.

    Example:
        >>> resolve({"security.protocol": "SASL_SSL"})
        {'security.protocol': 'SASL_SSL'}
    """
    resolved: dict[str, Scalar] = {}
    for name, value in config.items():
        # dagster.EnvVar is a str that must not be used as one, so this comes first.
        if isinstance(value, Deferred):
            resolved[name] = look_up(value, f"the option {name!r}")
        elif isinstance(value, (str, int, float, bool)):
            resolved[name] = value
        else:
            raise InvalidOptionError(
                f"the option {name!r} is a {type(value).__name__}",
                remedy="Use text, a number, a truth value or an EnvVar: executors get a copy.",
            )
        if not is_plain_text(f"{name}{resolved[name]}"):
            raise InvalidOptionError(
                f"the option {name!r}, or its value, has a NUL or a lone surrogate", remedy="Give it as UTF-8 text."
            )
    return resolved


def parse_client_option(text: str) -> tuple[str, Scalar | Deferred]:
    """Read ``NAME=VALUE``; a value ``env:VARIABLE`` stays in the environment.

    Raises:
        InvalidOptionError: no ``=`` in it.

    Example:
        >>> parse_client_option("sasl.password=env:KAFKA_PASSWORD")
        ('sasl.password', EnvironmentVariable(name='KAFKA_PASSWORD'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidOptionError("an option without a name or a value", remedy="Write NAME=VALUE or NAME=env:VARIABLE.")
    if value.startswith("env:"):
        return name, EnvironmentVariable(value.removeprefix("env:"))
    return name, value


def check_header_value(secret: str, name: str) -> str:
    r"""A secret as it can stand in a header of HTTP; one in a file ends with a newline, which is taken away.

    Args:
        secret: a token.
        name: of its option.

    Raises:
        InvalidOptionError: it has characters that no header may have.

    Example:
        >>> check_header_value("abc\n", "token")
        'abc'
    """
    value = secret.strip()
    if not (value.isascii() and value.isprintable()):
        raise InvalidOptionError(f"the {name} has characters that no header may have", remedy="Correct it.")
    return value


def look_up(value: Deferred, what: str) -> Scalar:
    """What a deferred value holds now.

    Args:
        value: that is deferred.
        what: comes from it, for the message.

    Raises:
        InvalidOptionError: the variable is not set.
    """
    found = value.get_value()
    if found is None:
        raise InvalidOptionError(
            f"{what} comes from the environment variable {variable(value)}, which is not set",
            remedy="Set it where this process runs: the daemon's code server and the runs.",
        )
    return found


def variable(value: object) -> str:
    """The name of the variable that a value comes from."""
    return str(getattr(value, "env_var_name", None) or getattr(value, "name", "environment"))


def without_values(text: str, options: Mapping[str, object]) -> str:
    """The text of a client or a server, which may repeat the options that it was given, without their values.

    A value is recognized as it is, encoded for a URL, in base64 and escaped; a long one also if only its beginning, or
    a part of it such as the password of a URL, is repeated. Numbers and the values of options like ``region`` stay.

    Args:
        text: of an error.
        options: with the secrets looked up.

    Example:
        >>> without_values("unknown command 'HELLO' with '3' 'AUTH' 'me' 's3cret'", {"password": "s3cret", "db": 3})
        "unknown command 'HELLO' with '3' 'AUTH' 'me' '[hidden]'"
    """
    forms = {form for name, value in options.items() if _may_be_secret(name, value) for form in _forms(str(value))}
    for form in sorted(forms, key=len, reverse=True):
        text = _without(text, form)
    return text


def _may_be_secret(name: str, value: object) -> bool:
    if not isinstance(value, str) or not value.strip() or not is_plain_text(value):
        return False
    if _SECRET.search(name):
        return True
    return not _NO_SECRET.fullmatch(value) and (not _SHOWN.search(name) or not set(value).isdisjoint("@?#;"))


def _forms(value: str) -> Iterator[str]:
    parts = (part for part in _BETWEEN_PARTS.split(value) if len(part) >= _LEAST_PART and part not in _NO_PARTS)
    yield base64.b64encode(value.encode()).decode()
    for one in (value, value.strip(), " ".join(value.split()), *parts):
        yield from (one, quote(one), quote(one, safe=""), json.dumps(one)[1:-1], repr(one)[1:-1])
        yield repr(one.encode())[2:-1]


def _without(text: str, form: str) -> str:
    if len(form) < _LEAST_PART:
        # It may be a part of a word.
        return re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", HIDDEN, text)
    beginning = form[:_LEAST_BEGINNING]
    place = text.find(beginning)
    while place >= 0:
        length = next((n for n, (said, known) in enumerate(zip(text[place:], form)) if said != known), len(form))
        text = f"{text[:place]}{HIDDEN}{text[place + length :]}"
        place = text.find(beginning, place + len(HIDDEN))
    return text
