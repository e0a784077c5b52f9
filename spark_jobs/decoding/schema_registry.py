"""Looks up schemas in a schema registry that speaks Confluent's protocol."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from spark_jobs.decoding.decoders import import_library, shortened
from spark_jobs.decoding.schema_limits import ENTRY_CHARACTERS, copied
from stream_consumers.client_config import ClientConfig, Deferred, Scalar, check_header_value, redact_options, resolve
from stream_consumers.deadlines import within
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidOptionError,
    SchemaMismatchError,
    SchemaNotFoundError,
    SchemaRegistryError,
    StreamAssetsError,
)
from stream_consumers.library_logs import redact_logs
from stream_consumers.options import check_name
from stream_consumers.urls import check_address

# Without these, the client waits for an answer and caches the newest version of a subject forever.
DEFAULTS: dict[str, Scalar] = {
    "timeout": 10,
    "max.retries": 5,
    "retries.wait.ms": 200,
    "retries.max.wait.ms": 2000,
    "cache.latest.ttl.sec": 0,
}
UNKNOWN_SECONDS = 30.0
"""Seconds until an unknown id is requested again, doubled each time that it is still unknown."""
MAX_UNKNOWN_DOUBLINGS = 5
MAX_UNKNOWN_ERRORS = 10_000
"""The number of unknown ids whose errors are kept."""
MAX_ID = (1 << 31) - 1
"""The largest id of a registry. A larger number is damaged, and is not requested."""
MAX_CACHED_CHARACTERS = 16 << 20
"""The cache size of a process for each registry, in characters, because messages can name any number of schemas."""
MAX_REFERENCES = 200
"""The most references of a schema, and the most schemas that it needs, directly or through others."""
MAX_NAME_CHARACTERS = 1000
"""The longest name or subject of a reference, in characters; a subject becomes part of the address of a request."""
MAX_SCHEMA_CHARACTERS = 1 << 20
"""The longest schema with all schemas that it refers to, and their names and subjects, in characters."""
MAX_ANSWER_BYTES = 8 * MAX_SCHEMA_CHARACTERS
"""The longest answer in bytes. JSON may write a character as six bytes."""
MAX_ANSWER_SECONDS = 60.0
"""The longest time for an answer to arrive completely, in seconds."""
MAX_WAIT_SECONDS = 10
"""The longest wait of a request for a registry that limits requests, in seconds; beyond that the run retries."""
_NUMBERS = (
    "timeout",
    "cache.capacity",
    "cache.latest.ttl.sec",
    "max.retries",
    "retries.wait.ms",
    "retries.max.wait.ms",
)
_TOKEN = "bearer.auth.token"  # noqa: S105 - the name of an option
_DENIED = (401, 403)
_FORBIDDEN = 403
_TOO_MANY = 429
_TRANSIENT = (408, 425, 429)
# The codes for subject, version and schema; a plain 404 comes from a server that is not a registry.
_MISSING = (40401, 40402, 40403)
_SERVER_ERRORS = 500
_RETRY_REMEDY = "Check that it runs, and its address; no message was lost, run again."
_ADDRESS = (
    "Write it like https://registry:8081, and put a user, a password or a key into options, like "
    "{'basic.auth.user.info': …}, preferably as an EnvVar."
)
_OPTION_ADDRESS = (
    "Write it like https://login/token, and put credentials into other options, such as bearer.auth.client.id and "
    "bearer.auth.client.secret, and parameters for OAUTHBEARER_AZURE_IMDS into bearer.auth.issuer.endpoint.query."
)
_ACCESS_REMEDY = "Check the credentials in the options, such as basic.auth.user.info, and the permissions of the user."
# The process is in the key, because a forked process must not share the connections of a client.
_lookups: dict[tuple[object, ...], Lookups] = {}
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """A schema in a registry.

    Args:
        kind: ``AVRO``, ``PROTOBUF`` or ``JSON``.
        text: the text of the schema; for Protobuf the file descriptor in base64 if the registry returns it.
        references: the schemas that it needs, directly or through others, by the names that refer to them. Each name
            occurs once, after those that it needs itself. These schemas have no references of their own.
        subject: the subject under which it was looked up; empty if it was looked up by its id.
    """

    kind: str
    text: str
    references: tuple[tuple[str, StoredSchema], ...] = ()
    subject: str = field(default="", compare=False)

    @property
    def characters(self) -> int:
        """The length of its text and of all schemas that it refers to."""
        return len(self.text) + sum(len(name) + one.characters for name, one in self.references)

    def check_kind(self, kind: str) -> None:
        """Check that the schema has this format.

        Raises:
            SchemaMismatchError: it has another format.
        """
        if self.kind != kind:
            raise SchemaMismatchError(
                f"the schema is of format {self.kind}, not {kind}", remedy="Decode it with the decoder of its format."
            )


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A schema registry of Confluent, or one with its protocol, such as Karapace, Apicurio and Redpanda.

    The client of ``confluent-kafka`` looks up each schema id once in each process. If the registry does not answer, the
    batch fails, and the run retries it for its ``retry_seconds``.

    Args:
        url: the URL of the registry, without a password; several, separated by commas, are tried in turn. An ``EnvVar``
            is looked up when it is used.
        options: options of the client, like ``basic.auth.user.info``, ``ssl.ca.location``, ``bearer.auth.token`` or
            ``timeout`` (seconds, 10 by default). An ``EnvVar`` is looked up on the driver. Options are never shown.

    Raises:
        InvalidOptionError: the URL is not a URL, or it or a URL in the options contains a password or parameters.
        MissingDependencyError: the libraries of the client are not installed.

    Example:
        >>> SchemaRegistry("https://registry:8081", options={"basic.auth.user.info": "me:secret"})
        SchemaRegistry(url='https://registry:8081')
    """

    url: str
    options: ClientConfig = field(default_factory=dict, repr=False, kw_only=True)
    known_id: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, Deferred):
            _check_url(self.url)
        if not isinstance(self.options, Mapping):
            raise InvalidOptionError(
                f"options must be a mapping, got a {type(self.options).__name__}",
                remedy="Write it like {'basic.auth.user.info': …}.",
            )
        for name, value in self.options.items():
            if name.endswith(".url") and isinstance(value, str) and not isinstance(value, Deferred):
                check_address(f"the option {name}", value, remedy=_OPTION_ADDRESS)
        _client_module()

    @property
    def is_resolved(self) -> bool:
        """Whether no value has to be looked up in the environment."""
        return not any(isinstance(value, Deferred) for value in (self.url, *self.options.values()))

    def resolved(self) -> SchemaRegistry:
        """Look up the values in the environment, which executors do not share.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        if self.is_resolved:
            return self
        return replace(self, url=str(resolve({"url": self.url})["url"]), options=resolve(self.options))

    def schema(self, number: int, *, form: str | None = None, subject: str = "") -> StoredSchema:
        """Look up the schema of an id.

        Args:
            number: the id.
            form: the requested format, ``serialized`` for Protobuf.
            subject: the subject under which the schema must be registered; any by default.

        Raises:
            SchemaNotFoundError: there is no such schema, or it is not registered under the subject.
            SchemaMismatchError: the schema is too large, or has too many references.
            SchemaRegistryError: the registry does not answer for now.
            AccessDeniedError: the registry denies access.
            InvalidOptionError: the server is not a registry, or the options are wrong.
        """
        return self._lookups().schema(number, form, subject)

    def subject(self, name: str, version: int | None = None, *, form: str | None = None) -> StoredSchema:
        """Look up the current schema of a subject.

        Args:
            name: the name of the subject, like ``orders-value``.
            version: the version; the newest by default.
            form: see :meth:`schema`.

        Raises:
            StreamAssetsError: see :meth:`schema`.
        """
        return self._lookups().subject(name, version, form)

    def with_known_id(self) -> SchemaRegistry:
        """Add an id whose schema the registry has returned, by which another process recognizes the registry."""
        known = replace(self)
        object.__setattr__(known, "known_id", self._lookups().known_id)
        return known

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep connections of this process to the registry open within the block."""
        with self._lookups().session():
            yield

    def _lookups(self) -> Lookups:
        registry = self.resolved()
        key = (os.getpid(), registry.url, *sorted(registry.options.items()))
        with _making:
            if key not in _lookups:
                _lookups[key] = Lookups(registry)
            _lookups[key].known_id = self.known_id or _lookups[key].known_id
            return _lookups[key]


