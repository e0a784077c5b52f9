"""Keys and headers beside the payload, as they are or decoded."""

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Raw, Text, header_columns, key_columns
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading import source
from spark_jobs.reading.blocks import decode_kept
from spark_jobs.reading.source import kept_fields
from spark_jobs.reading.spark_types import arrow_schema
from stream_consumers.batches import MESSAGE_SCHEMA
from stream_consumers.errors import InvalidOptionError
from tests.support.arrow_columns import spark_columns
from tests.support.avro_schemas import encoded

ORDER = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch):
    """The parser of DDL is that of a session."""
    for name in ("declared_columns", "struct_type"):
        monkeypatch.setattr(source, name, spark_columns)


def messages(*rows):
    """Rows of (key, headers)."""
    columns = zip(*(("s", 0, n, 1, key, b"x", headers, None, None) for n, (key, headers) in enumerate(rows)))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MESSAGE_SCHEMA)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def kept(decoder, *rows):
    fields = kept_fields(decoder)
    schema = arrow_schema(StructType(fields))
    columns, errors = decode_kept(messages(*rows), decoder, schema)
    found = pa.RecordBatch.from_arrays(columns, schema=schema) if columns else None
    if found is not None:
        found.validate(full=True)
    return (found.to_pylist() if found is not None else []), errors.to_pylist()


def header(name, value):
    return {"name": name, "value": value}


@pytest.mark.parametrize(
    ("key", "name", "kind"),
    [
        ("user", "user", "binary"),
        (Raw(), "key", "binary"),
        (Text(), "key", "string"),
        (Text("user"), "user", "string"),
        (Avro('"long"'), "key", "bigint"),
        (Avro('"long"', column="user"), "user", "bigint"),
        (Avro(ORDER), "key", "struct<id:bigint>"),
        (Avro(ORDER, column="user"), "user", "struct<id:bigint>"),
        (Json("id BIGINT"), "key", "struct<id:bigint>"),
    ],
)
def test_the_column_of_a_key(key, name, kind):
    (field,) = kept_fields(Text(key=key))
    assert (field.name, field.dataType.simpleString()) == (name, kind)
    assert key_columns(Text(key=key)) == (name,)


def test_a_key_that_is_decoded():
    good, bad = encoded(ORDER, {"id": 7}), b"\x80"
    assert kept(Text(key=Avro(ORDER)), (good, None), (bad, None), (None, None)) == (
        [{"key": {"id": 7}}, {"key": {"id": None}}, {"key": None}],
        [None, "the key: a number is cut off, or a union has no such branch", None],
    )
    assert kept(Text(key=Text("user")), (b"ada", None), (b"\xff", None), (None, None)) == (
        [{"user": "ada"}, {"user": None}, {"user": None}],
        [None, "the key: not UTF-8: invalid start byte at byte 0", None],
    )


def test_a_message_without_a_key_lacks_no_field_of_it(monkeypatch):
    columns = StructType([StructField("id", LongType(), nullable=False)])
    monkeypatch.setattr(source, "declared_columns", lambda ddl: columns)
    found, errors = kept(Text(key=Json("id BIGINT NOT NULL")), (b'{"id":7}', None), (None, None))
    assert (found, errors) == ([{"key": {"id": 7}}, {"key": None}], [None, None])


def test_headers_by_their_names():
    rows = [
        (None, [header("a", b"1"), header("b", b"2"), header("a", b"3")]),
        (None, None),
        (None, []),
        (None, [header("b", None), header("c", b"\xff")]),
        (None, [header("a", b"\xff"), header("a", b"x")]),
        (None, [header("a", b"x"), header("a", b"\xffx"), header("b", b"y")]),
        (None, [header("a", b"x"), header("a", None)]),
    ]
    decoder = Text(headers={"first": "a", "second": "b"})
    assert header_columns(decoder) == ("first", "second")
    found, errors = kept(decoder, *rows)
    assert [tuple(row.values()) for row in found] == [
        ("3", "2"),
        (None, None),
        (None, None),
        (None, None),
        ("x", None),
        (None, "y"),
        (None, None),
    ]
    assert errors == [None] * 5 + ["the header 'a' is not UTF-8: invalid start byte at byte 0", None]
    assert kept(Text(headers={"first": "a"}), *rows[:5])[1] == [None] * 5


def test_nothing_is_kept():
    assert kept(Text(), (b"k", [header("a", b"1")])) == ([], [None])
    assert kept(Raw(key="k", headers="h"), (b"k", [header("a", b"1")])) == (
        [{"k": b"k", "h": [{"name": "a", "value": b"1"}]}],
        [None],
    )


@pytest.mark.parametrize(
    ("decoder", "why"),
    [
        (Text(key=Text), "is not a decoder"),
        (Text(key=7), "is not a decoder"),
        (Text(headers={"": "a"}), "the column of a header='' cannot be used"),
        (Text(headers={"a": 7}), "the name of a header=7 cannot be used"),
    ],
)
def test_what_names_nothing_is_refused(decoder, why):
    with pytest.raises(InvalidOptionError, match=why):
        kept_fields(decoder)
