"""Reads the connections of Airflow: the servers and secrets of a stream, a table's storage, and Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import Connection

from stream_airflow.declaration import StreamTable
from stream_consumers.errors import InvalidOptionError

if TYPE_CHECKING:
    from spark_jobs.session import SparkOptions

_SERVERS = "bootstrap.servers"
# Options of consumers in a connection of the Kafka provider that only this package may set.
_OWN_OPTIONS = frozenset((_SERVERS, "group.id", "group.instance.id", "auto.offset.reset", "enable.auto.commit"))
_AWS_OPTIONS = {
    "region_name": "AWS_REGION",
    "endpoint_url": "AWS_ENDPOINT_URL",
    "aws_session_token": "AWS_SESSION_TOKEN",
}


def connected(declared: StreamTable) -> StreamTable:
    """Return the declaration with the servers and options of its connections, which its own options override.

    Raises:
        InvalidOptionError: a connection has another type.
        AirflowNotFoundException: there is no such connection.
    """
    if declared.stream_conn_id:
        source, client = _stream(Connection.get(declared.stream_conn_id), declared.source)
        declared = replace(declared, source=source, client={**client, **declared.client}, stream_conn_id=None)
    if declared.storage_conn_id:
        options = _storage(Connection.get(declared.storage_conn_id))
        declared = replace(declared, storage_options={**options, **declared.storage_options}, storage_conn_id=None)
    return declared


def connected_spark(options: SparkOptions, conn_id: str | None) -> SparkOptions:
    """Return the options of a Spark session with the address of a connection of type ``spark_connect`` or ``spark``.

    Raises:
        InvalidOptionError: the connection has another type.
        AirflowNotFoundException: there is no such connection.
    """
    if conn_id is None:
        return options
    connection = Connection.get(conn_id)
    address = f"{connection.host}:{connection.port}" if connection.port else str(connection.host)
    if connection.conn_type == "spark_connect":
        is_encrypted = "true" if connection.extra_dejson.get("use_ssl") else None
        given = {"use_ssl": is_encrypted, "user_id": connection.login, "token": connection.password}
        parameters = "".join(f";{name}={value}" for name, value in given.items() if value)
        return replace(options, remote=f"sc://{address.removeprefix('sc://')}/{parameters}")
    if connection.conn_type == "spark":
        return replace(options, master=address)
    raise _wrong_type(connection, "spark_connect or spark")


def _stream(connection: Connection, source: str) -> tuple[str, dict[str, Any]]:
    """Return the URL of streams and the options of the client; ``source`` is a URL, or only the keys of the streams."""
    make = _STREAMS.get(str(connection.conn_type))
    if make is None:
        raise _wrong_type(connection, " or ".join(_STREAMS))
    server, client = make(connection)
    return source if "://" in source else f"{server}/{source}", client


def _kafka(connection: Connection) -> tuple[str, dict[str, Any]]:
    extra = connection.extra_dejson
    client = {name: value for name, value in extra.items() if name not in _OWN_OPTIONS}
    return f"kafka://{extra.get(_SERVERS, '')}", client


def _redis(connection: Connection) -> tuple[str, dict[str, Any]]:
    extra = connection.extra_dejson
    protocol = "rediss" if extra.pop("ssl", False) else "redis"
    named = {"username": connection.login, "password": connection.password}
    client = {**{name: value for name, value in named.items() if value}, **extra}
    return f"{protocol}://{connection.host}:{connection.port or 6379}", client


_STREAMS: Mapping[str, Callable[[Connection], tuple[str, dict[str, Any]]]] = {"kafka": _kafka, "redis": _redis}


def _storage(connection: Connection) -> dict[str, str]:
    """Return the options of the table's storage from a connection of type ``aws``."""
    if connection.conn_type != "aws":
        raise _wrong_type(connection, "aws")
    extra = connection.extra_dejson
    options = {name: str(extra[key]) for key, name in _AWS_OPTIONS.items() if extra.get(key)}
    try:
        # With the Amazon provider a connection may name a role or a profile.
        from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook  # type: ignore[import-not-found]  # noqa: PLC0415

        found = AwsBaseHook(connection.conn_id).get_credentials()
        keys = {"id": found.access_key, "secret": found.secret_key, "token": found.token}
    except ImportError:
        keys = {"id": connection.login, "secret": connection.password}
    names = {"id": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
    return {**options, **{names[key]: value for key, value in keys.items() if value}}


def _wrong_type(connection: Connection, wanted: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"connection {connection.conn_id!r} is of type {connection.conn_type!r}", remedy=f"Use one of type {wanted}."
    )
