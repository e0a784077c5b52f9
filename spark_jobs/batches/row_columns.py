"""Calls the transform, and checks that its rows fit the columns of the table.

The columns of both may change during a run: a registry gets new schemas, messages have undeclared fields, and other
writers alter the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from spark_jobs.batches.ingestion import Ingestion, Transform
from spark_jobs.decoding.ddl import first_duplicate, folded, quoted
from spark_jobs.decoding.decoders import Decoder, StoredDecoder, is_resolved, resolved, rows_where
from spark_jobs.decoding.json_decoder import FieldFinder, Json, field_finder
from spark_jobs.decoding.json_inference import FieldStats
from spark_jobs.decoding.row_size import ROWS_IN_HEAP
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.reading.rejection import Rejections, Treatment, keep_bad_rows, reject, treating
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, SourceColumns
from spark_jobs.reading.spark_types import plain_strings
from spark_jobs.session import first_line, heap_bytes
from spark_jobs.writing.delta_table import read_table
from spark_jobs.writing.failures import public_text
from spark_jobs.writing.keyed import check_key_of_table
from spark_jobs.writing.layout import register
from spark_jobs.writing.schema_evolution import (
    check_columns,
    check_places,
    lets_widen,
    names_of_delta,
    new_columns,
    rescue,
    rescued_twice,
    takes_any_name,
    undeclared_values,
    with_columns_of,
    with_new_fields,
)
from stream_consumers.display import printable, shortened
from stream_consumers.errors import SchemaMismatchError, StreamAssetsError, TransformError, place_of
from stream_consumers.options import SchemaChanges
from stream_consumers.urls import StreamUrl

_log = logging.getLogger(__name__)
_PYSPARK = str(Path(pyspark.__file__).parent)
# The most names in a log line, and the most characters of each.
_SHOWN_NAMES, _SHOWN_CHARACTERS = 10, 100
_CORRECT_IT = "Correct it; nothing was written, and the next run reads the same messages."
# PySpark decides when the decorator runs which kind of session a UDF is for.
_MADE_EARLY = (
    "A UDF that is created when its module is imported works only if Spark runs in the process of the run. Create it "
    "inside the transform; or use such a Spark: SparkSessionResource(in_process=True), --in-process."
)
_RESCUED_TWICE = "an undeclared field has the name of a column that the transform makes and the table lacks"
_NO_SESSION = "SESSION_OR_CONTEXT_NOT_EXISTS"


class RowColumns:
    """The columns of the decoded messages, of the rows of the transform, and of the table.

    Args:
        spark: a session.
        ingestion: the decoder, the transform and the table.
        ledger: the ledger of the group.
        url: the URL of the source, for log lines.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, ledger: Ledger, *, url: StreamUrl) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._ledger = ledger
        self._url = url
        self._decoder: Decoder | None = None
        self._source: SourceColumns | None = None
        # Finds undeclared fields of JSON, and remembers those that cannot become columns.
        self._finder: FieldFinder | None = None
        self._of_table: StructType | None = None
        # The last decoder and schema of the table that were checked to fit.
        self._fitting: tuple[Decoder, str] | None = None
        # The fields of a registry's schema that a warning has named.
        self._warned: frozenset[str] = frozenset()
        self.settable: Mapping[str, str] = {}
        """The columns of the table that a write sets, and the SQL of the value of each in rows that lack it."""
        self.partitions: Sequence[str] | None = None
        """The partition columns of the table; ``None`` if they are not known."""
        self.may_reject = False
        """Whether the transform was seen to call :func:`spark_jobs.reading.rejection.reject`."""

    @property
    def decoder(self) -> Decoder:
        """The decoder, with the schema of a registry as of the newest batch, and with columns for new fields."""
        if self._finder is not None:
            return self._finder.decoder
        if self._decoder is None:
            self._decoder = resolved(self._ingestion.decoder)
            if self._ingestion.errors.schema_changes is SchemaChanges.ADD_COLUMNS:
                self._finder = field_finder(self._decoder)
        return self._decoder

    @property
    def source(self) -> SourceColumns:
        """The decoder with its columns."""
        decoder = self.decoder
        if self._source is None or self._source.decoder != decoder:
            self._source = SourceColumns.of(decoder, heap_bytes(self._spark) // ROWS_IN_HEAP)
        return self._source

    @property
    def source_of_batch(self) -> SourceColumns:
        """The same, with a decoder that finds undeclared fields if they are to become columns."""
        return self.source if self._finder is None else replace(self.source, decoder=self._finder)

    def rows(self, frame: DataFrame, treatment: Treatment = keep_bad_rows) -> DataFrame:
        """Return the rows to write, without bad messages.

        Args:
            frame: see :func:`spark_jobs.reading.source.read_splits`.
            treatment: what to do with rows that the transform rejects.

        Raises:
            TransformError: the transform raised.
        """
        return self.rows_of_clean(frame.where(f.col("_error").isNull()).drop(*DEAD_LETTER_COLUMNS), treatment)

    def rows_of_clean(self, messages: DataFrame, treatment: Treatment = keep_bad_rows) -> DataFrame:
        """Return the rows to write of messages without dead letters and their columns.

        Messages are left out of which the decoder makes no row; see :func:`spark_jobs.decoding.decoders.rows_where`.
        """
        if (condition := rows_where(self.decoder)) is not None:
            messages = messages.where(condition)
        rows = transformed(messages, self._ingestion.transform, treatment)
        made = _added(rows, messages) if self._ingestion.transform is not None else ()
        keys, table = self._ingestion.keys, self._of_table
        rescues = self._ingestion.errors.schema_changes is SchemaChanges.RESCUE
        if left_out := self._left_out(rows.columns):
            kept = StructType([column for column in rows.schema.fields if column.name not in left_out])
            rows = rescue(rows, kept) if rescues else rows.drop(*left_out)
        if keys is not None:
            rows = keys.changes(rows, made)
        if not rescues:
            return rows
        if keys is not None and table is not None:
            # A merge uses columns that the table does not have.
            written = keys.written(rows.columns)
            table = StructType([*table.fields, *(one for one in rows.schema.fields if one.name not in written)])
        if (is_bad := rescued_twice(rows, table)) is not None:
            with treating(treatment):
                rows = reject(rows, is_bad, _RESCUED_TWICE)
        return rescue(rows, table)

    def _left_out(self, names: Sequence[str]) -> list[str]:
        """Return which of these columns of rows are fields of a registry's schema that cannot be columns of the table.

        They are left out, because a user who adds a field to the schema could otherwise stop the stream.
        """
        decoder, keys = self._ingestion.decoder, self._ingestion.keys
        if not isinstance(decoder, StoredDecoder) or decoder.is_resolved:
            return []
        fields = set(self.source.decoded.names).difference(keys.except_columns if keys is not None else ())
        unusable = self._own_names | names_of_delta(self._of_table)
        found = [name for name in names if name in fields and folded(name) in unusable]
        if not self._warned.issuperset(found):
            self._warned = self._warned.union(found)
            _log.warning(
                "fields of the schema of %s cannot become columns, and are left out: %s", self._url, _few(found)
            )
        return found

    def of_table(self, rows: StructType) -> StructType:
        """Return the columns of a table for rows with these columns."""
        return rows if self._ingestion.keys is None else self._ingestion.keys.table_columns(rows)

    def rejections(self, frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """Return the rows that the transform does not reject, and the places of the messages that it rejects."""
        rejections = Rejections()
        rows = self.rows(frame, rejections)
        places = rejections.places
        self.may_reject |= places is not None
        return rows, places

    def no_rows(self) -> DataFrame:
        """Return an empty frame with the columns of the table."""
        rows = self.rows(self._no_messages())
        return rows.select(*(quoted(name) for name in self.of_table(rows.schema).names))

    def is_current(self, state: LedgerState) -> bool:
        """Return whether the table still has the columns that the rows were checked against."""
        return self._fitting is None or self._fitting[1] == state.schema

    def refresh_registry_schema(self) -> None:
        """Read the schema of payloads from the registry again, so that a long run sees new fields.

        It does nothing if the decoder uses no registry. Call it after the plan: producers register a schema before they
        send messages with it, so the registry then has the schemas of all planned messages.
        """
        if is_resolved(self._ingestion.decoder):
            return
        found = resolved(self._ingestion.decoder)
        if found != self._decoder:
            self._decoder = found
            if self._finder is not None:
                # Only the key of a JSON decoder has its schema in a registry.
                self._finder = replace(self._finder, decoder=replace(self._finder.decoder, key=found.key))
            self.check(self._ledger.read())

    def check(self, state: LedgerState) -> None:
        """Check that the rows fit the table, at the first batch and if the schema of payloads or table has changed.

        Raises:
            SchemaMismatchError, TransformError: they do not fit.
            UnsupportedError: the metadata of the table may let Spark run code.
        """
        decoder = self.decoder
        if self._fitting == (decoder, state.schema):
            # The columns are the same, but another program may have changed the other metadata.
            self._ledger.log.check_format(state.version)
            return
        try:
            self._check(state)
        except SchemaMismatchError:
            own = self._decoder
            if self._finder is None or not isinstance(own, Json) or own == decoder:
                raise
            # Another writer has added columns for the new fields, with other types.
            self._finder = replace(self._finder, decoder=own)
            self._check(state)
        if state.newest is not None:
            self._fitting = self.decoder, state.schema

    def _check(self, state: LedgerState) -> None:
        self._of_table = read_table(self._spark, self._ledger.log).schema if state.version >= 0 else None
        if self._of_table is not None and state.shards:
            check_places(self._of_table, path=self._ingestion.table)
        snapshot = self._ledger.log.snapshot() if state.version >= 0 else None
        if snapshot is not None:
            self.settable = snapshot.settable_columns
            self.partitions = snapshot.partition_columns
            if self._ingestion.keys is not None:
                check_key_of_table(self._ingestion.keys, snapshot.columns)
        is_plain = self._ingestion.transform is None
        # With a transform, the columns of the table need not be fields of the payloads.
        if is_plain and self._finder is not None and self._of_table is not None and snapshot is not None:
            # Delta sets the default of a column in rows that lack the column.
            made_by_delta = snapshot.computed_columns | snapshot.default_columns
            self._finder = with_columns_of(self._finder, self._of_table, computed=made_by_delta | self._own_names)
        rows = self.of_table(self.rejections(self._no_messages())[0].schema)
        layout = self._ingestion.layout
        if state.version >= 0:
            layout.check_table(self._ledger.log)
        else:
            layout.check_columns(rows.names)
        if state.newest is not None and layout.catalog_table:
            register(self._spark, self._ingestion.table, layout.catalog_table)
        self._check_fit(rows, widens=snapshot is not None and lets_widen(snapshot.configuration))

    def _check_fit(self, rows: StructType, *, widens: bool) -> None:
        check_columns(
            rows,
            self._of_table,
            path=self._ingestion.table,
            schema_changes=self._ingestion.errors.schema_changes,
            widens=widens,
            partitions=self.partitions or (),
        )

    def _no_messages(self) -> DataFrame:
        return self._spark.createDataFrame([], self.source.columns)

    def learn_fields(self, frame: DataFrame) -> bool:
        """Add columns for undeclared fields to the decoder; return whether the messages have to be read again.

        Args:
            frame: what was read with :attr:`source_of_batch`.
        """
        before = self._finder
        if before is None:
            return False
        found = frame.where(f.col("_undeclared").isNotNull()).select("_undeclared")
        seen = undeclared_values((row["_undeclared"] for row in found.toLocalIterator()), before.decoder)
        if not seen.fields:
            return False
        # Another run may have added columns for them meanwhile.
        self._of_table = read_table(self._spark, self._ledger.log).schema
        self._finder = self._with_new_fields(before, seen)
        self.check(self._ledger.read())
        if added := new_columns(before, self._finder):
            _log.info("%s has undeclared fields, which become columns: %s", self._url, _few(added))
        if refused := self._finder.known - before.known:
            # A key of an object that is no identifier may be a value.
            names = [repr(".".join(path)) for path in sorted(refused) if all(map(str.isidentifier, path))]
            names += [f"{odd} with other names"] if (odd := len(refused) - len(names)) else []
            _log.warning("fields of %s cannot become columns, and are left out: %s", self._url, _few(names))
        # With the same decoder, the next read would find the same fields, without end.
        return self._finder != before

    def _with_new_fields(self, before: FieldFinder, seen: FieldStats) -> FieldFinder:
        snapshot = self._ledger.log.snapshot()
        made_by_transform = set(self.no_rows().columns) - set(self.source.columns.names)
        grow = partial(
            with_new_fields,
            own=self._decoder or before.decoder,
            computed=names_of_delta(self._of_table).union(
                snapshot.computed_columns if snapshot else (), made_by_transform, self._own_names
            ),
            any_name=snapshot is not None and takes_any_name(snapshot.configuration),
        )
        widens = snapshot is not None and lets_widen(snapshot.configuration)
        if (grown := self._fitting_decoder(partial(grow, before, seen), widens=widens)) is not None:
            return grown
        # Some do not fit the transform, like a field with the name of a column that the transform adds.
        kept = before
        for name in seen.fields:
            grown = self._fitting_decoder(partial(grow, kept, seen.only(name)), widens=widens)
            kept = grown if grown is not None else replace(kept, known=kept.known | {(name,)})
        return kept

    @property
    def _own_names(self) -> frozenset[str]:
        """The names that a keyed table uses itself."""
        return frozenset() if self._ingestion.keys is None else self._ingestion.keys.own_names

    def _fitting_decoder(self, grow: Callable[..., FieldFinder], *, widens: bool) -> FieldFinder | None:
        """Return a decoder with new fields that fit the transform, with rows that fit the table; ``None`` if none does.

        The input of a transform may have other types than the table, such as text that it converts to a time. So the
        values decide the types first, and a column is only widened if the rows would not fit otherwise.
        """
        own = self._of_table
        ways = ((own, widens),) if self._ingestion.transform is None else ((None, False), (None, widens), (own, widens))
        for table, may_widen in ways:
            self._finder = grown = grow(table=table)
            with suppress(TransformError, SchemaMismatchError):
                rows = self.no_rows().schema
                # Without a transform new fields always fit; anything else that does not is an error of the check.
                if self._ingestion.transform is not None:
                    self._check_fit(rows, widens=may_widen)
                return grown
        return None


def _added(rows: DataFrame, messages: DataFrame) -> list[str]:
    """Return the columns that a transform has added to those of the messages."""
    known = set(map(folded, messages.columns))
    return [name for name in rows.columns if folded(name) not in known]


def _few(names: Sequence[str]) -> str:
    """Return the first of these names, for a log line."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(shortened(printable(name), _SHOWN_CHARACTERS) for name in names[:_SHOWN_NAMES]) + more


def transformed(rows: DataFrame, transform: Transform | None, treatment: Treatment = keep_bad_rows) -> DataFrame:
    """Call the transform, and return its rows; the same rows without a transform.

    Args:
        rows: rows with the columns of the decoder and of the stream.
        transform: the transform of the asset.
        treatment: what to do with rows that the transform rejects.

    Raises:
        TransformError: it raised an error, or returns a column twice.
    """
    if transform is None:
        return rows
    name = getattr(transform, "__name__", "transform")
    try:
        with treating(treatment):
            result = transform(rows)
        fields = result.schema.fields
    except StreamAssetsError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        said = f": {public_text(error)}" if isinstance(error, PySparkException) else ""
        failure = TransformError(
            f"the transform {name!r} raised {type(error).__name__}{place_of(error, library=_PYSPARK)}{said}",
            remedy=_MADE_EARLY if condition == _NO_SESSION else _CORRECT_IT,
        )
        failure.detail = first_line(error)
        # The text of the error may hold values of rows, and Dagster stores the text of each cause.
        raise failure from None
    if twice := first_duplicate(field.name for field in fields):
        raise TransformError(
            f"the transform {name!r} returns the column {twice!r} twice, if upper and lower case are the same",
            remedy=_CORRECT_IT,
        )
    return plain_strings(result, fields)
