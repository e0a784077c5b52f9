"""What an asset is declared with is checked when the code is loaded, not by its first run. No Spark is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import pytest

from sensors.lag_sensor import STALE_RUN_SECONDS, LagPolicy
from stream_assets import (
    NO_GAPS,
    ErrorPolicy,
    Json,
    KafkaCluster,
    OpOptions,
    RunLimits,
    SparkSessionResource,
    StreamTranslator,
    build_replay_job,
    stream_asset,
)
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from tests.support.dagster_runs import plain_asset

OBJECTS: Mapping[str, tuple[str, Any]] = {
    "max_records": ("limits", RunLimits),
    "linger_seconds": ("limits", RunLimits),
    "materialize_seconds": ("limits", RunLimits),
    "max_runs": ("sensor", LagPolicy),
    "min_lag": ("sensor", LagPolicy),
    "max_wait_seconds": ("sensor", LagPolicy),
    "interval_seconds": ("sensor", LagPolicy),
    "status": ("sensor", LagPolicy),
    "on_data_loss": ("errors", ErrorPolicy),
    "on_bad_rows": ("errors", ErrorPolicy),
    "schema_changes": ("errors", ErrorPolicy),
    "dead_letter_payloads": ("errors", ErrorPolicy),
    "single_writer": ("op", OpOptions),
    "pool": ("op", OpOptions),
    "partitions_def": ("spec", lambda **options: dg.AssetSpec("orders", **options)),
}
NONSENSE: Mapping[str, tuple[object, ...]] = {
    "max_records": (0, "5", True, math.nan),
    "linger_seconds": (-1, "60", True, math.nan, math.inf),
    "materialize_seconds": (-1, "60", True, math.nan, math.inf),
    "max_runs": (0, -1, 1.5, "2", True, None, math.inf),
    "min_lag": (-1, 1.5, "5", True, None, math.nan),
    "max_wait_seconds": (-1, "60", True, None, math.nan, math.inf),
    "interval_seconds": (0, -30, 0.5, "30", True, None),
    "status": ("on", "", None),
    "on_data_loss": ("skip", "", None),
    "on_bad_rows": ("skip", "", None),
    "schema_changes": ("add", "", True, None),
    "dead_letter_payloads": ("yes", "", 0, 1, None),
    "single_writer": ("false", "", 0, 1, None),
    "pool": ("",),
    "partitions_def": (dg.StaticPartitionsDefinition(["a"]),),
    "errors": ("fail", None),
    "limits": (100, None),
    "layout": ({"partition_by": ["day"]}, None),
    "sensor": ({"min_lag": 5}, None),
    "spec": ("orders",),
    "op": ("lake", None),
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
    "checks": ("no_gaps", NO_GAPS, None, ["no_gaps"]),
    "spark": (SparkSessionResource,),
    "translator": (StreamTranslator,),
}


@pytest.mark.parametrize("option", NONSENSE)
def test_nonsense_is_refused_with_the_option_and_the_value(option: str) -> None:
    name, make = OBJECTS.get(option, (option, None))
    for value in NONSENSE[option]:
        with pytest.raises(InvalidOptionError) as refused:
            plain_asset(**{name: make(**{option: value}) if make else value})
        assert f"{option}={value!r}" in str(refused.value)
        assert refused.value.remedy


@pytest.mark.parametrize(
    "make",
    [
        lambda: build_replay_job(plain_asset(), dg.StaticPartitionsDefinition(["a"])),  # type: ignore[arg-type]
        *(lambda decode=decode: plain_asset(decode=decode) for decode in ("json", Json, "", 5)),
        *(lambda schema=schema: Json(schema) for schema in ("", " ", 5)),
        *(
            lambda names=names: KafkaCluster(bootstrap_servers="a:9092").stream(*names)
            for names in (("",), ("a", None))
        ),
        *(lambda wrong=wrong: RunLimits(**wrong) for wrong in ({"max_recrods": 5}, {"linger": 5})),
        # A function without a name needs one.
        lambda: stream_asset(source="memory://declared/orders", table="t", group="g")(lambda batch: batch),
        # Several runs are not one writer, and a single writer has a pool.
        lambda: plain_asset(
            source="kafka://localhost:9092/orders",
            mode="load_balanced",
            sensor=LagPolicy(max_runs=2),
            op=OpOptions(single_writer=True, pool="orders"),
        ),
        lambda: OpOptions(single_writer=True),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidOptionError):
        make()


@pytest.mark.parametrize("source", [None, 5, b"memory://declared/orders"], ids=repr)
def test_a_source_is_text(source: object) -> None:
    with pytest.raises(InvalidUrlError):
        plain_asset(source=source)


@pytest.mark.parametrize(
    "name", ["budget_seconds", "answer_seconds", "retry_seconds", "after_cancel_seconds", "stale_run_seconds"]
)
def test_the_times_of_a_policy_are_numbers(name: str) -> None:
    for seconds in (-1, "5", math.nan):
        with pytest.raises(InvalidOptionError, match=f"{name}="):
            LagPolicy(**{name: seconds})


def test_a_run_that_stays_is_not_stale_and_waits_for_messages() -> None:
    source = {"source": "kafka://localhost:9092/orders", "mode": "load_balanced", "limits": RunLimits(linger_seconds=9)}
    usual = plain_asset(**source, sensor=LagPolicy(max_runs=4)).declared.policy
    assert (usual.max_runs, usual.keeps_alive, usual.stale_run_seconds) == (4, True, STALE_RUN_SECONDS + 9)
    own = plain_asset(**source, sensor=LagPolicy(stale_run_seconds=60, retry_seconds=5)).declared.policy
    assert (own.max_runs, own.keeps_alive, own.stale_run_seconds, own.retry_seconds) == (1, True, 60, 5)
    with pytest.raises(InvalidOptionError):
        plain_asset(**source, sensor=LagPolicy(min_lag=5))
