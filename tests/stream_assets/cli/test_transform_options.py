"""What a command makes of ``--transform``; without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from stream_assets import StreamRun, stream_asset
from stream_assets.cli.transform_options import make_rows
from stream_consumers.errors import InvalidOptionError


def declared(name: str, **more: Any) -> Any:
    return stream_asset(source="memory://transforms/orders", group="g", table=f"lake/{name}", name=name, **more)


@declared("plain")
def plain(batch: Any) -> Any:
    return batch


@declared("lenient", on_bad_rows="dead_letter")
def lenient(batch: Any) -> Any:
    return batch


@declared("with_context")
def with_context(context: Any, batch: Any) -> Any:
    return batch


@declared("with_resource")
def with_resource(batch: Any, settings: Any) -> Any:
    return batch


@declared("body")
def body(stream: StreamRun) -> Any:
    yield from ()


def test_the_transform_of_an_asset_is_its_function() -> None:
    assert make_rows(None, None, f"{__name__}:plain").transform is plain.ingestion.transform is not None


def test_what_becomes_of_bad_rows_is_what_is_said_or_what_the_asset_says() -> None:
    of_asset = (None, None, f"{__name__}:lenient")
    found = [make_rows(None, None, None), make_rows(*of_asset), make_rows(*of_asset, "fail")]
    assert [maker.options["on_bad_rows"].value for maker in found] == ["fail", "dead_letter", "fail"]


@pytest.mark.parametrize("name", ["with_context", "with_resource", "body"])
def test_an_asset_that_needs_dagster_is_refused_and_not_left_out(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=rf"{name} needs a run of Dagster: .*Run it there"):
        make_rows(None, None, f"{__name__}:{name}")
