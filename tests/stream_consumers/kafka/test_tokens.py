"""SASL/OAUTHBEARER with a token provider that is named in the client options."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_consumer, create_producer
from stream_consumers.errors import AccessDeniedError, InvalidOptionError, StreamAssetsError, TokenProviderError
from stream_consumers.kafka.client import ClientSecrets, TokenProvider, options_explained
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.options import Limits
from tests.support import tokens
from tests.support.kafka_broker import Listeners
from tests.support.kept_errors import kept
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.topics import create_topic, fill

PATIENCE = 30.0


def client(provider: str = "token") -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_token_provider": f"tests.support.tokens:{provider}",
    }


@pytest.fixture
def url(kafka_listeners: Listeners) -> str:
    topic = create_topic(kafka_listeners.plain, 1)
    fill(kafka_listeners.plain, topic, 5, partitions=1)
    return f"kafka://{kafka_listeners.secure}/{topic}"


def calling_processes(calls: Path) -> set[int]:
    return set(map(int, calls.read_text().split()))


def test_consumers_producers_groups_and_splits_in_another_process_have_tokens(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tokens.CALLS_VARIABLE, str(tmp_path / "calls"))
    with create_producer(url, client=client()) as producer:
        producer.send(b"six")
    with create_consumer(url, mode="resumable", group="g", live=False, client=client()) as member:
        messages = list(member)
        assert len(messages) == 6
        member.ack(messages[-1])
        assert member.commit() == 1
    shard = messages[0].shard
    with StreamSource(url, client=client()).open() as source:
        assert source.extents()[shard].end == 6
        assert source.committed("g") == {shard: 6}
        plan = source.plan({shard: Range(0, 6)}, limits=Limits(), parallelism=1)
        assert plan is not None
        (tmp_path / "split").write_bytes(pickle.dumps(plan.splits[0]))
    program = (
        f"import pickle; print(sum(b.num_rows for b in pickle.load(open({str(tmp_path / 'split')!r}, 'rb')).read()))"
    )
    read = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert read.stdout.split() == ["6"]
    assert len(calling_processes(tmp_path / "calls")) == 2


@pytest.mark.slow
def test_the_command_line_finds_a_module_in_its_folder(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop_tokens.py").write_text("from tests.support.tokens import token\n")
    words = [word for name, value in client().items() for word in ("-X", f"{name}={value}")]
    words[-1] = "oauth_token_provider=shop_tokens:token"
    program = "import sys; sys.path.remove(''); from stream_assets.cli.main import main; main()"
    command = [sys.executable, "-c", program, "lag", url, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "5" in done.stdout.split()) == (0, True), done.stderr


@pytest.mark.slow
def test_a_token_is_asked_for_again_before_it_expires(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv(tokens.CALLS_VARIABLE, str(calls))
    with create_consumer(url, client=client("short_token")) as consumer:
        clients = len(calls.read_text().split())
        until(lambda: consumer.next(0.1) is None and len(calls.read_text().split()) > clients, seconds=PATIENCE)
    assert calling_processes(calls) == {os.getpid()}


def uses(url: str, provider: str) -> list[Callable[[], object]]:
    def produce() -> None:
        with create_producer(url, client=client(provider)) as producer:
            producer.send(b"{}")

    return [
        lambda: KafkaBrokers(url, client(provider)).check(),
        lambda: create_consumer(url, client=client(provider)).next(PATIENCE),
        produce,
    ]


@pytest.mark.parametrize(
    ("provider", "kind"),
    [
        ("fails", TokenProviderError),
        ("reversed_token", TokenProviderError),
        ("in_milliseconds", TokenProviderError),
        ("made", TokenProviderError),
        ("nothing_of_this_name", InvalidOptionError),
        ("not_a_function", InvalidOptionError),
    ],
)
def test_what_is_wrong_with_a_provider_is_typed_and_shows_no_token(
    url: str, provider: str, kind: type[StreamAssetsError]
) -> None:
    for use in uses(url, provider):
        with pytest.raises(kind) as raised:
            use()
        shown = "".join(traceback.format_exception(raised.value))
        assert tokens.SECRET not in shown
        assert provider in shown
        assert pickle.loads(pickle.dumps(raised.value)).what == raised.value.what


def test_a_token_that_the_broker_refuses_is_no_access(url: str) -> None:
    with KafkaBrokers(url, client("refused_token")) as cluster:
        cluster.answer_seconds = 4
        with pytest.raises(AccessDeniedError):
            cluster.check()


@pytest.mark.parametrize("name", ["", "tokens", "a:b:c", ":token", "tokens:", "../a:b", "a.b:c d", 7])
def test_a_name_that_names_no_function_is_refused_before_anything_is_imported(name: object) -> None:
    options: dict[str, object] = {"oauth_token_provider": name}
    with pytest.raises(InvalidOptionError) as refused:
        StreamSource("kafka://127.0.0.1:1/orders", client=options)  # type: ignore[arg-type]
    assert repr(name) not in str(refused.value)


def test_a_function_itself_is_refused_and_the_error_names_the_option() -> None:
    function: object = tokens.token
    with pytest.raises(InvalidOptionError, match="oauth_token_provider"):
        StreamSource("kafka://127.0.0.1:1/orders", client={"oauth_cb": function})  # type: ignore[dict-item]


def test_a_provider_that_fails_later_is_named_where_the_broker_cannot_be_reached(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KafkaBrokers(url, client("short_token")) as cluster:
        cluster.check()
        made = cluster._reasons.tokens
        assert made is not None
        monkeypatch.setattr(made, "_function", tokens.fails)
        until(lambda: cluster._admin.poll(0.1) is not None and made.error is not None, seconds=PATIENCE)
        assert isinstance(made.error, TokenProviderError)
        assert "tests.support.tokens:short_token" in str(cluster._reasons)
        assert tokens.SECRET not in str(cluster._reasons)


def test_no_text_of_a_broker_repeats_the_last_tokens_or_their_extensions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="stream_consumers.kafka.client")
    with KafkaBrokers("kafka://127.0.0.1:1/orders", client("numbered_token")) as cluster:
        for _ in range(2):
            cluster._for_client(cluster.settings)
        said = " ".join(f"Bearer {tokens.SECRET}-{number} of {tokens.SECRET}-cluster" for number in tokens.NUMBERS)
        error = KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, said)
        cluster._reasons(error)
        cluster._log.log(logging.WARNING, "%s", said)
        shown = [cluster.said(error), str(cluster._reasons), *caplog.messages]
        assert len(shown) == 4
        assert not any(tokens.SECRET in text for text in shown)
        with pytest.raises(InvalidOptionError) as refused, options_explained(cluster._secrets):
            raise KafkaException(error)
        assert tokens.SECRET not in kept(refused.value)


@pytest.mark.parametrize("name", ["sasl.oauthbearer.config", "ssl.key.pem"])
def test_no_error_repeats_an_option(name: str) -> None:
    unsecured = {"sasl.mechanism": "OAUTHBEARER", "enable.sasl.oauthbearer.unsecure.jwt": True}
    client = {"security.protocol": "SASL_SSL", **unsecured, name: "hunter2-of-the-broker"}
    brokers = KafkaBrokers("kafka://127.0.0.1:1/orders", client)
    brokers.answer_seconds = 2
    with pytest.raises(StreamAssetsError) as raised:
        brokers.check()
    assert "hunter2" not in kept(raised.value)


def test_what_a_module_of_a_provider_raises_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaking_tokens.py").write_text("raise RuntimeError('401 for hunter2')")
    (tmp_path / "lacking_tokens.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidOptionError, match="RuntimeError") as raised:
        TokenProvider("leaking_tokens:token", ClientSecrets({}))
    assert "hunter2" not in kept(raised.value)
    with pytest.raises(InvalidOptionError, match="no_such_module"):
        TokenProvider("lacking_tokens:token", ClientSecrets({}))
