"""What an operator adds to a stream asset: maintenance, and alerts in the team's chat.

ALERT_WEBHOOK is the address of a chat webhook that accepts {"text": "…"}.
"""

import json
import urllib.request

import dagster as dg

from stream_assets import (
    Json,
    LagPolicy,
    NewDeadLetters,
    build_dead_letter_sensor,
    build_maintenance,
    stream_asset,
    stream_definitions,
)

WEBHOOK = dg.EnvVar("ALERT_WEBHOOK")


@stream_asset(
    source="file://orders.ss/orders",
    group="lakehouse",
    table="lake/orders",
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
    sensor=LagPolicy(status=dg.DefaultSensorStatus.RUNNING),
)
def orders(batch):
    return batch.where("amount > 0")


def alert_of_dead_letters(context: dg.SensorEvaluationContext, found: NewDeadLetters) -> None:
    send(found.describe())


@dg.run_failure_sensor(default_status=dg.DefaultSensorStatus.RUNNING)
def failed_runs(context: dg.RunFailureSensorContext):
    run = context.dagster_run
    send(f"run {run.run_id} of {run.job_name} failed: {context.failure_event.message}")


def send(text: str) -> None:
    body = json.dumps({"text": text}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(WEBHOOK.get_value(), body, headers)  # noqa: S310 - the operator's own address
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310
        pass


defs = dg.Definitions.merge(
    stream_definitions([orders]),
    build_maintenance(orders, cron_schedule="0 3 * * *", schedule_status=dg.DefaultScheduleStatus.RUNNING),
    dg.Definitions(
        sensors=[
            build_dead_letter_sensor(orders, alert=alert_of_dead_letters, sensor_status=dg.DefaultSensorStatus.RUNNING),
            failed_runs,
        ]
    ),
)
