"""How many examples the property tests draw: the same few every time, or many new ones in a soak (``make soak``)."""

from __future__ import annotations

import os

from hypothesis import settings

IS_SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
FACTOR = int(os.environ.get("SOAK_FACTOR", "20")) if IS_SOAK else 1


def examples(count: int) -> int:
    """``count``, and in a soak ``SOAK_FACTOR`` times as many."""
    return count * FACTOR


def load_profile() -> None:
    """The settings of every property test; to be called before they are imported."""
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("soak", deadline=None, max_examples=examples(100), print_blob=True)
    settings.load_profile("soak" if IS_SOAK else "repeatable")
