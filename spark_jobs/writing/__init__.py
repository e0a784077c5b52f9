"""Writes rows and dead letters into Delta tables."""
