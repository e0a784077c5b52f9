"""Metrics of batches, for OpenTelemetry and for Prometheus; nothing is measured for anybody who did not ask for it."""
