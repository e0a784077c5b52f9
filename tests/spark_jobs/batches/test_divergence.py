"""Where the next epoch of a stream begins that lost its newest messages and got others: never behind one of these."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pytest
import redis
from deltalake import CommitProperties, Transaction, write_deltalake

from spark_jobs.batches.accept import divergences
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.decoding.decoders import Raw
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.entries import to_sequence
from tests.support.written_log import made_entry


@pytest.mark.parametrize("apart_ms", [0, 1], ids=["one_millisecond", "a_millisecond_each"])
def test_entries_of_redis_with_the_ids_of_lost_ones_are_read(redis_address: str, tmp_path: Path, apart_ms: int) -> None:
    host, _, port = redis_address.partition(":")
    name = f"orders-{uuid.uuid4().hex[:8]}"
    shard, ids = Shard(name), [f"{1_700_000_000_000 + n * apart_ms}-{n}" for n in range(100)]
    what = Ingestion(group="g", table=str(tmp_path / "t"), decoder=Raw())
    with redis.Redis(host, int(port)) as client, RedisBatchSource(f"redis://{redis_address}/{name}") as source:
        begins = [to_sequence(entry_id) for entry_id in ids]
        for number, (start, end) in enumerate([(0, 40), (40, 100)], start=1):
            for n in range(start, 50 if end == 100 else end):
                client.xadd(name, {"msg": f"old {n}"}, id=ids[n])
            dump = client.dump(name)
            for n in range(50, end):
                client.xadd(name, {"msg": f"old {n}"}, id=ids[n])
            source.extents()
            part = Range(begins[start - 1] + 1 if start else 0, begins[end - 1] + 1)
            entry = made_entry(
                number,
                number - 2,
                origin={shard: 0} if number == 1 else {},
                ranges={shard: part},
                last_messages=source.last_messages({shard: part}),
                state={} if number == 1 else None,
            )
            rows = pa.table(
                {
                    "_stream": [name] * (end - start),
                    "_shard": pa.array([0] * (end - start), pa.int64()),
                    "_sequence": pa.array(begins[start:end], pa.int64()),
                    "_timestamp": pa.array([(s >> 16) * 1000 for s in begins[start:end]], pa.timestamp("us", "UTC")),
                }
            )
            properties = CommitProperties(
                {"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, number)]
            )
            write_deltalake(what.table, rows, mode="append", commit_properties=properties)
        client.restore(name, 0, dump, replace=True)
        for n in range(50, 80):
            client.xadd(name, {"msg": f"new {n}"}, id=ids[n])
        found = divergences(source, what, what.ledger().read(), source.extents(), [shard])
    assert found == {shard: begins[39] + 1}
