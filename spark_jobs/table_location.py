"""Where a table is, said so that Spark and the reader of its log understand the same.

A path without a scheme is taken by Spark from the working directory that its JVM was started in, and from the file
system that ``fs.defaultFS`` names; by this process from its working directory of the moment. So it is made absolute
once, and Spark is told that it is a local one.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

LOCAL = "file"


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


def scheme(table: str) -> str:
    """The scheme of its file system: ``file`` where none is given.

    Example:
        >>> scheme("s3a://lake/orders"), scheme("lake/orders"), scheme("file:/lake/orders")
        ('s3a', 'file', 'file')
    """
    return urlsplit(table).scheme.lower() if "://" in table else LOCAL


def spark_location(table: str) -> str:
    """The location for Spark, with the scheme.

    Example:
        >>> spark_location("/lake/orders"), spark_location("s3a://lake/orders")
        ('file:///lake/orders', 's3a://lake/orders')
    """
    location = absolute_location(table)
    return f"file://{location}" if location.startswith("/") else location


def sql_name(table: str) -> str:
    """The table in a SQL statement.

    Example:
        >>> sql_name("/lake/orders")
        'delta.`file:///lake/orders`'
    """
    escaped = spark_location(table).replace("`", "``")
    return f"delta.`{escaped}`"
