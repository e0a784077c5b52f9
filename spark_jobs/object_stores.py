"""Tables in object stores: one set of storage options for Spark and for the reader of the Delta log.

The names are those of delta-rs, which are those of the AWS tools. What is not given comes from the environment, for
both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from spark_jobs.jars import S3_LOG_STORE_CLASS, s3_jars
from spark_jobs.table_location import S3, is_s3
from stream_consumers.errors import InvalidOptionError

_PREFIX = "aws_"
_S3A: Mapping[str, str] = {
    "access_key_id": "fs.s3a.access.key",
    "secret_access_key": "fs.s3a.secret.key",
    "session_token": "fs.s3a.session.token",
    "token": "fs.s3a.session.token",
    "default_region": "fs.s3a.endpoint.region",
    "region": "fs.s3a.endpoint.region",
    "endpoint": "fs.s3a.endpoint",
    "endpoint_url": "fs.s3a.endpoint",
    "endpoint_url_s3": "fs.s3a.endpoint",
}


def object_store_config(table: str, storage_options: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings that Spark needs to write a table, beyond those for Delta; none for a local one.

    For Amazon S3, and for what speaks its protocol: the jars of S3A, our log store that puts a commit only if it is
    absent, and what the storage options say. They must be given before Spark starts.

    Args:
        table: a path or URI; only its scheme counts.
        storage_options: as delta-rs has them, such as ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
            ``AWS_SESSION_TOKEN``, ``AWS_REGION`` and ``AWS_ENDPOINT_URL``; what is not in them comes from the
            environment.

    Raises:
        MissingDependencyError: the jars cannot be downloaded, or this Spark is too old for tables on Amazon S3.
        InvalidOptionError: an option makes no sense.

    Example:
        >>> object_store_config("/lake/orders")
        {}
    """
    if not is_s3(table):
        return {}
    of_environment = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX.upper())}
    given = {**_normalized(of_environment), **_normalized(storage_options or {})}
    # Whatever its name is: what is given counts more than the environment, for delta-rs, too.
    config = {**_of_s3a(of_environment), **_of_s3a(storage_options or {})}
    if "fs.s3a.endpoint" in config:
        is_virtual = _flag(given, "virtual_hosted_style_request")
        config["fs.s3a.path.style.access"] = str(not is_virtual).lower()
    if _flag(given, "skip_signature"):
        config["fs.s3a.aws.credentials.provider"] = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
    return {
        "spark.jars": ",".join(str(jar) for jar in s3_jars()),
        **{f"spark.delta.logStore.{each}.impl": S3_LOG_STORE_CLASS for each in sorted(S3)},
        # Tables are named s3:// by others.
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        **{f"spark.hadoop.{name}": value for name, value in config.items()},
    }


def brings_s3(config: Mapping[str, str]) -> bool:
    """Whether somebody has chosen the jars or the log store for Amazon S3 in the settings of Spark.

    Example:
        >>> brings_s3({"spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.4.1"}), brings_s3({"spark.ui.port": "0"})
        (True, False)
    """
    stores = {f"spark.delta.logStore.{kind}.impl" for kind in S3}
    return not stores.isdisjoint(config) or any("hadoop-aws" in value for value in config.values())


def _normalized(options: Mapping[str, str]) -> dict[str, str]:
    """In lower case and without the prefix: delta-rs takes them with it or without it, in any case."""
    return {name.lower().removeprefix(_PREFIX): value for name, value in options.items()}


def _of_s3a(options: Mapping[str, str]) -> dict[str, str]:
    # Of two names of one setting the longer one counts, as it does for delta-rs.
    return {_S3A[name]: value for name, value in sorted(_normalized(options).items()) if name in _S3A}


def _flag(options: Mapping[str, str], name: str) -> bool:
    said = options.get(name, "false").lower()
    if said not in ("true", "false", "1", "0"):
        raise InvalidOptionError(
            f"the storage option {_PREFIX.upper()}{name.upper()} is {said!r}", remedy="Use 'true' or 'false'."
        )
    return said in ("true", "1")