_UNKNOWN_ID = np.dtype([("id_plus_one", np.uint32), ("doublings", np.uint8), ("asked", np.float64)])
_PLACE_BITS = 20


class _UnknownIds:
    """The times at which ids without a usable schema were requested, in 13 MiB.

    There are about as many entries as a process can request ids until the first of them is requested again. Of the ids
    with the same place in the table, only the last one is remembered. The places are random, so that ids cannot be
    chosen to displace each other.
    """

    def __init__(self) -> None:
        self._entries = np.zeros(1 << _PLACE_BITS, _UNKNOWN_ID)
        self._factor = secrets.randbits(64) | 1

    def is_recent(self, number: int) -> bool:
        """Return whether an id was requested so recently that it must not be requested again."""
        id_plus_one, doublings, asked = self._entries[self._place(number)].item()
        return bool(id_plus_one == number + 1 and time.monotonic() < asked + UNKNOWN_SECONDS * 2**doublings)

    def add(self, number: int) -> None:
        """Record that an id was requested now."""
        place = self._place(number)
        id_plus_one, doublings, _ = self._entries[place].item()
        doublings = min(doublings + 1, MAX_UNKNOWN_DOUBLINGS) if id_plus_one == number + 1 else 0
        self._entries[place] = (number + 1, doublings, time.monotonic())

    def _place(self, number: int) -> int:
        return (number * self._factor % (1 << 64)) >> (64 - _PLACE_BITS)


