"""Handlers with retries and dead letters over a stream backend (the StreamBackend trait)."""
