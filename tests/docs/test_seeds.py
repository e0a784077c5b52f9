"""The map check: in docs/coming-from.md every name and every test exists, and no function of a seed is missing.

It says that the map is whole, and nothing about what the code does: never count these tests as proof of a function.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest

from tests.docs.seed_statements import EVERY_STATEMENT, STATEMENTS
from tests.support.documents import resolve
from tests.support.settings import ROOT

LEFT_OUT = "Statements left out"
COLUMNS = ["Seed function", "Here", "Proved by", "Note"]
NOTHING = "–"

# The functions of the seeds: methods, properties, events, options and what their documentation promises beside them.
FUNCTIONS = {
    "SeaStreamer's Consumer": (
        "Consumer",
        "ConsumerOptions",
        "ConsumerMode",
        "ConsumerMode::RealTime",
        "ConsumerMode::Resumable",
        "ConsumerMode::Resumable, group id of the host",
        "ConsumerMode::Resumable, consumer id on Redis",
        "ConsumerMode::Resumable on Stdio and File",
        "ConsumerMode::LoadBalanced",
        "ConsumerGroup",
        "ConsumerGroup on Kafka",
        "ConsumerGroup on Redis",
        "ConsumerGroup on File",
        "ConsumerGroup on Stdio",
        "ack",
        "commit",
        "AutoCommit::Immediate",
        "AutoCommit::Delayed",
        "AutoCommit::Rolling",
        "AutoCommit::Disabled",
        "auto claim options",
        "next",
        "next from multiple threads",
        "stream",
        "stream, nothing else meanwhile",
        "assign",
        "assign, of a stream that was not subscribed",
        "assign, from the next seek or rewind on",
        "unassign",
        "ConsumerNotAssigned",
        "rewind",
        "rewind on Kafka",
        "rewind on Redis",
        "rewind on File",
        "rewind on Stdio",
        "seek",
        "seek on Kafka",
        "seek on Redis",
        "seek on File",
        "seek on Stdio",
        "AutoOffsetReset on Kafka",
        "AutoStreamReset on Redis",
        "AutoStreamReset on File",
        "AutoStreamReset on Stdio",
        "one file handle for consumers at the end",
    ),
    "Faust's Consumer": (
        "Consumer",
        "Consumer(transport)",
        "Consumer(callback)",
        "Consumer(on_partitions_revoked)",
        "Consumer(on_partitions_assigned)",
        "Consumer(commit_interval)",
        "Consumer(commit_livelock_soft_timeout)",
        "Consumer(loop)",
        "logger",
        "consumer_stopped_errors",
        "flow_active",
        "transport",
        "app",
        "in_transaction",
        "scheduler",
        "commit_interval",
        "randomly_assigned_topics",
        "can_resume_flow",
        "suspend_flow",
        "not_waiting_next_records",
        "transactions",
        "on_init_dependencies",
        "on_restart",
        "on_buffer_full",
        "on_buffer_drop",
        "perform_seek",
        "seek_to_committed",
        "seek",
        "stop_flow",
        "resume_flow",
        "wait_for_stopped_flow",
        "pause_partitions",
        "resume_partitions",
        "on_partitions_revoked",
        "on_partitions_assigned",
        "getmany",
        "track_message",
        "ack",
        "wait_empty",
        "commit_and_end_transactions",
        "on_stop",
        "verify_all_partitions_active",
        "verify_event_path",
        "verify_recovery_event_path",
        "commit",
        "maybe_wait_for_commit_to_finish",
        "force_commit",
        "on_task_error",
        "close",
        "unacked",
        "log",
        "diag",
        "async_exit_stack",
        "exit_stack",
        "reference counts of messages",
        "commits at an interval",
        "_new_offset",
        "Fetcher",
        "Fetcher(app)",
        "Fetcher.logger",
        "Fetcher.app",
        "Fetcher.on_stop",
        "Fetcher.log",
        "Fetcher.diag",
        "Fetcher.async_exit_stack",
        "Fetcher.exit_stack",
    ),
    "coredis' stream consumers": (
        "client.xconsumer",
        "Consumer",
        "Consumer(client)",
        "Consumer(client), a cluster",
        "Consumer(streams)",
        "Consumer, from the latest entry on",
        "Consumer(stream_parameters)",
        "Consumer(timeout)",
        "Consumer(buffer_size)",
        "Consumer.get_entry",
        "Consumer.__aiter__",
        "Consumer.__anext__",
        "Consumer, an infinite iterator",
        "Consumer.__aenter__",
        "Consumer.__aexit__",
        "Consumer.add_stream",
        "entry.identifier",
        "GroupConsumer",
        "GroupConsumer(group)",
        "GroupConsumer(consumer)",
        "GroupConsumer(auto_create)",
        "GroupConsumer(auto_acknowledge)",
        "GroupConsumer(start_from_backlog)",
        "GroupConsumer(stream_parameters)",
        "GroupConsumer.add_stream",
        "GroupConsumer.group",
        "GroupConsumer, two members in turn",
        "backlogs of other consumers",
        "client.xack",
        "client.xpending",
        "StreamConsumerInitializationError",
        "StreamDuplicateConsumerGroupError",
    ),
    "The StreamBackend trait": (
        "StreamBackend",
        "Send + Sync",
        "create_group",
        "publish",
        "reclaim_idle",
        "read_new",
        "ack",
        "ack_many",
        "ack_many, Ok says that the server has it",
        "ack_many, Err goes to everybody who waits",
        "forget_consumer",
        "forget_consumer, called on shutdown",
        "Message",
        "FetchedEntry",
        "EventBusError",
        "StreamBus",
    ),
}

Row = list[str]


class Table(NamedTuple):
    """A table of docs/coming-from.md."""

    columns: Row
    rows: list[Row]


def cells(line: str) -> Row:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(text: str) -> dict[str, Table]:
    """The tables, by their headings."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    found = {}
    for heading, body in zip(parts[::2], parts[1::2]):
        lines = [line for line in body.splitlines() if line.startswith("|")]
        found[heading] = Table(cells(lines[0]), [cells(line) for line in lines[2:]])
    return found


