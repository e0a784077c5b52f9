"""Where a table is, said so that Spark and the reader of its log understand the same.

A path without a scheme is taken by Spark from the working directory that its JVM was started in, and from the file
system that ``fs.defaultFS`` names; by this process from its working directory of the moment. So it is made absolute
once, and Spark gets it with the scheme of local files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_name
from stream_consumers.urls import check_address

LOCAL = "file"
MAX_NAME_BYTES = 255
"""The most bytes of one name in a path, as local file systems have it,"""
MAX_PATH_BYTES = 3900
"""and of the path of a table: Linux has 4,096 for that of a file in it."""
S3 = frozenset({"s3", "s3a"})
_AMBIGUOUS = re.compile(r"%[0-9A-Fa-f]{2}|[\x00-\x1f\x7f]" + ("" if os.sep == "\\" else r"|\\"))
_PLAIN_PATH = re.compile(r"[\w./=-]*")
# A URI for Hadoop, and a path for everybody else.
_ONE_SLASH = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:/(?!/)")


def absolute_location(table: str) -> str:
    """An absolute local path, or the URI as it is.

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
    """The :func:`absolute_location`, if Spark and delta-rs find the same table there.

    Raises:
        InvalidOptionError: it is a local path that delta-rs takes for another one, or that looks like something else;
            or a URI with credentials or parameters in it.

    Example:
        >>> check_location("/lake/a%20b")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: table='/lake/a%20b' has '%20' in it, which delta-rs takes for \
something else. Use a path without backslashes, control characters, and percent signs before two hexadecimal digits.
    """
    location = absolute_location(check_name("table", table))
    if scheme(table) != LOCAL:
        check_table_uri("table", table)
    if uri := _ONE_SLASH.match(table):
        # Of another one a part may be a secret.
        shown = repr(table) if _PLAIN_PATH.fullmatch(table.removeprefix(uri[0])) else f"{uri[0]}…"
        raise InvalidOptionError(
            f"table={shown} is a URI with one slash, and would be a folder of the working directory",
            remedy=f"Write {uri[0]}/host/… or {uri[0]}//…; or ./{uri[0]}… for a folder of this name.",
        )
    if table.startswith("~"):
        raise InvalidOptionError(
            f"table={table!r} would be a folder named '~…': only a shell knows whose home that is",
            remedy="Write the whole path; or ./~… for a folder of this name.",
        )
    if scheme(location) == LOCAL and (found := _AMBIGUOUS.search(location)):
        raise InvalidOptionError(
            f"table={location!r} has {found[0]!r} in it, which delta-rs takes for something else",
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


def check_table_uri(name: str, uri: str) -> str:
    """The URI of a table or a lake, if it has no credentials and no parameters in it: it is shown in Dagster.

    Args:
        name: of the option that it is given as.
        uri: with a scheme.

    Raises:
        InvalidOptionError: it has some; the message does not repeat them.

    Example:
        >>> check_table_uri("table", "abfss://lake@account.dfs.core.windows.net/orders")
        'abfss://lake@account.dfs.core.windows.net/orders'
    """
    return check_address(
        name,
        uri,
        remedy="Write it like s3a://bucket/folder/table, and give keys and tokens as storage options, best as EnvVars.",
        has_host=False,
    )


def scheme(table: str) -> str:
    """The scheme of its file system: ``file`` where none is given.

    Example:
        >>> scheme("s3a://lake/orders"), scheme("lake/orders"), scheme("file:/lake/orders")
        ('s3a', 'file', 'file')
    """
    return urlsplit(table).scheme.lower() if "://" in table else LOCAL


def is_s3(table: str) -> bool:
    """Whether a table is on Amazon S3, or on what speaks its protocol.

    Example:
        >>> is_s3("s3a://lake/orders"), is_s3("/lake/orders")
        (True, False)
    """
    return scheme(table) in S3


def spark_location(table: str) -> str:
    """The location for Spark, with the scheme.

    Example:
        >>> spark_location("/lake/orders"), spark_location("s3a://lake/orders")
        ('file:///lake/orders', 's3a://lake/orders')
    """
    location = absolute_location(table)
    return f"file://{location}" if location.startswith("/") else location


def reader_options(table: str, storage_options: Mapping[str, str]) -> dict[str, str]:
    """The storage options for delta-rs, so that it asks the server that they name.

    An AWS_ENDPOINT_URL_S3 of the environment is another option for it than the AWS_ENDPOINT_URL that is given, and
    would count more.

    Example:
        >>> reader_options("s3a://lake/orders", {"AWS_ENDPOINT_URL": "http://lake"})
        {'AWS_ENDPOINT_URL': 'http://lake', 'AWS_ENDPOINT_URL_S3': 'http://lake'}
    """
    for name, value in storage_options.items():
        if "endpoint" in name.lower() and "://" in value:
            check_address(
                name, value, remedy="Write http://host:port, and give keys and tokens as options of their own."
            )
    named = {name.lower().removeprefix("aws_"): value for name, value in storage_options.items()}
    endpoint = named.get("endpoint_url", named.get("endpoint"))
    if not is_s3(table) or endpoint is None or "endpoint_url_s3" in named:
        return dict(storage_options)
    return {**storage_options, "AWS_ENDPOINT_URL_S3": endpoint}


def sql_name(table: str) -> str:
    """The table in a SQL statement.

    Example:
        >>> sql_name("/lake/orders")
        'delta.`file:///lake/orders`'
    """
    escaped = spark_location(table).replace("`", "``")
    return f"delta.`{escaped}`"
