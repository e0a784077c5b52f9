"""Decodes payloads into typed columns, a record batch at a time."""
