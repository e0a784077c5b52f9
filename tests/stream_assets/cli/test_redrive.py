"""The command dead-letters redrive: what it says beforehand is what it does, and what is listed is what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.command_line import failing, printed, run
from tests.support.streams import sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
STRICT = ("--decode", "json", "--schema", "id BIGINT, user STRING, amount BIGINT NOT NULL")
TODAY = ("--decode", "json", "--schema", "id BIGINT, user STRING, amount BIGINT")
BROKEN = frozenset({4, 11})


def test_redrive_says_what_it_would_do_then_does_it(spark: SparkSession, folder: Path) -> None:
    place = ("--source", write_stream(folder / "orders.ss", 20, malformed=BROKEN), "--table", folder / "t")

    def rows(command: str, *more: str) -> list[dict[str, Any]]:
        return printed(*command.split(), *place, "--group", "g", *more)

    def listed(*more: str) -> dict[str, tuple[int, ...]]:
        found = rows("dead-letters list", *more)
        return {row["reason"]: tuple(row[n] for n in ("dead letters", "replaced") if n in row) for row in found}

    failing(run("dead-letters", "redrive", *place, "--group", "g", "--from", "latest", *TODAY), "reads no dead letter")
    rows("ingest", *STRICT)
    assert not sequences_in_table(folder / "t")
    missing, broken = "field '…' is missing, but it is NOT NULL", "not a JSON object"
    assert listed() == {missing: (18,), broken: (2,)}
    names = ("result", "dead letters", "reason", "example")
    wanted = [
        dict(zip(names, ("becomes a row", 18, None, None))),
        dict(zip(names, ("stays a dead letter", 2, "not a JSON object", "orders/0=3"))),
    ]
    assert rows("dead-letters redrive", *TODAY, "--dry-run") == wanted
    assert not sequences_in_table(folder / "t")
    assert rows("dead-letters redrive", *TODAY, "--until", "orders/0=2,orders/1=1") == [
        {**wanted[0], "dead letters": 1}
    ]
    assert listed() == {missing: (17,), broken: (2,)}
    assert rows("dead-letters redrive", *TODAY)[0]["dead letters"] == 17
    assert listed() == {broken: (2,)}
    assert listed("--all") == {missing: (0, 18), broken: (2, 0)}
    assert [row["_sequence"] for row in rows("dead-letters show", "orders/0=3", "orders/0=4")] == [3]
    found = sequences_in_table(folder / "t")
    assert (len(found), sum(found.values())) == (18, 18)
    assert [row["missing"] + row["duplicated"] + row["unknown"] for row in rows("verify")] == [0, 0]
    assert rows("dead-letters redrive", *TODAY) == wanted[1:]
