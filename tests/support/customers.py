"""A table of a database that clients change all the time, and what Debezium and a keyed table make of it."""

from __future__ import annotations

import datetime
import random
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extras
import pyarrow as pa
from deltalake import DeltaTable

from tests.support.polling import until
from tests.support.postgres import Postgres

SECONDS = 120.0
TABLE = "public.customers"
COLUMNS = (
    "id BIGINT, name STRING, notes STRING, balance DECIMAL(12,2), joined DATE, seen TIMESTAMP_NTZ, changed TIMESTAMP,"
    " active BOOLEAN, score DOUBLE, document STRING, photo BINARY, tags ARRAY<STRING>, code STRING"
)
ADDED = "level BIGINT"
EARLIEST = datetime.datetime.fromisoformat("2024-02-29T23:59:59.999999")
LARGE = 4000
"""A text of so many characters is logged only if it changes: 2,000 bytes of a row stay in its page."""
_CREATE = (
    "CREATE TABLE customers (id BIGINT PRIMARY KEY, name TEXT NOT NULL, notes TEXT, balance NUMERIC(12,2), joined DATE,"
    " seen TIMESTAMP, changed TIMESTAMPTZ, active BOOLEAN, score DOUBLE PRECISION, document JSONB, photo BYTEA,"
    " tags TEXT[], code UUID)",
    "ALTER TABLE customers ALTER COLUMN notes SET STORAGE EXTERNAL, ALTER COLUMN photo SET STORAGE EXTERNAL",
)
_NAMES = "id, name, notes, balance, joined, seen, changed, active, score, document, photo, tags, code"
_ROW = (
    "%(name)s, %(notes)s, %(balance)s, %(joined)s, %(at)s, %(at)s, %(active)s, %(score)s, %(document)s, %(photo)s,"
    " %(tags)s, %(code)s"
)
_INSERT = f"INSERT INTO customers ({_NAMES}) VALUES (%(id)s, {_ROW}) ON CONFLICT DO NOTHING"
_CHANGES = {
    _INSERT: 25,
    "UPDATE customers SET name = %(name)s, changed = %(at)s WHERE id = %(id)s": 25,
    "UPDATE customers SET notes = %(notes)s, balance = %(balance)s, photo = %(photo)s WHERE id = %(id)s": 12,
    "UPDATE customers SET name = %(name)s, active = NULL, notes = NULL WHERE id = %(id)s": 3,
    "DELETE FROM customers WHERE id = %(id)s": 20,
}
# The large values of the row are in the message only if they are written, or if the log has whole rows.
_NEW_KEY = (
    "UPDATE customers SET id = %(other)s{} WHERE id = %(id)s"
    " AND NOT EXISTS (SELECT 1 FROM customers WHERE id = %(other)s)"
)


