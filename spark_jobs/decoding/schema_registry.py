"""A schema registry that speaks Confluent's protocol, as a value: which one, and how to get in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.rows import shortened
from stream_consumers.client_config import ClientConfig, Deferred, Scalar, resolve
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
ENTRY_CHARACTERS = 1000
"""What each schema counts for besides its text."""
UNKNOWN_SECONDS = 30.0
MOST_UNKNOWN = 10_000
MOST_KEPT = 64 << 20
"""The characters of schemas that a process keeps for each registry: messages can name new ones without end."""
MOST_REFERENCES = 200
LONGEST_SCHEMA = 4 << 20
"""The characters of a schema and of all schemas that it refers to."""
_NUMBERS = (
    "timeout",
    "cache.capacity",
    "cache.latest.ttl.sec",
    "max.retries",
    "retries.wait.ms",
    "retries.max.wait.ms",
)
_DENIED = (401, 403)
_PASSING = (408, 425, 429)
# Subject, version and schema; a plain 404 is that of a server that is no registry.
_MISSING = (40401, 40402, 40403)
_SERVER_ERRORS = 500
_ASK_AGAIN = "Check that it runs, and the address; nothing was lost, run again."
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
            return _lookups[key]


class Lookups:
    """What one process asks a registry, and what it has found.

    Args:
        registry: with nothing left in the environment.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self._url = registry.url
        _check_url(registry.url)
        self._options = resolve(registry.options)
        self._lock = threading.RLock()
        self._users = 0
        self._client: Any = None
        self._known: dict[tuple[object, ...], Any] = {}
        self._kept = 0
        self._unknown: dict[tuple[object, ...], tuple[float, SchemaNotFoundError | SchemaMismatchError]] = {}

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
            numbers = {name: float(config[name]) for name in _NUMBERS if name in config}
            return _client_module().SchemaRegistryClient({**config, **numbers, "url": self._url})
        except (ValueError, TypeError, OSError) as error:
            raise InvalidOptionError(
                f"the client of the schema registry {self._url} refuses its options: {_said(error)}",
                remedy="See the options of SchemaRegistryClient in confluent-kafka.",
            ) from error

    def schema(self, number: int, form: str | None, subject: str) -> StoredSchema:
        """See :meth:`SchemaRegistry.schema`."""
        key = (number, subject, form)
        if isinstance(known := self._known.get(key), StoredSchema):
            return known
        # Damaged ids would ask the registry for each message; one that is new may be known to it a little later.
        since, refused = self._unknown.get(key, (0.0, None))
        if refused is not None and time.monotonic() - since < UNKNOWN_SECONDS:
            raise refused
        try:
            if subject:
                self._check_registered(number, subject)
            found = self._ask(f"schema id {number}", lambda client: client.get_schema(number, fmt=form))
            stored = self._stored(found, form)
        except (SchemaNotFoundError, SchemaMismatchError) as error:
            if len(self._unknown) >= MOST_UNKNOWN:
                self._unknown.clear()
            self._unknown[key] = (time.monotonic(), error)
            raise
        self._keep(key, stored, [stored.text, *(one.text for _, one in stored.references)])
        return stored

    def _keep(self, key: tuple[object, ...], found: Any, texts: list[str]) -> None:
        length = ENTRY_CHARACTERS + sum(map(len, texts))
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
        if version is None:
            found = self._ask(what, lambda client: client.get_latest_version(name, fmt=form).schema)
        else:
            found = self._ask(what, lambda client: client.get_version(name, version, fmt=form).schema)
        return replace(self._stored(found, form), subject=name)

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
            self._keep(key, found, [found.schema_str])
        return found

    def _ask(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """The schema that the registry answers."""

        def checked(client: Any) -> Any:
            found = ask(client)
            if not isinstance(found.schema_str, str) or not found.schema_str:
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
        module = _client_module()
        where = f"the schema registry {self._url}"
        try:
            with self.session():
                return ask(self._connected())
        except StreamAssetsError:
            raise
        except module.error.SchemaRegistryError as error:
            raise _explained(error, what=what, where=where) from error
        except Exception as error:  # its HTTP client, and its parsing, raise what comes
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise InvalidOptionError(
                    f"{where} shows a certificate that is not trusted: {_said(error)}",
                    remedy="Give the certificate of who has signed it as ssl.ca.location in the options.",
                ) from error
            if isinstance(error, (ValueError, KeyError, TypeError, AttributeError)):
                raise InvalidOptionError(
                    f"{where} answered {what} with something that is no schema",
                    remedy="Check the address: is it that of a schema registry?",
                ) from error
            raise SchemaRegistryError(f"{where} does not answer: {_said(error)}", remedy=_ASK_AGAIN) from error


def _explained(error: Any, *, what: str, where: str) -> StreamAssetsError:
    status, said = error.http_status_code, shortened(str(error.error_message))
    if error.error_code in _MISSING:
        return SchemaNotFoundError(f"{where} has no {what}", remedy="Check the name, or the producer.")
    if status in _DENIED:
        return AccessDeniedError(f"{where} does not let us read {what}: {said}", remedy=_LET_IN, status=status)
    if status in _PASSING or status >= _SERVER_ERRORS:
        return SchemaRegistryError(f"{where} cannot answer for {what}: {said}", remedy=_ASK_AGAIN, status=status)
    return InvalidOptionError(
        f"{where} refuses {what}: {said}", remedy="Check the name and the version.", status=status
    )


def _said(error: Exception) -> str:
    return shortened(str(error)) or type(error).__name__


def _check_url(url: str) -> None:
    check_name("url", url)
    for one in url.split(","):
        scheme, _, rest = one.strip().partition("://")
        if scheme not in ("http", "https") or not rest:
            raise InvalidOptionError(f"url={_bare(url)!r} is no URL", remedy="Write it like https://registry:8081.")
        if "@" in rest.partition("/")[0]:
            raise InvalidOptionError(
                f"the URL of the schema registry, {_bare(url)}, holds a user or a password, which would be shown",
                remedy="Take it out, and give options={'basic.auth.user.info': …}, best as an EnvVar.",
            )


def _bare(url: str) -> str:
    """Without users and passwords."""
    parts = (one.partition("://") for one in url.split(","))
    return ",".join(f"{scheme}{slashes}{rest.rpartition('@')[2]}" for scheme, slashes, rest in parts)


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
