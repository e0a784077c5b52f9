"""Dagster sensors: lag in, run requests out. They never consume and never commit."""
