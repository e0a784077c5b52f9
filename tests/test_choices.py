"""Where one of several choices is taken, text is as good as the member, and a word that is no choice is refused."""

from __future__ import annotations

import asyncio
import enum
import inspect
from typing import Any

import pytest
from confluent_kafka import IsolationLevel

import stream_consumers.options as options
from stream_assets.asset import stream_asset
from stream_consumers.errors import InvalidOptionError
from stream_consumers.tracking.options import Activity
from tests.support.signatures import Parameter, modules, parameters

NOT_A_CHOICE = {
    "ignore_steps": "an observer: it is told",
    "KillSwitch.__call__": "an observer: it is told",
    "BatchTelemetry.__call__": "an observer: it is told",
    "Modes.group": "asks Modes.check",
    "RowMaker": "made from options of the command line, which are choices",
    "SharedGroupConsumer": "opened by backends, with what create_consumer has checked",
    "Place.opened": "called by commands, and hands the mode to a StreamSource",
    "Backend.check_batches": "called with the mode of a StreamSource",
    "Backend.open_batch_source": "called with the mode of a StreamSource",
    "FileStreams.open_batch_source": "called with the mode of a StreamSource",
    "MemoryStreams.open_batch_source": "called with the mode of a StreamSource",
}
# A set of flags, and an enumeration of the Kafka client that its client options name.
NO_CHOICES = (Activity, IsolationLevel)
FOUND = [
    parameter
    for parameter in parameters()
    if parameter.kind not in NO_CHOICES and not parameter.place.endswith(tuple(NOT_A_CHOICE))
]


class SettledError(Exception):
    """Text was made a member; what comes after is not of interest here."""


def call(parameter: Parameter, value: object) -> Any:
    found = parameter.call(value)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def test_the_walk_sees_all_kinds_of_places() -> None:
    seen = {str(parameter) for parameter in FOUND}
    assert {
        "stream_consumers.create.create_consumer(mode)",
        "stream_consumers.redis.group_consumer.RedisGroupConsumer(reset)",
        "stream_consumers.async_consumer.AsyncConsumer.rewind(to)",
        "stream_consumers.subscription.config.SubscriptionConfig(ack_mode)",
        "spark_jobs.batches.replay.Replay(on_replay)",
        "sensors.lag_sensor.LagPolicy(status)",
    } <= seen


@pytest.mark.parametrize("parameter", FOUND, ids=str)
@pytest.mark.parametrize("nonsense", ["nonsense", 3.7])
def test_nonsense_is_refused_with_the_choices(parameter: Parameter, nonsense: object) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        call(parameter, nonsense)
    assert repr(nonsense) in str(refused.value)
    for member in parameter.kind:
        assert str(member.value) in refused.value.remedy


@pytest.mark.parametrize("parameter", FOUND, ids=str)
def test_text_becomes_the_member(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    member: enum.Enum = list(parameter.kind)[-1]
    choice, settled = options.choice, []

    def watched(kind: Any, value: Any, **names: Any) -> Any:
        found = choice(kind, value, **names)
        if type(value) is str and value == member.value:
            settled.append(found)
            raise SettledError
        return found

    for module in modules():
        if getattr(module, "choice", None) is choice:
            monkeypatch.setattr(module, "choice", watched)
    with pytest.raises(SettledError):
        call(parameter, member.value)
    assert settled == [member]


@pytest.mark.parametrize("option", ["mode", "start"])
def test_an_asset_refuses_it_where_it_is_declared(option: str) -> None:
    words: dict[str, Any] = {option: "nonsense"}
    with pytest.raises(InvalidOptionError):
        stream_asset(source="memory://shop/orders", table="lake/orders", **words)


def test_a_member_of_another_enumeration_is_no_text() -> None:
    with pytest.raises(InvalidOptionError):
        options.choice(options.AutoCommit, options.ConsumerMode.RESUMABLE, option="auto_commit")

    class Elsewhere(str, enum.Enum):
        NEVER = "never"

    with pytest.raises(InvalidOptionError):
        options.FileProducerOptions(creation=Elsewhere.NEVER)  # type: ignore[arg-type]
