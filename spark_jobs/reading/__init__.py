"""Reads planned splits on Spark's executors and decodes their payloads."""
