"""SeaStreamer's URL vectors."""

from __future__ import annotations

import pytest

from stream_consumers.connect import create_consumer, create_producer, open_batch_source
from stream_consumers.errors import InvalidStreamKeyError, InvalidUrlError
from stream_consumers.messages import Shard, check_stream_key
from stream_consumers.urls import StreamUrl


@pytest.mark.parametrize(
    ("text", "nodes", "streams"),
    [
        ("proto://h:1234/", ["proto://h:1234"], []),
        ("kafka://a:1,b:2/x,y", ["kafka://a:1", "kafka://b:2"], ["x", "y"]),
        ("kafka://a:1,,b:2/x,,y,", ["kafka://a:1", "kafka://b:2"], ["x", "y"]),
        ("stdio:///a,b", ["stdio://."], ["a", "b"]),
        ("redis://localhost/a,b", ["redis://localhost"], ["a", "b"]),
        ("file://./path/to/hi/a,b", ["file://./path/to/hi"], ["a", "b"]),
        ("file://./path/to/hi/", ["file://./path/to/hi"], []),
        ("file:///var/orders.ss/orders", ["file:///var/orders.ss"], ["orders"]),
    ],
)
def test_vectors(text: str, nodes: list[str], streams: list[str]) -> None:
    url = StreamUrl.parse(text)
    assert list(url.node_urls) == nodes
    assert list(url.streams) == streams
    assert StreamUrl.parse(str(url)) == url


@pytest.mark.parametrize("text", ["proto://h:1234", "sea-ql.org:1234", "sea-ql.org:1234/a", "://h/a", ""])
def test_no_url(text: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        StreamUrl.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["proto://h:1/stream?", "proto://h:1/a,b c", "proto://h/ö", "proto://h/" + "k" * 250])
def test_no_stream_key(text: str) -> None:
    with pytest.raises(InvalidStreamKeyError):
        StreamUrl.parse(text)


def test_longest_stream_key() -> None:
    assert StreamUrl.parse("proto://h/" + "k" * 249).streams == ("k" * 249,)
    with pytest.raises(InvalidStreamKeyError, match="length=250"):
        check_stream_key("k" * 250)
    with pytest.raises(InvalidStreamKeyError):
        check_stream_key("orders\n")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file://./path/to/hi.ss/a", "./path/to/hi.ss"),
        ("file:///abs/hi.ss/a", "/abs/hi.ss"),
        ("file:///abs/hi.ss//a", "/abs/hi.ss"),
        ("file://hi.ss/a", "hi.ss"),
    ],
)
def test_path(text: str, path: str) -> None:
    assert StreamUrl.parse(text).path == path


def test_several_files_are_no_path() -> None:
    with pytest.raises(InvalidUrlError, match="files=2"):
        _ = StreamUrl.parse("file://a.ss,b.ss/orders").path


def test_streams_are_required_where_something_is_read() -> None:
    with pytest.raises(InvalidUrlError, match="names no stream"):
        StreamUrl.parse("file://a.ss/").required_streams()
    for open_url in (open_batch_source, create_consumer, create_producer):
        with pytest.raises(InvalidUrlError, match="names no stream"):
            open_url("memory://nowhere/")
        with pytest.raises(InvalidUrlError, match="no backend for 'carrier-pigeon'"):
            open_url("carrier-pigeon://coop/orders")


def test_shard_text() -> None:
    assert Shard.parse("orders/3") == Shard("orders", 3)
    assert str(Shard("orders", 3)) == "orders/3"
    for text in ("orders", "orders/", "orders/x", "orders/-1", "orders/²", "or ders/1"):
        with pytest.raises(InvalidUrlError):
            Shard.parse(text)
