"""Ranges of numbers; default names: those of groups stay the same from run to run, those of members never."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import pytest

from stream_consumers import options
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_range, host_id, new_consumer_name

RANDOM_NODES = (0x01_00_5E_00_00_01, 0x35_3B_12_77_00_09)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of which nothing is known; returns where its machine id would be."""
    monkeypatch.delenv("HOST_ID", raising=False)
    monkeypatch.setattr(options, "_container_id", lambda: None)
    monkeypatch.setattr(options, "MACHINE_IDS", (tmp_path / "machine-id",))
    nodes = iter(RANDOM_NODES * 10)
    monkeypatch.setattr(uuid, "getnode", lambda: next(nodes))
    return tmp_path / "machine-id"


def test_a_random_node_is_no_host_id(bare: Path) -> None:
    bare.write_text("0b46ad7b3ba24b4d9e1c\n")
    assert [host_id(), host_id()] == ["0b46ad7b3ba24b4d9e1c"] * 2


def test_where_nothing_stays_the_same_a_name_is_asked_for(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("", "\n"):
        bare.write_text(found)
        with pytest.raises(InvalidOptionError, match="Give the group a name, or set the environment variable HOST_ID"):
            host_id()
    assert new_consumer_name() != new_consumer_name()
    monkeypatch.setenv("HOST_ID", "thishost")
    assert host_id() == "thishost"


def test_a_mac_address_is_a_host_id(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "getnode", lambda: 0x02_42_AC_11_00_02)
    assert host_id() == "0242AC110002"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, -1, 11])
def test_a_number_outside_of_its_range_is_named(value: float | None) -> None:
    with pytest.raises(InvalidOptionError, match=rf"retry_seconds={value} .* >= 0 and <= 10"):
        check_range("retry_seconds", value, at_most=10)
