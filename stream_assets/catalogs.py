"""Tables of catalogs, whose locations are queried on use, without Spark, because the sensor needs them, too."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import dagster as dg
from pydantic import ConfigDict, Field

from stream_assets.resources import TableLocation, is_deferred, resolved_text, shown_text
from stream_consumers.client_config import check_header_value, redact_options
from stream_consumers.deadlines import within
from stream_consumers.errors import (
    AccessDeniedError,
    CatalogUnavailableError,
    InvalidOptionError,
    MissingDependencyError,
    StreamAssetsError,
)
from stream_consumers.urls import check_address

REQUEST_TIMEOUT_SECONDS = 10.0
MAX_ANSWER_SECONDS = 60.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_NAME_PART = r"[^\s.`/\\]+"
_CREATE_TABLE = "Create it there with CREATE TABLE … USING DELTA LOCATION '…'; the first run fills it."


class TableCatalog(dg.ConfigurableResource, ABC):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A catalog, which has the locations of tables by name."""

    example: ClassVar[str]
    """An example of a table name, with the number of parts that the catalog requires."""
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    def table(self, name: str, *, storage_options: Mapping[str, str] | None = None) -> CatalogTable:
        """Select a table by name.

        Args:
            name: the table with its schema, and in Unity Catalog its catalog; or an ``EnvVar``.
            storage_options: options of the object store, for Spark and for reading the Delta log; never displayed.

        Raises:
            InvalidOptionError: the name is not valid in this catalog.
        """
        return CatalogTable(self, name, storage_options or {})

    def check(self, name: str) -> None:
        """Check the name of a table.

        Raises:
            InvalidOptionError: the name is not valid in this catalog.
        """
        dots = self.example.count(".")
        if not isinstance(name, str) or not re.fullmatch(rf"{_NAME_PART}(\.{_NAME_PART}){{{dots}}}", name):
            raise InvalidOptionError(
                f"table {name!r} is not a name in this catalog", remedy=f"Write it like {self.example}."
            )

    @abstractmethod
    def location(self, name: str) -> str:
        """Query the location of a table.

        Args:
            name: the name of the table, which was checked.

        Raises:
            InvalidOptionError: the table does not exist, or is not a Delta table.
            AccessDeniedError: the catalog refuses access.
            CatalogUnavailableError: the catalog does not answer.
        """

    def check_address(self) -> None:
        """Check the address, unless it is in a variable. It must not contain credentials, because it is displayed.

        Raises:
            InvalidOptionError: the address is not valid, or contains credentials.
        """

    @property
    @abstractmethod
    def shown(self) -> str:
        """The catalog for display, with the names of variables in braces."""


@dataclass(frozen=True)
class CatalogTable(TableLocation):
    """A table whose location is in a catalog.

    Args:
        catalog: the catalog.
        name: the name of the table in the catalog.
        storage_options: see :class:`TableLocation`.
    """

    catalog: TableCatalog
    name: str
    storage_options: Mapping[str, str] = field(repr=False)
    is_named_by_key: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.catalog.check_address()
        if not is_deferred(self.name):
            self.catalog.check(self.name)

    @property
    def is_deferred(self) -> bool:
        """Always true, because the catalog may not answer when the code is loaded."""
        return True

    @property
    def label(self) -> str:
        """The name in the catalog."""
        return shown_text(self.name)

    @property
    def path(self) -> str:
        """See :attr:`TableLocation.path`."""
        name = resolved_text("table", self.name)
        self.catalog.check(name)
        return self.catalog.location(name)

    def __str__(self) -> str:
        return f"{self.catalog.shown}/{self.label}"