def quoted(cell: str) -> list[str]:
    """The names in back quotes, which are all that the cell holds."""
    names = re.findall(r"`([^`]+)`", cell)
    assert ", ".join(f"`{name}`" for name in names) == cell, f"not a list of names: {cell!r}"
    return names


@cache
def named_tests(path: str) -> frozenset[str]:
    """The tests of a file: functions, and Class::method."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def check_test(name: str) -> None:
    """Raises unless there is such a test; parameters in brackets are left out of it."""
    path, _, test = name.partition("::")
    assert path.startswith(("tests/", "stream_consumers/testing/")), f"no path of a test: {name}"
    assert (ROOT / path).is_file(), f"no file of tests: {path}"
    assert test.partition("[")[0] in named_tests(path), f"no such test: {name}"


def check_row(row: Row) -> None:
    function, here, proved_by, note = row
    assert all((function, here, proved_by)), f"an empty cell: {row}"
    if here == NOTHING:
        assert note, f"{function} is nowhere, without a reason"
        return
    for name in quoted(here):
        resolve(name)
    for name in quoted(proved_by):
        check_test(name)


TABLES = read_tables((ROOT / "docs" / "coming-from.md").read_text())
ROWS = [(heading, row) for heading, table in TABLES.items() if heading in FUNCTIONS for row in table.rows]


def test_there_is_a_table_for_each_seed() -> None:
    assert [*FUNCTIONS, LEFT_OUT] == list(TABLES)
    assert all(TABLES[heading].columns == COLUMNS for heading in FUNCTIONS)


@pytest.mark.parametrize("heading", FUNCTIONS)
def test_every_function_has_a_row(heading: str) -> None:
    assert [row[0] for row in TABLES[heading].rows] == list(FUNCTIONS[heading])


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{heading}: {row[0]}" for heading, row in ROWS])
def test_a_row_is_true(row: Row) -> None:
    check_row(row)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_has_tests(name: str) -> None:
    says, tests = STATEMENTS[name]
    assert says
    assert tests
    for test in tests:
        check_test(test)


def test_every_statement_has_tests_or_a_reason() -> None:
    table = TABLES[LEFT_OUT]
    assert table.columns == ["Statement", "Reason"]
    assert all(reason for _, reason in table.rows)
    wholly = {name for name, _ in table.rows if name in EVERY_STATEMENT}
    partly = {name for name, _ in table.rows} - wholly
    # "Faust 20, the generation": a part of a statement, of which the rest has tests.
    assert {name for name in partly if not name.startswith(tuple(f"{known}, " for known in STATEMENTS))} == set()
    assert wholly & set(STATEMENTS) == set()
    assert wholly | set(STATEMENTS) == set(EVERY_STATEMENT)


GOOD = [
    "next",
    "`stream_consumers.consumer.Consumer.next`",
    "`tests/docs/test_seeds.py::test_a_row_is_true[x]`",
    "",
]


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        (0, "", "empty cell"),
        (1, "", "empty cell"),
        (2, "", "empty cell"),
        (1, NOTHING, "without a reason"),
        (1, "consumer.Consumer.next", "not a list"),
        (1, "`stream_consumers.consumer.Consumer.first`", "first"),
        (1, "`stream_consumers.consumers.Consumer`", "consumers"),
        (1, "`stream_consumers.options.RedisGroupOptions.batch`", "batch"),
        (1, "`stream_consumers.create.create_consumer(grouping)`", "no option grouping"),
        (2, "`tests/docs/test_seeds.py`", "no such test"),
        (2, "`tests/docs/test_seeds.py::test_nothing`", "no such test"),
        (2, "`tests/docs/test_seeds.py::cells`", "no such test"),
        (2, "`tests/consumers/test_seed.py::test_nothing`", "no file"),
        (2, "`tests/spark_jobs/ledger/test_ledger.py::test_with_our_bid`", "no such test"),
    ],
)
def test_a_row_that_is_wrong_is_found(column: int, cell: str, said: str) -> None:
    check_row(GOOD)
    wrong = [*GOOD[:column], cell, *GOOD[column + 1 :]]
    with pytest.raises((AssertionError, AttributeError), match=said):
        check_row(wrong)


def test_names_that_are_fields_options_and_methods_of_classes_are_found() -> None:
    assert resolve("stream_consumers.options.AutoCommit.ROLLING").value == "rolling"  # type: ignore[attr-defined]
    resolve("stream_consumers.create.StreamSource.client")
    resolve("stream_consumers.create.create_consumer(group)")
    check_test("tests/spark_jobs/ledger/test_ledger.py::TestWritten::test_with_our_bid")
