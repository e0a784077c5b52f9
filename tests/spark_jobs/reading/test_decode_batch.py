"""BlockDecoder: every value stays with its own sequence."""

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.decoders import Raw, Text
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.blocks import BlockDecoder
from stream_consumers.batches import HEADERS_TYPE, MESSAGE_SCHEMA
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS, to_milliseconds
from tests.support.payloads import BAD, documents, payload
from tests.support.profiles import examples

STREAM = [
    pa.field("_stream", pa.string()),
    pa.field("_shard", pa.int64()),
    pa.field("_sequence", pa.int64()),
    pa.field("_timestamp", pa.timestamp("us", "UTC")),
    pa.field("_key", pa.binary()),
    pa.field("_payload", pa.binary()),
    pa.field("_headers", HEADERS_TYPE),
    pa.field("_error", pa.string()),
    pa.field("_offset", pa.int64()),
    pa.field("_is_message", pa.bool_()),
    pa.field("_undeclared", pa.string()),
]
WANTED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("nested", pa.struct([pa.field("a", pa.int32())])),
        pa.field("list", pa.list_(pa.struct([pa.field("price", pa.decimal128(10, 2))]))),
    ]
)


HEADERS = [{"name": "trace", "value": b"1"}, {"name": "trace", "value": None}]


def messages(rows, timestamp_ms=20):
    """Rows of (sequence, payload, error of the stream)."""
    columns = zip(*(("s", 0, number, timestamp_ms, b"key", data, HEADERS, error, 7) for number, data, error in rows))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MESSAGE_SCHEMA)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def decode(rows, decoder=None, wanted=WANTED, timestamp_ms=20):
    schema = pa.schema([*(field.with_nullable(True) for field in wanted), *STREAM])
    batch = BlockDecoder(decoder or Json("v BIGINT", mode="strict"), wanted, schema)(messages(rows, timestamp_ms))
    batch.validate(full=True)
    assert batch.schema == schema
    return batch.to_pylist()


@settings(deadline=None, max_examples=examples(100))
@given(documents, st.data())
def test_the_id_inside_is_the_sequence_beside(choices, data):
    lost = data.draw(st.lists(st.booleans(), min_size=len(choices), max_size=len(choices)), label="lost by the stream")
    rows = [
        (None if gone and number % 2 else number, payload(number, choice), "torn" if gone else None)
        for number, (choice, gone) in enumerate(zip(choices, lost))
    ]
    found = decode(rows)
    assert [row["_sequence"] for row in found] == [row[0] for row in rows]
    for row, choice, (sequence, content, error) in zip(found, choices, rows):
        if error or choice < 0:
            assert row["_error"] == error or (row["_error"] and not error)
            assert (row["_payload"], row["_key"]) == (content, b"key")
            assert all(row[name] is None for name in WANTED.names)
        else:
            assert row["id"] == sequence
            assert (row["_error"], row["_payload"], row["_key"]) == (None, None, None)


def test_many_rows_with_every_bad_payload_between_good_ones():
    rows = [(i, BAD[i % len(BAD)] if i % 3 == 1 else b'{"id":%d}' % i, None) for i in range(5000)]
    found = decode(rows)
    assert [row["id"] for row in found] == [None if i % 3 == 1 else i for i in range(5000)]
    assert [row["_error"] is None for row in found] == [i % 3 != 1 for i in range(5000)]


@pytest.mark.parametrize("decoder", [Json("v BIGINT", mode="strict"), Text("id"), Raw("id", key=None, headers=None)])
def test_only_rows_that_the_stream_could_not_read(decoder):
    kind = {Json: pa.int64(), Text: pa.string(), Raw: pa.binary()}[type(decoder)]
    found = decode([(None, b"\xff", "torn"), (3, b"{}", "bad checksum")], decoder, pa.schema([("id", kind)]))
    assert [(row["id"], row["_payload"], row["_error"], row["_is_message"]) for row in found] == [
        (None, b"\xff", "torn", False),
        (None, b"{}", "bad checksum", False),
    ]


def test_a_dead_letter_has_no_values():
    (row,) = decode([(0, b'{"text":"x","price":1}', None)])
    assert row["_error"] == "field 'id' is missing, but it is NOT NULL"
    assert (row["text"], row["price"], row["_payload"]) == (None, None, b'{"text":"x","price":1}')
    assert row["_is_message"]


def test_tombstones():
    rows = [(0, None, None), (1, b"x", None)]
    for decoder, kind in ((Text("v"), pa.string()), (Raw("v", key=None, headers=None), pa.binary())):
        found = decode(rows, decoder, pa.schema([("v", kind)]))
        assert [row["_error"] for row in found] == [None, None]
        assert found[0]["v"] is None
    (row,) = decode(rows[:1], Json("v BIGINT", mode="strict"), pa.schema([pa.field("v", pa.int64())]))
    assert (row["v"], row["_error"], row["_sequence"]) == (None, None, 0)
    assert decode(rows)[0]["_error"] == "field 'id' is missing, but it is NOT NULL"


