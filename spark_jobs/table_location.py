"""Converts the location of a table, so that Spark and the reader of its log find the same table.

Spark resolves a path without a scheme by the working directory in which its JVM was started, and in the file system of
``fs.defaultFS``; this process resolves it by its current working directory. So the path is made absolute once, and
Spark gets it with the scheme of local files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from stream_consumers.display import shortened
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_name
from stream_consumers.urls import check_address

LOCAL = "file"
_SHOWN = 80
MAX_NAME_BYTES = 255
"""The most bytes of one name in a path on local file systems."""
MAX_PATH_BYTES = 3900
"""The most bytes of the path of a table: on Linux the path of a file in it may have 4,096."""
S3 = frozenset({"s3", "s3a"})
_AMBIGUOUS = re.compile(r"%[0-9A-Fa-f]{2}|[\x00-\x1f\x7f]" + ("" if os.sep == "\\" else r"|\\"))
_PLAIN_NAME = re.compile(r"(?!(?:\.\.?|_delta_log)\Z)[^/\\\x00-\x1f\x7f-\x9f]+")
_PLAIN_PATH = re.compile(r"[\w./=-]*")
# Hadoop parses it as a URI, and other programs as a path.
_ONE_SLASH = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:/(?!/)")


def absolute_location(table: str) -> str:
    """Return an absolute local path, or the unchanged URI.

    Example:
        >>> absolute_location("s3a://lake/orders"), absolute_location("file:///lake/orders")
        ('s3a://lake/orders', '/lake/orders')
    """
    if scheme(table) != LOCAL:
        return table
    if table.startswith("file:"):
        table = table.removeprefix("file:")
        table = table.removeprefix("//") if table.startswith("///") else table
    return os.path.abspath(table)


def check_location(table: str) -> str:
    """Return the :func:`absolute_location` after a check that Spark and delta-rs find the same table there.

    Raises:
        InvalidOptionError: delta-rs would read another path, the path looks like a URI or a home directory, or a URI
            contains credentials or parameters.

    Example:
        >>> check_location("/lake/a%20b")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: table='/lake/a%20b' contains '%20', which delta-rs \
misinterprets. Use a path without backslashes, control characters, and percent signs before two hexadecimal digits.
    """
    location = absolute_location(check_name("table", table))
    if scheme(table) != LOCAL:
        check_table_uri("table", table)
    if uri := _ONE_SLASH.match(table):
        # A part of a less plain path may be a secret.
        shown = repr(table) if _PLAIN_PATH.fullmatch(table.removeprefix(uri[0])) else f"{uri[0]}…"
        raise InvalidOptionError(
            f"table={shown} is a URI with one slash, and would be a folder of the working directory",
            remedy=f"Write {uri[0]}/host/… or {uri[0]}//…; or ./{uri[0]}… for a folder of this name.",
        )
    if table.startswith("~"):
        raise InvalidOptionError(
            f"table={table!r} would be a folder named '~…', because only a shell expands it",
            remedy="Write the whole path; or ./~… for a folder of this name.",
        )
    if scheme(location) == LOCAL and (found := _AMBIGUOUS.search(location)):
        raise InvalidOptionError(
            f"table={location!r} contains {found[0]!r}, which delta-rs misinterprets",
            remedy="Use a path without backslashes, control characters, and percent signs before two hexadecimal "
            "digits.",
        )
    if scheme(location) == LOCAL:
        name, path = max(map(len, os.fsencode(location).split(b"/"))), len(os.fsencode(location))
        if name > MAX_NAME_BYTES or path > MAX_PATH_BYTES:
            raise InvalidOptionError(
                f"table={location[:80]!r}… has {path:,} bytes, and up to {name:,} between two slashes",
                remedy=f"Use a path of at most {MAX_PATH_BYTES:,} bytes, with names of at most {MAX_NAME_BYTES}.",
            )
    return location


def check_folder_name(option: str, name: str) -> str:
    """Return the name of a table or a schema if it is the name of one folder.

    A client that creates a stream may have chosen the name. One like ``..`` would select the folder of other tables.

    Args:
        option: the name of the option, for the message.
        name: the name.

    Raises:
        InvalidOptionError: it is ``.`` or ``..``, has a separator, a control character or an encoded character, or has
            too many bytes.

    Example:
        >>> check_folder_name("table", "..")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: table='..' cannot be the name of a folder. Use a name without \
