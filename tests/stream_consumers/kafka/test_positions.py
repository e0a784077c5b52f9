"""A coordinator that moves, or is still loading, ends no process that asks it for positions or sets them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.settings import ROOT

ASK = """
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.topics import admin, create_topic
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

offsets, address = "__consumer_offsets", sys.argv[1]
brokers = admin(address)
topic = create_topic(address, 1)

def ask(number):
    cluster = KafkaBrokers(StreamUrl.parse(f"kafka://{address}/{topic}"))
    shard = Shard(topic)
    def turn(position):
        cluster.commit(f"group-{number}", {shard: position})
        return cluster.committed(f"group-{number}", [shard])[shard]
    return [turn(position) for position in range(3)]

with ThreadPoolExecutor(4) as threads:
    for number in range(6):
        brokers.delete_topics([offsets])[offsets].result(10)
        print(*threads.map(ask, range(8)))
"""


def test_a_coordinator_that_was_lost_ends_no_process(own_kafka: str) -> None:
    """An admin client that asks for positions ends with a segmentation fault, most of the times."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK, own_kafka], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (asked.returncode, asked.stdout.split()) == (0, ["[0,", "1,", "2]"] * 48), asked.stderr