class UnityCatalog(TableCatalog):
    """A Unity Catalog, whose REST interface gives the locations of tables; credential vending is not used.

    Use it as ``table=catalog.table("main.sales.orders")`` of a stream asset. The table must exist, and be external or
    have all of its commits in its log. Each text may be a ``dg.EnvVar``, which is read when it is used.

    Example:
        >>> catalog = UnityCatalog(url=dg.EnvVar("UNITY"), token=dg.EnvVar("UNITY_TOKEN"))
        >>> str(catalog.table("main.sales.orders"))
        '{UNITY}/main.sales.orders'
    """

    example: ClassVar[str] = "main.sales.orders"
    url: str = Field(description="The URL of the server, like https://unity:8443, without /api.")
    token: str | None = Field(default=None, description="The token of this client; use an EnvVar.", repr=False)

    @property
    def shown(self) -> str:
        """The URL."""
        return shown_text(self.url).rstrip("/")

    def check_address(self) -> None:
        """See :meth:`TableCatalog.check_address`."""
        if not is_deferred(self.url):
            _checked_url(self.url)

    def location(self, name: str) -> str:
        """See :meth:`TableCatalog.location`."""
        found = self._get(f"tables/{quote(name, safe='.')}", what=name)
        kind, place = found.get("data_source_format"), found.get("storage_location")
        if kind != "DELTA" or not isinstance(place, str) or not place:
            raise _not_delta_error(name, self.shown, self._redacted(f"{found.get('table_type')} of format {kind}"))
        return place

    def _get(self, path: str, *, what: str) -> Mapping[str, Any]:
        url = _checked_url(resolved_text("url", self.url))
        request = urllib.request.Request(f"{url}/api/2.1/unity-catalog/{path}")  # noqa: S310 - the scheme is checked
        if token := self._token():
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            text = within(MAX_ANSWER_SECONDS, partial(_text_of, request))
        except urllib.error.HTTPError as error:
            with error:
                raise self._status_error(error.code, what) from None
        except (OSError, HTTPException, ValueError) as error:
            # The value of a variable that is not the address of a proxy is a ValueError.
            raise CatalogUnavailableError(
                f"the catalog at {self.shown} does not answer: {self._redacted(str(getattr(error, 'reason', error)))}",
                remedy="Check the address, the proxies of the environment, and that it runs.",
            ) from None
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidOptionError(f"{self.shown} does not answer like a Unity Catalog", remedy="Correct its url.")
        return found

    def _token(self) -> str:
        return "" if self.token is None else check_header_value(resolved_text("token", self.token), "token")

    def _redacted(self, text: str) -> str:
        """Return a text of the server, which may repeat the request, as one line without the token."""
        return " ".join(redact_options(text, {"token": self._token()}).split())

    def _status_error(self, code: int, what: str) -> StreamAssetsError:
        if code == HTTPStatus.NOT_FOUND:
            return InvalidOptionError(f"the catalog at {self.shown} has no table {what}", remedy=_CREATE_TABLE)
        if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return AccessDeniedError(
                f"the catalog at {self.shown} refuses access to {what} (HTTP {code})",
                remedy="Correct the token, or grant it access to the table.",
            )
        if code == HTTPStatus.TOO_MANY_REQUESTS or code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return CatalogUnavailableError(
                f"the catalog at {self.shown} answers with HTTP {code}", remedy="Check its log."
            )
        return InvalidOptionError(
            f"the catalog at {self.shown} refuses the request for {what} (HTTP {code})",
            remedy="Check its url and the name.",
        )


