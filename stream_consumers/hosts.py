"""What names this host in default group and consumer names (SeaStreamer's rule)."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

HOST_VARIABLE = "HOST_ID"
_CONTAINER_ID_DIGITS = 12


def host_id() -> str:
    """``$HOST_ID``, else the container's id, else the MAC address; letters and digits.

    A default group name made of it stays the same over restarts on one host only: give groups a name where hosts come
    and go.

    Example:
        >>> host_id().isalnum()
        True
    """
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return given
    cgroup = Path("/proc/self/cgroup")
    if cgroup.exists():
        last = cgroup.read_text().strip().rpartition("\n")[2]
        container = last.partition("0::/docker/")[2]
        if container:
            return container[:_CONTAINER_ID_DIGITS]
    return f"{uuid.getnode():012X}"