class Customers:
    """The table in a database.

    Args:
        database: the server.
        has_whole_rows: the log has all values of each row before its change.
    """

    def __init__(self, database: Postgres, *, has_whole_rows: bool = False) -> None:
        self.database = database
        self._has_whole_rows = has_whole_rows
        self._has_level = False
        database.run(*_CREATE)
        if has_whole_rows:
            database.run("ALTER TABLE customers REPLICA IDENTITY FULL")

    def insert(self, count: int) -> None:
        """Some rows to begin with."""
        dice = random.Random(0)
        with closing(self.database.connection()) as connection, connection.cursor() as cursor:
            for number in range(count):
                cursor.execute(_INSERT, {**_values(dice, keys=1), "id": number})
            connection.commit()

    def add_column(self) -> None:
        """A column that the table has from now on, and that changes write."""
        self.database.run("ALTER TABLE customers ADD COLUMN level BIGINT")
        self._has_level = True

    def rows(self) -> dict[int, dict[str, Any]]:
        """``SELECT *``, by key."""
        with closing(self.database.connection()) as connection, connection.cursor() as cursor:
            cursor.execute("SET timezone = 'UTC'")
            psycopg2.extras.register_default_jsonb(cursor, loads=str)
            cursor.execute("SELECT * FROM customers")
            names = [column.name for column in cursor.description or ()]
            return _by_key(dict(zip(names, row)) for row in cursor.fetchall())

    def assert_equal(self, table: str | Path) -> None:
        """Assert that a keyed table has these rows, with equal values in all columns."""
        expected = self.rows()
        found = rows_in_table(table, list(next(iter(expected.values()))))
        differing = {
            (key, name): (found.get(key, {}).get(name), row[name])
            for key, row in expected.items()
            for name in row
            if found.get(key, {}).get(name) != row[name]
        }
        assert (differing, set(found) - set(expected)) == ({}, set())

    def until_sent(self) -> None:
        """Wait until the broker has all changes so far, of which Debezium then tells the server."""
        ((end,),) = self.database.rows("SELECT pg_current_wal_lsn()")
        # With a change, Debezium tells of the transaction before it.
        last = "INSERT INTO customers (id, name) VALUES (-1, '') ON CONFLICT (id) DO UPDATE SET name = 'again'"
        self.database.run(*[last] * 3)
        sent = f"SELECT 1 FROM pg_replication_slots WHERE confirmed_flush_lsn >= '{end}'"
        until(lambda: self.database.rows(sent), seconds=SECONDS, what="the changes being sent")

    @contextmanager
    def changing(self, *, keys: int, clients: int = 2, pause: float = 0.2) -> Iterator[None]:
        """Clients change random rows until the block ends, each in transactions of some changes, of which some fail."""
        is_over, failures = threading.Event(), list[BaseException]()

        def client(seed: int) -> None:
            dice = random.Random(seed)
            try:
                with closing(self.database.connection()) as connection, connection.cursor() as cursor:
                    while not is_over.wait(pause * dice.random() * 2):
                        self._transaction(connection, cursor, dice, keys)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert not failures, failures

    def _transaction(self, connection: Any, cursor: Any, dice: random.Random, keys: int) -> None:
        try:
            for _ in range(dice.choice((1, 1, 1, 2, 5))):
                cursor.execute(self._change(dice), _values(dice, keys))
        except (psycopg2.errors.DeadlockDetected, psycopg2.errors.UniqueViolation):
            connection.rollback()
            return
        if dice.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()

    def _change(self, dice: random.Random) -> str:
        written = "" if self._has_whole_rows else ", notes = %(notes)s, photo = %(photo)s"
        known = {**_CHANGES, _NEW_KEY.format(written): 15}
        if self._has_level:
            known["UPDATE customers SET level = %(level)s WHERE id = %(id)s"] = 15
        return dice.choices(list(known), list(known.values()))[0]


def rows_in_table(table: str | Path, names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The rows of a keyed table, by key, with the columns of the database."""
    found = DeltaTable(str(table))
    has_deleted = "_deleted" in {field.name for field in found.schema().fields}
    return _by_key(pa.table(found.scan(list(names), "NOT _deleted" if has_deleted else None)).to_pylist())


def _by_key(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows by their keys, with values as Python has them in both places."""
    found = [{name: _plain(value) for name, value in row.items()} for row in rows]
    by_key = {row["id"]: row for row in found}
    assert len(by_key) == len(found), "a key is there twice"
    return by_key


def _plain(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.timezone.utc)
    return value


def _values(dice: random.Random, keys: int) -> dict[str, Any]:
    at = EARLIEST + datetime.timedelta(microseconds=dice.randrange(10**13))
    word = "".join(dice.choices("abcdeé'\\\"\n{}€😀", k=12))
    return {
        "id": dice.randrange(keys),
        "other": dice.randrange(keys),
        "name": word,
        "notes": dice.choice((word, word * (LARGE // len(word)), None)),
        "balance": None if dice.random() < 0.1 else dice.randrange(-(10**9), 10**9) / 100,
        "joined": at.date(),
        "at": at,
        "active": dice.choice((True, False, None)),
        "score": dice.choice((dice.random(), -0.0, 1e300, None)),
        "document": dice.choice(('{"a": [1, null, {"b": 1.50}]}', "[]", None)),
        "photo": dice.choice((dice.randbytes(9), dice.randbytes(LARGE), None)),
        "tags": dice.choice(([], ["a", None, "b c"], None)),
        "code": str(uuid.UUID(int=dice.getrandbits(128))),
        "level": dice.randrange(10**6),
    }
