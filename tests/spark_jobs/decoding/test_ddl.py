"""DDL is checked where a decoder is made, without a JVM."""

import pytest
from pyspark.sql import SparkSession

from spark_jobs.decoding.ddl import declared_types, first_duplicate
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.spark_types import declared_columns
from stream_consumers.errors import SchemaMismatchError

TAKEN = [
    *(
        "id BIGINT",
        "id: BIGINT",
        "id BIGINT NOT NULL COMMENT 'a, <b', user STRING",
        "a INT COMMENT \"x\" 'y'",
        "`` INT",
        "interval INT, `interval day` INT COMMENT 'an interval day'",
    ),
    *("a decimal, b DEC(5), c NUMERIC(5, 2), d DECIMAL(38,38)", "`a``b c` INT", "interval DATE", "a INTERVAL MONTH"),
    *("a ARRAY<ARRAY<INT>>", "a MAP<STRING, ARRAY<STRUCT<x: INT NOT NULL COMMENT 'x', y DOUBLE>>>", "struct<a: int>"),
    *("a STRUCT<>", "a struct<x INT>", "a VARIANT, b TIMESTAMP_NTZ, c TIMESTAMP_LTZ, d TIMESTAMP WITHOUT TIME ZONE"),
    *("a STRING COLLATE UTF8_LCASE", "a CHAR(3), b VARCHAR(10)", "a byte, b short, c long, d real, e integer, f void"),
    *("a -- x\n INT /* y */", "not INT, comment STRING, struct INT, array INT, 1a INT", "a INTERVAL DAY TO SECOND"),
    *("timestamp TIMESTAMP, date DATE", "a\tINT\n,\nb INT", "a BINARY, b BOOLEAN, c TINYINT, d SMALLINT, e FLOAT"),
]
REFUSED = [
    *[
        ("id BIGINTT", "'BIGINTT' at character 4"),
        ("id BIGINT,", "the end, at character 11,"),
        ("a", "at character 2,"),
    ],
    *[("a ARRAY<INT", "at character 12,"), ("a ARRAY<INT>>", "'>' at character 13"), ("a ARRAY", "at character 8,")],
    *[("a MAP<INT>", "'>' at character 10"), ("a STRUCT<x: INT,>", "'>' at character 17"), ("a INT(3)", "'(' at")],
    *[("a INT b INT", "'b' at character 7"), ("a INT DEFAULT 1", "'DEFAULT' at"), ("a INT;", "';' at character 6")],
    *[("a DECIMAL(39,0)", "'39' at character 11"), ("a DECIMAL(3,4)", "'3' at character 11"), ("$a INT", "'$' at")],
    *[("a DECIMAL(10 2)", "'2' at character 14"), ("a DECIMAL()", "')' at"), ("a `INT`", "'`INT`' at character 3")],
    *[("a STRUCT<b: STRUCT<c: STRIN>>", "'STRIN' at character 23"), ("a INT NOT", "at character 10,")],
    *[("a INT COMMENT x", "'x' at character 15"), ("a.b INT", "'.' at character 2"), ("a INT NULL", "'NULL' at")],
]


@pytest.mark.parametrize(("ddl", "place"), REFUSED)
def test_what_is_no_ddl_is_refused_where_the_decoder_is_made(ddl: str, place: str) -> None:
    with pytest.raises(SchemaMismatchError) as raised:
        Json(ddl)
    assert place in str(raised.value)
    assert repr(ddl) in str(raised.value)


def test_names_are_compared_as_java_does_and_no_character_becomes_two() -> None:
    assert first_duplicate(["user", "u\u017fer"]) == "u\u017fer"
    assert first_duplicate(["id", "\u0131d"]) == "\u0131d"
    assert first_duplicate(["strasse", "straße", "STRA\u1e9eE"]) == "STRA\u1e9eE"
    assert first_duplicate(["i", "i\u0307"]) is None
    # Delta compares names in lower case.
    assert first_duplicate(["\u0130", "i\u0307"]) == "i\u0307"


@pytest.mark.parametrize("ddl", [one for one in TAKEN if "INTERVAL" not in one])
def test_what_is_ddl_makes_a_decoder(ddl: str) -> None:
    assert Json(ddl).ddl() == ddl


@pytest.mark.spark
def test_spark_agrees(spark: SparkSession) -> None:
    for ddl in TAKEN:
        declared_types(ddl)
        assert declared_columns(ddl).fields, ddl
    for ddl, _ in REFUSED:
        with pytest.raises(SchemaMismatchError):
            declared_columns(ddl)
