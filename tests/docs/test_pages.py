"""The documentation is true: its examples run, its commands, settings and names are there.

The Python blocks of a page are one program: they run in order, in an empty folder. A ``text`` block behind one of them
is what it prints. Addresses like ``localhost:9092`` become those of the test servers.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest
import redis
import yaml
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark_jobs.lag import measure
from spark_jobs.reading.source import STREAM_DDL
from stream_assets import RedriveConfig, StreamAsset, StreamConfig
from stream_assets.cli.main import main
from stream_consumers import StreamUrl, create_producer
from tests.support.dg_projects import DgProject
from tests.support.settings import ROOT
from tests.support.topics import delete_topics, topics

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, with the line where it begins and the word behind its fence."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"])
        for found in FENCE.finditer(text)
    ]


# Its DAG needs an environment with Airflow: tests/examples/test_airflow.py loads it.
AIRFLOW = ROOT / "docs" / "airflow.md"
PROGRAMS = [page for page in PAGES if page != AIRFLOW and any(block.language == "python" for block in blocks(page))]
README = ROOT / "README.md"
# Their programs write tables.
WITH_SPARK = [ROOT / "docs" / "test-your-assets.md"]
DECODE = ROOT / "docs" / "decode-messages.md"
BAD_MESSAGES = ROOT / "docs" / "bad-messages.md"
BROKERS = {"localhost:9092": "kafka", "localhost:6379": "redis_address"}
# A dotted name that is no name of Python.
ENTRY_POINT_GROUP = "stream_consumers.backends"
CODE = re.compile(r"(stream_consumers|spark_jobs|sensors|stream_assets)(\.\w+)+(\(\w+\))?\Z")


def in_project(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(language: str) -> list[Any]:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    return [pytest.param(block, id=block.place) for block in found]


def run(page: Path, addresses: dict[str, str]) -> dict[str, Any]:
    """Run the Python of a page, compare what it prints, and return what it defined."""
    namespace: dict[str, Any] = {"__name__": "example"}
    found = blocks(page)
    for block, behind in zip(found, [*found[1:], None]):
        if block.language != "python":
            continue
        text = block.text
        for written, real in addresses.items():
            text = text.replace(written, real)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + text, str(page), "exec"), namespace)  # the line numbers of the page
        if behind is not None and behind.language == "text":
            assert printed.getvalue() == behind.text, f"what {block.place} prints"
    return namespace


def assets(namespace: dict[str, Any]) -> list[StreamAsset]:
    return [value for value in namespace.values() if isinstance(value, StreamAsset)]


# -- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def addresses(page: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The servers for the addresses that a page names; what it makes there is gone after the test."""
    text = page.read_text()
    made = {written: str(request.getfixturevalue(name)) for written, name in BROKERS.items() if written in text}
    broker, server = made.get("localhost:9092"), made.get("localhost:6379")
    before = topics(broker) if broker else set()
    if server:
        forget_keys(server)
    yield made
    if broker:
        delete_topics(broker, list(topics(broker) - before))
    if server:
        forget_keys(server)


def forget_keys(server: str) -> None:
    host, _, port = server.partition(":")
    with redis.Redis(host, int(port)) as client:
        client.flushdb()


