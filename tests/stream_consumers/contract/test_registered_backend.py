"""A backend of another distribution: found by its entry point, opened by URL, proved by the contract suite."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from stream_assets.cli.main import main
from stream_consumers import (
    Backend,
    Consumer,
    ConsumerMode,
    FileProducerOptions,
    InvalidOptionError,
    Producer,
    Shard,
    StreamUrl,
    connect,
    create_committer,
    create_consumer,
    create_producer,
    open_batch_source,
)
from stream_consumers.backend import ConsumerOptions, find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.errors import BackendLoadError, GroupsNotRememberedError, InvalidUrlError, UnsupportedError
from stream_consumers.options import Modes
from stream_consumers.testing import BatchSourceContract, ConsumerContract, Harness, ProducerContract

LINES = "tests.support.line_files:LineStreams"
Install = Callable[..., None]


class WithoutModes(Backend):
    """A backend whose author forgot its modes, and has no batches."""

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        raise NotImplementedError

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        raise NotImplementedError


class WithoutBatches(WithoutModes):
    """A backend with consumers and producers only."""

    consumer_modes = Modes(of="consumers of sink", available=(ConsumerMode.REAL_TIME,))


@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution that registers backends, as pip leaves it: metadata and entry points on the path."""

    def install(name: str, **schemes: str) -> None:
        site = tmp_path_factory.mktemp("site")
        folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        listed = "".join(f"{scheme} = {target}\n" for scheme, target in schemes.items())
        (folder / "entry_points.txt").write_text(f"[stream_consumers.backends]\n{listed}")
        monkeypatch.syspath_prepend(site)

    return install


@pytest.fixture
def harness(install: Install) -> Harness:
    install("stream-lines", lines=LINES)
    return Harness("lines", create=lambda folder: f"lines://{folder}/")


# The same suite as for our own backends: whoever has another one runs it.
@pytest.mark.slow
class TestConsumer(ConsumerContract):
    """See :class:`stream_consumers.testing.ConsumerContract`."""


class TestProducer(ProducerContract):
    """See :class:`stream_consumers.testing.ProducerContract`."""


@pytest.mark.slow
class TestBatchSource(BatchSourceContract):
    """See :class:`stream_consumers.testing.BatchSourceContract`."""


def test_everything_opens_it_by_url(harness: Harness, tmp_path: Path) -> None:
    url = harness.create(tmp_path) + "orders"
    with connect(url) as streamer:
        streamer.create_producer().send(b"one")
        assert [message.text() for message in streamer.create_consumer(live=False)] == ["one"]
    with create_producer(url) as producer:
        producer.send(b"two")
    with create_consumer(url, live=False) as consumer:
        assert [message.text() for message in consumer] == ["one", "two"]
    with open_batch_source(url) as source:
        assert source.extents()[Shard("orders")].end == 2
    source = pickle.loads(pickle.dumps(StreamSource(StreamUrl.parse(url))))
    assert source.group("billing") == "billing"
    assert not source.is_claimed
    with source.open() as opened:
        assert opened.extents().keys() == {Shard("orders")}


def test_the_command_line_knows_it_too(harness: Harness, tmp_path: Path) -> None:
    url = harness.create(tmp_path) + "orders"
    assert CliRunner().invoke(main, ["produce", url, "--count", "3"]).exit_code == 0
    shown = CliRunner().invoke(main, ["peek", url])
    assert shown.exit_code == 0, shown.output
    assert len(shown.stdout.splitlines()) == 3


def test_what_it_does_not_have_is_refused_as_for_our_own(harness: Harness, tmp_path: Path) -> None:
    url = harness.create(tmp_path) + "orders"
    parsed = StreamUrl.parse(url)
    for call in (
        lambda: create_consumer(url, mode=ConsumerMode.LOAD_BALANCED, group="g"),
        lambda: StreamSource(parsed, ConsumerMode.REAL_TIME),
        lambda: create_consumer(url, group="g"),
        lambda: create_consumer(url, client={"a": "b"}),
        lambda: connect(url, producer_options=FileProducerOptions()),
        lambda: create_consumer(url, group_options=object()),
    ):
        with pytest.raises(InvalidOptionError):
            call()
    with pytest.raises(GroupsNotRememberedError):
        create_committer(parsed, "g")
    for ask in (StreamSource(parsed).join, StreamSource(parsed).claims):
        with pytest.raises(UnsupportedError):
            ask("g")


def test_a_scheme_without_a_backend_names_those_there_are(install: Install) -> None:
    with pytest.raises(InvalidUrlError, match="file, kafka, memory, redis"):
        find_backend("lines")
    install("stream-lines", lines=LINES)
    assert find_backend("lines").kind is None
    with pytest.raises(InvalidUrlError, match="kafka, lines, memory"):
        find_backend("pigeon")


def test_a_backend_that_cannot_be_loaded_is_named(install: Install) -> None:
    install(
        "stream-broken",
        missing="stream_broken:Streams",
        wrong="builtins:dict",
        abstract="stream_consumers:Backend",
        module="tests.support.line_files",
        modeless=f"{__name__}:WithoutModes",
    )
    for scheme in ("missing", "wrong", "abstract", "module", "modeless"):
        with pytest.raises(BackendLoadError, match=f"{scheme}:// .* of stream-broken 1.0"):
            connect(f"{scheme}://here/")
    with pytest.raises(InvalidUrlError, match="missing"):
        find_backend("pigeon")


def test_a_backend_without_batches_says_so(install: Install) -> None:
    install("stream-sinks", sink=f"{__name__}:WithoutBatches")
    with pytest.raises(UnsupportedError):
        open_batch_source("sink://here/orders")


def test_two_backends_of_a_scheme_are_told_and_ours_stay_ours(install: Install) -> None:
    install("stream-lines", lines=LINES, kafka=LINES)
    install("stream-other", lines="stream_other:Streams")
    with pytest.raises(BackendLoadError, match=r"stream-other 1\.0"):
        find_backend("lines")
    assert find_backend("kafka").kind == "kafka"
