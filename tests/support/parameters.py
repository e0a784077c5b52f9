"""How parameters of tests are named."""

from __future__ import annotations

import re


def shown(value: object) -> str:
    """What a value looks like, the same in each process: an object without a text of its own shows where it is kept."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
