"""How payloads become typed columns, a record batch at a time."""
