"""Asks a Hive metastore over Thrift; the module is imported where there is pymetastore."""

from __future__ import annotations

from typing import Any

from pymetastore.hive_metastore.ThriftHiveMetastore import Client  # type: ignore[import-untyped]
from pymetastore.hive_metastore.ttypes import NoSuchObjectException  # type: ignore[import-untyped]
from thrift.protocol.TBinaryProtocol import TBinaryProtocol  # type: ignore[import-untyped]
from thrift.Thrift import TException  # type: ignore[import-untyped]
from thrift.transport.TSocket import TSocket  # type: ignore[import-untyped]
from thrift.transport.TTransport import TBufferedTransport  # type: ignore[import-untyped]


class MetastoreError(Exception):
    """The server does not answer, or cannot look."""


def table_at(host: str, port: int, schema: str, name: str, *, answer_seconds: float) -> Any | None:
    """What a server knows of a table, as Thrift has it; ``None`` if it knows nothing.

    Args:
        host: of the server.
        port: of the server.
        schema: of the table.
        name: of the table.
        answer_seconds: how long to wait.

    Raises:
        MetastoreError: it does not answer, or cannot look.
    """
    socket = TSocket(host, port)
    socket.setTimeout(answer_seconds * 1000)
    transport = TBufferedTransport(socket)
    try:
        transport.open()
        return Client(TBinaryProtocol(transport)).get_table(schema, name)
    except NoSuchObjectException:
        return None
    except (TException, OSError, EOFError) as error:
        raise MetastoreError(f"{host}:{port}: {getattr(error, 'message', None) or error}") from error
    finally:
        transport.close()
