"""Configuration of broker clients: secrets come from the environment and are hidden in error messages."""

from __future__ import annotations

import os
import re
from base64 import b64encode, urlsafe_b64encode
from binascii import hexlify
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from html.entities import html5
from typing import Protocol, runtime_checkable
from urllib.parse import quote_plus, unquote

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import is_plain_text
from stream_consumers.urls import SECRET_PARAMETER, USER_INFO, address_secrets, is_address

Scalar = str | int | float | bool
HIDDEN = "[hidden]"
"""Replaces the value of an option in a text from a client or a server."""
# Options whose values are shown: a file, if the value is a path; an address without credentials; and names and
# choices. All other values may be secrets.
_FILE = re.compile(
    r"(location|file|path|certs|bundle|keytab|(key|trust).?store|service_account|application_credentials)$",
    re.IGNORECASE,
)
_PATH = re.compile(r"[~.]{0,2}/[^\n\"'{}=;?#]*|[\w./-]+\.[a-z]\w{0,6}")
_ADDRESS = re.compile(r"(url(_s3)?|uri|endpoint|servers?|host|address|proxy)$", re.IGNORECASE)
# The type of a key store and the provider of credentials are not secret.
_SECRET = re.compile(
    r"(?!.*(algorithm|provider|source|type)$).*(pass|pwd|secret|token|key|user.?info|auth(orization)?$|credential)",
    re.IGNORECASE | re.DOTALL,
)
_CHOICE = re.compile(
    r"(name|user|arn|region|location|level|protocol|mechanisms?|service|field|type|source|strategy|family|reset"
    r"|algorithm|codec|debug|encoding|mode|output|pager|profile|project|provider|conditional.?put"
    r"|(client|group|instance|transactional|tenant|pool|project).?id)$",
    re.IGNORECASE,
)
# Values that are never secret, and values that are secret only if the option is.
_WORD = re.compile(r"\s*(true|false|none|arn:aws[\w-]*:\S*)\s*", re.IGNORECASE)
_NO_SECRET = re.compile(r"required|optional|-?\d+(\.\d+)?\w{0,2}|arn:\S*|.{0,3}", re.IGNORECASE | re.DOTALL)
_BETWEEN_LINES = re.compile(r"\r|\n|\\n")
_BETWEEN_PARTS = re.compile(r"[\s:@/?#&,;=\"'{}\\]+")
_QUOTED = re.compile(r"([\"'])(.+?)\1", re.DOTALL)
_NO_PARTS = frozenset({
    "http", "https", "socks5", "socks5h", "required", "username", "password", "token", "credentials", "true", "false",
    "none", "metrics",
})  # fmt: skip
_BACKSLASHES = re.compile(r"\\+")
_MIN_PART_CHARACTERS = 4
_USER_INFO = re.compile(USER_INFO)
_SCHEME = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PROXY = re.compile(r"(https?|all)_proxy", re.IGNORECASE)
# An HTTP client sends a user, or the id of a client, together with its secret. Their options have the same prefix.
_USER = re.compile(r"(.*?)(user(name)?|id)", re.IGNORECASE | re.DOTALL)
_SECRET_OF_USER = re.compile(r"(.*?)(password|secret)", re.IGNORECASE | re.DOTALL)
# S3 repeats the token of a session that a client got from the machine, so that its value is not known.
_PARAMETER = re.compile(
    rf"({SECRET_PARAMETER}|<Token-\d{{1,2}}>|x-amz-security-token\s?[:=]\s?)[^\s&;\"'<>]+", re.IGNORECASE
)
# A client encodes a password together with a user. A word without digits and signs is none.
_CREDENTIALS = re.compile(r"\b(Basic|Bearer) (?=[\w+/.~-]*[0-9=+/])[\w+/.~-]{8,}=*", re.IGNORECASE)
# A client or a server may truncate a value that it repeats, so the first 12 characters identify it. A shorter value may
# be a common word, so it is not searched for within other words.
_MIN_PREFIX_CHARACTERS = 12
# Word boundaries; the end of an escape sequence also precedes a word.
_BEFORE_WORD = (
    r"(?:(?<![^\W_])|(?<=%[0-9A-Fa-f]{2})|(?<=%25[0-9A-Fa-f]{2})"
    r"|(?<=\\[abfnrtv0])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
)
# A JSON Web Token, which a client may have fetched itself, so that its value is not known; it may be truncated. It
# begins with a JSON object in base64, in which white space may come first. Without a dot it is another word, which is
# matched as well: a pattern that required the dot would read a word again from each place where a token may begin.
_TOKEN = re.compile(rf"{_BEFORE_WORD}e(?:yJ[\w-]{{8,}}|[w-z][\w-]{{14,}})(?P<parts>(?:\.[\w-]*){{0,4}})")
_AFTER_WORD = r"(?![^\W_])"
# The names of each character in HTML and XML, such as "lt;".
_ENTITIES: defaultdict[str, list[str]] = defaultdict(list)
for _entity, _char in html5.items():
    if _entity.endswith(";"):
        _ENTITIES[_char].append(_entity)
