"""Consumers that track which messages are finished, and commit only up to those (Faust's consumer)."""
