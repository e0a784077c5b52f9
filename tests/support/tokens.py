"""Token providers: unsecured JSON web tokens, which the listener ``secure`` of the test broker accepts."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

SECRET = "marked-secret"
CALLS_VARIABLE = "TOKEN_CALLS"
NUMBERS: list[int] = []


def token() -> tuple[str, float]:
    """A token that the broker accepts; the process that asks is noted in the file that the environment names."""
    note()
    return made(3600)


def short_token() -> tuple[str, float]:
    """One that is asked for again within seconds."""
    note()
    return made(5)


def refused_token() -> tuple[str, float]:
    """One that expired long ago, whatever is said of it."""
    return made(-3600)[0], time.time() + 3600


def fails() -> tuple[str, float]:
    """Raise, with what must not be shown."""
    raise OSError(f"no answer for {SECRET}")


def reversed_token() -> tuple[float, str]:
    """Return the parts in the wrong order."""
    return time.time() + 60, SECRET


def in_milliseconds() -> tuple[str, float]:
    """Return an expiry in milliseconds."""
    return SECRET, (time.time() + 60) * 1000


def numbered_token() -> tuple[str, float, str, dict[str, str]]:
    """Another one each time, with an extension."""
    NUMBERS.append(len(NUMBERS))
    return f"{SECRET}-{NUMBERS[-1]}", time.time() + 60, "reader", {"logicalCluster": f"{SECRET}-cluster"}


not_a_function = SECRET


def made(seconds: float) -> tuple[str, float]:
    """A token for so many seconds, and when it expires."""
    now = time.time()
    claims = {"sub": "reader", "iat": min(now, now + seconds - 1), "exp": now + seconds}
    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, claims)]
    coded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts]
    return f"{'.'.join(coded)}.", now + seconds


def note() -> None:
    """Note the process."""
    if calls := os.environ.get(CALLS_VARIABLE):
        with Path(calls).open("a") as file:
            file.write(f"{os.getpid()}\n")
