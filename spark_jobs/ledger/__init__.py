"""The ledger: what the Delta log of a table says about a consumer group."""
