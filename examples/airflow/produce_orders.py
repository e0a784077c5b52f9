"""Appends 3000 orders to a stream file in the folder ``SHOP``; those of a new file are of the last three days."""

import json
import os
import time
from pathlib import Path

from stream_consumers import create_producer

ORDERS, DAYS = 3000, 3
DAY_MS = 24 * 60 * 60 * 1000

shop = Path(os.environ.get("SHOP") or Path(__file__).parents[2] / ".demo" / "airflow").absolute()
file = shop / "orders.ss"
shop.mkdir(parents=True, exist_ok=True)
span_ms = 0 if file.exists() else DAYS * DAY_MS
now = int(time.time() * 1000)
with create_producer(f"file://{file}/orders") as producer:
    for number in range(ORDERS):
        order = {"id": number, "user": f"user-{number % 97}", "amount": number % 1000 / 100}
        sent = now - span_ms * (ORDERS - number) // ORDERS
        producer.send(json.dumps(order).encode(), shard=number % 2, timestamp_ms=sent)
print(f"{ORDERS} orders in {file}")
