"""The commands that look at dead letters and take them along; none of them starts Spark."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from stream_assets.cli import dead_letters as module
from stream_assets.cli import letter_export
from stream_assets.cli.redrive import read_payloads
from stream_consumers.create import create_consumer
from stream_consumers.errors import InvalidOptionError
from tests.support.command_line import failing, run
from tests.support.letter_tables import CLICKS, ORDERS, SECOND, Tables

NASTY = '{"id": "\x1b[2J\x9b31m\u202e", \n"user": "[/red]"}'
BINARY = b"\xff\x00" * 400


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(tmp_path)
    made.add(ORDERS, 9, 2, reason="field 'id' is not a whole number of 64 bits", payload=NASTY.encode())
    made.add(SECOND, 7, reason="field 'amount' is not a whole number of 32 bits", payload=BINARY)
    made.add(CLICKS, 5, reason="bad [/red] \x1b[31m", payload=None)
    made.add(ORDERS, None, reason="lost: sequences 50 to 59 were removed", payload=None, is_message=False)
    made.add(CLICKS, 6, batch="b9", number=2)
    return made


def letters(command: str, tables: Tables, *more: str) -> str:
    done = run("dead-letters", command, "--table", tables.main.path, "--group", "g", *more)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["rows"]
    return found


def test_list_says_how_many_there_are_of_each_kind(tables: Tables) -> None:
    found = rows(letters("list", tables, "--json"))
    assert found[0] == {
        "reason": "field '…' is not a whole number of # bits",
        "dead letters": 3,
        "first": "2026-11-17T12:02:00.000Z",
        "last": "2026-11-17T12:09:00.000Z",
        "shards": ["orders/0", "orders#2/1"],
        "example": {
            "place": "orders/0=2",
            "reason": "field 'id' is not a whole number of 64 bits",
            "payload": '{"id": "\\x1b[2J\\x9b31m\\u202e", \\n"user": "[/red]"}',
        },
    }
    assert [row["dead letters"] for row in found] == [3, 1, 1]
    assert len(rows(letters("list", tables, "--json", "--limit", "1"))) == 1
    everything = rows(letters("list", tables, "--json", "--all"))
    assert [(row["dead letters"], row["orphaned"]) for row in everything] == [(3, 0), (1, 0), (1, 0), (0, 1)]
    only = rows(letters("list", tables, "--json", "--source", "kafka://a:9092/clicks"))
    assert [row["shards"] for row in only] == [["clicks/0"]]
    text = letters("list", tables)
    assert "5 dead letters, 3 kinds of reasons" in text
    assert "2 more kinds" in letters("list", tables, "--limit", "1")
    assert "5 dead letters, and 1 that do not count" in letters("list", tables, "--all")
    assert "there are no dead letters" in letters("list", tables, "--reason", "no such reason")


def test_show_tells_all_of_single_ones(tables: Tables) -> None:
    (found,) = rows(letters("show", tables, "orders/0=9", "--json"))
    assert (found["payload"], found["key"], found["_batch"], found["is_message"]) == (NASTY, "k", "b1", True)
    assert found["headers"] == [{"name": "trace", "value_base64": "/w=="}]
    (found,) = rows(letters("show", tables, "orders#2/1:7", "--json"))
    assert "payload" not in found
    assert base64.b64decode(found["payload_base64"]) == BINARY
    assert [row["_sequence"] for row in rows(letters("show", tables, "--json", "--limit", "3"))] == [5, 2, 9]
    assert rows(letters("show", tables, "--json", "--reason", "no such reason")) == []
    (found,) = rows(letters("show", tables, "--json", "--all", "clicks/0=6"))
    assert found["status"] == "orphaned"
    text = letters("show", tables, "--limit", "2")
    assert text.startswith("clicks/0=5  2026-11-17T12:05:00.000Z\n  reason   bad [/red] \\x1b[31m\n")
    assert "and more: --limit 4" in text
    assert "clicks/0=6  2026-11-17T12:06:00.000Z  orphaned" in letters("show", tables, "--all", "clicks/0=6")
    assert "orders/0  –\n  reason   lost" in letters("show", tables)


def test_nothing_that_a_terminal_obeys_reaches_it(tables: Tables) -> None:
    whole = letters("show", tables, "--full", "orders/0=9")
    assert whole.endswith('  payload\n    {"id": "\\x1b[2J\\x9b31m\\u202e", \n    "user": "[/red]"}\n')
    for command in (["list"], ["list", "--json"], ["show"], ["show", "--full"], ["show", "--json"], ["export", "-"]):
        text = letters(*command[:1], tables, *command[1:])
        assert not [char for char in text.replace("\n", "") if not char.isprintable()], command


def test_wide_payloads_are_cut_on_a_terminal(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.add(ORDERS, 80, payload=b"wide " * 2_000_000)
    assert "(10000000 bytes)" in letters("show", tables, "orders/0=80")
    shown = Console(width=60, force_terminal=True, highlight=False)
    monkeypatch.setattr(module, "out", shown)
    with shown.capture() as captured:
        letters("show", tables, "orders/0=80")
        letters("list", tables)
    lines = [line for line in captured.get().splitlines() if "wide wide" in line]
    assert [len(line) for line in lines] == [60, 60]
    (found,) = rows(letters("show", tables, "orders/0=80", "--json"))
    assert len(found["payload"]) == 10_000_000


def test_what_cannot_be_meant_is_refused(tables: Tables, tmp_path: Path) -> None:
    place = ("--table", tables.main.path, "--group", "g")
    failing(run("dead-letters", "show", *place, "orders=9"), "'orders=9' is no place of a message")
    failing(run("dead-letters", "show", *place, "orders/0"), "is no place of a message")
    failing(run("dead-letters", "show", *place, "orders/0=nine"), "'orders/0=nine' has no sequence")
    failing(run("dead-letters", "show", *place, "orders/0=77"), "there is no such dead letter")
    failing(run("dead-letters", "list", *place, "--from", "latest"), "reads no dead letter")
    failing(run("dead-letters", "list", *place[:2]), "dead letters there are of 'g' (6)")
    failing(run("dead-letters", "list", "--table", tmp_path / "typo", "--group", "g"), "or ingest first")
    failing(run("dead-letters", "export", *place), "there is no FILE and no --to")
    failing(run("dead-letters", "export", *place, "-", "--to", "memory://a/b"), "there are a FILE and a --to")
    failing(run("dead-letters", "export", *place, "letters.xlsx"), "Use .ndjson, .jsonl, .csv, .parquet")
    failing(run("dead-letters", "export", *place, tmp_path / "none" / "a.csv"), "Make the folder")
    failing(run("dead-letters", "export", *place, "--to", "memory://a/b,c"), "names 2 streams")
    source = ("--source", "kafka://a:9092/orders")
    failing(run("dead-letters", "export", *place, *source, "--to", "kafka://a:9092/orders"), "is where they are from")
    failing(run("redrive", *place), "No such command 'redrive'")


def test_an_export_has_each_byte_of_them_in_every_format(tables: Tables, tmp_path: Path) -> None:
    payloads = [None, NASTY.encode(), NASTY.encode(), BINARY, None]
    found = [json.loads(line) for line in letters("export", tables, "-").splitlines()]
    assert [row["_sequence"] for row in found] == [5, 2, 9, 7, None]
    assert [_bytes(row.get("payload"), row.get("payload_base64")) for row in found] == payloads
    letters("export", tables, str(tmp_path / "letters.jsonl"))
    assert [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()] == found
    letters("export", tables, str(tmp_path / "letters.parquet"))
    table = pq.read_table(tmp_path / "letters.parquet")
    assert table == tables.letters().to_arrow()
    assert table.column("payload").to_pylist() == payloads
    tables.add(ORDERS, 90, payload=b" ")
    letters("export", tables, str(tmp_path / "letters.csv"), "--all")
    with (tmp_path / "letters.csv").open(newline="", encoding="utf-8") as file:
        of_csv = list(csv.DictReader(file))
    shown = [
        _bytes(row["payload"] or None, row["payload_base64"] or None) for row in of_csv if row["status"] == "counts"
    ]
    assert shown == [None, NASTY.encode(), NASTY.encode(), b" ", BINARY, None]
    assert json.loads(of_csv[0]["headers"]) == [{"name": "trace", "value_base64": "/w=="}]
    letters("export", tables, str(tmp_path / "none.csv"), "--reason", "no such reason")
    assert (tmp_path / "none.csv").read_text().startswith('"_stream","_shard"')
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "letters.csv",
        "letters.jsonl",
        "letters.parquet",
        "none.csv",
    ]


def _bytes(text: str | None, encoded: str | None) -> bytes | None:
    assert text is None or encoded is None
    return base64.b64decode(encoded) if encoded is not None else None if text is None else text.encode()


def test_an_empty_payload_is_no_missing_one(tmp_path: Path) -> None:
    made = Tables(tmp_path)
    made.add(ORDERS, 1, payload=None)
    made.add(ORDERS, 2, payload=b"")
    found = [json.loads(line) for line in letters("export", made, "-").splitlines()]
    assert [row["payload"] for row in found] == [None, ""]
    letters("export", made, str(tmp_path / "letters.csv"))
    missing, empty = (tmp_path / "letters.csv").read_text().splitlines()[1:]
    assert ('"k",,,,' in missing, '"k",,"",,' in empty) == (True, True)
    assert "payload  (empty)" in letters("show", made, "orders/0=2")


def test_an_export_that_fails_leaves_the_file_as_it_was(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "letters.ndjson"
    file.write_text("before")
    monkeypatch.setattr(letter_export, "letter_json", lambda row: 1 / 0)
    done = run("dead-letters", "export", "--table", tables.main.path, "--group", "g", file)
    assert isinstance(done.exception, ZeroDivisionError)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["letters.ndjson"]


def test_messages_are_sent_again_with_where_they_are_from(tables: Tables) -> None:
    url = f"memory://{uuid.uuid4()}/repair"
    done = run("dead-letters", "export", "--table", tables.main.path, "--group", "g", "--to", url, "--shards", "2")
    assert done.exit_code == 0, done.output
    assert "sent 4 messages to memory://" in done.stderr
    assert "1 were no whole messages, and were left out" in done.stderr
    with create_consumer(url, live=False) as consumer:
        found = [(message.shard.id, message.payload, message.timestamp.minute) for message in consumer]
    assert sorted(found) == [(0, b"", 5), (0, NASTY.encode(), 2), (0, NASTY.encode(), 9), (1, BINARY, 7)]


def test_no_jvm_is_started(tables: Tables) -> None:
    script = (
        "import sys; from stream_assets.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "from pyspark import SparkContext; print(SparkContext._gateway, file=sys.stderr)"
    )
    words = ["dead-letters", "list", "--table", str(tables.main.path), "--group", "g", "--json"]
    environment = {**os.environ, "JAVA_HOME": "/nowhere", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], check=False, capture_output=True, text=True, env=environment
    )
    assert done.stderr.strip() == "None"
    assert len(rows(done.stdout)) == 3


def test_dismissed_ones_are_listed_apart(tables: Tables) -> None:
    before = sum(row["dead letters"] for row in rows(letters("list", tables, "--json")))
    tables.add(ORDERS, 11, 12, reason="not a JSON object", dismissed_by="ann")
    assert sum(row["dead letters"] for row in rows(letters("list", tables, "--json"))) == before
    (found,) = rows(letters("list", tables, "--dismissed", "--json"))
    assert (found["reason"], found["dead letters"], found["dismissed"]) == ("not a JSON object", 0, 2)
    assert "2 dismissed dead letters" in letters("list", tables, "--dismissed")
    (found,) = rows(letters("show", tables, "--all", "orders/0=11", "--json"))
    assert (found["status"], found["dismissed_by"]) == ("dismissed", "ann")
    assert tables.reader().places()[0][ORDERS].tolist() == [2, 9], "no redrive tries them"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{",
        '{"_stream": "orders", "_shard": 0, "payload": "x"}',
        '{"_stream": "orders", "_shard": 0, "_sequence": "5", "payload": "x"}',
        '{"_stream": "orders", "_shard": true, "_sequence": 5, "payload": "x"}',
        '{"_stream": "orders", "_shard": 0, "_sequence": 5, "payload": 7}',
        '{"_stream": "orders", "_shard": 0, "_sequence": 5, "payload_base64": "?"}',
        '{"_stream": "orders", "_shard": 0, "_sequence": 4, "payload": "again"}',
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_a_file_of_corrected_payloads_is_refused_with_the_number_of_the_line(tmp_path: Path, line: str) -> None:
    good = '{"_stream": "orders", "_shard": 0, "_sequence": 4, "payload_base64": "/w=="}'
    file = tmp_path / "corrected.ndjson"
    file.write_text(f"{good}\n")
    assert read_payloads(file) == {(ORDERS, 4): b"\xff"}
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(InvalidOptionError, match="line 2 of "):
        read_payloads(file)
