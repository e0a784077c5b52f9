"""A schema registry that speaks Confluent's protocol, as a value: which one, and how to get in."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.rows import shortened
from spark_jobs.decoding.schema_cache import ENTRY_CHARACTERS, copied
from stream_consumers.addresses import check_address
from stream_consumers.client_config import ClientConfig, Deferred, Scalar, check_header_value, resolve, without_values
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidOptionError,
    SchemaMismatchError,
    SchemaNotFoundError,
    SchemaRegistryError,
    StreamAssetsError,
)
from stream_consumers.options import check_count, check_name

# The client itself would wait for an answer, and remember what was the newest version, for ever.
DEFAULTS: dict[str, Scalar] = {
    "timeout": 10,
    "max.retries": 2,
    "retries.wait.ms": 200,
    "retries.max.wait.ms": 2000,
    "cache.latest.ttl.sec": 0,
}
UNKNOWN_SECONDS = 30.0
"""After how long an unknown id is asked for again; twice as long after each time that it is still unknown."""
MOST_UNKNOWN_DOUBLINGS = 5
MOST_UNKNOWN = 10_000
LARGEST_ID = (1 << 31) - 1
"""Registries count with 32 bits and a sign: a larger number is damage, and is not asked for."""
FEW_UNKNOWN = 100
"""How many unknown ids are asked for whatever they are; see :meth:`Lookups.schema` for those behind them."""
NEW_IDS = 10_000
"""By how much an id may be above twice the greatest known one, to be asked for all the same."""
MOST_KEPT = 16 << 20
"""The characters of schemas that a process keeps for each registry: messages can name new ones without end."""
MOST_REFERENCES = 200
LONGEST_SCHEMA = 1 << 20
"""The characters of a schema and of all schemas that it refers to."""
LONGEST_ANSWER = 8 * LONGEST_SCHEMA
"""The bytes of an answer: JSON may write a character as six."""
LONGEST_ANSWER_SECONDS = 60.0
"""How long an answer may take to arrive, however regularly its parts do."""
LONGEST_WAIT_SECONDS = 10
"""How long a look-up waits for a registry that takes no more requests for now; longer is up to the run."""
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
_PASSING = (408, 425, 429)
# Subject, version and schema; a plain 404 is that of a server that is no registry.
_MISSING = (40401, 40402, 40403)
_SERVER_ERRORS = 500
_ASK_AGAIN = "Check that it runs, and the address; nothing was lost, run again."
_ADDRESS = (
    "Write it like https://registry:8081, and give a user, a password or a key in options, like "
    "{'basic.auth.user.info': …}, best as an EnvVar."
)
_LET_IN = "Check basic.auth.user.info, or what else the registry takes, in the options, and the rights of the user."
# With the process in the key: a client that was forked would share its connections.
_lookups: dict[tuple[object, ...], Lookups] = {}
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """A schema as it is registered.

    Args:
        kind: ``AVRO``, ``PROTOBUF`` or ``JSON``.
        text: of the schema; for Protobuf, the file descriptor in base64 where the registry gives it.
        references: the schemas that it needs, directly or through others, by the names that they are referred to. Each
            name is there once, after those that it needs itself. They have no references of their own.
        subject: the subject as whose schema it was looked up; empty if it was looked up by its id.
    """

    kind: str
    text: str
    references: tuple[tuple[str, StoredSchema], ...] = ()
    subject: str = field(default="", compare=False)

    @property
    def characters(self) -> int:
        """How long it is with all that it refers to."""
        return len(self.text) + sum(len(name) + one.characters for name, one in self.references)


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A schema registry: Confluent's, or one that speaks its protocol, as Karapace, Apicurio and Redpanda do.

    Schemas are looked up by ``confluent-kafka``'s own client, once for each id and process. A registry that does not
    answer fails the batch, and the run tries again for its ``retry_seconds``.

    Args:
        url: of the registry, without a password; several, separated by commas, are tried in turn. An ``EnvVar`` is
            looked up when it is used.
        options: of the client, like ``basic.auth.user.info``, ``ssl.ca.location``, ``bearer.auth.token`` or
            ``timeout`` (seconds, 10 by default). An ``EnvVar`` is looked up on the driver. They are shown nowhere.

    Raises:
        InvalidOptionError: no URL, or one with a password in it.
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
                f"options is a {type(self.options).__name__}", remedy="Give {'basic.auth.user.info': …}, and the like."
            )
        _client_module()

    @property
    def is_resolved(self) -> bool:
        """Whether nothing of it is still in the environment."""
        return not any(isinstance(value, Deferred) for value in (self.url, *self.options.values()))

    def resolved(self) -> SchemaRegistry:
        """The same, with what is in the environment looked up: executors have another one.

        Raises:
            InvalidOptionError: a variable that is not set.
        """
        if self.is_resolved:
            return self
        return replace(self, url=str(resolve({"url": self.url})["url"]), options=resolve(self.options))

    def schema(self, number: int, *, form: str | None = None, subject: str = "") -> StoredSchema:
        """The schema of an id.

        Args:
            number: the id.
            form: the format to ask for, ``serialized`` for Protobuf.
            subject: under which it must be registered; any by default.

        Raises:
            SchemaNotFoundError: there is none, or it is not registered under the subject.
            SchemaMismatchError: it is too large, or has too many references.
            SchemaRegistryError: the registry does not answer for now.
            AccessDeniedError: it does not let us in.
            InvalidOptionError: it is no registry, or its options are wrong.
        """
        return self._lookups().schema(number, form, subject)

    def subject(self, name: str, version: int | None = None, *, form: str | None = None) -> StoredSchema:
        """The schema of a subject as it is now.

        Args:
            name: of the subject, like ``orders-value``.
            version: the newest by default.
            form: see :meth:`schema`.

        Raises:
            StreamAssetsError: see :meth:`schema`.
        """
        return self._lookups().subject(name, version, form)

    def with_known_id(self) -> SchemaRegistry:
        """The same with an id of which it gave us the schema: by it another process knows the registry from others."""
        known = replace(self)
        object.__setattr__(known, "known_id", self._lookups().known_id)
        return known

    @contextmanager
    def open(self) -> Iterator[None]:
        """Connections that are made meanwhile are kept, for all who ask in this process, and closed at the end."""
        with self._lookups().session():
            yield

    def _lookups(self) -> Lookups:
        registry = self.resolved()
        key = (os.getpid(), registry.url, *sorted(registry.options.items()))
        with _making:
            if key not in _lookups:
                _lookups[key] = Lookups(registry)
            _lookups[key].learn(self.known_id)
            return _lookups[key]


@dataclass(frozen=True, slots=True)
class _Unknown:
    """An id of which the registry gave no schema that can be used.

    Args:
        asked: when it was asked for last.
        doublings: how often the time until it is asked for again was doubled.
        error: what it said.
    """

    asked: float
    doublings: int
    error: StreamAssetsError


class Lookups:
    """What one process asks a registry, and what it has found.

    Args:
        registry: with nothing left in the environment.

    The attribute ``known_id`` is the id of a schema that the registry gave, 0 for none.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self.known_id = self._greatest = 0
        self._url = registry.url
        _check_url(registry.url)
        self._options = resolve(registry.options)
        self._lock = threading.RLock()
        self._users = 0
        self._client: Any = None
        self._known: dict[tuple[object, ...], Any] = {}
        self._kept = 0
        self._unknown: dict[tuple[object, ...], _Unknown] = {}

    @contextmanager
    def session(self) -> Iterator[None]:
        """A client that is made meanwhile is kept; it ends with the last one who may use it."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._client is not None:
                    self._client.close()
                    self._client = None

    def _connected(self) -> Any:
        with self._lock:
            # It takes 30 ms to make one: a block of messages whose schemas are known needs none.
            self._client = self._client or self._made()
            return self._client

    def _made(self) -> Any:
        try:
            config = {**DEFAULTS, **self._options}
            if _TOKEN in config:
                config[_TOKEN] = check_header_value(str(config[_TOKEN]), _TOKEN)
            numbers = {name: float(config[name]) for name in _NUMBERS if name in config}
            client = _client_module().SchemaRegistryClient({**config, **numbers, "url": self._url})
            _limit_answers(client._rest_client.session)  # it has no option for this
            return client
        except (ValueError, TypeError, OSError) as error:
            raise InvalidOptionError(
                f"the client of the schema registry {self._url} refuses its options: {self._said(error)}",
                remedy="See the options of SchemaRegistryClient in confluent-kafka.",
            ) from None

    def _said(self, error: Exception) -> str:
        """What the client says, which may repeat its options; for that it is the cause of no error."""
        text = str(getattr(error, "error_message", error))
        return shortened(without_values(text, self._options)) or type(error).__name__

    def schema(self, number: int, form: str | None, subject: str) -> StoredSchema:
        """See :meth:`SchemaRegistry.schema`.

        Damaged ids must not ask the registry for each message. An unknown one is asked for again after a while only,
        since it may be new. Once more than :data:`FEW_UNKNOWN` are unknown, one that is far above all known ids, as
        most numbers are, is not asked for.
        """
        key = (number, subject, form)
        if isinstance(known := self._known.get(key), StoredSchema):
            return known
        is_far = number > 2 * self._greatest + NEW_IDS
        if number > LARGEST_ID or (is_far and len(self._unknown) >= FEW_UNKNOWN):
            raise SchemaNotFoundError(
                f"schema id {number} is far above those of the schema registry {self._url}",
                remedy="It is damaged, or of another registry.",
            )
        before = self._unknown.get(key)
        if before is not None and time.monotonic() < before.asked + UNKNOWN_SECONDS * 2**before.doublings:
            raise copied(before.error)
        try:
            stored = self._asked_schema(number, form, subject)
        except (SchemaNotFoundError, SchemaMismatchError) as error:
            self._unknown.pop(key, None)
            if len(self._unknown) >= MOST_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]
            doublings = 0 if before is None else min(before.doublings + 1, MOST_UNKNOWN_DOUBLINGS)
            self._unknown[key] = _Unknown(time.monotonic(), doublings, copied(error))
            raise
        self._unknown.pop(key, None)
        self._keep(key, stored, stored.characters)
        self.learn(number)
        return stored

    def learn(self, number: int) -> None:
        """Note the id of a schema that the registry gave, here or to another process; 0 for none."""
        self.known_id, self._greatest = number or self.known_id, max(number, self._greatest)

    def _asked_schema(self, number: int, form: str | None, subject: str) -> StoredSchema:
        try:
            if subject:
                self._check_registered(number, subject)
            found = self._ask(f"schema id {number}", lambda client: client.get_schema(number, fmt=form))
            return self._stored(found, form)
        except AccessDeniedError as error:
            # A message may name the schema of others. A user without any rights would make dead letters of all.
            if error.facts["status"] == _FORBIDDEN and self._is_registry():
                raise SchemaMismatchError(error.what, remedy=error.remedy, **error.facts) from error
            raise

    def _keep(self, key: tuple[object, ...], found: Any, characters: int) -> None:
        length = ENTRY_CHARACTERS + characters
        if self._kept + length > MOST_KEPT:
            self._known.clear()
            self._kept = 0
        self._known[key] = found
        self._kept += length

    def _check_registered(self, number: int, subject: str) -> None:
        """Refuse the id of a schema that is not registered, and never was, under a subject."""
        subjects = self._answer(
            f"schema id {number}", lambda client: list(client.get_subjects_by_schema_id(number, subject, deleted=True))
        )
        if subject not in subjects:
            raise SchemaNotFoundError(
                f"schema id {number} is not registered under subject {subject!r}",
                remedy="Register it there, if its messages are to be read.",
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
            self.learn(number)
        return stored

    def _stored(self, schema: Any, form: str | None) -> StoredSchema:
        """A schema with all schemas that it needs.

        Raises:
            SchemaMismatchError: they are too many, or too large together.
        """
        found: dict[str, StoredSchema] = {}
        seen: set[str] = set()
        length = 0

        def add(one: Any) -> StoredSchema:
            nonlocal length
            length += len(one.schema_str)
            if len(seen) > MOST_REFERENCES or length > LONGEST_SCHEMA:
                raise SchemaMismatchError(
                    "a schema of the registry has too many references, or is too long with them",
                    remedy=f"At most {MOST_REFERENCES} references and {LONGEST_SCHEMA} characters are read.",
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
        """The schema that another one refers to."""
        subject, version = reference.subject, reference.version
        key = (subject, version, form)
        found = self._known.get(key)
        if found is None:
            what = f"version {version} of subject {subject!r}, to which another schema refers"
            found = self._ask(what, lambda client: client.get_version(subject, version, fmt=form).schema)
            self._keep(key, found, len(found.schema_str))
        return found

    def _ask(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """The schema that the registry answers."""

        def checked(client: Any) -> Any:
            found = ask(client)
            if found.schema_str == "":
                raise SchemaMismatchError(f"{what} is empty", remedy="Correct it in the registry.")
            if not isinstance(found.schema_str, str):
                raise ValueError("an answer without a schema")
            for one in found.references or ():
                # The client puts the version into the path of a request as it is.
                if not (isinstance(one.name, str) and isinstance(one.subject, str) and isinstance(one.version, int)):
                    raise SchemaMismatchError(
                        f"{what} has a reference without a name, a subject and a number as its version",
                        remedy="Correct it in the registry.",
                    )
            return found

        return self._answer(what, checked)

    def _answer(self, what: str, ask: Callable[[Any], Any]) -> Any:
        try:
            return self._raw_answer(what, ask)
        except InvalidOptionError as error:
            # An odd answer is about one schema, which a message may have named, if the server is a registry otherwise.
            # Another server at the address would make dead letters of all messages.
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
                return ask(self._connected())
        except (StreamAssetsError, MemoryError):
            raise
        except module.error.SchemaRegistryError as error:
            raise _explained(error, self._said(error), what=what, where=where) from None
        except Exception as error:  # noqa: BLE001 - its HTTP client, and its parsing, raise what comes
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise InvalidOptionError(
                    f"{where} shows a certificate that is not trusted: {self._said(error)}",
                    remedy="Give the certificate of who has signed it as ssl.ca.location in the options.",
                ) from None
            if isinstance(error, (ValueError, KeyError, TypeError, AttributeError, RecursionError)):
                raise InvalidOptionError(
                    f"{where} answered {what} with something that is no schema",
                    remedy="Check the address: is it that of a schema registry?",
                ) from None
            raise SchemaRegistryError(f"{where} does not answer: {self._said(error)}", remedy=_ASK_AGAIN) from None

    def _is_registry(self) -> bool:
        """Whether the server gives us once more the schema that it gave last, or without one lists its subjects."""

        def is_given(client: Any) -> bool:
            if self.known_id:
                # The client would answer out of its own cache.
                return isinstance(client._rest_client.get(f"schemas/ids/{self.known_id}")["schema"], str)
            return isinstance(client.get_subjects(), list)

        try:
            return bool(self._raw_answer("what it knows", is_given))
        except (AccessDeniedError, InvalidOptionError, SchemaMismatchError, SchemaNotFoundError):
            return False


def _limit_answers(session: Any) -> None:
    """Stop reading an answer that is too long or takes too long, before it fills the memory.

    Args:
        session: the client of ``httpx``, or of its successor ``httpx2``, that confluent-kafka asks with.
    """
    base: Any = sys.modules[type(session).__module__.partition(".")[0]].SyncByteStream

    class LimitedStream(base):  # type: ignore[misc]  # which of the two libraries it is, is known at run time only
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            size, end = 0, time.monotonic() + LONGEST_ANSWER_SECONDS
            for part in self._stream:
                size += len(part)
                if size > LONGEST_ANSWER:
                    raise SchemaMismatchError(
                        f"the schema registry answers with more than {LONGEST_ANSWER} bytes",
                        remedy="Check the address, and the size of the schema.",
                    )
                if time.monotonic() > end:
                    raise SchemaRegistryError(
                        f"the schema registry took more than {LONGEST_ANSWER_SECONDS:.0f} s for an answer of which "
                        f"{size} bytes have arrived",
                        remedy=_ASK_AGAIN,
                    )
                yield part

        def close(self) -> None:
            self._stream.close()

    def limit(response: Any) -> None:
        # The client does not know this header. It asks again after a short wait; the run may wait for longer.
        seconds = response.headers.get("retry-after", "")
        if response.status_code == _TOO_MANY and seconds.isdecimal() and len(seconds) < 10:
            if int(seconds) > LONGEST_WAIT_SECONDS:
                raise SchemaRegistryError(
                    "the schema registry takes no more requests for now",
                    remedy=_ASK_AGAIN,
                    status=_TOO_MANY,
                    retry_after=int(seconds),
                )
            time.sleep(int(seconds))
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SchemaMismatchError(
                "the schema registry compresses its answer though it was asked not to: its size cannot be bounded",
                remedy="Switch compression off in the registry, or in the proxy in front of it.",
            )
        response.stream = LimitedStream(response.stream)

    # Some bytes of a compressed answer may stand for gigabytes.
    session.headers["Accept-Encoding"] = "identity"
    session.event_hooks["response"].append(limit)


def _explained(error: Any, said: str, *, what: str, where: str) -> StreamAssetsError:
    status = error.http_status_code
    if error.error_code in _MISSING:
        return SchemaNotFoundError(f"{where} has no {what}", remedy="Check the name, or the producer.")
    if status in _DENIED:
        return AccessDeniedError(f"{where} does not let us read {what}: {said}", remedy=_LET_IN, status=status)
    if status in _PASSING or status >= _SERVER_ERRORS:
        return SchemaRegistryError(f"{where} cannot answer for {what}: {said}", remedy=_ASK_AGAIN, status=status)
    return InvalidOptionError(
        f"{where} refuses {what}: {said}", remedy="Check the name and the version.", status=status
    )


def _check_url(url: str) -> None:
    check_name("url", url)
    for one in map(str.strip, url.split(",")):
        check_address("the URL of the schema registry", one, remedy=_ADDRESS)
        if not one.startswith(("http://", "https://")):
            raise InvalidOptionError(f"url={url!r} is no URL", remedy=_ADDRESS)


def _client_module() -> Any:
    return imported("confluent_kafka.schema_registry", extra="schema-registry")


def check_subject(registry: SchemaRegistry | None, subject: str | None, version: int | None) -> None:
    """Refuse a subject without a registry, and the like.

    Raises:
        InvalidOptionError: they do not go together.
    """
    if registry is not None and not isinstance(registry, SchemaRegistry):
        raise InvalidOptionError(
            f"registry is a {type(registry).__name__}", remedy="Give SchemaRegistry('https://registry:8081')."
        )
    if subject is not None:
        check_name("subject", subject)
        if registry is None:
            raise InvalidOptionError(
                f"subject={subject!r} is in no registry", remedy="Give registry=SchemaRegistry(url), too."
            )
    if version is not None:
        check_count("version", version)
        if subject is None:
            raise InvalidOptionError(f"version={version} is of no subject", remedy="Give subject=, too.")
