"""stream-assets infer: a schema of a stream, without Spark, a group or a commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from deltalake import write_deltalake

from stream_assets.cli.main import main
from stream_consumers.create import create_producer

ORDERS = (
    b'{"id":1,"amount":12.5,"at":"2024-02-29T12:00:00Z"}',
    b'{"id":2,"amount":3,"at":"2024-03-01T12:00:00Z","note":7}',
    b"no JSON",
    b'{"id":3,"note":"x"}',
)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["infer", *words])


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"file://{tmp_path}/orders.ss/orders"
    with create_producer(made, shards=2) as producer:
        for number, payload in enumerate(ORDERS):
            producer.send(payload, shard=number % 2, timestamp_ms=1_700_000_000_000 + 1000 * number)
    return made


def test_stdout_is_the_ddl_and_stderr_tells_of_it(url: str) -> None:
    done = run(url)
    assert done.exit_code == 0, done.output
    assert done.stdout == "id bigint, amount double, at timestamp, note string\n"
    assert "1 of 4 messages would become dead letters: not a JSON object" in done.stderr
    assert "note is whole number 1 time and text 1 time" in done.stderr


def test_all_of_it_as_json(url: str) -> None:
    found = json.loads(run(url, "--json").stdout)
    assert (found["ddl"], found["messages"]) == ("id bigint, amount double, at timestamp, note string", 4)
    assert [(field["name"], field["messages"]) for field in found["fields"]] == [
        *(("id", 3), ("amount", 2), ("at", 2), ("note", 2))
    ]
    assert found["refused"] == {"not a JSON object": 1}


def test_the_sample_is_as_large_as_asked_and_begins_where_asked(url: str) -> None:
    assert run(url, "--sample", "1").stdout == "id bigint, amount double, at timestamp\n"
    assert run(url, "--start", "2023-11-14T22:13:23Z").stdout == "id bigint, note string\n"


def test_types_of_a_table_are_kept_where_messages_fit(url: str, tmp_path: Path) -> None:
    schema = pa.schema(
        [("ID", pa.int32()), ("amount", pa.decimal128(10, 2)), ("note", pa.bool_()), ("gone", pa.date32())]
    )
    write_deltalake(str(tmp_path / "t"), schema.empty_table())
    done = run(url, "--table-like", str(tmp_path / "t"))
    assert done.stdout == "id int, amount decimal(10,2), at timestamp, note string\n"
    assert "boolean in the table, which 2 of the messages do not fit" in done.stderr
    assert "not in the table" in done.stderr
    assert "'gone' of the table has no value in any message" in done.stderr


def test_a_name_of_a_table_prints_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    url, name = f"file://{tmp_path}/nested.ss/nested", "x\x1b]0;title\x07\x9b2J"
    with create_producer(url) as producer:
        producer.send(b'{"a": {"y": 1}}')
    write_deltalake(str(tmp_path / "t"), pa.table({"a": pa.array([], pa.struct([(name, pa.int64())]))}))
    done = run(url, "--table-like", str(tmp_path / "t"))
    assert done.exit_code == 1, "Delta may write such a name into Java source"
    assert done.stderr.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--start", "latest"), "--start latest selects no messages. Use earliest, a sequence, or a time."),
        (("--start", "2030-01-01"), "no message at or after 2030-01-01"),
        (("--table-like", "nowhere"), "nowhere is not a Delta table. Correct --table-like, or leave it out."),
        (("--sample", "0"), "x>=1"),
    ],
)
def test_what_cannot_be_done_is_told(url: str, words: tuple[str, ...], told: str) -> None:
    done = run(url, *words)
    assert done.exit_code != 0
    assert told in done.stderr


def test_it_needs_no_java(url: str) -> None:
    command = [sys.executable, "-m", "stream_assets.cli.main", "infer", url]
    environment = {**os.environ, "PATH": "", "JAVA_HOME": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("id bigint")


def test_a_stream_without_objects_has_no_schema(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/other.ss/other"
    with create_producer(url) as producer:
        producer.send(b"[]")
    done = run(url)
    assert done.exit_code == 1
    assert (
        "of 1 message, none has a field: 1 are not a JSON object. Read from another position with --start; or use "
        "--decode variant, text or raw, without a schema."
    ) in done.stderr
