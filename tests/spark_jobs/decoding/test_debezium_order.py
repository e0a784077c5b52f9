"""The place of a change in the log of its database: the order of the text is that of the log."""

import pytest

from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.debezium_order import source_order
from tests.support.arrow_columns import decode
from tests.support.debezium_messages import MYSQL, ORACLE, POSTGRES, SQLSERVER, envelope, heartbeat


def postgres(lsn, sequence=None):
    return {**POSTGRES, "lsn": lsn, "sequence": sequence}


LATER = [
    # A snapshot, then transactions in the order of their commits, whose changes overlap.
    (postgres(100, '[null,"100"]'), postgres(120, '["100","120"]')),
    (postgres(120, '["100","120"]'), postgres(130, '["100","130"]')),
    (postgres(130, '["100","130"]'), postgres(90, '["131","90"]')),
    (postgres(None, '["131","140"]'), postgres(150, '["131","150"]')),
    (postgres(9), postgres(10)),
    (postgres(2**63 - 1), postgres(-(2**63))),
    ({**MYSQL, "pos": 484}, {**MYSQL, "pos": 1000}),
    ({**MYSQL, "row": 9}, {**MYSQL, "row": 10}),
    ({**MYSQL, "file": "mysql-bin.000009", "pos": 10**9}, {**MYSQL, "file": "mysql-bin.000010", "pos": 4}),
    ({**MYSQL, "file": "mysql-bin.999999"}, {**MYSQL, "file": "mysql-bin.1000000"}),
    ({**MYSQL, "connector": "mariadb"}, {**MYSQL, "connector": "mariadb", "pos": 485}),
    (
        {**SQLSERVER, "change_lsn": None, "event_serial_no": None},
        {**SQLSERVER, "change_lsn": "00000027:00000758:0003"},
    ),
    ({**SQLSERVER, "change_lsn": "00000027:00000758:0009"}, {**SQLSERVER, "change_lsn": "00000027:00000758:000a"}),
    ({**SQLSERVER, "event_serial_no": 2}, {**SQLSERVER, "event_serial_no": 10}),
    (
        {**SQLSERVER, "commit_lsn": "00000027:00000758:0005", "change_lsn": "00000027:00000758:0003"},
        {**SQLSERVER, "commit_lsn": "00000027:00000760:0001", "change_lsn": "00000027:00000757:0001"},
    ),
    ({**ORACLE, "commit_scn": "99"}, {**ORACLE, "commit_scn": "100"}),
    ({**ORACLE, "scn": "2122183"}, {**ORACLE, "scn": "2122184"}),
    ({**ORACLE, "commit_scn": None, "scn": "2122184"}, ORACLE),
    ({**ORACLE, "ssn": 9}, {**ORACLE, "ssn": 10}),
    ({**ORACLE, "rs_id": "001234.00012345.0124"}, {**ORACLE, "rs_id": "001234.00012346.0001"}),
    ({**ORACLE, "lcr_position": "0000aa"}, {**ORACLE, "lcr_position": "0000AB"}),
]


@pytest.mark.parametrize(("first", "second"), LATER)
def test_the_order_of_the_text_is_that_of_the_log(first, second):
    assert source_order(first) < source_order(second)
    messages = [envelope("c", after={"id": 7}, source=first), envelope("t", source=second), heartbeat()]
    rows, errors = decode(Debezium("id BIGINT", source_order=True), messages)
    assert errors == [None] * 3
    assert [row["_source_order"] for row in rows] == [source_order(first), source_order(second), None]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, "source"),
        ([], "source"),
        ({}, "source.connector"),
        ({"connector": "mongodb"}, "source.connector"),
        ({"connector": ["mysql"]}, "source.connector"),
        (postgres(None), "source.lsn"),
        (postgres("24023128"), "source.lsn"),
        (postgres(1.5), "source.lsn"),
        (postgres(True), "source.lsn"),
        (postgres(10**30), "source.lsn"),
        (postgres(7, "[7,8]"), "source.sequence"),
        (postgres(7, ["7", "8"]), "source.sequence"),
        ({**MYSQL, "file": None}, "source.file"),
        ({**MYSQL, "file": "mysql-bin"}, "source.file"),
        ({**MYSQL, "pos": -1}, "source.pos"),
        ({**MYSQL, "row": None}, "source.row"),
        ({**SQLSERVER, "commit_lsn": None}, "source.commit_lsn"),
        ({**SQLSERVER, "change_lsn": "27:758:3"}, "source.change_lsn"),
        ({**ORACLE, "scn": 7}, "source.scn"),
        ({**ORACLE, "commit_scn": "7,8"}, "source.commit_scn"),
        ({**ORACLE, "rs_id": "/" * 9}, "source.rs_id"),
    ],
    ids=lambda part: str(part)[-40:],
)
def test_a_change_without_a_place_is_a_dead_letter(source, name):
    """Only if the place is asked for."""
    message = envelope("c", after={"id": 7}, source=source)
    rows, errors = decode(Debezium("id BIGINT", source_order=True), [message])
    assert rows[0]["id"] is None
    assert f"'{name}'" in errors[0]
    assert decode(Debezium("id BIGINT"), [message])[1] == [None]
