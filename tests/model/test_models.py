"""The protocol, explored: what passes, and that each shorter way is seen to be wrong."""

from __future__ import annotations

import pytest

from tests.model import (
    accepts,
    adoption,
    claims,
    cleaned,
    counts,
    dead_letters,
    epochs,
    fold,
    groups,
    keyed,
    load_balanced,
    one_pass,
    rebuilds,
    redrive,
    restored_claims,
    resumable,
    truncation,
)
from tests.model.search import Variant

MODELS = {
    "accepts": accepts.VARIANTS,
    "adoption": adoption.VARIANTS,
    "resumable": resumable.VARIANTS,
    "load_balanced": load_balanced.VARIANTS,
    "claims": claims.VARIANTS,
    "cleaned": cleaned.VARIANTS,
    "counts": counts.VARIANTS,
    "dead_letters": dead_letters.VARIANTS,
    "fold": fold.VARIANTS,
    "groups": groups.VARIANTS,
    "keyed": keyed.VARIANTS,
    "rebuilds": rebuilds.VARIANTS,
    "epochs": epochs.VARIANTS,
    "one_pass": one_pass.VARIANTS,
    "redrive": redrive.VARIANTS,
    "restored_claims": restored_claims.VARIANTS,
    "truncation": truncation.VARIANTS,
}
VARIANTS = [
    pytest.param(variant, id=f"{name}-{variant.name}", marks=() if variant.is_small else pytest.mark.slow)
    for name, variants in MODELS.items()
    for variant in variants
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_search_finds(variant: Variant) -> None:
    result = variant.explore()
    print(variant.what, result)
    assert result.verdict == variant.expect, f"{variant.what}: {result}"
