"""The commands that look at dead letters and take them along; none of them starts Spark."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stream_assets.cli import dead_letter_commands as module
from stream_assets.cli.dead_letter_commands import read_payloads
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import bytes_from_json
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
        "example": "orders/0=2",
    }
    assert [row["dead letters"] for row in found] == [3, 1, 1]
    assert len(rows(letters("list", tables, "--json", "--limit", "1"))) == 1
    everything = rows(letters("list", tables, "--json", "--all"))
    assert [(row["dead letters"], row["orphaned"]) for row in everything] == [(3, 0), (1, 0), (1, 0), (0, 1)]
    only = rows(letters("list", tables, "--json", "--source", "kafka://a:9092/clicks"))
    assert [row["shards"] for row in only] == [["clicks/0"]]
    assert "5 dead letters of 3 kinds" in letters("list", tables)
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
    assert "clicks/0=6  2026-11-17T12:06:00.000Z  orphaned" in letters("show", tables, "--all", "clicks/0=6")
    assert "orders/0  –\n  reason   lost" in letters("show", tables)


def test_nothing_that_a_terminal_obeys_reaches_it(tables: Tables) -> None:
    whole = letters("show", tables, "--full", "orders/0=9")
    assert whole.endswith('  payload  \n    {"id": "\\x1b[2J\\x9b31m\\u202e", \n    "user": "[/red]"}\n')
    for command in (["list"], ["list", "--json"], ["show"], ["show", "--full"], ["show", "--json"]):
        text = letters(*command[:1], tables, *command[1:])
        assert not [char for char in text.replace("\n", "") if not char.isprintable()], command


def test_wide_payloads_are_cut_on_a_terminal(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.add(ORDERS, 80, payload=b"wide " * 2_000_000)
    assert "(10000000 bytes)" in letters("show", tables, "orders/0=80")
    shown = Console(width=60, force_terminal=True, highlight=False)
    monkeypatch.setattr(module, "out", shown)
    with shown.capture() as captured:
        letters("show", tables, "orders/0=80")
    lines = [line for line in captured.get().splitlines() if "wide wide" in line]
    assert [len(line) for line in lines] == [60]
    (found,) = rows(letters("show", tables, "orders/0=80", "--json"))
    assert len(found["payload"]) == 10_000_000


def test_what_cannot_be_meant_is_refused(tables: Tables, tmp_path: Path) -> None:
    place = ("--table", tables.main.path, "--group", "g")
    for wrong in ("orders=9", "orders/0", "orders/0=nine"):
        failing(run("dead-letters", "show", *place, wrong), wrong)
    failing(run("dead-letters", "show", *place, "orders/0=77"), "there is no such dead letter")
    failing(run("dead-letters", "list", *place, "--from", "latest"), "latest")
    failing(run("dead-letters", "list", *place[:2]), "'g' (6)")
    failing(run("dead-letters", "list", "--table", tmp_path / "typo", "--group", "g"), "or ingest first")


def test_show_has_each_byte_of_them(tables: Tables) -> None:
    found = rows(letters("show", tables, "--json"))
    assert [row["_sequence"] for row in found] == [5, 2, 9, 7, None]
    payloads = [bytes_from_json("payload", row) for row in found]
    assert payloads == [None, NASTY.encode(), NASTY.encode(), BINARY, None]
    assert tables.letters().to_arrow().column("payload").to_pylist() == payloads


@pytest.mark.slow
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
        '{"_stream": "orders", "_shard": 0, "_sequence": 5, "payload": "x", "payload_base64": "eA=="}',
        '{"_stream": "orders", "_shard": 0, "_sequence": 4, "payload": "again"}',
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_a_file_of_corrected_payloads_is_refused_with_the_number_of_the_line(tmp_path: Path, line: str) -> None:
    good = '{"_stream": "orders", "_shard": 0, "_sequence": 4, "payload_base64": "/w=="}'
    file = tmp_path / "corrected.ndjson"
    file.write_text(f"{good}\n")
    assert read_payloads(file) == {(ORDERS, 4): b"\xff"}
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(InvalidOptionError, match="line 2 of "):
        read_payloads(file)