def test_key_and_headers_are_columns_where_they_are_asked_for():
    wanted = pa.schema([("v", pa.binary())])
    schema = pa.schema([*wanted, ("k", pa.binary()), ("h", HEADERS_TYPE), *STREAM])
    batch = BlockDecoder(Raw("v", key="k", headers="h"), wanted, schema)(messages([(0, b"x", None), (1, b"y", "torn")]))
    good, dead = batch.to_pylist()
    assert (good["v"], good["k"], good["h"]) == (b"x", b"key", HEADERS)
    assert (good["_key"], good["_headers"]) == (None, None)
    assert (dead["v"], dead["k"], dead["h"]) == (None, None, None)
    assert (dead["_payload"], dead["_key"], dead["_headers"]) == (b"y", b"key", HEADERS)


def test_payloads_are_kept_where_any_row_may_become_a_dead_letter():
    wanted = pa.schema([("v", pa.binary())])
    schema = pa.schema([*wanted, *STREAM])
    for rows in ([(0, b"x", None), (1, b"y", "torn")], [(0, b"x", None)]):
        decoder = Raw("v", key=None, headers=None)
        good, *dead = BlockDecoder(decoder, wanted, schema, keeps_payloads=True)(messages(rows)).to_pylist()
        assert (good["v"], good["_payload"], good["_key"], good["_headers"]) == (b"x", b"x", b"key", HEADERS)
        assert (good["_error"], good["_is_message"]) == (None, True)
        assert [(row["v"], row["_payload"], row["_error"], row["_is_message"]) for row in dead] == [
            (None, b"y", "torn", False)
        ][: len(dead)]


def test_stream_columns():
    (row,) = decode([(5, b'{"id":5}', None)])
    assert (row["_stream"], row["_shard"], row["_sequence"], row["_offset"]) == ("s", 0, 5, 7)
    assert row["_timestamp"].timestamp() == 0.02


@pytest.mark.parametrize("timestamp_ms", [MIN_TIMESTAMP_MS, -1, 0, MAX_TIMESTAMP_MS])
def test_times_that_a_timestamp_can_say(timestamp_ms):
    (row,) = decode([(5, b'{"id":5}', None)], timestamp_ms=timestamp_ms)
    assert (row["id"], row["_error"]) == (5, None)
    assert to_milliseconds(row["_timestamp"]) == timestamp_ms


@pytest.mark.parametrize(
    "timestamp_ms",
    [-(2**63), MIN_TIMESTAMP_MS - 1, MAX_TIMESTAMP_MS + 1, 1_700_000_000_000_000, 1_700_000_000_000_000_000, 2**63 - 1],
)
def test_times_that_a_timestamp_cannot_say_are_dead_letters(timestamp_ms):
    rows = [(0, b'{"id":0}', None), (1, b'{"id":1}', "torn")]
    wrong, torn = decode(rows, timestamp_ms=timestamp_ms)
    assert wrong["_error"] == f"timestamp {timestamp_ms} ms is not in the years 1 to 9999"
    assert (wrong["id"], wrong["_timestamp"], wrong["_sequence"]) == (None, None, 0)
    assert (wrong["_payload"], wrong["_key"]) == (b'{"id":0}', b"key")
    assert (torn["_error"], torn["_timestamp"], torn["_sequence"]) == ("torn", None, 1)
    mixed = pa.Table.from_batches([messages(rows[:1]), messages([(1, b'{"id":1}', None)], timestamp_ms)])
    schema = pa.schema([*(field.with_nullable(True) for field in WANTED), *STREAM])
    decode_block = BlockDecoder(Json("v BIGINT", mode="strict"), WANTED, schema)
    found = decode_block(mixed.combine_chunks().to_batches()[0]).to_pylist()
    assert [(row["id"], row["_error"] is None) for row in found] == [(0, True), (None, False)]


def test_no_rows():
    schema = pa.schema([*WANTED, *STREAM])
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)
    assert BlockDecoder(Json("v BIGINT", mode="strict"), WANTED, schema)(empty).num_rows == 0


def test_the_dead_letter_of_a_message_that_is_too_large_itself_lacks_its_content():
    block = messages([(7, b"x" * 2_000, None)])
    decoder = BlockDecoder(Raw(), pa.schema([]), pa.schema(STREAM))
    assert decoder.refused(block, "why").column("_payload").to_pylist() == [b"x" * 2_000]
    decoder = replace(decoder, max_row_bytes=1_000)
    (row,) = decoder.refused(block, "why").to_pylist()
    assert (row["_sequence"], row["_payload"], row["_key"], row["_headers"]) == (7, None, None, None)
    assert (row["_error"], row["_is_message"]) == ("why", False)


def test_many_headers_without_values_are_too_large_for_a_dead_letter():
    """Each one is an object in Spark, and takes eight bytes here."""
    block = messages([(7, b"x", None)])
    headers = pa.array([[("", b"")] * 10_000], HEADERS_TYPE)
    block = block.set_column(block.schema.get_field_index("headers"), block.schema.field("headers"), headers)
    assert block.nbytes < 200_000
    decoder = BlockDecoder(Raw(), pa.schema([]), pa.schema(STREAM), max_row_bytes=200_000)
    (row,) = decoder.refused(block, "why").to_pylist()
    assert (row["_payload"], row["_headers"], row["_error"]) == (None, None, "why")
