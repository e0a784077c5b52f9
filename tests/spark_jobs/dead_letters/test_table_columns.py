"""The columns of dead letters are the same where messages are read, in their table, and in its documentation."""

from __future__ import annotations

import re

from spark_jobs.dead_letters.table import COPIED_COLUMNS, DEAD_LETTER_SCHEMA
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS
from tests.support.settings import ROOT

NOT_STORED = {"_undeclared"}


def test_every_column_that_is_read_for_dead_letters_has_its_column_in_the_table() -> None:
    read = [name.removeprefix("_") for name in DEAD_LETTER_COLUMNS if name not in NOT_STORED]
    assert (*STREAM_COLUMNS, *read) == COPIED_COLUMNS


def test_the_documentation_has_the_columns_of_the_table() -> None:
    page = (ROOT / "docs" / "bad-messages.md").read_text()
    _, found = page.split("| column of the dead-letter table | meaning |\n|---|---|\n")
    first_cells = [line.split("|")[1] for line in found.partition("\n\n")[0].splitlines()]
    documented = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(documented) == sorted(DEAD_LETTER_SCHEMA.names)
