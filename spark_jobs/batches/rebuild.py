"""A rebuild makes a whole table anew from the first message of its stream, with today's decoder, transform and keys.

 1. The messages are ingested into a staging table beside the table, by its own ledger, so that a rebuild that was
    killed continues. These positions are not committed to the broker.
 2. The *swap* is one overwrite of the table, in the transaction sequence of the group. It copies one version of the
    staging table, which has read at least as far as the table, because the stream may lose what would have to be read
    again. Its entry has the state of the staging ledger in that version. A batch of the group that is in flight loses
    its number. The swap loses to each commit of the group after its plan, and to rows of others that the table then
    has. Readers see the old rows until then.
 3. The staging table is deleted. Its id in the ledger shows that the swap has landed, if a run was killed before that.

Rows and dead letters whose messages the staging table could not read are last copies
(:mod:`spark_jobs.batches.unread_rows`). If there are any, the rebuild is refused, and the next one begins anew. With
``on_data_loss="record"``, the swap writes them again unchanged. Rows can only be kept in a table without keys that
keeps its columns; for other tables the rebuild is still refused.

The key of the table may change, which is otherwise refused. A batch of another sequence that is in flight meanwhile, or
a batch that is in flight over a RESTORE to before the swap, lands in a table with another key. Then the ledger is
unreadable until that batch is taken back (:func:`spark_jobs.ledger.fold.is_of_other_keys`).
``tests/model/keyed.py`` and ``tests/model/rebuilds.py`` explore it.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from tokenize import TokenError

import pyarrow as pa
import pyarrow.fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark_jobs.batches.bad_rows import Cached, caching
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import (
    Batch,
    Event,
    Ingestion,
    Observer,
    PlanAgain,
    Step,
    Transform,
    WrittenBatch,
    ignore_steps,
)
from spark_jobs.batches.job import SourceJob, batch_events, read_all
from spark_jobs.batches.ledger_recovery import commit_positions
from spark_jobs.batches.replay import check_replay, replay_progress
from spark_jobs.batches.run_control import Retries
from spark_jobs.batches.source_checks import check_source, lag
from spark_jobs.batches.target_table import YieldRequests, layout_of
from spark_jobs.batches.unread_rows import Stored, unread_rows, without_places
from spark_jobs.dead_letters.corrections import records_within
from spark_jobs.dead_letters.table import COPIED_COLUMNS, HAS_NO_SEQUENCE
from spark_jobs.decoding.ddl import quoted
from spark_jobs.decoding.decoders import Raw
from spark_jobs.ledger.delta_log import DeltaLog, TableSnapshot
from spark_jobs.ledger.entries import LedgerEntry, PlannedFields
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_expressions import CHECK
from spark_jobs.ledger.table_rows import ROW_PLACE, extents_of, in_ranges, scan
from spark_jobs.reading.source import SourceColumns
from spark_jobs.reading.spark_types import properties
from spark_jobs.table_folders import check_folder, create_folder
from spark_jobs.table_location import LOCAL, scheme, sql_name
from spark_jobs.writing.delta_table import read_table, unless_changed
from spark_jobs.writing.failures import OTHERS_WROTE, explain
from stream_consumers.batches import BatchPlan, BatchSource, Range, Resume, hint_with_facts
from stream_consumers.display import counted
from stream_consumers.errors import (
    DataLossError,
    GroupActiveError,
    InvalidOptionError,
    KeyConflictError,
    SchemaMismatchError,
    StreamNotFoundError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, DataLoss

STAGING = "stream-assets.stagingOf"
"""The property of a staging table: the group of the rebuild."""
OPTIONS = "stream-assets.rebuildOptions"
"""The property of a staging table that only rebuilds with the same options continue."""
REBUILD_MEMBER = "rebuild"
"""The member in whose sequence a rebuild asks the group to pause; the swap itself is in that of the group."""
_ONE_SEQUENCE = ("", ConsumerMode.RESUMABLE.value, ConsumerMode.REAL_TIME.value)
_log = logging.getLogger(__name__)


def staging_path(table: str) -> str:
    """Return the path of the staging table of a table, which is in the same folder."""
    return f"{table.rstrip('/')}_rebuild"


def staging_of(ingestion: Ingestion) -> Ingestion:
    """Return the ingestion into the staging table, which is beside the table.

    Example:
        >>> staging_of(Ingestion(group="lakehouse", table="/lake/orders")).table
        '/lake/orders_rebuild'
    """
    properties = {**ingestion.layout.properties, STAGING: ingestion.group, OPTIONS: _options_of(ingestion)}
    layout = replace(ingestion.layout, catalog_table=None, properties=properties)
    return replace(ingestion, table=staging_path(ingestion.table), layout=layout, shard=None)


def _options_of(ingestion: Ingestion) -> str:
    """Return a hash of what makes the rows: decoder, name and source text of the transform, keys and corrections."""
    records = ingestion.dead_letters().corrections(ingestion.ledger()).select([*ROW_PLACE, "_number"]).to_pylist()
    text = repr((ingestion.decoder, ingestion.transform_name, _source_of(ingestion.transform), ingestion.keys, records))
    # An object without a representation of its own has its address in memory there.
    return hashlib.sha256(re.sub(r" at 0x\w+", "", text).encode()).hexdigest()


def _source_of(transform: Transform | None) -> str:
    """Return the source text of a transform; empty for an object that has none, or whose file cannot be read."""
    with suppress(OSError, TypeError, SyntaxError, TokenError):
        return "" if transform is None else inspect.getsource(transform)
    return ""


def rebuild_events(
    spark: SparkSession, source: BatchSource, ingestion: Ingestion, *, observer: Observer = ignore_steps
) -> Iterator[Event]:
    """Make the table anew from the first message of the stream, and yield the events of the run.

    A run that was killed is continued by the next one, which must have the same options. These include the source text
    of the transform, but not that of other functions that it calls, nor the values that it captures: after a change of
    those, delete the staging table before the next run. If a run was killed after the swap, and the next one has other
    options or the group has written since, that one begins anew. A run reads up to the end that the stream has when it
    starts; ingestion, which may run at the same time, reads on from there.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: the group, the table, and how rows are made.
        observer: called at each step.

    Yields:
        The batches of the staging table, with its versions; at last the swap, whose entry is of kind ``rebuild``. If a
        killed run has swapped the table already, there are no batches.

    Raises:
        StreamNotFoundError: the group has written nothing into the table.
        DataLossError: the stream no longer holds messages of the table, so that their rows would be gone; with
            ``on_data_loss="record"``, only if they cannot be kept.
        InvalidOptionError, UnsupportedError, KeyConflictError: the table has rows that the rebuild cannot make.
        StreamAssetsError: see :func:`spark_jobs.batches.job.batch_events`.
    """
    ingestion, staging = replace(ingestion, shard=None), staging_of(ingestion)
    retries = Retries(ingestion.retry_seconds)
    is_swapped = yield from retries.call(lambda: check_staging(ingestion, staging))
    if is_swapped and not (yield from retries.call(lambda: is_continued(ingestion, staging))):
        delete_staging(staging)
        is_swapped = False
    if not is_swapped:
        origin = yield from retries.call(lambda: first_messages(source, ingestion, staging))
        create_folder(staging.table, table=ingestion.table)
        swap = _SwapJob(spark, source, ingestion, staging, observer=observer)
        while swap.is_behind:
            stage = _StagingJob(spark, source, staging, table=ingestion, observer=observer, origin=origin)
            yield from batch_events(stage)
            yield from batch_events(swap)
    lay_out(spark, ingestion)
    delete_staging(staging)


def check_staging(ingestion: Ingestion, staging: Ingestion) -> bool:
    """Return whether the table has the rows of the staging table, which only was not deleted.

    Raises:
        InvalidOptionError: there is another table in its place, or in that of its dead letters; or a rebuild with
            other options has begun.
        UntrustedFileError: another user made its folder.
    """
    check_folder(staging.table, table=ingestion.table)
    _check_dead_letters(staging)
    found = staging.ledger().log.snapshot()
    if found is None:
        return False
    if found.configuration.get(STAGING) != ingestion.group:
        raise InvalidOptionError(
            f"{staging.table} is not the staging table of group {ingestion.group!r}, which a rebuild would write and "
            "delete",
            remedy="Move that table, or make the table anew under another name.",
        )
    if replay_progress(ingestion.ledger(), found.table_id, kind="rebuild") is not None:
        return True
    _check_options(found, ingestion, staging)
    return False


def _check_options(found: TableSnapshot, ingestion: Ingestion, staging: Ingestion) -> None:
    """Refuse a staging table whose rows would be others today.

    Raises:
        InvalidOptionError: the options of the rebuild have changed, or messages were corrected, since it began.
    """
    if found.configuration.get(OPTIONS) != _options_of(ingestion):
        raise InvalidOptionError(
            f"a rebuild of {ingestion.table} with another decoder, transform, key or corrections has begun, and is not "
            "finished",
            remedy="Run it with the same options, which continues it. Or delete the folders "
            f"{staging.table} and {staging.dead_letters().path}, and run this again.",
        )


def is_continued(ingestion: Ingestion, staging: Ingestion) -> bool:
    """Return whether a run is the retry of the one that swapped: it has its options, and nothing was written since."""
    found, newest = staging.ledger().log.snapshot(), ingestion.ledger().read().newest
    is_newest = found is not None and newest is not None and newest.replay == found.table_id
    return is_newest and found is not None and found.configuration.get(OPTIONS) == _options_of(ingestion)


def _check_dead_letters(staging: Ingestion) -> None:
    """Refuse a table that a rebuild would write and delete as the dead letters of its staging table.

    Raises:
        InvalidOptionError: it has other columns, the group has not written it, or it is no table.
    """
    log, ledger = staging.dead_letters().log(), staging.ledger()
    found = log.snapshot()
    if found is None:
        # A killed write leaves files, but not before the staging table has begun.
        is_ours = ledger.log.snapshot() is not None or not _files_in(log)
    else:
        has_columns = {column["name"] for column in found.columns} >= {*COPIED_COLUMNS, "_batch"}
        is_ours = has_columns and found.last_number(ledger.app) > 0
    if not is_ours:
        raise InvalidOptionError(
            f"{log.path} does not have the dead letters of the staging table {staging.table}, which a rebuild "
            "would write and delete there",
            remedy="Move that table, or make the table anew under another name.",
        )


def lay_out(spark: SparkSession, ingestion: Ingestion) -> None:
    """Give the table the clustering and the properties that it would have as a new table.

    Raises:
        WriteError, …: Spark failed; see :func:`spark_jobs.writing.failures.explain`.
    """
    log, name = ingestion.ledger().log, sql_name(ingestion.table)
    snapshot = log.snapshot()
    if snapshot is None or ingestion.layout.is_plain:
        return
    try:
        layout = layout_of(ingestion, read_table(spark, log).schema)
        wanted = {key: value for key, value in layout.all_properties().items() if not key.lower().startswith(CHECK)}
        if any(snapshot.configuration.get(key) != value for key, value in wanted.items()):
            spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES {properties(wanted)}")
        clustered = spark.sql(f"DESCRIBE DETAIL {name}").collect()[0]["clusteringColumns"]
        if layout.cluster_by and not snapshot.partition_columns and clustered != list(layout.cluster_by):
            spark.sql(f"ALTER TABLE {name} CLUSTER BY ({', '.join(map(quoted, layout.cluster_by))})")
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        raise explain(error, table=ingestion.table) from None


def delete_staging(staging: Ingestion) -> None:
    """Delete the staging table and its dead letters.

    Raises:
        InvalidOptionError: its dead letters are another table.
    """
    _check_dead_letters(staging)
    _delete(staging.dead_letters().log())
    _delete(staging.ledger().log)


def _delete(log: DeltaLog) -> None:
    """Delete a table. If this is interrupted, the log is that of an older version, which has the id of the table."""
    files = log.files()
    for path in sorted(sorted(_files_in(log), reverse=True), key=lambda path: path.startswith("_delta_log/")):
        files.delete_file(path)
    if scheme(log.path) == LOCAL:
        shutil.rmtree(log.path, ignore_errors=True)


def _files_in(log: DeltaLog) -> list[str]:
    """Return the paths of the files in the folder of a table; links to local folders are not followed."""
    if scheme(log.path) == LOCAL:
        found = (os.path.join(folder, name) for folder, _, names in os.walk(log.path) for name in names)
        return [os.path.relpath(path, log.path) for path in found]
    listed = log.files().get_file_info(pyarrow.fs.FileSelector("", allow_not_found=True, recursive=True))
    return [one.path for one in listed if one.type is pyarrow.fs.FileType.File]


def check_rebuild(state: LedgerState, ingestion: Ingestion, ledger: Ledger, streams: Iterable[str]) -> None:
    """Refuse to make a table anew that has other rows than those of the group and of these streams.

    Args:
        state: the ledger of the table.
        ingestion: group and table.
        ledger: the ledger of the group.
        streams: the names of the streams that are read, in their epochs.

    Raises:
        StreamNotFoundError, UnsupportedError: see :func:`spark_jobs.batches.replay.check_replay`.
        InvalidOptionError: the rows of others would be gone, or the group has several transaction sequences.
        DataLossError: the table has rows of a stream that is gone.
    """
    check_replay(state, ingestion)
    if state.sharing not in _ONE_SEQUENCE:
        raise InvalidOptionError(
            f"group {ingestion.group!r} is {state.sharing}, so that its members may write while the table is made anew",
            remedy="Change its mode with: stream-assets switch --to resumable. Run this again, and change it back.",
        )
    if others := sorted(ledger.other_groups()):
        raise InvalidOptionError(
            f"{ingestion.table} has rows of group {others[0]!r}, which a rebuild for group {ingestion.group!r} would "
            "remove",
            remedy="Write each group into a table of its own, or read all streams by one group.",
        )
    known = {shard.stream for shard in state.shards}
    gone = sorted(shard.stream for shard, one in state.shards.items() if one.ended is not None)
    if gone:
        raise DataLossError(
            f"{ingestion.table} has rows of {gone[0]!r}, a stream that was recreated since: its messages are gone, so "
            "a rebuild would remove these rows",
            remedy="Write the new stream into a new table.",
        )
    if missing := sorted(known - set(streams)):
        raise InvalidOptionError(
            f"{ingestion.table} has rows of {', '.join(missing)}, which a rebuild from other streams would remove",
            remedy="Name all streams of the group in the URL.",
        )


def first_messages(source: BatchSource, ingestion: Ingestion, staging: Ingestion) -> Bound:
    """Return where the staging table starts, unless it has begun, after all checks that need no Spark.

    Raises:
        StreamAssetsError: see :func:`rebuild_events`.
    """
    ledger = ingestion.ledger()
    source = ingestion.in_epochs(source, ledger)
    state = ledger.read()
    check_rebuild(state, ingestion, ledger, source.identities())
    starts = {
        shard: one.origin if one.adopted is None else one.adopted
        for shard, one in state.shards.items()
        if one.origin is not None
    }
    has_begun = staging.ledger().read().newest is not None
    # A replay may have written rows from before the origin.
    earlier = "" if has_begun else in_ranges({shard: Range(0, start) for shard, start in starts.items() if start})
    found = extents_of(scan(ledger.log, ROW_PLACE, where=earlier)) if earlier else {}
    starts = {shard: min(start, found[shard].start) if shard in found else start for shard, start in starts.items()}
    facts = {shard: one.start_facts for shard, one in state.shards.items() if one.start_facts is not None}
    check_source(source, ingestion.group, state, source.extents(resume=state.resume))
    extents = source.extents(resume=Resume(starts, hint_with_facts(None, facts)))
    keys = ingestion.keys
    added = sorted(extents.keys() - state.shards.keys())
    if keys is not None and keys.is_ordered_by_position and added:
        raise KeyConflictError(
            f"{', '.join(map(str, added))} were added to {source.url} after group {ingestion.group!r} began, so the "
            "changes of a key may be in two shards, and positions do not order them",
            remedy="Rebuild with sequence_by, which orders changes by a value.",
        )
    read = {shard: Range(start, extents[shard].end) for shard, start in starts.items() if shard in extents}
    lost = {} if has_begun else source.lost(read)
    if lost:
        # The swap finds out whether the table has rows of them. To refuse it here saves the time until then.
        ingestion.refuse_or_record(
            DataLossError(
                f"{source.url} no longer holds messages of {ingestion.table}, so a rebuild may remove their rows",
                remedy="The rows may be the last copies, so nothing was changed. Bring the messages back, or write "
                "into a new table. With on_data_loss='record', it is refused only if last copies cannot be kept.",
                **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(lost.items())},
            )
        )
    # Messages that are lost from now on are a loss of the ingestion into the staging table.
    return Bound(sequences={shard: extent.start for shard, extent in extents.items()})


class _StagingJob(IngestJob):
    """Ingestion into the staging table: the positions of the group at the broker are those of the table.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        staging: the staging table.
        table: group and table of the rebuild, whose corrections its messages have.
        observer: called at each step.
        origin: where the staging table starts.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: BatchSource,
        staging: Ingestion,
        *,
        table: Ingestion,
        observer: Observer,
        origin: Bound,
    ) -> None:
        super().__init__(spark, source, staging, observer=observer, origin=origin)
        self._records = table.dead_letters().corrections(table.ledger())

    def _corrections(self, ranges: Mapping[Shard, Range]) -> pa.Table:
        return records_within(self._records, ranges)

    def _plan_new(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        """Plan them with the corrections that the table of the rebuild has."""
        return self._plan_again(gaps)

    def commit_to_broker(self, state: LedgerState) -> None:
        """Commit nothing."""


class _SwapJob(SourceJob):
    """Plans one batch: the swap.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: group and table.
        staging: the staging table, which has everything that the stream held.
        observer: called at each step.
    """

    def __init__(
        self, spark: SparkSession, source: BatchSource, ingestion: Ingestion, staging: Ingestion, *, observer: Observer
    ) -> None:
        super().__init__(spark, source, replace(ingestion, shard=None), observer=observer)
        self._staging = staging
        self._staged = staging.ledger()
        pausing = replace(ingestion, member=REBUILD_MEMBER, shard=None)
        self.yields = YieldRequests(spark, pausing, pausing.ledger())
        self.is_behind = True
        """Whether the staging table has not read as far as the table, when the swap was planned last."""
        self._behind_at = -1

    def plan(self) -> Batch | None:
        """Return the swap; ``None`` if it is in the table, or the table has read further than the staging table.

        Raises:
            StreamAssetsError: the table cannot be made anew; see :func:`check_rebuild`.
            StreamNotFoundError: another run has deleted the staging table.
        """
        state = self.ledger.read()
        found = self._staged.log.snapshot()
        staged = self._staged.read()
        self.is_behind = False
        if found is None or staged.newest is None:
            raise StreamNotFoundError(
                f"there is no staging table {self._staging.table}: another run has rebuilt the table, or deleted it",
                remedy="Run one rebuild at a time. If the table is not rebuilt, run it again.",
            )
        if replay_progress(self.ledger, found.table_id, kind="rebuild") is not None:
            return None
        check_rebuild(state, self.ingestion, self.ledger, self._source.identities())
        _check_options(found, self.ingestion, self._staging)
        ranges = {
            shard: Range(one.origin, one.position)
            for shard, one in staged.shards.items()
            if one.origin is not None and one.position is not None and one.position == one.covered.position
        }
        ends = {shard: one.covered.ranges[-1].end for shard, one in state.shards.items() if one.covered}
        behind = sorted(shard for shard, end in ends.items() if shard not in ranges or ranges[shard].end < end)
        if behind and self._behind_at != staged.version:
            self._behind_at = staged.version
            self.is_behind = True
            self._lost_race(PlanAgain.NOT_NEXT)
            return None
        if missing := sorted({*behind, *(state.shards.keys() | staged.shards.keys()) - ranges.keys()}):
            raise StreamNotFoundError(
                f"the staging table {self._staging.table} has not read {', '.join(map(str, missing))} to the end",
                remedy="Run the rebuild again, which continues it.",
            )
        checked = self.clean_up_dead_letters(state)
        fields = PlannedFields(
            ranges=ranges,
            mode="rebuild",
            messages=sum(c.entry.messages for c in self._staged.surviving(staged.version) if c.entry),
            lost=staged.totals.lost,
            hint=staged.hint,
            last_messages=staged.last_messages,
            facts_at_start={s: known.facts_at_start for s, known in staged.shards.items() if known.facts_at_start},
            keys=staged.keys,
            replay=found.table_id,
            goal=ranges,
            begins=True,
        )
        return Batch("rebuild", checked, fields=fields, identities=staged.identities, job_data=staged.version)

    def write(self, batch: Batch) -> WrittenBatch | PlanAgain:
        """Write the dead letters and the rows of the staging table; see :meth:`BatchJob.write`."""
        with caching() as cached:
            return self._write(batch, cached)

    def _write(self, batch: Batch, cached: Cached) -> WrittenBatch | PlanAgain:
        target, spark, dead = self.target, self.target.spark, 0
        rows = read_table(spark, self._staged.log, version=batch.job_data)
        letters = self._staging.dead_letters().counted(spark, self._staged)
        if letters is not None:
            letters = letters.where(f"{HAS_NO_SEQUENCE} OR {in_ranges(batch.fields['ranges']) or 'FALSE'}")
        staged = self._with_last_copies(Stored(rows, letters), batch.state, cached)
        rows, letters = staged.rows, staged.dead_letters
        if letters is not None:
            # The record of a lost range has neither, and is no message.
            dead = letters.where("_sequence IS NOT NULL OR payload IS NOT NULL").count()
        entry = target.entry(batch, dead=dead, by=REBUILD_MEMBER)
        if not self._write_letters(letters, entry):
            return self._lost_race(PlanAgain.DEAD_LETTERS_TAKEN)
        target.observer(Step.DEAD_LETTERS_WRITTEN, batch)
        writer = replace(target.writer, new_partitions=self._new_partitions(rows))
        if writer.new_partitions is None:
            # Otherwise the staging table has the partitions.
            rows = target.filter.failing_on_changes(rows)
        rows = unless_changed(rows, self.ledger.log, version=batch.state.version, fails=OTHERS_WROTE)
        target.observer(Step.WRITING, batch)
        failure = writer.try_write(rows, entry)
        target.observer(Step.ROWS_WRITTEN, batch)
        if failure is not None:
            check_rebuild(self.ledger.read(), self.ingestion, self.ledger, self._source.identities())
        commit = writer.verified(entry, failure, spark=spark, ledger=self.ledger)
        if commit is None:
            return self._lost_race(PlanAgain.LOST_RACE)
        target.observer(Step.VERIFIED, batch)
        self._check_alone(batch.state.version)
        return WrittenBatch(batch, entry, commit, {})

    def _check_alone(self, before: int) -> None:
        """Refuse rows of another group that landed while the swap of a keyed table was written.

        Raises:
            KeyConflictError: there is another group; the next run of either would mix their keys.
        """
        if self.ingestion.keys is not None and (others := sorted(self.ledger.other_groups())):
            raise KeyConflictError(
                f"group {others[0]!r} began to write {self.ingestion.table} while it became a keyed table, which takes "
                "only one group",
                remedy=f"RESTORE the table to version {before}, let group {others[0]!r} write into another table, and "
                "run the rebuild again.",
                version=before,
            )

    def _with_last_copies(self, staged: Stored, state: LedgerState, cached: Cached) -> Stored:
        """Return the staging table with the rows and dead letters of the table whose messages it has not read.

        Raises:
            DataLossError: there are some, and they are not to be kept, or cannot be.
        """
        spark, ingestion = self.target.spark, self.ingestion
        letters = self.target.dead_letters.counted(spark, self.ledger)
        table = Stored(read_table(spark, self.ledger.log, version=state.version), letters)
        found = unread_rows(table, staged, self._held, cached, keys=ingestion.keys, was=state.keys)
        if not found.rows and not found.dead:
            return staged
        has_same_columns = _types(table.rows.schema) == _types(staged.rows.schema)
        can_keep = not found.rows or (ingestion.keys is None and has_same_columns)
        keeps = ", or set on_data_loss='record' to keep them as they are" if can_keep else ""
        error = DataLossError(
            f"a rebuild would remove {counted(found.rows, 'row')} and {counted(found.dead, 'dead letter')} of "
            f"{ingestion.table}, because {self._source.url} no longer holds their messages",
            remedy="They may be the last copies, so nothing was changed. If the group has messages to read, ingest "
            f"first: newer changes may replace these rows. Otherwise bring the messages back{keeps}, or write into a "
            "new table. The next rebuild begins anew.",
            rows=found.rows,
            dead_letters=found.dead,
            **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(found.within.items())},
        )
        if not can_keep or ingestion.errors.on_data_loss is DataLoss.ERROR:
            # A rebuild that continues would not read messages that are brought back.
            delete_staging(self._staging)
            raise error
        _log.warning("%s: they are written again unchanged", error.what)
        rows, dead = staged.rows, staged.dead_letters
        if dead is not None:
            # The dead letter of the damaged bytes that are in the stream at such a place.
            dead = without_places(dead, found.places)
        if found.rows:
            rows = rows.unionByName(found.of_rows(table.rows))
        if found.dead and letters is not None:
            letters = found.of_dead_letters(letters)
            dead = letters if dead is None else dead.unionByName(letters, allowMissingColumns=True)
        return Stored(rows, dead)

    def _held(self, ranges: Mapping[Shard, Range]) -> DataFrame:
        """Return the messages and damaged bytes that the stream holds within these ranges."""
        extents = self._source.extents()
        held = {s: part.clamp(Range(extents[s].start, extents[s].end)) for s, part in ranges.items() if s in extents}
        return read_all(self.target.spark, self._source, held, SourceColumns.of(Raw()))

    def _write_letters(self, letters: DataFrame | None, entry: LedgerEntry) -> bool:
        if letters is None or not (entry.dead or entry.lost):
            return True
        return self.target.dead_letters.append(letters, ledger=self.ledger, number=entry.number, bid=entry.bid)

    def _new_partitions(self, rows: DataFrame) -> Sequence[str] | None:
        """Return the partitions of the table if the swap changes its columns or partitions; ``None`` if it does not.

        Raises:
            SchemaMismatchError: the table has other columns, and Delta computes some of them.
        """
        snapshot, wanted = self.ledger.log.snapshot(), self.ingestion.layout.partition_by
        before, after = _types(read_table(self.target.spark, self.ledger.log).schema), _types(rows.schema)
        if snapshot is None or (before == after and _lower(wanted) in ([], _lower(snapshot.partition_columns))):
            return None
        if snapshot.computed_columns:
            raise SchemaMismatchError(
                f"the columns {', '.join(sorted({name for name, _ in before.items() ^ after.items()}))} of "
                f"{self.ingestion.table} would change, and Delta could not compute "
                f"{', '.join(sorted(snapshot.computed_columns))} any more",
                remedy="Delta accepts computed columns only when a table is created: write into a new table.",
            )
        return wanted

    def _lost_race(self, reason: PlanAgain) -> PlanAgain:
        self.count_lost_race()
        self.yields.ask()
        return reason

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Commit the positions of the staging table to the broker, where the group goes on."""
        state = self.ledger.read()
        try:
            commit_positions(self._source, self.ingestion, state, self._identities)
        except GroupActiveError as error:
            _log.warning("the table was rebuilt, but the position of the broker was not moved: %s", error)
        self.telemetry(Step.COMMITTED, written.batch)
        extents = self._source.extents(resume=state.resume)
        return lag(self._source, state, self.ingestion.own(extents, self._identities))


def _types(columns: StructType) -> Mapping[str, str]:
    return {column.name.lower(): column.dataType.simpleString() for column in columns.fields}


def _lower(names: Sequence[str]) -> list[str]:
    return [name.lower() for name in names]
