"""Translation of streams and tables to assets: keys, upstream assets, groups, tags, freshness and automation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import dagster as dg

from stream_assets.metadata import TABLE_URI
from stream_assets.resources import StreamLocation
from stream_consumers.backend import find_backend
from stream_consumers.client_config import variable_name
from stream_consumers.urls import StreamUrl

STREAM_URL = "stream/url"
"""The metadata key with the URL of a stream."""
_UNENCODED = re.compile(r"[A-Za-z0-9._-]+")
_ENCODED = "percent-encoded"
_DEFAULT_PORTS = {"kafka": ":9092", "redis": ":6379", "rediss": ":6379"}


@dataclass(frozen=True)
class StreamTranslatorData:
    """The data about an asset that a translator gets.

    Args:
        spec: the spec of the declaration; by default its key is the name of the function.
        origin: the streams; ``str(origin)`` is for display.
        group: the consumer group, for display.
        table: the table, for display; ``None`` if the key selects it.
    """

    spec: dg.AssetSpec
    origin: StreamLocation
    group: str
    table: str | None = None

    @property
    def kind(self) -> str | None:
        """The kind of the broker, for its icon in Dagster; ``None`` if it has none or is unknown."""
        shown = self.origin.shown
        return None if shown is None else find_backend(shown.protocol).kind

    @property
    def streams(self) -> Sequence[str]:
        """The stream keys; the name of the variable if it holds them."""
        shown = self.origin.shown
        return [variable_name(self.origin.source)] if shown is None else shown.required_streams()


class StreamTranslator:
    """Decides how streams and tables become assets. Pass an object of your subclass to ``stream_asset``.

    Example:
        >>> class Sales(StreamTranslator):
        ...     def get_asset_spec(self, data):
        ...         spec = super().get_asset_spec(data)
        ...         return spec.replace_attributes(key=spec.key.with_prefix("sales"), group_name="sales")
        ...     def get_stream_spec(self, data, stream):
        ...         return dg.AssetSpec(["events", stream], owners=["team:shop"])
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="kafka://kafka:9092/orders", group="g", table="lake/orders", translator=Sales())
        ... def orders(batch):
        ...     return batch
        >>> orders.key.to_user_string(), [key.to_user_string() for key in orders.dependency_keys]
        ('sales/orders', ['events/orders'])
    """

    def get_asset_spec(self, data: StreamTranslatorData) -> dg.AssetSpec:
        """Return the spec of the table's asset, with its dependency on the streams.

        Args:
            data: the data of the asset.
        """
        spec = data.spec
        known = {TABLE_URI: data.table} if data.table else {}
        return spec.replace_attributes(
            deps=[*(self.get_stream_spec(data, stream).key for stream in data.streams), *spec.deps],
            kinds=spec.kinds or {"spark", "deltalake", *([data.kind] if data.kind else [])},
            metadata={**known, "stream/source": str(data.origin), "stream/group": data.group, **spec.metadata},
        )

    def get_stream_spec(self, data: StreamTranslatorData, stream: str) -> dg.AssetSpec:
        """Return the spec of the external asset of a stream, whose key includes the cluster.

        Two tables that read one stream must get the same spec.

        Args:
            data: the data of an asset that reads the stream.
            stream: the stream key.
        """
        shown = data.origin.shown
        if shown is None:
            return dg.AssetSpec(["stream", stream], description=f"The streams in the variable {stream}.")
        cluster = cluster_name(shown)
        # The spec depends on nothing but the key, because Dagster refuses two different specs with one key.
        url = shown if shown.protocol == "file" else replace(shown, nodes=(cluster,))
        return dg.AssetSpec(
            stream_asset_key(shown.protocol, cluster, stream),
            description=f"Stream {stream} of {url.with_streams([])}.",
            kinds={data.kind} if data.kind else None,
            metadata={STREAM_URL: str(url.with_streams([stream])), "stream/key": stream},
        )


def cluster_name(url: StreamUrl) -> str:
    """Return the name of the cluster in asset keys: the first server, or the name of the file.

    Example:
        >>> cluster_name(StreamUrl.parse("kafka://b:9093,a:9092/orders"))
        'a'
        >>> cluster_name(StreamUrl.parse("file:///data/orders.ss/orders"))
        'orders.ss'
    """
    if url.protocol == "file":
        return os.path.basename(url.path) or "file"
    return min(url.nodes).removesuffix(_DEFAULT_PORTS.get(url.protocol, ""))


def stream_asset_key(protocol: str, cluster: str, stream: str) -> dg.AssetKey:
    """Return the key of the asset of a stream; each stream has its own key.

    Dagster derives the name of an input from the key, and allows few characters in it. So colons separate the parts of
    the key, and a stream with other characters or an empty part is encoded as a whole.

    Example:
        >>> stream_asset_key("redis", "localhost:6380", "user:events").to_user_string()
        'redis/localhost_6380/user/events'
        >>> stream_asset_key("redis", "cache", "user%3A42").to_user_string()
        'redis/cache/percent-encoded/user_3A42'
    """
    server = re.sub(r"[^A-Za-z0-9._-]+", "_", cluster).strip("_") or "local"
    parts = stream.split(":")
    if parts[0] != _ENCODED and all(map(_UNENCODED.fullmatch, parts)):
        return dg.AssetKey([protocol, server, *parts])
    # Percent signs in a stream key are kept: they are part of its encoding.
    text = quote(stream.replace("_", "%5F").replace("~", "%7E"), safe="%")
    return dg.AssetKey([protocol, server, _ENCODED, text.replace("%", "_")])
