"""Expressions in the metadata of a table are an attacker's: another writer of the log chooses their text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.job import drain_batches
from spark_jobs.dead_letters.table import DeadLetterTable
from spark_jobs.ledger import delta_log
from spark_jobs.ledger.delta_log import DeltaLog, TableSnapshot
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_expressions import check_expression, check_metadata
from spark_jobs.writing.delta_table import read_table
from stream_consumers.create import open_batch_source
from stream_consumers.errors import LedgerUnreadableError, TableUnreadableError, UnsupportedError
from tests.support.ingesting import ingestion
from tests.support.ledger_tables import write_batch
from tests.support.streams import write_stream

CALL = "reflect('java.lang.System', 'load', '/x.so')"
UNSAFE = [
    f"{CALL} IS NULL",
    "REFLECT('a', 'b') > 1",
    "`reflect`('a', 'b') > 1",
    "reflect /* so that it is not seen */ ('a', 'b') > 1",
    "try_reflect('a', 'b') > 1",
    '"reflect" (1, 2) > 1',
    "system.builtin.java_method('a', 'b') > 1",
    "IDENTIFIER('ref' || 'lect')('a', 'b') > 1",
    "r'\\' = 'x' OR reflect('a', 'b') > 1",
    "id > (SELECT max(value) FROM text.`file:///etc/hostname`)",
    "id > (\u017felect max(value) FROM text.`file:///etc/hostname`)",
    "id > (TABLE text.`file:///etc/hostname`)",
    "TABLE text.`file:///etc/hostname`",
    "id > (/* /* */ */ TABLE text.`file:///etc/hostname`)",
    "id > (-- \n TABLE text.`file:///etc/hostname`)",
    "id > (FROM text.`file:///etc/hostname` |> AGGREGATE max(value))",
    "EXISTS ((WITH a AS (VALUES (1)) FROM text.`file:///etc/hostname` |> LIMIT 1))",
    "id > (MAP id USING 'id' AS x FROM t)",
    "id > (MAP (id) USING 'id')",
    "id < (VALUES (9) UNION ALL TABLE text.`file:///etc/hostname`)",
    "EXISTS(VALUES (1) AS t(a) |> JOIN text.`file:///etc/hostname` ON TRUE)",
    "from_xml('<a/>', 'a INT', map('rowValidationXSDPath', '/etc/hostname')) IS NULL",
    # Spark loads and makes the class that the text of a type names.
    'from_json(a, \'{"type":"udt","class":"javax.swing.JFrame","sqlType":"string"}\') IS NULL',
    'variant_get(parse_json(a), \'$\', \'{"type":"udt","class":"javax.swing.JFrame"}\') IS NULL',
    "try_variant_get(parse_json(a), '$', 'INT') IS NULL",
    "of_nobody(id) > 0",
    "abs(id) > 0 AND `abs`(id) > 0",
    "other.abs(id) > 0",
    "IDENTIFIER('abs')(id) > 0",
    "id > 0 -- and not what follows",
    "id > /* what */ 0",
    "gr\u00f6\u00dfe > 0",
    "scheme://a'b = 'c'",
    "1.r'\\' = 'x' OR reflect('a', 'b') > 1 OR '' = ''",
    "ar'\\' = 'x' OR reflect('a', 'b') > 1 OR '' = ''",
    "id > 0 OR 'x",
    "$$'$$ = 'x'",
    "name = '${env:HOME}'",
    "`${spark.sql.x}` > 0",
    'name <> "${system:user.name}"',
    '`y"\\u0029\\u003brun\\u0028\\u0029\\u003b"` < 7',
    "`a\\u0022b` > 0",
    "`a\nb` > 0",
    "hash(*) < 7",
    "hash(id, t.*) < 7",
]
SAFE = [
    "id > 0",
    "extract(YEAR FROM at) > 1999 AND trim(BOTH 'x' FROM name) <> ''",
    "name IN ('a', 'b') OR name IS NULL",
    "CAST(at AS DATE)",
    "(`table` > 1) AND from_unixtime(id) IS NOT NULL AND with_tax >= price - 1",
    "a - -1 > 0 AND selected",
    "concat_ws(' ', name, 'with')",
    "name <> '--' AND url NOT LIKE '%/*%'",
    "identifier IS NOT NULL AND is_reflected AND reflectance BETWEEN 0 AND (1)",
    "kind IN ('using', 'map')",
    "name RLIKE r'^[\\w--]+$' AND DATE'2020-01-01' < at",
    "CAST(price AS DECIMAL(10, 2)) >= .5 AND code = X'41'",
    "CASE WHEN (a > 1) THEN ('x') ELSE (b) END IS NOT NULL",
    "a IS DISTINCT FROM b AND (c) IS NOT DISTINCT FROM (d)",
    "substring(name FROM 1 FOR 2) LIKE ANY ('a%', 'b%')",
    "exists(tags, tag -> tag = 'it''s \\' (SELECT 1)') OR \"a\"\"b\" = 'c'",
    "`gr\u00f6\u00dfe` + `values` <=> `from`.`a``b`[0].c % 2",
    "fields:name::string IS NOT NULL AND NOT (a || b = '')",
    "INTERVAL '1' DAY + at < current_timestamp()",
    "(a + 1) * 2 > b * 3 AND c[0] * 2.5 > `it's` * -1",
]


def expressed(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """A table whose first version has other metadata: what changes it gets the metadata, and the schema in it."""
    table = folder / "t"
    write_batch(table, {1: "2026-11-17"})
    write_anew(table, change)
    return str(table)


def write_anew(table: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    commit = table / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for metadata in (action["metaData"] for action in actions if "metaData" in action):
        schema = json.loads(metadata["schemaString"])
        change(metadata, schema)
        metadata["schemaString"] = json.dumps(schema)
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


def field(**metadata: str) -> dict[str, Any]:
    return {"name": "made", "type": "string", "nullable": True, "metadata": metadata}


ITEMS = {"type": "array", "elementType": "string", "containsNull": True}
PAIRS = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
PLACES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "check": lambda metadata, schema: metadata["configuration"].update({"Delta.Constraints.x": CALL}),
    "generated": lambda metadata, schema: schema["fields"].append(field(**{"delta.generationExpression": CALL})),
    "default": lambda metadata, schema: schema["fields"].append(field(CURRENT_DEFAULT=CALL)),
    "first default": lambda metadata, schema: schema["fields"].append(field(EXISTS_DEFAULT=CALL)),
    "invariant": lambda metadata, schema: schema["fields"].append(
        field(**{"delta.invariants": '{"expression": {"expression": "\\u0072eflect(1) > 0"}}'})
    ),
    "invariant that is told twice": lambda metadata, schema: schema["fields"].append(
        field(**{"delta.invariants": f'{{"expression": {{"expression": "{CALL}", "expression": "id > 0"}}}}'})
    ),
    "invariant that is no JSON": lambda metadata, schema: schema["fields"].append(field(**{"delta.invariants": "{'a"})),
    "invariant with a line": lambda metadata, schema: schema["fields"].append(
        field(**{"delta.invariants": '{"expression": {"expression": "id > (\\nTABLE t)"}}'})
    ),
    "name": lambda metadata, schema: schema["fields"].append(
        {**field(**{"delta.generationExpression": "id + 1"}), "name": 'y"\\u0029\\u003b'}
    ),
    # Delta makes a constraint for its length.
    "name of a VARCHAR": lambda metadata, schema: schema["fields"].append(
        {**field(__CHAR_VARCHAR_TYPE_STRING="varchar(5)"), "name": 'x"+1+"'}
    ),
    "name of a field": lambda metadata, schema: schema["fields"].append(
        {**field(), "type": {**PAIRS, "keyType": {"type": "struct", "fields": [{**field(), "name": "a\u2028b"}]}}}
    ),
    "nested": lambda metadata, schema: schema["fields"].append(
        {
            "name": "list",
            "nullable": True,
            "metadata": {},
            "type": {
                "type": "array",
                "containsNull": True,
                "elementType": {"type": "struct", "fields": [field(**{"delta.generationExpression": CALL})]},
            },
        }
    ),
}


VARIABLE = "of ${env.KAFKA_PASSWORD}"
STRUCT = {"type": "struct", "fields": [field(comment=VARIABLE)]}
# Hadoop replaces a variable when Spark reads it from the settings of a write, and Spark writes the result into files.
VARIABLES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "comment": lambda metadata, schema: schema["fields"].append(field(comment=VARIABLE)),
    "comment in a list": lambda metadata, schema: schema["fields"].append(
        {**field(), "type": {**ITEMS, "elementType": STRUCT}}
    ),
    "comment in the values of a map": lambda metadata, schema: schema["fields"].append(
        {**field(), "type": {**PAIRS, "valueType": STRUCT}}
    ),
    "other metadata": lambda metadata, schema: schema["fields"].append(field(x=cast("str", {"y": [VARIABLE]}))),
    "key of metadata": lambda metadata, schema: schema["fields"].append(field(**{VARIABLE: "x"})),
    "name": lambda metadata, schema: schema["fields"].append({**field(), "name": VARIABLE}),
    "value of a property": lambda metadata, schema: metadata["configuration"].update({"delta.x": VARIABLE}),
    "name of a property": lambda metadata, schema: metadata["configuration"].update({"delta.${env.X}": "x"}),
    "description": lambda metadata, schema: metadata.update(description=VARIABLE),
    "name of the table": lambda metadata, schema: metadata.update(name=VARIABLE),
}
# Spark adds the properties to the settings of Hadoop for a write.
SETTINGS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    name: lambda metadata, schema, name=name: metadata["configuration"].update({name: "x"})  # type: ignore[misc]
    for name in (
        *("fs.file.impl", "mapreduce.jdbc.url", "parquet.crypto.factory.class", "io.compression.codecs"),
        *("spark.sql.x", "hadoop.tmp.dir", " fs.file.impl", "deltas.x", ".delta.x"),
    )
}


@pytest.mark.parametrize("change", {**VARIABLES, **SETTINGS}.values(), ids={**VARIABLES, **SETTINGS})
def test_a_table_whose_metadata_would_be_settings_of_hadoop_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    table = expressed(tmp_path, change)
    with pytest.raises(UnsupportedError):
        DeltaLog(table).snapshot()


def with_options(metadata: dict[str, Any], schema: dict[str, Any]) -> None:
    metadata["format"]["options"] = {"fs.file.impl": "x"}


def test_options_of_the_format_in_a_commit_are_refused(tmp_path: Path) -> None:
    table = Path(expressed(tmp_path, lambda metadata, schema: None))
    log = DeltaLog(str(table))
    log.check_version()
    first = (table / "_delta_log" / f"{0:020d}.json").read_text()
    write_anew(table, with_options)
    changed = [
        line for line in (table / "_delta_log" / f"{0:020d}.json").read_text().splitlines() if "metaData" in line
    ]
    (table / "_delta_log" / f"{0:020d}.json").write_text(first)
    (table / "_delta_log" / f"{1:020d}.json").write_text("\n".join(changed))
    for opened in (log, DeltaLog(str(table))):
        write_batch(table, {2: "2026-11-18"})
        for version in (None, 1):
            with pytest.raises(UnsupportedError):
                opened.check_version(version)
        opened.check_version(0)


def set_format_options(log: Path, *, of: int, version: int) -> None:
    """Write a version that only repeats the metadata of another one, with options of the format."""
    actions = [json.loads(line) for line in (log / f"{of:020d}.json").read_text().splitlines()]
    metadata = next(action for action in actions if "metaData" in action)
    with_options(metadata["metaData"], {})
    (log / f"{version:020d}.json").write_text(json.dumps(metadata))


def test_options_of_the_format_are_refused_before_dead_letters_are_appended(tmp_path: Path) -> None:
    table = Path(expressed(tmp_path, lambda metadata, schema: None))
    set_format_options(table / "_delta_log", of=0, version=1)
    ledger = Ledger(DeltaLog(str(tmp_path / "main")), group="g", member="main")
    with pytest.raises(UnsupportedError):
        DeadLetterTable(str(table)).append(cast("DataFrame", None), ledger=ledger, number=1, bid="b")


def test_options_of_the_format_between_two_batches_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    url, what = write_stream(tmp_path / "orders.ss", 20), ingestion(tmp_path / "t", records=10)
    with open_batch_source(url) as source:
        reports = drain_batches(IngestJob(spark, source, what))
        assert next(reports).version == 1
        set_format_options(tmp_path / "t/_delta_log", of=0, version=2)
        with pytest.raises(UnsupportedError):
            next(reports)
    assert DeltaTable(tmp_path / "t").version() == 2


def test_options_of_the_format_in_a_checkpoint_that_is_newer_than_the_pointer_are_refused(tmp_path: Path) -> None:
    table = Path(expressed(tmp_path, lambda metadata, schema: None))
    log = table / "_delta_log"
    DeltaTable(table).create_checkpoint()
    pointer = (log / "_last_checkpoint").read_text()
    write_batch(table, {2: "2026-11-18"})
    DeltaTable(table).create_checkpoint()
    (log / "_last_checkpoint").write_text(pointer)
    DeltaLog(str(table)).check_version()
    put_format_options(log / f"{1:020d}.checkpoint.parquet")
    with pytest.raises(UnsupportedError):
        DeltaLog(str(table)).check_version()


def put_format_options(checkpoint: Path) -> None:
    found = pq.read_table(checkpoint)
    rows = found.to_pylist()
    for row in rows:
        if row["metaData"] is not None:
            row["metaData"]["format"]["options"] = [("fs.file.impl", "x")]
    pq.write_table(pa.Table.from_pylist(rows, schema=found.schema), checkpoint)


@pytest.mark.parametrize("has_pointer", [True, False])
@pytest.mark.parametrize("is_cleaned", [True, False])
def test_options_of_the_format_in_a_checkpoint_are_refused(tmp_path: Path, has_pointer: bool, is_cleaned: bool) -> None:
    table = Path(expressed(tmp_path, lambda metadata, schema: None))
    DeltaTable(table).create_checkpoint()
    write_batch(table, {2: "2026-11-18"})
    DeltaLog(str(table)).check_version()
    put_format_options(table / "_delta_log" / f"{0:020d}.checkpoint.parquet")
    if is_cleaned or not has_pointer:
        (table / "_delta_log" / f"{0:020d}.json").unlink()
    if not has_pointer:
        (table / "_delta_log" / "_last_checkpoint").unlink()
    with pytest.raises(UnsupportedError):
        DeltaLog(str(table)).check_version()


def test_a_partition_column_with_a_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        check_metadata("/lake/t", {}, [], others=("", "", VARIABLE))


def test_properties_of_delta_of_this_project_and_without_dots_are_accepted(tmp_path: Path) -> None:
    names = ("delta.appendOnly", "Delta.x", "stream-assets.stagingOf", "pipelines.pipelineId", "team", "$x", "a{b")
    table = expressed(tmp_path, lambda metadata, schema: metadata["configuration"].update(dict.fromkeys(names, "$5 {")))
    assert DeltaLog(table).snapshot() is not None


@pytest.mark.parametrize("text", UNSAFE)
def test_what_may_run_code_or_read_other_tables_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError):
        check_expression(text, where="the constraint x")


@pytest.mark.parametrize("text", SAFE)
def test_what_only_looks_like_it_is_not(text: str) -> None:
    check_expression(text, where="the constraint x")


@pytest.mark.parametrize("change", PLACES.values(), ids=PLACES)
def test_a_table_with_such_an_expression_is_refused_before_spark_sees_it(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    table = expressed(tmp_path, change)
    with pytest.raises(UnsupportedError):
        Ledger(DeltaLog(table), group="lakehouse", member="main").read()


def test_other_expressions_are_read(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], schema: dict[str, Any]) -> None:
        metadata["configuration"]["delta.constraints.x"] = "id > 0"
        schema["fields"].append(
            field(CURRENT_DEFAULT="'x'", **{"delta.invariants": '{"expression": {"expression": "made > \'a\'"}}'})
        )

    snapshot = DeltaLog(expressed(tmp_path, change)).snapshot()
    assert snapshot is not None
    assert snapshot.default_columns == {"made"}


def test_the_same_metadata_are_checked_once_and_others_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []

    def counting(
        path: str, configuration: Mapping[str, str], columns: Sequence[Mapping[str, Any]], *, others: object
    ) -> None:
        checked.append(columns)
        check_metadata(path, configuration, columns, others=others)

    monkeypatch.setattr(delta_log, "check_metadata", counting)
    table = tmp_path / "t"
    log = DeltaLog(expressed(tmp_path, lambda metadata, schema: None))
    for day in ("2026-11-18", "2026-11-19"):
        snapshot = log.snapshot()
        assert snapshot is not None
        assert snapshot.schema is snapshot.schema, "rendered once"
        write_batch(table, {2: day})
    assert len(checked) == 1
    # The version and the id of the table stay as they are.
    log.snapshot()
    write_anew(table, PLACES["check"])
    with pytest.raises(UnsupportedError):
        log.snapshot()


COUNTER = "delta.identity.highWaterMark"


def column(name: str, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": "string", "nullable": True, "metadata": metadata}


def test_an_expression_between_texts_like_identity_counters_is_refused(tmp_path: Path) -> None:
    # Where such counters were cut out of the text of the schema, the rest was other JSON, without the expression.
    opens = column("c0", x=[{COUNTER: "0},{"}, {":[{": ":{"}, {":[{": ":"}, {COUNTER: "0z"}])
    closes = column("c1", x=[{COUNTER: "0}]}}]}]},"}, {":{": ":[{"}, {":0,": ":"}, {COUNTER: "0z"}])
    evil = field(**{"delta.generationExpression": CALL})
    table = expressed(tmp_path, lambda metadata, schema: schema["fields"].extend([opens, evil, closes]))
    with pytest.raises(UnsupportedError):
        DeltaLog(table).snapshot()


def test_a_table_with_an_identity_beside_other_metadata_is_read(tmp_path: Path) -> None:
    def counted(number: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
        def change(metadata: dict[str, Any], schema: dict[str, Any]) -> None:
            identity = {"delta.identity.start": 1, COUNTER: number, "delta.identity.step": 1}
            schema["fields"] = [one for one in schema["fields"] if one["name"] not in ("number", "made")]
            schema["fields"] += [{**column("number", **identity), "type": "long"}, field(CURRENT_DEFAULT="'x'")]

        return change

    def read() -> TableSnapshot:
        snapshot = log.snapshot()
        assert snapshot is not None
        return snapshot

    log = DeltaLog(expressed(tmp_path, counted(1)))
    first = read()
    assert [one["metadata"].get(COUNTER) for one in first.columns if one["name"] == "number"] == [1]
    assert (first.computed_columns, first.default_columns) == ({"number"}, {"made"})
    write_anew(Path(log.path), counted(7))
    assert read().schema == first.schema
    write_anew(Path(log.path), lambda metadata, schema: schema["fields"].append(column("new")))
    assert read().schema != first.schema


def first_commit(table: Path) -> tuple[Path, list[str]]:
    commit = table / "_delta_log" / f"{0:020d}.json"
    return commit, commit.read_text().splitlines()


def escaped(line: str) -> str:
    return line.replace("a", "\\u0061", 1).replace("o", "\\u006f", 1)


AGAIN: dict[str, Callable[[str], str]] = {
    "twice": lambda line: line + "\n" + line,
    "twice, with escapes in its name": lambda line: line + "\n" + escaped(line),
    "twice in a line": lambda line: line[:-1] + "," + line[1:],
    "twice without an end of line": lambda line: line + line,
    "in the line of another action": lambda line: '{"txn":{"appId":"a","version":1},' + line[1:],
    "with a name twice": lambda line: re.sub(r'"(id|minReaderVersion)"', r'"\1":1,"\1"', line, count=1),
}


@pytest.mark.parametrize("action", ["metaData", "protocol"])
@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_a_commit_whose_metadata_may_be_read_in_two_ways_is_refused(
    tmp_path: Path, action: str, again: Callable[[str], str]
) -> None:
    write_batch(tmp_path / "t", {1: "2026-11-17"})
    commit, lines = first_commit(tmp_path / "t")
    assert DeltaLog(str(tmp_path / "t")).commit(0) is not None
    commit.write_text("".join(f"{again(line) if action in json.loads(line) else line}\n" for line in lines))
    with pytest.raises((UnsupportedError, LedgerUnreadableError)):
        DeltaLog(str(tmp_path / "t")).commit(0)


def test_a_commit_is_read_whose_other_actions_only_look_like_it(tmp_path: Path) -> None:
    write_batch(tmp_path / "t", {1: "2026-11-17"})
    commit, lines = first_commit(tmp_path / "t")
    adds = [json.dumps({"add": {"path": "\u0001", "partitionValues": {"metaData": "x", "protocol": "y"}}})] * 2
    commit.write_text("".join(f"{line}\n" for line in (*lines, *adds)))
    assert DeltaLog(str(tmp_path / "t")).commit(0) is not None


def checksum(configuration: dict[str, Any], *columns: dict[str, Any], files: object = 1) -> str:
    schema = json.dumps({"type": "struct", "fields": columns})
    return json.dumps({"numFiles": files, "metadata": {"configuration": configuration, "schemaString": schema}})


def put_checksum(folder: Path, text: str) -> DeltaLog:
    write_batch(folder / "t", {1: "2026-11-17"})
    (folder / "t/_delta_log" / f"{0:020d}.crc").write_text(text)
    return DeltaLog(str(folder / "t"))


@pytest.mark.parametrize(
    "text",
    [
        # Java makes a number of the text, and delta-rs does not take the file.
        checksum({"delta.constraints.x": CALL}, files="1"),
        checksum({}, field(**{"delta.generationExpression": CALL}), files="1"),
        checksum({}, {**field(__CHAR_VARCHAR_TYPE_STRING="varchar(5)"), "name": 'x"+1+"'}, files="1"),
        checksum({}, field(**{"delta.generationExpression": CALL}), files="1").replace(
            "generation", "\\\\u0067eneration"
        ),
        checksum({}, field(comment=VARIABLE), files="1"),
        checksum({}, field(comment=VARIABLE), files="1").replace("${", "\\u0024\\u007b"),
        checksum({"fs.file.impl": "x"}, files="1"),
        checksum({}, files="1").replace('"configuration"', f'"description": "{VARIABLE}", "configuration"'),
        checksum({}, files="1").replace('"configuration"', '"format": {"options": {"a": "b"}}, "configuration"'),
    ],
)
def test_an_expression_in_a_checksum_is_refused_that_delta_rs_does_not_see(tmp_path: Path, text: str) -> None:
    log = put_checksum(tmp_path, text)
    assert not DeltaTable(log.path).metadata().configuration
    with pytest.raises(UnsupportedError):
        log.snapshot()


@pytest.mark.parametrize("version", [None, 0])
def test_spark_reads_no_version_with_such_an_expression(tmp_path: Path, version: int | None) -> None:
    table = tmp_path / "t"
    log = put_checksum(tmp_path, checksum({"delta.constraints.x": CALL}, files="1"))
    if version is not None:
        write_batch(table, {2: "2026-11-18"})
        assert log.snapshot() is not None
    with pytest.raises(UnsupportedError):
        # The check comes before anything of Spark.
        read_table(cast("SparkSession", None), log, version=version)


@pytest.mark.parametrize(
    "text",
    [
        checksum({"delta.constraints.x": CALL})[:-1],
        checksum({"delta.constraints.x": "id > 0"}).replace("{", '{"metadata": {}, ', 1),
        '{"metadata": [1]}',
    ],
)
def test_a_checksum_that_may_be_read_in_two_ways_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(LedgerUnreadableError):
        put_checksum(tmp_path, text).snapshot()


USER_DEFINED = {"type": "udt", "pyClass": "this.X", "serializedClass": "eA==", "sqlType": "string"}
FOREIGN_TYPES: dict[str, object] = {
    "user-defined": USER_DEFINED,
    "user-defined, for Java": {"type": "udt", "class": "javax.swing.JFrame", "pyClass": "this.X", "sqlType": "string"},
    "with the parts of a struct": {**USER_DEFINED, "fields": []},
    "with the parts of an array": {**ITEMS, **USER_DEFINED},
    "with the parts of a map": {**PAIRS, **USER_DEFINED},
    "in an array": {**ITEMS, "elementType": USER_DEFINED},
    "in the keys of a map": {**PAIRS, "keyType": USER_DEFINED},
    "in the values of a map": {**PAIRS, "valueType": {**ITEMS, "elementType": USER_DEFINED}},
    "in a struct": {"type": "struct", "fields": [{**field(), "type": USER_DEFINED}]},
    "unknown": "class",
}
foreign_types = pytest.mark.parametrize("kind", FOREIGN_TYPES.values(), ids=FOREIGN_TYPES)


@foreign_types
@pytest.mark.parametrize(
    "unparsed",
    [
        lambda text: text.replace('"numFiles": 1', '"numFiles": "1"'),
        lambda text: text[:-1] + ', "x": NaN}',
        lambda text: text[:-1] + ', "\\ud800": 1}',
    ],
    ids=["number as text", "NaN", "half a character"],
)
def test_a_type_in_a_checksum_is_refused_that_delta_rs_does_not_see(
    tmp_path: Path, kind: object, unparsed: Callable[[str], str]
) -> None:
    log = put_checksum(tmp_path, unparsed(checksum({}, {**field(), "type": kind})))
    assert "made" not in DeltaTable(log.path).schema().to_json()
    with pytest.raises(LedgerUnreadableError):
        log.snapshot()


@foreign_types
def test_such_a_type_in_a_commit_is_refused(tmp_path: Path, kind: object) -> None:
    table = expressed(tmp_path, lambda metadata, schema: schema["fields"].append({**field(), "type": kind}))
    with pytest.raises(TableUnreadableError):
        DeltaLog(table).snapshot()


def put_pointer(folder: Path, **more: object) -> DeltaLog:
    write_batch(folder / "t", {1: "2026-11-17"})
    DeltaTable(str(folder / "t")).create_checkpoint()
    pointer = folder / "t/_delta_log/_last_checkpoint"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), **more}))
    return DeltaLog(str(folder / "t"))


@foreign_types
def test_such_a_type_in_the_schema_of_a_checkpoint_is_refused(tmp_path: Path, kind: object) -> None:
    schema = {"type": "struct", "fields": [{**field(), "type": kind}]}
    log = put_pointer(tmp_path, checkpointSchema=schema)
    with pytest.raises(LedgerUnreadableError):
        log.snapshot()


def test_a_variable_in_the_schema_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    log = put_pointer(tmp_path, checkpointSchema={"type": "struct", "fields": [field(comment=VARIABLE)]})
    with pytest.raises(UnsupportedError):
        log.snapshot()


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 0, "checkpointSchema": {"type": "udt"}} x',
        '{"version": 0, "checkpointSchema": {"type": "udt"}, "checkpointSchema": null}',
        *("[1]", "[" * 100_000),
    ],
    ids=["more after it", "with a name twice", "an array", "too deep"],
)
def test_a_pointer_that_may_be_read_in_two_ways_is_refused(tmp_path: Path, text: str) -> None:
    log = put_pointer(tmp_path)
    (tmp_path / "t/_delta_log/_last_checkpoint").write_text(text)
    with pytest.raises(LedgerUnreadableError):
        log.snapshot()


def test_an_expression_beside_the_schema_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    metadata = json.loads(checksum({"delta.constraints.x": CALL}))["metadata"]
    log = put_pointer(tmp_path, v2Checkpoint={"path": "x", "nonFileActions": [{"txn": {}}, {"metaData": metadata}]})
    with pytest.raises(UnsupportedError):
        log.snapshot()


def test_the_schema_that_spark_writes_beside_a_checkpoint_is_read(tmp_path: Path) -> None:
    action = {"type": "struct", "fields": [field(), {**field(), "name": "made too", "type": PAIRS}]}
    schema = {"type": "struct", "fields": [{**field(), "name": "txn", "type": action}]}
    log = put_pointer(tmp_path, checkpointSchema=schema, tags={}, checksum="x")
    assert log.snapshot() is not None


def test_a_checksum_with_all_types_of_delta_is_read(tmp_path: Path) -> None:
    names = "string long integer short byte float double boolean binary date timestamp timestamp_ntz variant void"
    kinds = [*names.split(), "decimal(38,18)", ITEMS, PAIRS, {"type": "struct", "fields": [field()]}]
    columns = [{**field(), "name": f"c{at}", "type": kind} for at, kind in enumerate(kinds)]
    assert put_checksum(tmp_path, checksum({}, *columns, files="1")).snapshot() is not None
    # Without a schema, Spark has no types.
    assert put_checksum(tmp_path, '{"metadata": {}}').snapshot() is not None


def test_other_checksums_are_read_and_each_time_anew(tmp_path: Path) -> None:
    log = put_checksum(tmp_path, checksum({"delta.constraints.x": "id > 0"}, field()))
    assert log.snapshot() is not None
    put = tmp_path / "t/_delta_log" / f"{0:020d}.crc"
    put.write_text(checksum({"delta.constraints.x": CALL}, files="1"))
    with pytest.raises(UnsupportedError):
        log.snapshot()
    put.unlink()
    assert log.snapshot() is not None