_VARIABLE = "env:"


@runtime_checkable
class Deferred(Protocol):
    """A value that is looked up when the client is created, such as ``dagster.EnvVar``."""

    def get_value(self) -> Scalar | None:
        """Return the current value; ``None`` if it is not set."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """A value that stays in the environment until the client is created, so that no log or page shows it.

    Args:
        name: the name of the variable.

    Example:
        >>> EnvironmentVariable("KAFKA_PASSWORD")
        EnvironmentVariable(name='KAFKA_PASSWORD')
    """

    name: str

    def get_value(self) -> str | None:
        """Return the value of the variable."""
        return os.environ.get(self.name)


def environment() -> dict[str, str]:
    """Return a copy of the environment; ``os.environ.items()`` fails if another thread removes a variable.

    Example:
        >>> environment().get("NO_SUCH_VARIABLE") is None
        True
    """
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


ClientConfig = Mapping[str, "Scalar | Deferred"]


def resolve(config: ClientConfig) -> dict[str, Scalar]:
    """Return the configuration with every deferred value looked up.

    Raises:
        InvalidOptionError: a variable is not set, a value is not text, a number or a Boolean, or text contains a NUL
            or a lone surrogate.

    Example:
        >>> resolve({"security.protocol": "SASL_SSL"})
        {'security.protocol': 'SASL_SSL'}
    """
    resolved: dict[str, Scalar] = {}
    for name, value in config.items():
        # Test this first: dagster.EnvVar is a str that must not be used as one.
        if isinstance(value, Deferred):
            resolved[name] = resolve_value(value, f"the option {name!r}")
        elif isinstance(value, (str, int, float, bool)):
            resolved[name] = value
        else:
            raise InvalidOptionError(
                f"the option {name!r} is a {type(value).__name__}",
                remedy="Use text, a number, a Boolean or an EnvVar, because executors get a copy.",
            )
        if not is_plain_text(f"{name}{resolved[name]}"):
            raise InvalidOptionError(
                f"the option {name!r} or its value contains a NUL or a lone surrogate", remedy="Use valid UTF-8 text."
            )
    return resolved


def parse_client_option(text: str) -> tuple[str, Scalar | Deferred]:
    """Parse ``NAME=VALUE``; a value ``env:VARIABLE`` stays in the environment.

    Raises:
        InvalidOptionError: the text has no ``=`` or no name.

    Example:
        >>> parse_client_option("sasl.password=env:KAFKA_PASSWORD")
        ('sasl.password', EnvironmentVariable(name='KAFKA_PASSWORD'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidOptionError("an option has no name or no value", remedy="Write NAME=VALUE or NAME=env:VARIABLE.")
    return name, option_value(value)


def option_value(value: Scalar) -> Scalar | Deferred:
    """Return the value of an option; a text ``env:VARIABLE`` stays in the environment.

    Example:
        >>> option_value("env:KAFKA_PASSWORD"), option_value(5)
        (EnvironmentVariable(name='KAFKA_PASSWORD'), 5)
    """
    is_variable = isinstance(value, str) and value.startswith(_VARIABLE)
    return EnvironmentVariable(str(value).removeprefix(_VARIABLE)) if is_variable else value


def check_header_value(secret: str, name: str) -> str:
    r"""Return a secret as a valid HTTP header value; white space around it, such as a file's newline, is removed.

    Args:
        secret: a token.
        name: the name of its option.

    Raises:
        InvalidOptionError: it contains characters that a header cannot contain.

    Example:
        >>> check_header_value("abc\n", "token")
        'abc'
    """
    value = secret.strip()
    if not (value.isascii() and value.isprintable()):
        raise InvalidOptionError(f"the {name} contains characters that no header may have", remedy="Correct it.")
    return value


def resolve_value(value: Deferred, what: str) -> Scalar:
    """Return the current value of a deferred option.

    Args:
        value: the deferred value.
        what: the option, for the error message.

    Raises:
        InvalidOptionError: the variable is not set.
    """
    found = value.get_value()
    if found is None:
        raise InvalidOptionError(
            f"{what} is read from the environment variable {variable_name(value)}, which is not set",
            remedy="Set it where this process runs: the daemon's code server and the runs.",
        )
    return found


def variable_name(value: object) -> str:
    """Return the name of the variable that holds a deferred value."""
    return str(getattr(value, "env_var_name", None) or getattr(value, "name", "environment"))


def redact_options(text: str, options: Mapping[str, object]) -> str:
    """Remove secret option values from a text of a client or a server, which may repeat them.

    Numbers, Booleans, file paths, addresses without credentials, names and choices (such as a user or a region) stay;
    any other value may be a secret. A secret is recognized verbatim, encoded for a URL, in base64, in hexadecimal
    digits and escaped; and in base64 and in hexadecimal digits also together with its user or client id. A secret of
    fewer than 12 characters is recognized only as a whole word. A longer one is also recognized in another case and by
    its beginning, but not without its first 12 characters. The parts of a secret, such as the password in a URL, are
    secrets as well, unless the value is the path of a file. The user and the password of any URL in the text are
    secrets, too, as are its parameters with names like ``password`` or ``sig``, JSON Web Tokens, the session tokens in
    the answers of S3, and the credentials of the proxies in the environment.

    Args:
        text: the text of an error.
        options: the options, with the secrets looked up.

    Example:
        >>> redact_options("unknown command 'HELLO' with '3' 'AUTH' 'me' 's3cret'", {"password": "s3cret", "db": 3})
        "unknown command 'HELLO' with '3' 'AUTH' 'me' '[hidden]'"
    """
    secrets: set[str] = set()
    # All HTTP clients use the proxies of the environment.
    proxies = address_options({name: value for name, value in environment().items() if _PROXY.fullmatch(name)})
    for name, value in [*options.items(), *proxies.items()]:
        if _may_be_secret(name, value):
            secrets |= _secrets(str(value), has_parts=bool(_SECRET.match(name) or not _PATH.fullmatch(str(value))))
    secrets |= _coded(_pairs(options))
    # The beginning of a secret may also be that of another one, so the longest match counts.
    shown, end = [], 0
    for first, last in sorted(place for secret in secrets for place in _places(text, secret)):
        if first >= end:
            shown.append(text[end:first])
        end = max(end, last)
    text = HIDDEN.join([*shown, text[end:]])
    text = _CREDENTIALS.sub(rf"\1 {HIDDEN}", text)
    text = _TOKEN.sub(lambda found: HIDDEN if found["parts"] else found[0], text)
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER_INFO.sub(f"://{HIDDEN}@", text))


def address_options(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of addresses as options for :func:`redact_options`, which then hides all but their hosts.

    Example:
        >>> address_options({"HTTP_PROXY": "http://me:s3cret@proxy:3128"})
        {'HTTP_PROXY 0 password': 'me:s3cret', 'HTTP_PROXY 1 password': 's3cret'}
    """
    return {
        f"{name} {place} password": secret
        for name, address in addresses.items()
        for place, secret in enumerate(sorted(address_secrets(address)))
    }


def secret_values(options: Mapping[str, object]) -> Iterator[str]:
    r"""Yield the values of options that may be secrets, and the lines of each, for a program that hides these texts.

    Example:
        >>> list(secret_values({"ssl.key.pem": "-----BEGIN-----\nMIIEvQ", "security.protocol": "SSL"}))
        ['-----BEGIN-----\nMIIEvQ', '-----BEGIN-----', 'MIIEvQ']
    """
    for name, value in options.items():
        if _may_be_secret(name, value):
            # A key within JSON has escaped line breaks.
            yield from dict.fromkeys((str(value), *map(str.strip, _BETWEEN_LINES.split(str(value)))))


def _may_be_secret(name: str, value: object) -> bool:
    text = "" if value is None or isinstance(value, bool) else str(value)
    if not text.strip() or _WORD.fullmatch(text):
        return False
    if _FILE.search(name) and _PATH.fullmatch(text):
        return False
    if _ADDRESS.search(name) and all(is_address(one.strip()) for one in text.split(",")):
        return False
    is_choice = _CHOICE.search(name) and "://" not in text and set("?#;").isdisjoint(text)
    return bool(_SECRET.match(name)) or not (is_choice or _NO_SECRET.fullmatch(text))


@lru_cache(maxsize=256)
def _secrets(value: str, *, has_parts: bool) -> frozenset[str]:
    """Return a secret and its parts: verbatim, decoded from a URL, in base64 and in hexadecimal."""
    credentials = value.partition("://")[2].rpartition("@")[0] or value
    # A password may contain the characters that separate parts.
    parts = {*_BETWEEN_PARTS.split(value), credentials, credentials.partition(":")[2]}
    parts |= {quoted[2] for quoted in _QUOTED.finditer(value)}
    plain = {value, value.strip()}
    if has_parts:
        plain |= {part for part in parts - _NO_PARTS if len(part) >= _MIN_PART_CHARACTERS}
        plain |= address_secrets(value) if _SCHEME.match(value) else set()
    plain |= set(map(unquote, plain))
    # A text may repeat a space or a backslash any number of times.
    return frozenset(_BACKSLASHES.sub(r"\\", " ".join(one.split())) for one in plain | _coded(plain)) - {""}


def _coded(texts: Iterable[str]) -> set[str]:
    """Return the texts in base64 and in hexadecimal."""
    codes = (b64encode, urlsafe_b64encode, hexlify)
    return {encode(form).decode().rstrip("=") for one in texts for form in _byte_forms(one) for encode in codes}


def _byte_forms(text: str) -> Iterator[bytes]:
    """Yield the bytes of a text in UTF-8, and in Latin-1, in which requests sends a user and a password."""
    yield _encoded(text)
    with suppress(UnicodeEncodeError):
        yield text.encode("latin-1")


def _pairs(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the pairs of a user and its secret that a client encodes; as they are, and encoded for a URL before."""
    users = [(found[1], str(value)) for name, value in options.items() if (found := _USER.fullmatch(name))]
    for name, value in options.items():
        if (found := _SECRET_OF_USER.fullmatch(name)) and _may_be_secret(name, value):
            for user in (user for prefix, user in users if prefix == found[1]):
                yield f"{user}:{value}"
                yield f"{quote_plus(_encoded(user))}:{quote_plus(_encoded(str(value)))}"


@lru_cache(maxsize=1024)
def _beginning(secret: str) -> re.Pattern[str]:
    """Return the search pattern: a short secret as a whole word, or the beginning of a longer one."""
    pattern = "".join(map(_written, secret[:_MIN_PREFIX_CHARACTERS]))
    if len(secret) >= _MIN_PREFIX_CHARACTERS:
        return re.compile(pattern, re.IGNORECASE)
    before = _BEFORE_WORD if secret[0].isalnum() else ""
    after = _AFTER_WORD if secret[-1].isalnum() else ""
    return re.compile(f"{before}{pattern}{after}")


def _encoded(text: str) -> bytes:
    """Return the bytes of a text; Python reads bytes that are not UTF-8 as lone surrogates."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def _places(text: str, secret: str) -> Iterator[tuple[int, int]]:
    """Yield where a secret begins and ends in a text."""
    end = 0
    for found in _beginning(secret).finditer(text):
        if found.start() >= end:
            end = found.end()
            for char in secret[_MIN_PREFIX_CHARACTERS:]:
                more = re.compile(_written(char), re.IGNORECASE).match(text, end)
                if more is None:
                    break
                end = more.end()
            yield found.start(), end


def _written(char: str) -> str:
    """Return a pattern for a character: verbatim, encoded for a URL or escaped, possibly several times over."""
    # Repetitions are bounded, because an untrusted text may repeat a character any number of times.
    if char == " ":
        return r"(?:\s|\+|%(?:25){0,3}(?:20|0[9ABCDabcd])|\\{1,4}[fnrtv]){1,40}"
    entities = "".join(f"|{name}" for name in _ENTITIES.get(char, ()))
    utf_8, utf_16 = _encoded(char), char.encode("utf-16-be", "surrogatepass").hex()
    codes = (
        "".join(f"%(?:25){{0,3}}{byte:02x}" for byte in utf_8),
        "".join(rf"\\{{1,4}}x{byte:02x}" for byte in utf_8),
        "".join(rf"\\{{1,4}}u{utf_16[place : place + 4]}" for place in range(0, len(utf_16), 4)),
        rf"\\{{1,4}}x{ord(char):02x}",
        rf"\\{{1,4}}U{ord(char):08x}",
        f"&(?:amp;){{0,3}}(?:#0{{0,5}}{ord(char)};|#x0{{0,5}}{ord(char):x};{entities})",
    )
    escaped = rf"\\{{0,4}}{re.escape(char)}"
    plain = r"\\{1,16}" if char == "\\" else re.escape(char) if char.isalnum() else escaped
    if not is_plain_text(char):
        # A text may have a replacement for a byte that is not UTF-8.
        plain = f"[{char}\ufffd?]"
    # A code may begin with the character, as "&amp;" does.
    return f"(?:(?i:{'|'.join(codes)})|{plain})"