class Lookups:
    """The client of one process for a registry, with a cache of the schemas that it found and did not find.

    Args:
        registry: the registry, with values of the environment resolved.

    The attribute ``known_id`` is the id of a schema that the registry has returned, or 0.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self.known_id = 0
        self._url = registry.url
        _check_url(registry.url)
        self._options = resolve(registry.options)
        self._lock = threading.RLock()
        self._users = 0
        # The credentials that the client has sent: its options, or tokens that it has fetched and renewed.
        self._sent: deque[str] = deque(maxlen=16)
        self._client: Any = None
        # The errors of a request that failed before an answer arrived.
        self._outages: tuple[type[Exception], ...] = (OSError,)
        self._known: dict[tuple[object, ...], Any] = {}
        self._kept = 0
        # For each subject and form.
        self._unknown: defaultdict[tuple[str, str | None], _UnknownIds] = defaultdict(_UnknownIds)
        self._errors: dict[tuple[object, ...], StreamAssetsError] = {}

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the client that is created within the block until the last such block ends."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._client is not None:
                    _close(self._client)
                    self._client = None

    def _connected(self) -> Any:
        with self._lock:
            # Creating a client takes 30 ms, and a block of messages with known schemas needs none.
            self._client = self._client or self._made()
            return self._client

    def _made(self) -> Any:
        try:
            config = {**DEFAULTS, **self._options}
            if _TOKEN in config:
                config[_TOKEN] = check_header_value(str(config[_TOKEN]), _TOKEN)
            numbers = {name: float(config[name]) for name in _NUMBERS if name in config}
            client = _client_module().SchemaRegistryClient({**config, **numbers, "url": self._url})
            redact_logs(_secrets_of_registries)
            session = client._rest_client.session
            # The client uses httpx, or its successor httpx2.
            library: Any = sys.modules[type(session).__module__.partition(".")[0]]
            _limit_answers(session, library.SyncByteStream)  # it has no option for this
            for one in (session, *_token_clients(client)):
                one.event_hooks["request"].append(self._remember)
            self._outages = (OSError, library.TransportError, library.HTTPStatusError)
            return client
        except (ValueError, TypeError, OSError) as error:
            raise InvalidOptionError(
                f"the client of the schema registry {self._url} rejects its options: {self._said(error)}",
                remedy="See the options of SchemaRegistryClient in confluent-kafka.",
            ) from None

    def _said(self, error: Exception) -> str:
        return shortened(self.redacted(str(getattr(error, "error_message", error)))) or type(error).__name__

    def redacted(self, text: str) -> str:
        """Return a text of the client without the values of its options, and without the credentials that it sent."""
        return redact_options(text, self.secrets())

    def secrets(self) -> dict[str, Scalar]:
        """Return the options of the client, and the credentials that it sent, for :func:`redact_options`."""
        sent = {f"{place} token": token for place, token in enumerate(tuple(self._sent))}
        return {**self._options, **sent}

    def _remember(self, request: Any) -> None:
        token = request.headers.get("authorization", "").partition(" ")[2]
        if token and token not in self._sent:
            self._sent.append(token)

    def schema(self, number: int, form: str | None, subject: str) -> StoredSchema:
        """See :meth:`SchemaRegistry.schema`.

        Only the registry decides whether an id is unknown. An unknown id may be new, so it is requested again, but only
        after a while. So damaged ids cost one request each, one after the other, at the rate of the registry.
        """
        key = (number, subject, form)
        if isinstance(known := self._known.get(key), StoredSchema):
            return known
        if number > MAX_ID:
            raise SchemaNotFoundError(f"schema id {number} is larger than ids can be", remedy="The message is damaged.")
        unknown = self._unknown[subject, form]
        if unknown.is_recent(number):
            if key in self._errors:
                raise copied(self._errors[key])
            raise SchemaNotFoundError(
                f"the schema registry {self._url} has returned no usable schema with id {number}",
                remedy="Check the producer.",
            )
        try:
            stored = self._asked_schema(number, form, subject)
        except (SchemaNotFoundError, SchemaMismatchError) as error:
            unknown.add(number)
            if len(self._errors) >= MAX_UNKNOWN_ERRORS:
                self._errors.clear()
            self._errors[key] = copied(error)
            raise
        self._keep(key, stored, stored.characters)
        self.known_id = number
        return stored

    def _asked_schema(self, number: int, form: str | None, subject: str) -> StoredSchema:
        try:
            if subject:
                self._check_registered(number, subject)
            found = self._ask(f"schema id {number}", lambda client: client.get_schema(number, fmt=form))
            return self._stored(found, form)
        except AccessDeniedError as error:
            # A message may name a schema to which we have no access, but without any access the run must fail.
            if error.facts["status"] == _FORBIDDEN and self._is_registry():
                raise SchemaMismatchError(error.what, remedy=error.remedy, **error.facts) from error
            raise
        except SchemaRegistryError as error:
            # A message may name a schema for which the registry always fails, but if it fails for others too, the run
            # must retry.
            with suppress(SchemaRegistryError):
                if error.facts.get("status") == _SERVER_ERRORS and self.known_id and self._is_registry():
                    raise SchemaMismatchError(error.what, remedy=error.remedy, **error.facts) from error
            raise

    def _keep(self, key: tuple[object, ...], found: Any, characters: int) -> None:
        length = ENTRY_CHARACTERS + characters
        if self._kept + length > MAX_CACHED_CHARACTERS:
            self._known.clear()
            self._kept = 0
        self._known[key] = found
        self._kept += length

    def _check_registered(self, number: int, subject: str) -> None:
        """Check that the schema of an id was ever registered under a subject."""
        subjects = self._answer(
            f"schema id {number}", lambda client: list(client.get_subjects_by_schema_id(number, subject, deleted=True))
        )
        if subject not in subjects:
            raise SchemaNotFoundError(
                f"schema id {number} is not registered under subject {subject!r}",
                remedy="Register it there if its messages should be read.",
            )

    def subject(self, name: str, version: int | None, form: str | None) -> StoredSchema:
        """See :meth:`SchemaRegistry.subject`."""
        what = f"subject {name!r}" if version is None else f"version {version} of subject {name!r}"
        number = 0

        def ask(client: Any) -> Any:
            nonlocal number
            if version is None:
                found = client.get_latest_version(name, fmt=form)
            else:
                found = client.get_version(name, version, fmt=form)
            number = found.schema_id
            return found.schema

        stored = replace(self._stored(self._ask(what, ask), form), subject=name)
        if isinstance(number, int):
            self.known_id = number
        return stored

    def _stored(self, schema: Any, form: str | None) -> StoredSchema:
        """Look up all schemas that a schema needs.

        Raises:
            SchemaMismatchError: there are too many schemas, or they are too large together.
        """
        found: dict[str, StoredSchema] = {}
        seen: set[str] = set()
        length = 0

        def add(one: Any) -> StoredSchema:
            nonlocal length
            length += _characters(one)
            if len(seen) > MAX_REFERENCES or length > MAX_SCHEMA_CHARACTERS:
                raise SchemaMismatchError(
                    "a schema of the registry has too many references, or is too long with them",
                    remedy=f"Use at most {MAX_REFERENCES} references and {MAX_SCHEMA_CHARACTERS} characters.",
                    references=len(seen),
                    characters=length,
                )
            for reference in one.references or ():
                if reference.name not in seen:
                    seen.add(reference.name)
                    found[reference.name] = add(self._reference(reference, form))
            return StoredSchema(one.schema_type or "AVRO", one.schema_str)

        stored = add(schema)
        return replace(stored, references=tuple(found.items()))

    def _reference(self, reference: Any, form: str | None) -> Any:
        """Look up a schema that another one refers to."""
        subject, version = reference.subject, reference.version
        key = (subject, version, form)
        found = self._known.get(key)
        if found is None:
            what = f"version {version} of subject {subject!r}, to which another schema refers"
            found = self._ask(what, lambda client: client.get_version(subject, version, fmt=form).schema)
            self._keep(key, found, _characters(found))
        return found

    def _ask(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """Request a schema, and check the form of the answer."""

        def checked(client: Any) -> Any:
            found = ask(client)
            if found.schema_str == "":
                raise SchemaMismatchError(f"{what} is empty", remedy="Correct it in the registry.")
            if not isinstance(found.schema_str, str) or not isinstance(found.schema_type, str | None):
                raise ValueError("an answer without a schema")
            if len(found.references or ()) > MAX_REFERENCES or not all(map(_is_reference, found.references or ())):
                raise SchemaMismatchError(
                    f"{what} has more than {MAX_REFERENCES} references, or one without a name and a subject of at most "
                    f"{MAX_NAME_CHARACTERS} characters and a numeric version",
                    remedy="Correct it in the registry.",
                )
            return found

        return self._answer(what, checked)

    def _answer(self, what: str, ask: Callable[[Any], Any]) -> Any:
        try:
            return self._raw_answer(what, ask)
        except InvalidOptionError as error:
            # If the server is a registry, the odd answer is about one schema, which a message may have named. If it is
            # another server, the run must fail, or all messages would become dead letters.
            if self._is_registry():
                raise SchemaMismatchError(
                    error.what, remedy="Correct the schema in the registry.", **error.facts
                ) from error
            raise

    def _raw_answer(self, what: str, ask: Callable[[Any], Any]) -> Any:
        module = _client_module()
        where = f"the schema registry {self._url}"
        try:
            with self.session():
                return within(MAX_ANSWER_SECONDS, partial(ask, self._connected()))
        except (StreamAssetsError, MemoryError):
            raise
        except module.error.SchemaRegistryError as error:
            raise _explained(error, self._said(error), what=what, where=where) from None
        except module.error.OAuthTokenError as error:
            # The client raises it while it handles the error of the request for a token.
            if isinstance(error.__context__, self._outages):
                raise self._outage(error, where) from None
            raise AccessDeniedError(
                f"{where} cannot be asked without a token: {self._said(error)}", remedy=_ACCESS_REMEDY, status=401
            ) from None
        except self._outages as error:
            raise self._outage(error, where) from None
        except Exception:  # noqa: BLE001 - its HTTP client and its parser may raise anything
            # The schema decides what is requested and answered, so it must not count as an outage, which is retried.
            raise InvalidOptionError(
                f"{where} cannot be asked for {what}, or its answer is not a schema",
                remedy="Check that the address is that of a schema registry.",
            ) from None

    def _outage(self, error: Exception, where: str) -> StreamAssetsError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return InvalidOptionError(
                f"the certificate of {where} is not trusted: {self._said(error)}",
                remedy="Set ssl.ca.location in the options to the certificate of its authority.",
            )
        return SchemaRegistryError(f"{where} does not answer: {self._said(error)}", remedy=_RETRY_REMEDY)

    def _is_registry(self) -> bool:
        """Return whether the server returns a schema that it returned before or, without one, lists its subjects."""

        def is_given(client: Any) -> bool:
            if self.known_id:
                # The method of the client would answer from its own cache.
                return isinstance(client._rest_client.get(f"schemas/ids/{self.known_id}")["schema"], str)
            return isinstance(client.get_subjects(), list)

        try:
            return bool(self._raw_answer("what it knows", is_given))
        except (AccessDeniedError, InvalidOptionError, SchemaMismatchError, SchemaNotFoundError):
            return False


def _is_reference(one: Any) -> bool:
    """Return whether a reference names a schema that can be requested."""
    names = (one.name, one.subject)
    # The client puts the version into the path of a request without a check.
    has_names = all(isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS for name in names)
    return has_names and isinstance(one.version, int)


def _characters(schema: Any) -> int:
    """Return the length of a schema with its references."""
    return len(schema.schema_str) + sum(len(one.name) + len(one.subject) for one in schema.references or ())


def _close(client: Any) -> None:
    client.close()
    # It leaves the client open that fetches its tokens.
    for fetching in _token_clients(client):
        fetching.close()


def _token_clients(client: Any) -> list[Any]:
    """Return the HTTP client that fetches tokens, if there is one."""
    fetching = getattr(client._rest_client.bearer_field_provider, "client", None)
    return [] if fetching is None else [fetching]


def _secrets_of_registries() -> dict[str, Scalar]:
    """Return the secrets of all registries of this process, because a log record does not name its client."""
    clients = enumerate(tuple(_lookups.values()))
    return {f"{place} {name}": value for place, client in clients for name, value in client.secrets().items()}


def _limit_answers(session: Any, base: Any) -> None:
    """Stop reading an answer that is too long, before it fills the memory.

    Args:
        session: the HTTP client of confluent-kafka.
        base: the class of the streams of its answers.
    """

    class LimitedStream(base):  # type: ignore[misc]  # the library is known only at run time
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in self._stream:
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise SchemaMismatchError(
                        f"the schema registry answers with more than {MAX_ANSWER_BYTES} bytes",
                        remedy="Check the address, and the size of the schema.",
                    )
                yield part

        def close(self) -> None:
            self._stream.close()

    def limit(response: Any) -> None:
        # The client ignores this header. Wait here for a short time; for a longer one the run retries. Wait also if
        # there is no such header, because the client's own waits are too short if several processes share the limit.
        seconds = response.headers.get("retry-after", "1")
        if response.status_code == _TOO_MANY and seconds.isdecimal() and len(seconds) < 10:
            if int(seconds) > MAX_WAIT_SECONDS:
                raise SchemaRegistryError(
                    "the schema registry accepts no more requests for now",
                    remedy=_RETRY_REMEDY,
                    status=_TOO_MANY,
                    retry_after=int(seconds),
                )
            time.sleep(int(seconds))
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SchemaMismatchError(
                "the schema registry compresses its answer despite Accept-Encoding: identity, so that its size cannot "
                "be limited",
                remedy="Switch compression off in the registry, or in the proxy in front of it.",
            )
        response.stream = LimitedStream(response.stream)

    # A few bytes of a compressed answer may expand to gigabytes.
    session.headers["Accept-Encoding"] = "identity"
    session.event_hooks["response"].append(limit)


def _explained(error: Any, said: str, *, what: str, where: str) -> StreamAssetsError:
    status = error.http_status_code
    if error.error_code in _MISSING:
        return SchemaNotFoundError(f"{where} has no {what}", remedy="Check the name, or the producer.")
    if status in _DENIED:
        return AccessDeniedError(f"{where} denies access to {what}: {said}", remedy=_ACCESS_REMEDY, status=status)
    if status in _TRANSIENT or status >= _SERVER_ERRORS:
        return SchemaRegistryError(f"{where} cannot answer for {what}: {said}", remedy=_RETRY_REMEDY, status=status)
    return InvalidOptionError(
        f"{where} rejects {what}: {said}", remedy="Check the name and the version.", status=status
    )


def _check_url(url: str) -> None:
    check_name("url", url)
    for one in map(str.strip, url.split(",")):
        check_address("the URL of the schema registry", one, remedy=_ADDRESS)
        if not one.startswith(("http://", "https://")):
            raise InvalidOptionError(f"url={url!r} is not a URL", remedy=_ADDRESS)


def _client_module() -> Any:
    return import_library("confluent_kafka.schema_registry", extra="schema-registry")
