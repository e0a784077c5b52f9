"""The ledger: the positions of a consumer group, read from the Delta log of its table."""
