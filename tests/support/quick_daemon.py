"""The Dagster daemon, looking for backfills each second: it has no setting for that, and its 30 seconds would be most
of a test."""

from __future__ import annotations

from dagster._daemon import controller
from dagster._daemon.cli import main

if __name__ == "__main__":
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 1
    main()
