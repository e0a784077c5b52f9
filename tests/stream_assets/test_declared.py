"""What an asset is declared with is checked when the code is loaded, not by its first run. No Spark is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest

from sensors.lag_sensor import LagPolicy
from stream_assets import (
    NO_GAPS,
    Json,
    SparkSessionResource,
    StreamAsset,
    StreamTranslator,
    build_replay_job,
    stream_asset,
    stream_definitions,
)
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from tests.support.parameters import shown


def declare(**options: Any) -> StreamAsset:
    @stream_asset(**{"source": "memory://declared/orders", "table": "lake/orders", "group": "lakehouse", **options})
    def orders(batch: Any) -> Any:
        return batch

    return orders


NONSENSE: Mapping[str, tuple[object, ...]] = {
    "max_records": (0, "5", math.nan),
    "members": (0, -1, 1.5, "2", True, None, math.inf),
    "min_lag": (-1, 1.5, "5", True, None, math.nan),
    "max_wait_seconds": (-1, "60", True, None, math.nan, math.inf),
    "retry_seconds": (-1, "60", True, None, math.nan, math.inf),
    "sensor_seconds": (0, -30, 0.5, "30", True, None),
    "schema_changes": ("add", "", True, None),
    "single_writer": ("false", "", 0, 1, None),
    "group": ("", " ", "a/b", 5),
    "table": (
        "",
        " ",
        None,
        5,
        "/lake/a%20b",
        "/lake/a\nb",
        "/lake/a\\b",
        "~/lake/a",
        "hdfs:/lake/a",
        "s3a:/b/a",
        "dbfs:/a",
    ),
    "deps": ("orders", b"orders"),
    "owners": ("team:shop",),
    "kinds": ("kafka",),
    "linger_seconds": (-1, "60", True, None, math.nan, math.inf),
    "checks": ("no_gaps", NO_GAPS, None, ["no_gaps"]),
    "pool": ("",),
    "spark": (SparkSessionResource,),
    "translator": (StreamTranslator,),
    "replay_partitions": ("daily", dg.StaticPartitionsDefinition(["a"])),
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in NONSENSE.items() for v in values], ids=shown)
def test_nonsense_is_refused_with_the_option_and_the_value(option: str, value: object) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        declare(**{option: value})
    assert f"{option}={value!r}" in str(refused.value)
    assert refused.value.remedy


def test_a_replay_job_has_windows_of_time() -> None:
    days: Any = dg.StaticPartitionsDefinition(["a"])
    with pytest.raises(InvalidOptionError, match=r"partitions=.*no windows of time"):
        build_replay_job(declare(), days)


@pytest.mark.parametrize("prefix", ["sales", ["sales"], ("sales",)], ids=repr)
def test_a_prefix_of_one_part_may_be_text(prefix: object) -> None:
    assert declare(key_prefix=prefix).key == dg.AssetKey(["sales", "orders"])


@pytest.mark.parametrize("decode", ["json", Json, "", 5], ids=repr)
def test_a_decoder_is_none_by_its_name_or_its_class(decode: object) -> None:
    with pytest.raises(InvalidOptionError, match=r"decodes nothing.*Use Json\(schema\)"):
        declare(decode=decode)


def test_a_function_without_a_name_needs_one() -> None:
    with pytest.raises(InvalidOptionError, match=r"has no name.*Give name="):
        stream_asset(source="memory://declared/orders", table="lake/orders", group="g")(lambda batch: batch)


@pytest.mark.parametrize("schema", ["", " ", 5], ids=repr)
def test_a_schema_without_columns_would_keep_nothing(schema: Any) -> None:
    with pytest.raises(InvalidOptionError, match="schema="):
        Json(schema)


@pytest.mark.parametrize("source", [None, 5, b"memory://declared/orders"], ids=repr)
def test_a_source_is_text(source: object) -> None:
    with pytest.raises(InvalidUrlError, match=r"is no text.*file://"):
        declare(source=source)


@pytest.mark.parametrize("seconds", [-1, "5", math.nan], ids=repr)
@pytest.mark.parametrize(
    "name", ["budget_seconds", "answer_seconds", "retry_seconds", "after_cancel_seconds", "stale_run_seconds"]
)
def test_the_times_of_a_policy_are_numbers(name: str, seconds: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name}="):
        LagPolicy(**{name: seconds})


def test_a_policy_keeps_the_members_and_the_stay_that_the_other_options_say() -> None:
    source = {"source": "kafka://localhost:9092/orders", "mode": "load_balanced", "members": 4, "linger_seconds": 600}
    usual = declare(**source).declared.policy
    assert (usual.max_runs, usual.keeps_alive) == (4, True)
    assert declare(**source, policy=LagPolicy()).declared.policy == usual
    own = declare(**source, policy=LagPolicy(max_runs=2, stale_run_seconds=60, retry_seconds=5)).declared.policy
    assert (own.max_runs, own.keeps_alive, own.stale_run_seconds, own.retry_seconds) == (2, True, 60, 5)
    with pytest.raises(InvalidOptionError, match=r"min_lag=5 lets messages wait, but linger_seconds=600"):
        declare(**source, policy=LagPolicy(min_lag=5))


def claiming(name: str, **options: Any) -> StreamAsset:
    source = "redis://localhost:6379/jobs,more"
    return declare(**{"name": name, "source": source, "mode": "load_balanced", "table": f"lake/{name}", **options})


@pytest.mark.parametrize("other", [{}, {"source": "redis://localhost:6379/more"}], ids=repr)
def test_two_tables_do_not_share_a_group_that_claims_entries(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=r"one and two share group 'lakehouse' of .*more.*a group of its own"):
        stream_definitions([claiming("one"), claiming("two", **other)])


@pytest.mark.parametrize(
    "other",
    [
        {"group": "another"},
        {"source": "redis://localhost:6379/others"},
        {"source": "redis://localhost:6380/jobs"},
        {"mode": "resumable"},
    ],
    ids=repr,
)
def test_but_whatever_else_two_tables_may_share(other: dict[str, Any]) -> None:
    stream_definitions([claiming("one"), claiming("two", **other)])
