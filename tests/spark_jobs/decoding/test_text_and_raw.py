"""Text and Raw."""

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.decoders import Raw, Text

PAYLOADS = st.lists(st.none() | st.binary(max_size=8) | st.text(max_size=4).map(str.encode))


def as_text(payload):
    try:
        return None if payload is None else payload.decode()
    except UnicodeDecodeError:
        return None


def is_text(payload):
    return payload is None or as_text(payload) is not None


@settings(deadline=None)
@given(PAYLOADS)
def test_text_takes_what_is_utf_8(payloads):
    decoded = Text("body").decode(pa.array(payloads, pa.binary()), pa.schema([("body", pa.string())]))
    (column,) = decoded.columns
    column.validate(full=True)
    assert column.type == pa.string()
    assert column.to_pylist() == [as_text(payload) for payload in payloads]
    assert [error is None for error in decoded.errors.to_pylist()] == [is_text(payload) for payload in payloads]
    assert decoded.errors.type == pa.string()


def test_text_says_where():
    decoded = Text().decode(pa.array([b"ab\xff"], pa.binary()), pa.schema([("payload", pa.string())]))
    assert decoded.errors.to_pylist() == ["not UTF-8: invalid start byte at byte 2"]


@settings(deadline=None)
@given(PAYLOADS)
def test_raw_takes_everything(payloads):
    decoded = Raw("body").decode(pa.array(payloads, pa.binary()), pa.schema([("body", pa.binary())]))
    assert decoded.columns[0].to_pylist() == payloads
    assert decoded.errors.null_count == len(payloads)


def test_columns_are_quoted():
    assert Text("a b").ddl() == "`a b` STRING"
    assert Raw("a b").ddl() == "`a b` BINARY"
