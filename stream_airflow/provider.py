"""What Airflow lists about this package on its page of providers."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the description of this provider; the entry point ``apache_airflow_provider`` names this function."""
    return {
        "package-name": "stream-assets",
        "name": "Stream assets",
        "description": "Streams into Delta tables exactly once.",
    }
