"""The operators that replace rows of a table, or compare it with its stream."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from stream_airflow.airflow_names import AirflowFailException
from stream_airflow.operators import StreamOperator
from stream_consumers.display import counted
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import choice

if TYPE_CHECKING:
    from airflow.sdk import Context

    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.replay import Replay


class ReplayOperator(StreamOperator):
    """Reads a range of the stream again and replaces its rows; by default the time of the data interval of the run.

    So ``airflow backfill create`` replaces the rows of the days that it is given. A retry continues the replay of the
    task. A task that is cleared after it has ended replays anew.

    Args:
        start: where to start: a time, ``earliest``, a sequence, or a sequence per shard (``orders/0=5,orders/1=7``).
            Without ``start`` and ``stop`` it is the start of the data interval.
        stop: where to stop, before it; without ``stop``, with ``start``, it is the position of the group.
        on_replay: ``replace`` the rows of the range, or ``append`` to them.
        arguments: see :class:`stream_airflow.operators.StreamOperator`.
    """

    template_fields = (*StreamOperator.template_fields, "start", "stop")
    kind = "replay"

    def __init__(
        self, *, start: str | None = None, stop: str | None = None, on_replay: str = "replace", **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.start = start
        self.stop = stop
        self.on_replay = on_replay

    def work(self, context: Context) -> dict[str, Any]:
        """Replay."""
        from spark_jobs.batches.job import batch_events  # noqa: PLC0415 - Spark is imported when it is needed
        from spark_jobs.batches.replay import ReplayJob  # noqa: PLC0415
        from spark_jobs.batches.run_control import result_of  # noqa: PLC0415
        from spark_jobs.run_report import describe_ranges, kept_rows  # noqa: PLC0415

        wanted = self.replay(context)
        declared = self.declared()
        ingestion = self.ingestion(declared)
        with self.session(declared) as spark, declared.stream.open() as opened:
            job = ReplayJob(spark, opened, ingestion, wanted)
            plan = result_of(job.retries.call(job.resolve), self.log.warning)
            start, stop = str(wanted.start or "earliest"), str(wanted.stop or "the position of the group")
            self.log.info("replaying from %s to %s: %s", start, stop, describe_ranges(plan.progress.goal) or "nothing")
            for note in kept_rows(plan):
                self.log.warning("%s", note)
            left_out = sum(part.rows for part in plan.left_out.values())
            found = self.report(batch_events(job), ingestion)
        return {**found, "start": start, "stop": stop, "rows_left_out": left_out}

    def replay(self, context: Context) -> Replay:
        """Return what the task replays.

        Raises:
            InvalidOptionError: the run has no data interval, and no bound is given.
        """
        from spark_jobs.batches.bounds import Bound  # noqa: PLC0415 - as in work()
        from spark_jobs.batches.replay import OnReplay, Replay  # noqa: PLC0415

        start: Bound | None
        stop: Bound | None
        if self.start or self.stop:
            start, stop = (Bound.parse(text) if text else None for text in (self.start, self.stop))
        else:
            first, end = context.get("data_interval_start"), context.get("data_interval_end")
            if first is None or end is None or first >= end:
                raise InvalidOptionError(
                    f"the data interval of run {context['run_id']!r} is empty",
                    remedy="Use a timetable with data intervals, like CronDataIntervalTimetable('@daily', "
                    "timezone='UTC'); or give start and stop.",
                )
            start, stop = (Bound.at_time(moment.isoformat()) for moment in (first, end))
        asked = [str(start), str(stop), self.on_replay]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        task, begun = context["ti"], context["dag_run"].start_date
        # Only the retries of a task share all of it. A run that is deleted and created again has the same id but begins
        # later, as a run that has ended and is cleared does. A task that is cleared in a running run gets more tries.
        own_run = f"{task.run_id}/{'' if begun is None else begun.isoformat()}/{task.max_tries - (self.retries or 0)}"
        own = f"{task.dag_id}/{task.task_id}/{task.map_index}/{own_run}/{digest[:16]}"
        return Replay(start, stop, choice(OnReplay, self.on_replay, option="on_replay"), id=own)


class RebuildOperator(StreamOperator):
    """Makes the whole table anew from the first message of the stream, and swaps it in by one commit.

    A retry continues with the staging table.
    """

    kind = "rebuild"

    def work(self, context: Context) -> dict[str, Any]:
        """Rebuild."""
        from spark_jobs.batches.rebuild import rebuild_events  # noqa: PLC0415 - as in ReplayOperator.work()

        declared = self.declared()
        ingestion = self.ingestion(declared)
        with self.session(declared) as spark, declared.stream.open() as opened:
            events = rebuild_events(spark, opened, ingestion)
            batches = list(self.logged(events))
        # A run that was killed may have swapped the table already.
        swap = batches[-1] if batches and batches[-1].entry.kind == "rebuild" else None
        version = ingestion.ledger().read().version if swap is None else swap.version
        numbers = (
            {} if swap is None else {"rows": swap.rows, "messages": swap.entry.messages, "dead_letters": swap.dead}
        )
        return {"batches": len(batches), **numbers, "lag": 0, "version": version}


class RedriveOperator(StreamOperator):
    """Decodes dead letters again, with the present decoder and transform, and writes the rows of those that decode.

    Args:
        start: the first dead letter; all by default. See :class:`ReplayOperator`.
        stop: the dead letter to stop before.
        limit: the most dead letters to try.
        only_preview: report how many would become rows, and why the others do not, and change nothing.
        arguments: see :class:`stream_airflow.operators.StreamOperator`.
    """

    template_fields = (*StreamOperator.template_fields, "start", "stop")
    kind = "redrive"

    def __init__(
        self,
        *,
        start: str | None = None,
        stop: str | None = None,
        limit: int | None = None,
        only_preview: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.start = start
        self.stop = stop
        self.limit = limit
        self.only_preview = only_preview

    def work(self, context: Context) -> dict[str, Any]:
        """Redrive."""
        from spark_jobs.batches.bounds import Bound  # noqa: PLC0415 - as in ReplayOperator.work()
        from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob  # noqa: PLC0415
        from spark_jobs.batches.job import batch_events  # noqa: PLC0415

        start, stop = (Bound.parse(text) if text else None for text in (self.start, self.stop))
        declared = self.declared()
        ingestion, stream = self.ingestion(declared), declared.stream
        with self.session(declared) as spark:
            wanted = Redrive(start, stop, self.limit)
            job = RedriveJob(spark, ingestion, wanted, url=stream.url, client=stream.client)
            if self.only_preview:
                outcome, found = job.preview(), self.summary(None, ingestion)
            else:
                found = self.report(batch_events(job), ingestion)
                outcome = job.outcome
        self.log.info("%s decoded, %d remain dead letters", counted(outcome.decoded, "dead letter"), outcome.dead)
        for reason, refusal in outcome.refused.items():
            self.log.info("%s remain dead letters: %s", refusal.count, reason)
        reasons = {reason: refusal.count for reason, refusal in outcome.refused.items()}
        return {**found, "decoded": outcome.decoded, "still_dead": outcome.dead, "reasons": reasons}


class VerifyOperator(StreamOperator):
    """Compares the stream with the table, message by message, or key by key with ``keys``; fails if they differ."""

    kind = "verify"

    def work(self, context: Context) -> dict[str, Any]:
        """Verify.

        Raises:
            AirflowFailException: messages are missing, duplicated, unknown or other, a range is lost, or bytes after
                the last message cannot be read.
        """
        found = self._keyed() if self.keys is not None else self._by_message()
        if not found["is_right"]:
            raise AirflowFailException(f"{self.table} is not what {self.source} makes: {found}")
        return found

    def _by_message(self) -> dict[str, Any]:
        from spark_jobs.claims.claim_state import claim_state  # noqa: PLC0415 - as in ReplayOperator.work()
        from spark_jobs.ledger.entries import CLAIMS  # noqa: PLC0415
        from spark_jobs.verify import COUNTS, verify  # noqa: PLC0415

        declared = self.declared()
        ingestion, stream = self.ingestion(declared), declared.stream
        claimed, state = None, ingestion.ledger().read()
        if state.sharing == CLAIMS:
            names = ingestion.epochs(stream.url.required_streams())
            with stream.claims(ingestion.group, names) as claims:
                claimed = claim_state(claims, ingestion, state.shards)
        with stream.open() as opened:
            verdicts = verify(opened, ingestion, claims=claimed)
        return {
            **{name: sum(getattr(verdict, name) for verdict in verdicts) for name in (*COUNTS, "lag")},
            "lost": {str(verdict.shard): list(verdict.lost) for verdict in verdicts if verdict.lost is not None},
            "unreadable_tail": verdicts[0].unreadable_tail if verdicts else None,
            "is_right": all(verdict.is_right for verdict in verdicts),
        }

    def _keyed(self) -> dict[str, Any]:
        from spark_jobs.verify_keyed import COUNTS, verify_keyed  # noqa: PLC0415 - as in ReplayOperator.work()

        declared = self.declared()
        with self.session(declared) as spark, declared.stream.open() as opened:
            verdict = verify_keyed(spark, opened, self.ingestion(declared))
        numbers = {name: getattr(verdict, name) for name in COUNTS}
        lost = {str(shard): list(part) for shard, part in verdict.lost.items()}
        tail = verdict.unreadable_tail
        return {**numbers, "lost": lost, "unreadable_tail": tail, "is_right": verdict.is_right}
