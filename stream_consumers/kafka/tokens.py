"""Tokens for SASL/OAUTHBEARER, from a function of the user's that is named in the client options."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from stream_consumers.client_config import Scalar
from stream_consumers.errors import InvalidOptionError, TokenProviderError
from stream_consumers.options import is_plain_text

OPTION = "oauth_token_provider"
# Ten years; milliseconds instead of seconds are beyond it.
LONGEST_LIFE_SECONDS = 10 * 365 * 86400.0


def check_token_provider(name: object) -> None:
    """Refuse what does not name a function; nothing is imported.

    Raises:
        InvalidOptionError: it is not written as ``module:function``.

    Example:
        >>> check_token_provider("aws_tokens:token")
    """
    module, colon, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidOptionError(
            f"{OPTION}={name!r} names no function", remedy="Write module:function, like aws_tokens:token."
        )


class TokenProvider:
    """Calls the function that an option names; it is the ``oauth_cb`` of one client of librdkafka.

    The function is called without arguments. It returns a token, and when the token expires, in seconds since 1970;
    optionally also the principal, and a mapping of SASL extensions. It is called once when the client is made, so
    that what is wrong with it is an error at once, and then before a token expires. No error repeats what it returned,
    or the text of what it raised, because that may contain the token.

    Args:
        name: ``module:function``.

    Raises:
        InvalidOptionError: it cannot be imported, or is no function.
        TokenProviderError: it raised, or returned something else than a token that is still valid.
    """

    def __init__(self, name: str) -> None:
        check_token_provider(name)
        self._name = name
        self._function = _imported(name)
        self._first: tuple[Any, ...] | None = self._call()
        self.error: TokenProviderError | None = None

    def __call__(self, config: str) -> tuple[Any, ...]:
        """Called by the client, in a thread of its own.

        Args:
            config: the client option ``sasl.oauthbearer.config``, which is not used.
        """
        found, self._first = self._first, None
        try:
            found = found or self._call()
        except TokenProviderError as error:
            # The client reports only that something was raised.
            self.error = error
            raise
        self.error = None
        return found

    def _call(self) -> tuple[Any, ...]:
        try:
            found = self._function()
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            raise TokenProviderError(
                f"{OPTION}={self._name!r} raised {type(error).__name__}",
                remedy="Correct the function, or what it asks; its message is not repeated, as it may contain a token.",
            ) from None
        wrong = _what_is_wrong(found)
        if wrong:
            raise TokenProviderError(
                f"{OPTION}={self._name!r} returned {wrong}",
                remedy="Return (token, expiry), with the expiry in seconds since 1970; optionally also a principal "
                "and a mapping of extensions.",
            )
        token, expiry, *rest = found
        return (token, float(expiry), *rest)


def with_tokens(settings: Mapping[str, Scalar]) -> dict[str, Any]:
    """The settings of one client of librdkafka: the option that names a token provider becomes its ``oauth_cb``.

    Raises:
        InvalidOptionError, TokenProviderError: as :class:`TokenProvider` says.

    Example:
        >>> with_tokens({"security.protocol": "SASL_SSL"})
        {'security.protocol': 'SASL_SSL'}
    """
    left = dict(settings)
    name = left.pop(OPTION, None)
    return left if name is None else {**left, "oauth_cb": TokenProvider(str(name))}


def _imported(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        missing = f" ({error.name} is missing)" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidOptionError(
            f"{OPTION}={name!r} cannot be imported: {type(error).__name__}{missing}",
            remedy="Install its module, or put it on the path, where the sensor, the run and the executors are; what "
            "it raised is not repeated, as it may contain a token.",
        ) from None
    if not callable(found):
        raise InvalidOptionError(
            f"{OPTION}={name!r} is a {type(found).__name__}", remedy="Name a function without arguments."
        )
    return found  # type: ignore[no-any-return]


def _what_is_wrong(found: object) -> str:
    """What the function returned instead of a token; types only, since any of the values may be the token."""
    if not isinstance(found, (tuple, list)) or not 2 <= len(found) <= 4:
        return f"a {type(found).__name__}, not a token and its expiry"
    defaults: tuple[Any, ...] = ("", {})
    token, expiry, principal, extensions = (*list(found), *defaults[len(found) - 2 :])
    if not isinstance(token, str) or not token or not is_plain_text(token):
        return f"a {type(token).__name__} that is no token, or is empty"
    if not isinstance(expiry, (int, float)):
        return f"a {type(expiry).__name__} as expiry"
    left = expiry - time.time()
    if not 0 < left < LONGEST_LIFE_SECONDS:
        return f"a token that expires {left:.0f} s from now"
    is_plain = isinstance(principal, str) and _is_text_to_text(extensions)
    return "" if is_plain else f"a {type(principal).__name__} as principal, a {type(extensions).__name__} as extensions"


def _is_text_to_text(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)
