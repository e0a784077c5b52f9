"""How streams and tables become assets: keys, upstream assets, groups, tags, freshness and automation."""

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
"""The metadata of a stream's asset that says where it is."""
_UNENCODED = re.compile(r"[A-Za-z0-9._-]+")
_ENCODED = "percent-encoded"
_DEFAULT_PORTS = {"kafka": ":9092", "redis": ":6379", "rediss": ":6379"}


@dataclass(frozen=True)
class StreamTranslatorData:
    """What a translator knows of an asset.

    Args:
        spec: what the asset was declared with; its key is the name of the function where nothing else was given.
        origin: where its messages come from; ``str(origin)`` is for people.
        group: the consumer group, for people.
        table: the table for people; ``None`` where the key says which one it is.
    """

    spec: dg.AssetSpec
    origin: StreamLocation
    group: str
    table: str | None = None

    @property
    def kind(self) -> str | None:
        """The kind of the broker, if there is an icon for it and it is known."""
        shown = self.origin.shown
        return None if shown is None else find_backend(shown.protocol).kind

    @property
    def streams(self) -> Sequence[str]:
        """The stream keys; the name of the variable where one holds them."""
        shown = self.origin.shown
        return [variable_name(self.origin.source)] if shown is None else shown.required_streams()


class StreamTranslator:
    """Decides how streams and tables become assets. Inherit from it, and give ``stream_asset`` yours.

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
        """The asset of the table; what depends on its streams is added if it is not there.

        Args:
            data: of the asset.
        """
        spec = data.spec
        known = {TABLE_URI: data.table} if data.table else {}
        return spec.replace_attributes(
            deps=[*(self.get_stream_spec(data, stream).key for stream in data.streams), *spec.deps],
            kinds=spec.kinds or {"spark", "deltalake", *([data.kind] if data.kind else [])},
            metadata={**known, "stream/source": str(data.origin), "stream/group": data.group, **spec.metadata},
        )

    def get_stream_spec(self, data: StreamTranslatorData, stream: str) -> dg.AssetSpec:
        """The external asset that stands for a stream. Its key says which cluster it is at.

        Two tables that read one stream have to get the same here.

        Args:
            data: of an asset that reads it.
            stream: the stream key.
        """
        shown = data.origin.shown
        if shown is None:
            return dg.AssetSpec(["stream", stream], description=f"What the variable {stream} names.")
        cluster = cluster_name(shown)
        # Nothing else than what the key says: Dagster refuses two specs of one key that differ.
        place = shown if shown.protocol == "file" else replace(shown, nodes=(cluster,))
        return dg.AssetSpec(
            stream_asset_key(shown.protocol, cluster, stream),
            description=f"Stream {stream} of {place.with_streams([])}.",
            kinds={data.kind} if data.kind else None,
            metadata={STREAM_URL: str(place.with_streams([stream])), "stream/key": stream},
        )


def cluster_name(url: StreamUrl) -> str:
    """The name of the cluster in asset keys: the first server, or the name of the file.

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
    """The key of the asset that stands for a stream; each stream has its own.

    Dagster makes the name of an input of it, which may have few characters: colons separate parts of the key, and a
    stream with other characters, or a part that is empty, is encoded as a whole.

    Example:
        >>> stream_asset_key("redis", "localhost:6380", "user:events").to_user_string()
        'redis/localhost_6380/user/events'
        >>> stream_asset_key("redis", "cache", "user%3A42").to_user_string()
        'redis/cache/percent-encoded/user_3A42'
    """
    place = re.sub(r"[^A-Za-z0-9._-]+", "_", cluster).strip("_") or "local"
    parts = stream.split(":")
    if parts[0] != _ENCODED and all(map(_UNENCODED.fullmatch, parts)):
        return dg.AssetKey([protocol, place, *parts])
    # What it has of percent signs is encoding already.
    text = quote(stream.replace("_", "%5F").replace("~", "%7E"), safe="%")
    return dg.AssetKey([protocol, place, _ENCODED, text.replace("%", "_")])