class HiveMetastore(TableCatalog):
    """A Hive metastore, whose Thrift interface gives the locations of tables; Kerberos is not supported.

    It needs ``pip install 'stream-assets[hive]'``. Use it as ``table=metastore.table("sales.orders")`` of a stream
    asset. The Delta table must exist. The Derby metastore inside Spark is not a server: with it, use the path of the
    table, and ``catalog_table``.

    Example:
        >>> str(HiveMetastore(uri="thrift://hive:9083").table("sales.orders"))
        'thrift://hive:9083/sales.orders'
    """

    example: ClassVar[str] = "sales.orders"
    uri: str = Field(description="The addresses, like thrift://one:9083,thrift://two:9083; they are tried in turn.")

    @property
    def shown(self) -> str:
        """The addresses."""
        return shown_text(self.uri).rstrip("/")

    def check_address(self) -> None:
        """See :meth:`TableCatalog.check_address`."""
        if not is_deferred(self.uri):
            _servers(self.uri)

    def location(self, name: str) -> str:
        """See :meth:`TableCatalog.location`."""
        found = self._table(*name.split("."))
        if found is None:
            raise InvalidOptionError(f"the catalog at {self.shown} has no table {name}", remedy=_CREATE_TABLE)
        properties, storage = found.parameters or {}, found.sd
        # For a table that Hive cannot read, Spark sets a location where no data is, and the path in the properties.
        place = (storage.serdeInfo.parameters or {}).get("path") or storage.location
        kind = properties.get("spark.sql.sources.provider")
        if str(kind).lower() != "delta" or not place:
            raise _not_delta_error(name, self.shown, f"{found.tableType} of provider {kind}")
        return str(place)

    def _table(self, schema: str, name: str) -> Any:
        """Get a table from the first server that answers; ``None`` if it does not exist."""
        try:
            # An optional dependency, which takes a second to import.
            from pymetastore.hive_metastore.ThriftHiveMetastore import Client  # type: ignore[import-untyped] # noqa: PLC0415
            from pymetastore.hive_metastore.ttypes import NoSuchObjectException  # type: ignore[import-untyped] # noqa: PLC0415
            from thrift.protocol.TBinaryProtocol import TBinaryProtocol  # type: ignore[import-untyped] # noqa: PLC0415
            from thrift.Thrift import TException  # type: ignore[import-untyped] # noqa: PLC0415
            from thrift.transport.TSocket import TSocket  # type: ignore[import-untyped] # noqa: PLC0415
            from thrift.transport.TTransport import TBufferedTransport  # type: ignore[import-untyped] # noqa: PLC0415
        except ImportError as error:
            raise MissingDependencyError(
                f"a Hive metastore needs pymetastore, which cannot be imported: {error}",
                remedy="Install it: pip install 'stream-assets[hive]'.",
            ) from error
        reasons = []
        for host, port in _servers(resolved_text("uri", self.uri)):
            socket = TSocket(host, port)
            socket.setTimeout(REQUEST_TIMEOUT_SECONDS * 1000)
            transport = TBufferedTransport(socket)
            try:
                transport.open()
                return Client(TBinaryProtocol(transport)).get_table(schema, name)
            except NoSuchObjectException:
                return None
            except (TException, OSError, EOFError) as error:
                reasons.append(f"{host}:{port}: {getattr(error, 'message', None) or error}")
            finally:
                transport.close()
        raise CatalogUnavailableError(
            f"the catalog at {self.shown} does not answer: {'; '.join(reasons)}",
            remedy="Check the address, and that it runs.",
        )


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because only the catalog itself may answer."""

    def redirect_request(self, *request: Any) -> None:
        """Return no request, so that no redirect is followed."""


_OPENER = urllib.request.build_opener(_RefuseRedirects)


def _text_of(request: urllib.request.Request) -> bytes:
    with _OPENER.open(request, timeout=REQUEST_TIMEOUT_SECONDS) as answer:
        text: bytes = answer.read(MAX_ANSWER_BYTES + 1)
    if len(text) > MAX_ANSWER_BYTES:
        raise InvalidOptionError(
            f"the server answers with more than {MAX_ANSWER_BYTES} bytes, unlike a Unity Catalog",
            remedy="Correct its url.",
        )
    return text


def _checked_url(url: str) -> str:
    check_address(
        "url", url, remedy="Write it like https://host:port, and set the token with token=, best as an EnvVar."
    )
    if not url.startswith(("http://", "https://")):
        raise InvalidOptionError(f"url={url!r} is not the address of a server", remedy="Write https://host:port.")
    return url.rstrip("/")


def _servers(uri: str) -> list[tuple[str, int]]:
    """Parse the hosts and ports of the servers of a metastore."""
    servers = []
    for address in map(str.strip, uri.split(",")):
        check_address("uri", address, remedy="Write thrift://host:9083.")
        server = urlsplit(address)
        if server.scheme != "thrift" or not server.hostname or not server.port:
            raise InvalidOptionError(f"uri={uri!r} is not a metastore address", remedy="Write thrift://host:9083.")
        servers.append((server.hostname, server.port))
    return servers


def _not_delta_error(name: str, catalog: str, found: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{name} in the catalog at {catalog} is not a Delta table with a location, but {found}",
        remedy="Use a Delta table.",
    )
