"""Metrics of batches, for OpenTelemetry and for Prometheus, recorded only if the environment enables them."""
