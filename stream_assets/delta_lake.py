"""Where Delta tables are, as a resource, and how downstream assets load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import dagster as dg
from pydantic import ConfigDict, Field

from spark_jobs.table_location import LOCAL, check_table_uri, scheme
from stream_assets.deferred import is_deferred, resolved_options, resolved_text, shown_text
from stream_consumers.options import check_name

PUBLIC = "public"


class DeltaLake(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A folder or bucket of Delta tables: ``<root>/<schema>/<table>``, as the IO managers of dagster-deltalake have it.

    As the ``table=`` of a stream asset the key of the asset says which one: its last part is the table, the part before
    it the schema, ``public`` without one. Each text may be a ``dg.EnvVar``, which is looked up when it is used.

    Example:
        >>> lake = DeltaLake(root=dg.EnvVar("LAKE"), storage_options={"AWS_SECRET_ACCESS_KEY": dg.EnvVar("SECRET")})
        >>> str(lake.table("orders", schema="sales"))
        '{LAKE}/sales/orders'
        >>> str(lake.table_of(dg.AssetKey(["sales", "orders"])))
        '{LAKE}/sales/orders'
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    root: str = Field(description="A folder or URI, like /lake or s3a://bucket/lake.")
    schema_name: str | None = Field(default=None, description="Of all tables, whatever their keys are.")
    storage_options: dict[str, str] = Field(
        default_factory=dict, description="Of an object store, for Spark and for reading the Delta log.", repr=False
    )

    def table(self, name: str, *, schema: str | None = None) -> LakeTable:
        """A table by its name.

        Args:
            name: of the table.
            schema: the folder that it is in; ``public`` by default.
        """
        return LakeTable(self.root, (schema or self.schema_name or PUBLIC, name), self.storage_options)

    def table_of(self, key: dg.AssetKey) -> LakeTable:
        """The table of an asset."""
        table = self.table(key.path[-1], schema=self.schema_name or ([PUBLIC, *key.path][-2]))
        return replace(table, is_of_key=True)


@dataclass(frozen=True)
class LakeTable:
    """Where a table is; it is looked up when it is used.

    Args:
        root: a folder or URI, or the whole path of the table.
        parts: what follows it.
        storage_options: for reading the log; shown nowhere.
        is_of_key: whether the key of an asset says which one it is.

    Raises:
        InvalidOptionError: a URI with credentials or parameters in it.
    """

    root: str
    parts: Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_of_key: bool = False

    def __post_init__(self) -> None:
        # It is shown even where the rest is still in the environment.
        if not is_deferred(self.root) and scheme(check_name("table", self.root)) != LOCAL:
            check_table_uri("table", self.root)

    @property
    def is_deferred(self) -> bool:
        """Whether a variable has to be looked up."""
        return any(map(is_deferred, (self.root, *self.parts)))

    @property
    def label(self) -> str:
        """What its name is made of."""
        return str(self)

    @property
    def path(self) -> str:
        """The path or URI.

        Raises:
            InvalidOptionError: a variable is not set, or nothing says where the table is.
        """
        root = check_name("table", resolved_text("table", self.root))
        return _joined(root, [check_name("table", resolved_text("table", part)) for part in self.parts])

    def options(self) -> dict[str, str]:
        """The storage options.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return resolved_options("storage_options", self.storage_options)

    def __str__(self) -> str:
        return _joined(shown_text(self.root), [shown_text(part) for part in self.parts])


def _joined(root: str, parts: Sequence[str]) -> str:
    return "/".join([root.rstrip("/"), *parts]) if parts else root
