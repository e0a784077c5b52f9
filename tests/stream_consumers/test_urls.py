"""SeaStreamer's URL vectors, and any text at all."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_consumers.create import StreamSource, create_consumer, create_producer, open_batch_source
from stream_consumers.errors import InvalidStreamKeyError, InvalidUrlError, UnsupportedError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

PARTS = st.sampled_from(["kafka", "file", "://", "/", ",", ":", ".", "?", " ", "h:1", "x", "ö", "\n", "\ud800"])
ANY_TEXT = st.text() | st.lists(PARTS, max_size=12).map("".join)
STREAMS = st.lists(st.text("abcXYZ019._-", min_size=1, max_size=249), max_size=4)
NODES = st.lists(st.text(min_size=1).filter(lambda node: "," not in node), min_size=1, max_size=4)
PROTOCOLS = st.text(min_size=1).filter(lambda text: ":" not in text)


@pytest.mark.parametrize(
    ("text", "nodes", "streams"),
    [
        ("proto://h:1234/", ["proto://h:1234"], []),
        ("kafka://a:1,b:2/x,y", ["kafka://a:1", "kafka://b:2"], ["x", "y"]),
        ("kafka://a:1,,b:2/x,,y,", ["kafka://a:1", "kafka://b:2"], ["x", "y"]),
        ("stdio:///a,b", ["stdio://."], ["a", "b"]),
        ("file://./path/to/hi/", ["file://./path/to/hi"], []),
        ("file:///var/orders.ss/orders", ["file:///var/orders.ss"], ["orders"]),
        ("REDIS://LocalHost/Orders", ["redis://LocalHost"], ["Orders"]),
    ],
)
def test_vectors(text: str, nodes: list[str], streams: list[str]) -> None:
    url = StreamUrl.parse(text)
    assert [f"{url.protocol}://{node}" for node in url.nodes] == nodes
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


def test_streams_are_required_where_something_is_read() -> None:
    with pytest.raises(InvalidUrlError):
        StreamUrl.parse("file://a.ss/").required_streams()
    for open_url in (open_batch_source, create_consumer, create_producer):
        with pytest.raises(InvalidUrlError):
            open_url("memory://nowhere/")
        with pytest.raises(InvalidUrlError):
            open_url("carrier-pigeon://coop/orders")


def test_shard_text() -> None:
    assert Shard.parse("orders/3") == Shard("orders", 3)
    assert str(Shard("orders", 3)) == "orders/3"
    for text in ("orders", "orders/", "orders/x", "orders/-1", "orders/²", "or ders/1", "orders/" + "1" * 5_000):
        with pytest.raises(InvalidUrlError):
            Shard.parse(text)


@given(ANY_TEXT)
@example("://")
@example("p:///")
@example("p://,/,")
@example("p://a/://b/c")
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        url = StreamUrl.parse(text)
    except (InvalidUrlError, InvalidStreamKeyError):
        return
    assert StreamUrl.parse(str(url)) == url
    assert len(url.nodes) >= 1
    assert url.protocol == text[: text.index("://")].lower()
    assert list(url.streams) == [key for key in text[text.rindex("/") + 1 :].split(",") if key]


@given(PROTOCOLS, NODES, STREAMS)
@example("file", ["."], [])
@example("file", ["/"], ["a"])
@example("kafka", ["a:1", "."], ["a"])
def test_every_url_comes_back(protocol: str, nodes: list[str], streams: list[str]) -> None:
    url = StreamUrl.parse(f"{protocol}://{','.join(nodes)}/{','.join(streams)}")
    assert url == StreamUrl(protocol.lower(), tuple(nodes), tuple(streams))
    assert StreamUrl.parse(str(url)) == url


@given(ANY_TEXT | st.from_regex(r"[a-z.]{0,5}/[0-9]{0,30}"))
def test_any_text_is_a_shard_or_refused(text: str) -> None:
    try:
        shard = Shard.parse(text)
    except (InvalidUrlError, InvalidStreamKeyError):
        return
    assert Shard.parse(str(shard)) == shard
    assert text.startswith(f"{shard.stream}/")


@pytest.mark.parametrize("scheme", ["kafka", "redis", "rediss"])
@pytest.mark.parametrize(
    "server", ["h:0", "h:65536", "h:99999", "h:-1", "h:x", "h i", "h:1/3", "::1", "h?password=hunter2", "h;hunter2"]
)
def test_what_is_no_server_is_refused_before_a_client_takes_it_for_another(scheme: str, server: str) -> None:
    # librdkafka connects to port 34463 for 99999.
    for connect in (create_consumer, create_producer):
        with pytest.raises(InvalidUrlError) as refused:
            connect(f"{scheme}://ok:1,{server}/orders")
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("server", ["h", "h:1", "h.example-1_a:65535", "[::1]", "[fe80::1]:9092"])
def test_a_server_is_a_host_with_or_without_a_port(server: str) -> None:
    StreamUrl.parse(f"kafka://{server}/orders").check_servers()


LEAKING = """
    redis://:hunter2@host:6379 rediss://me:hunter2@host:6379/ redis://me:hunter2@host:6379/user:42
    redis://:hunter2/x@host:6379 redis://:hunter2/x@host redis://:hunter2/x@host:6379/0 redis://:x/hunter2@host
    kafka://me:x/hunter2@host:9092 kafka://me:hunter2@host:9092/orders,* me:hunter2@host:6379/orders
    redis://me:hunter2%40host:6379/orders redis:hunter2%40host/orders redis://host:hunter2/orders
    redis://me:x#hunter2/orders kafka://host;password=hunter2/orders kafka://host/orders;password=hunter2
    kafka://host:9092/orders?password=hunter2 redis://h:1/orders?password=hunter2
"""


@pytest.mark.parametrize("text", [*LEAKING.split(), b"redis://:hunter2@host:6379/orders"])
def test_what_may_be_a_password_is_in_no_error(text: str) -> None:
    for connect in (StreamSource, create_consumer, create_producer):
        with pytest.raises((InvalidUrlError, UnsupportedError)) as refused:
            connect(text)
        error = refused.value
        # The lines of code in it are those of this test, which name no value.
        assert "hunter2" not in "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("redis://:hunter2/x@host", "a user or a password"),
        ("redis://me:hunter2%40host:6379/orders", "a user or a password"),
        ("me:hunter2@host:6379/orders", "a user or a password"),
        ("kafka://host/orders;password=hunter2", "parameters"),
        ("kafka://host:9092/orders?password=hunter2", "parameters"),
        ("redis://me:x#hunter2/orders", "parameters"),
        ("redis://host:hunter2/orders", "a port"),
        ("kafka://host:99999/orders", "a port"),
        ("kafka://:9092/orders", "no host"),
        ("kafka://ho st:9092/orders", "white space"),
        ("redis:hunter2/orders", "no protocol"),
        ("redis://host:hunter2", "which streams"),
        ("redis://host/hunter2%", "a stream key"),
    ],
)
def test_what_is_wrong_with_a_url_is_named_without_it(text: str, cause: str) -> None:
    with pytest.raises(InvalidUrlError, match=cause) as refused:
        create_consumer(text)
    assert "hunter2" not in str(refused.value)


def test_an_at_sign_may_be_in_a_path_and_in_a_key_of_redis() -> None:
    assert StreamUrl.parse("file:///data/me@home/orders.ss/orders").path == "/data/me@home/orders.ss"
    url = StreamUrl.parse("redis://host:6379/me@home,you%40home")
    url.check_servers()
    assert url.streams == ("me@home", "you@home")
