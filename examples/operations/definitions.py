"""What an operator adds to a stream asset: checks on a schedule, maintenance, and alerts in the team's chat.

ALERT_WEBHOOK is the address of a chat webhook that accepts {"text": "…"}.
"""

import http.client
import json
import urllib.request

import dagster as dg

from stream_assets import (
    DEFAULT_CHECKS,
    Json,
    LagPolicy,
    NewDeadLetters,
    build_dead_letter_sensor,
    build_freshness_check,
    build_lag_check,
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
    checks=[*DEFAULT_CHECKS, build_lag_check(max_messages=100_000), build_freshness_check(max_seconds=900)],
)
def orders(batch):
    return batch.where("amount > 0")


def alert_of_dead_letters(context: dg.SensorEvaluationContext, found: NewDeadLetters) -> None:
    send(found.describe())


@dg.run_failure_sensor(default_status=dg.DefaultSensorStatus.RUNNING)
def failed_runs(context: dg.RunFailureSensorContext):
    run = context.dagster_run
    send(f"run {run.run_id} of {run.job_name} failed: {context.failure_event.message}")


# A failed check does not fail its run, so the sensor above does not report it.
@dg.run_status_sensor(dg.DagsterRunStatus.SUCCESS, default_status=dg.DefaultSensorStatus.RUNNING)
def failed_checks(context: dg.RunStatusSensorContext):
    run = context.dagster_run
    for event in context.instance.all_logs(run.run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION):
        check = event.asset_check_evaluation
        if not check.passed:
            about = check.description or "no description"
            send(f"check {check.check_name} of {check.asset_key.to_user_string()} failed in run {run.run_id}: {about}")


def send(text: str) -> None:
    body = json.dumps({"text": text}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(WEBHOOK.get_value(), body, headers)  # noqa: S310 - the operator's own address
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310
            pass
    except (ValueError, http.client.InvalidURL) as error:
        # Their texts contain the address, which is a secret.
        raise RuntimeError(f"ALERT_WEBHOOK is no address: {type(error).__name__}") from None


check_orders = dg.define_asset_job("check_orders", selection=dg.AssetSelection.checks_for_assets(orders.key))
defs = dg.Definitions.merge(
    stream_definitions([orders]),
    build_maintenance(orders, cron_schedule="0 3 * * *", schedule_status=dg.DefaultScheduleStatus.RUNNING),
    dg.Definitions(
        sensors=[
            build_dead_letter_sensor(orders, alert=alert_of_dead_letters, sensor_status=dg.DefaultSensorStatus.RUNNING),
            failed_runs,
            failed_checks,
        ],
        schedules=[
            # While no run succeeds, and also while the ticks of the lag sensor fail, these checks notice it.
            dg.ScheduleDefinition(
                job=check_orders, cron_schedule="*/10 * * * *", default_status=dg.DefaultScheduleStatus.RUNNING
            )
        ],
    ),
)
