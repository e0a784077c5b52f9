"""The wire format: each payload goes to the schema that it names, and its row stays where it was."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.schema_decoder import decode_frames
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidOptionError,
    MissingDependencyError,
    SchemaNotFoundError,
    SchemaRegistryError,
)
from tests.support.profiles import examples

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.binary())])
UNKNOWN = 99
frames = st.tuples(st.sampled_from([1, 7, 2**32 - 1, UNKNOWN]), st.binary(max_size=7))
payloads = st.lists(st.none() | st.binary(max_size=4) | frames, max_size=12)


def decoder_of(number):
    if number == UNKNOWN:
        raise SchemaNotFoundError("nobody knows 99", remedy="Ask.")

    def part(texts):
        errors = ["it begins with x" if text.startswith(b"x") else None for text in texts.to_pylist()]
        return [pa.array([number] * len(texts), pa.int64()), texts], pa.array(errors, pa.string())

    return part


@settings(max_examples=examples(150), deadline=None)
@given(payloads, st.integers(0, 3))
def test_each_payload_reaches_its_schema(drawn, skipped):
    made = [p if p is None or isinstance(p, bytes) else b"\0" + p[0].to_bytes(4, "big") + p[1] for p in drawn]
    # A slice shares its buffers with what is before it.
    column = pa.array([b"before"] * skipped + made, pa.binary()).slice(skipped)
    found = decode_frames(column, SCHEMA, decoder_of, None)
    rows = list(zip(*(part.to_pylist() for part in (*found.columns, found.errors)), strict=True))
    assert len(rows) == len(drawn)
    for row, payload in zip(rows, drawn, strict=True):
        if payload is None:
            assert row == (None, None, None)
        elif isinstance(payload, bytes):
            assert row == (None, None, f"{len(payload)} bytes are too short for a schema id")
        elif payload[0] == UNKNOWN:
            assert row == (None, None, "nobody knows 99")
        else:
            assert row == (*payload, "it begins with x" if payload[1].startswith(b"x") else None)


@pytest.mark.parametrize("kind", [SchemaRegistryError, AccessDeniedError, InvalidOptionError, MissingDependencyError])
def test_what_may_be_gone_soon_is_no_dead_letter(kind):
    def refuse(number):
        raise kind("nobody answers", remedy="Ask again.")

    with pytest.raises(kind):
        decode_frames(pa.array([b"\0\0\0\0\1"], pa.binary()), SCHEMA, refuse, None)
