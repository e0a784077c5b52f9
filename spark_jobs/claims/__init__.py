"""Ingestion of a group that claims entries one by one (Redis, mode ``load_balanced``)."""