@pytest.mark.parametrize("page", [page for page in PROGRAMS if page not in WITH_SPARK], ids=in_project)
def test_the_python_of_a_page_runs(
    page: Path, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = run(page, addresses)
    for asset in assets(namespace):
        # The servers of the tests have no secrets: with them, an asset is declared, and that is all.
        if not {"password", "sasl.password", "oauth_token_provider"} & asset.declared.stream.client.keys():
            with create_producer(asset.declared.source, shards=1) as producer:
                producer.send(b'{"id": 1, "amount": 5}')
            assert measure(asset.declared.stream, asset.declared.ingestion).total >= 1
    if defs := namespace.get("defs"):
        dg.Definitions.validate_loadable(defs)
        assert {asset.key for asset in assets(namespace)} <= {spec.key for spec in defs.resolve_all_asset_specs()}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("page", [README], ids=in_project)
def test_the_readme_from_the_first_message_to_the_verdict(
    page: Path, addresses: dict[str, str], spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ingest = run(page, addresses)["defs"].resolve_job_def("ingest_orders")
    ran = []
    (text,) = (block.text for block in blocks(page) if "dg dev" in block.text)
    for written, real in addresses.items():
        text = text.replace(written, real)
    for words in commands(text):
        if words[:2] == ["dg", "dev"]:
            assert ingest.execute_in_process().success
        elif words[0] == "stream-assets":
            result = CliRunner().invoke(main, words[1:])
            assert result.exit_code == 0, result.output
        ran.append(words[:2])
    assert ran[-4:] == [
        ["stream-assets", "produce"],
        ["dg", "dev"],
        ["stream-assets", "lag"],
        ["stream-assets", "verify"],
    ]


@pytest.mark.slow
@pytest.mark.spark
def test_csv_is_read_as_the_page_about_decoding_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = run(DECODE, {})["csv_readings"]
    good, broken = "cellar,7.5,2024-02-29T12:00:00Z", "cellar,cold,"
    columns = f"payload STRING, {STREAM_DDL}"
    batch = spark.createDataFrame([(good, "r", 0, 0, None), (broken, "r", 0, 1, None)], columns)
    rows = read(batch).orderBy("_sequence")
    found = [tuple(row) for row in rows.selectExpr("sensor", "celsius", "unix_seconds(at)", "broken").collect()]
    assert found[0] == ("cellar", 7.5, 1709208000, None)
    assert found[1][3] == broken
    assert {"_stream", "_shard", "_sequence", "_timestamp"} <= {*rows.columns}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("page", WITH_SPARK, ids=in_project)
def test_a_page_that_writes_tables_runs(
    page: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, {})


@pytest.mark.slow
@pytest.mark.spark
def test_messages_become_what_the_page_about_bad_messages_says(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = re.findall(r"^\| `(.+)` \| (?:(a row)|a dead letter: `?(.+?)`?) \|$", BAD_MESSAGES.read_text(), re.MULTILINE)
    namespace = run(BAD_MESSAGES, {})
    with create_producer("file://orders.ss/orders") as producer:
        for message, _, _ in said:
            producer.send(message.encode())
    assert namespace["defs"].resolve_job_def("ingest_orders").execute_in_process().success
    letters = namespace["as_pandas"]().sort_values("_sequence")
    expected = [(message.encode(), reason) for message, row, reason in said if not row]
    assert len(expected) == 4
    for letter, (payload, reason) in zip(letters.itertuples(), expected, strict=True):
        assert letter.payload == payload
        assert letter.error.startswith(reason)
    assert sum(row.letters for row in namespace["as_rows"](spark)) == len(expected)


# -- options ----------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block of shell lines, without comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def check_commands(text: str) -> None:
    """Raises unless each command of ours is one that there is, with options that it has."""
    for line in commands(text):
        words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, line))
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no make {words[1]}"
        if words[0] != "stream-assets":
            continue
        with click.Context(main, info_name=words[0]) as context:
            name, command, options = main.resolve_command(context, words[1:])
            if isinstance(command, click.Group):
                name, command, options = command.resolve_command(context, options)
            assert command is not None
            with command.make_context(name, options, parent=context):
                for word in words:
                    if re.match(r"(file|kafka|redis|rediss|stdio)://", word):
                        StreamUrl.parse(word).required_streams()


def helps(group: click.Group) -> Iterator[str]:
    """The help of each command of a group, and of the groups in it."""
    for command in group.commands.values():
        yield command.help or ""
        if isinstance(command, click.Group):
            yield from helps(command)


@pytest.mark.parametrize("block", blocks_of("sh"))
def test_the_shell_lines_of_a_page_are_accepted(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_commands(block.text)


def test_the_examples_in_the_help_of_a_command_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for text in helps(main):
        _, heading, examples = text.partition("Example")
        assert heading, f"no example in: {text}"
        check_commands(examples.partition("\n")[2])


@pytest.mark.parametrize("block", blocks_of("yaml"))
def test_the_settings_of_a_page_are_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = yaml.safe_load(block.text)
    if "type" in document:
        project = DgProject.make(tmp_path)
        monkeypatch.syspath_prepend(project.source)
        project.write("defs/shop/defs.yaml", block.text)
        project.write("defs/shop/transforms.py", "".join(b.text for b in blocks(block.page) if b.language == "python"))
        dg.Definitions.validate_loadable(project.load())
        return
    if "ops" not in document:
        (tmp_path / "dagster.yaml").write_text(block.text)
        with dg.DagsterInstance.from_config(str(tmp_path)):
            return
    ((op, settings),) = document["ops"].items()
    is_redrive = op.endswith("_dead_letters")
    job = op.removesuffix("_partition") if op.endswith("_partition") else f"ingest_{op}"
    job = op.removesuffix("_dead_letters") if is_redrive else job
    assert dg.validate_run_config(run(block.page, {})["defs"].resolve_job_def(job), document)
    if is_redrive:
        RedriveConfig(**settings["config"]).redrive().span()
        return
    config = StreamConfig(**settings["config"])
    config.check()
    config.replay()


def resolve(name: str) -> None:
    """Raise unless a dotted name is one that there is; ``name(option)`` must have the option."""
    path, _, option = name.removesuffix(")").partition("(")
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for index, part in enumerate(parts[length:], start=length + 1):
            is_field = is_dataclass(found) and part in {field.name for field in fields(found)}
            if is_field and index == len(parts):
                return
            found = getattr(found, part)
        assert not option or (callable(found) and option in inspect.signature(found).parameters), name
        return
    raise AssertionError(f"no module of {name}")


def test_the_tests_of_the_invariants_are_there() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", (ROOT / "DESIGN.md").read_text())
    assert len(named) >= 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / "tests" / "spark_jobs" / path).read_text(), f"no {path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=in_project)
def test_the_names_on_a_page_are_there(page: Path) -> None:
    for name in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text())):
        if CODE.match(name) and name != ENTRY_POINT_GROUP:
            resolve(name)
