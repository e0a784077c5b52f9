"""A group in claim mode, one of whose keys was recreated: it goes on in the other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_jobs.batches.accept import plan_accept
from spark_jobs.claims.claim_state import ClaimLosses, losses_of_claims
from spark_jobs.ledger.entries import CLAIMS, ClaimedRange
from stream_consumers.create import open_batch_source
from stream_consumers.errors import SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.redis.claims import ClaimedEntries, ClaimName
from stream_consumers.redis.entries import to_sequence
from tests.support.redis_tables import Stream
from tests.support.written_log import WrittenLog, made_entry

NO_SPARK: Any = None


def test_an_accept_of_one_key_that_was_recreated_keeps_the_place_in_the_other(redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=2, mode="load_balanced")
    log, ingestion = WrittenLog(stream.table), stream.ingestion(claims=True)
    own = [Shard(stream.name, number) for number in range(2)]
    stream.add(20)
    with stream.source.claims(stream.group) as claims:
        fields = {"origin": claims.prepare(AutoStreamReset.EARLIEST), "identities": claims.identities()}
        log.ours(made_entry(1, -1, kind="init", group=stream.group, switch=CLAIMS, **fields))
        claims.positions()
        held = ClaimedEntries(ClaimName("main", 2, f"{2:032x}"), 1000, 1 << 30)
        for shard in own:
            claims.claim_new(held, shard, 10)
        places = {shard: sorted(map(to_sequence, ids)) for shard, ids in held.ids.items()}
        claimed = {shard: ClaimedRange(found[0], found[-1] + 1, 10) for shard, found in places.items()}
        log.ours(made_entry(2, 0, group=stream.group, bid=held.name.bid, claims=claimed, state=None))
        claims.acknowledge(held.ids)
        for shard in own:
            claims.remove_name(shard, held.name)
    stream.client.delete(stream.keys[0])
    stream.add(6)
    state = ingestion.ledger().read()
    with open_batch_source(stream.url) as source, stream.source.claims(stream.group) as claims:
        with pytest.raises(SourceRecreatedError):
            losses_of_claims(claims, ingestion, ingestion.ledger())
        (accepted,) = plan_accept(source, ingestion, state, claims=claims)
    new = [Shard(f"{stream.name}#2", number) for number in range(2)]
    assert accepted.origin == {new[0]: 0, new[1]: places[own[1]][-1] + 1}
    entry = ingestion.ledger().entry(
        "accept",
        state,
        origin=accepted.origin,
        ended=accepted.ended,
        claims=accepted.claims,
        identities={**state.identities, accepted.name: accepted.identity},
    )
    log.ours(entry)
    known = {shard: one.written_end for shard, one in ingestion.ledger().read().shards.items()}
    assert {shard: known[shard] for shard in new} == {new[0]: None, new[1]: places[own[1]][-1] + 1}
    with stream.source.claims(stream.group, ingestion.epochs([stream.name])) as claims:
        claims.prepare(AutoStreamReset.EARLIEST, known=known)
        assert ClaimLosses(NO_SPARK, claims, ingestion, observer=lambda step, batch: None).next() is None
        held = ClaimedEntries(ClaimName("main", 4, f"{4:032x}"), 1000, 1 << 30)
        claims.positions()
        for shard in new:
            claims.claim_new(held, shard, 1000)
        assert {shard: len(ids) for shard, ids in held.ids.items()} == dict.fromkeys(new, 3)
