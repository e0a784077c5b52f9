"""The services of ``make debezium`` keep the password of their database from other users of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.support.debezium import EXAMPLE, debezium
from tests.support.kafka_broker import kafka_broker
from tests.support.postgres import postgres_server

SECONDS = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "connectors/shop", "connectors/shop/config"])
def test_the_rest_api_of_kafka_connect_needs_a_password(connect: str, path: str) -> None:
    with pytest.raises(HTTPError) as raised:
        build_opener(ProxyHandler({})).open(f"{connect}/{path}", timeout=SECONDS)
    with raised.value as refused:
        assert refused.code == HTTPStatus.UNAUTHORIZED


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the REST API, while Debezium runs."""
    folder: Path = tmp_path_factory.mktemp("debezium")
    with kafka_broker(folder) as (broker, _), postgres_server(logs_changes=True) as database:
        database.run(*EXAMPLE)
        with debezium(folder / "connect", broker, database, "public.customers") as server:
            yield server.said(r"REST server listening at (http://127\.0\.0\.1:\d+)")[0]