slashes, backslashes, control characters, and percent signs before two hexadecimal digits, of at most 255 bytes.
    """
    is_plain = _PLAIN_NAME.fullmatch(check_name(option, name)) and not _AMBIGUOUS.search(name)
    if not is_plain or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise InvalidOptionError(
            f"{option}={shortened(name, _SHOWN)!r} cannot be the name of a folder",
            remedy="Use a name without slashes, backslashes, control characters, and percent signs before two "
            f"hexadecimal digits, of at most {MAX_NAME_BYTES} bytes.",
        )
    return name


def comparable_location(location: str) -> str:
    """Return the location in the form in which two locations of one table are equal: S3 has two schemes.

    Example:
        >>> comparable_location("s3a://bucket/lake/orders/"), comparable_location("/lake/orders")
        ('s3://bucket/lake/orders', '/lake/orders')
    """
    kind = scheme(location)
    return (f"s3{location[len(kind) :]}" if kind in S3 else location).rstrip("/")


def folders_above(location: str) -> Iterator[str]:
    """Yield the folders in which a table is, except the root of a file system.

    Example:
        >>> list(folders_above("s3a://bucket/lake/orders")), list(folders_above("/lake/orders"))
        (['s3a://bucket/lake', 's3a://bucket'], ['/lake'])
    """
    start = location.find("://") + len("://") if "://" in location else 0
    while (end := location.rstrip("/").rfind("/", start)) > start:
        location = location[:end]
        yield location


def check_table_uri(name: str, uri: str) -> str:
    """Check that the URI of a table or a lake, which Dagster shows, has no credentials or parameters, and return it.

    Args:
        name: the name of the option, for the message.
        uri: a URI with a scheme.

    Raises:
        InvalidOptionError: it has credentials or parameters; the message does not repeat them.

    Example:
        >>> check_table_uri("table", "abfss://lake@account.dfs.core.windows.net/orders")
        'abfss://lake@account.dfs.core.windows.net/orders'
    """
    return check_address(
        name,
        uri,
        remedy="Write it like s3a://bucket/folder/table, and put keys and tokens into storage options, as EnvVars.",
        has_host=False,
    )


def scheme(table: str) -> str:
    """Return the scheme of its file system; ``file`` for a path without a scheme.

    Example:
        >>> scheme("s3a://lake/orders"), scheme("lake/orders"), scheme("file:/lake/orders")
        ('s3a', 'file', 'file')
    """
    return table.partition("://")[0].lower() if "://" in table else LOCAL


def is_s3(table: str) -> bool:
    """Return whether a table is on Amazon S3 or a compatible storage.

    Example:
        >>> is_s3("s3a://lake/orders"), is_s3("/lake/orders")
        (True, False)
    """
    return scheme(table) in S3


def spark_location(table: str) -> str:
    """Return the location for Spark, with the scheme.

    Example:
        >>> spark_location("/lake/orders"), spark_location("s3a://lake/orders")
        ('file:///lake/orders', 's3a://lake/orders')
    """
    location = absolute_location(table)
    return f"file://{location}" if location.startswith("/") else location


def reader_options(table: str, storage_options: Mapping[str, str]) -> dict[str, str]:
    """Return the storage options for delta-rs, with the endpoint under the name that has priority.

    Otherwise an AWS_ENDPOINT_URL_S3 of the environment would override an AWS_ENDPOINT_URL in the options.

    Example:
        >>> reader_options("s3a://lake/orders", {"AWS_ENDPOINT_URL": "http://lake"})
        {'AWS_ENDPOINT_URL': 'http://lake', 'AWS_ENDPOINT_URL_S3': 'http://lake'}
    """
    for name, value in storage_options.items():
        if "endpoint" in name.lower() and "://" in value:
            check_address(
                name, value, remedy="Write http://host:port, and put keys and tokens into options of their own."
            )
    named = {name.lower().removeprefix("aws_"): value for name, value in storage_options.items()}
    endpoint = named.get("endpoint_url", named.get("endpoint"))
    if not is_s3(table) or endpoint is None or "endpoint_url_s3" in named:
        return dict(storage_options)
    return {**storage_options, "AWS_ENDPOINT_URL_S3": endpoint}


def sql_name(table: str) -> str:
    """Return the name of the table in a SQL statement.

    Example:
        >>> sql_name("/lake/orders")
        'delta.`file:///lake/orders`'
    """
    escaped = spark_location(table).replace("`", "``")
    return f"delta.`{escaped}`"
