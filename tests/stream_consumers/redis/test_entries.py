"""Pages of entries become columns as each entry becomes a message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stream_consumers.errors import FormatError
from stream_consumers.messages import Message, Shard
from stream_consumers.redis.batches import plain_entries
from stream_consumers.redis.entries import MAX_MS, MAX_SUB, read_entry

NUMBERS = st.sampled_from([0, 1, MAX_SUB, MAX_SUB + 1, MAX_MS, MAX_MS + 1, 2**63, 2**64 - 1]) | st.integers(0, 2**48)
IDS = st.builds(lambda ms, sub: b"%d-%d" % (ms, sub), NUMBERS, NUMBERS) | st.sampled_from([b"", b"7", b"1-2-3", b"x-1"])
FIELDS = st.lists(st.sampled_from([b"msg", b"trace", b"", b"\xff"]), max_size=4)
ENTRIES = st.tuples(IDS, FIELDS) | st.tuples(
    st.builds(lambda ms, sub: b"%d-%d" % (ms, sub), st.integers(0, MAX_MS), st.integers(0, MAX_SUB)),
    st.binary(max_size=3).map(lambda payload: [b"msg", payload]),
)


@given(st.lists(ENTRIES, max_size=4).filter(lambda page: all(len(fields) % 2 == 0 for _, fields in page)))
def test_columns_are_what_the_entries_are(page: list[tuple[bytes, list[bytes]]]) -> None:
    columns = plain_entries(page, b"msg")
    try:
        found = [read_entry(Shard("orders"), entry_id, fields, b"msg") for entry_id, fields in page]
    except FormatError:
        assert columns is None
        return
    is_plain = all(isinstance(message, Message) and not message.headers for message in found)
    assert (columns is not None) == (is_plain and bool(page))
    if columns is not None:
        sequences, times, payloads = (column.to_pylist() for column in columns)
        assert sequences == [message.sequence for message in found]
        assert times == [message.timestamp_ms for message in found]
        assert payloads == [message.payload for message in found]
