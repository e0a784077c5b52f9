"""Decides which of the streams that patterns find become assets.

Any client that can create a stream chooses its name. So a new stream must neither take the place of an existing asset
nor stop other assets from loading. A broker may also not list a stream for a while, so a run of a found stream checks
that its table belongs to no other one (:func:`spark_jobs.batches.source_checks.check_owner`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import dagster as dg

from spark_jobs.batches.rebuild import staging_path
from spark_jobs.dead_letters.table import dead_letter_path
from spark_jobs.table_location import folders_above
from stream_assets.asset import StreamAsset
from stream_assets.definitions_builder import location_of, stream_definitions
from stream_assets.stream_to_table import StreamToTable
from stream_assets.translator import STREAM_URL
from stream_consumers.errors import log_text

_IMPLICIT_JOB = "__ASSET_JOB"
"""The name of the job that Dagster makes of all assets."""
_READERS = 16
"""How many ledgers are read at the same time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How a table began.

    Args:
        streams: the streams of which it has positions of the group.
        first: the streams that it began with; empty if they are unknown.
        created_ms: when the table was created, in milliseconds since 1970.
    """

    streams: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    created_ms: int = 0


def conflicting(named: Sequence[StreamAsset], found: Sequence[StreamAsset]) -> frozenset[StreamAsset]:
    """Return the found assets that have no place beside the others.

    Of found assets that cannot be loaded together, the one whose stream began its table first has a place. If no table
    has positions of one of their streams, none has a place. Beside an asset that the user names, no conflicting one
    has a place.

    Args:
        named: the assets whose streams the user names.
        found: the assets whose streams a pattern found.
    """
    claims = {asset: _claims(asset) for asset in (*named, *found)}
    fixed: list[Mapping[str, object]] = [{f"name {_IMPLICIT_JOB}": _IMPLICIT_JOB}, *(claims[asset] for asset in named)]
    disputed = _disputed([*fixed, *(claims[asset] for asset in found)])
    rivals = [asset for asset in found if not disputed.isdisjoint(claims[asset])]
    owners = {what: owner for claimed in fixed for what, owner in claimed.items()}
    kept: set[StreamAsset] = set()
    for asset in oldest_first(rivals):
        if all(owners.get(what, owner) == owner for what, owner in claims[asset].items()):
            owners.update(claims[asset])
            kept.add(asset)
    return frozenset(rivals) - kept


def oldest_first(assets: Sequence[StreamAsset]) -> Sequence[StreamAsset]:
    """Return the assets whose tables have positions of their streams, those first that began first."""
    places = {asset: (location_of(asset.declared), asset.declared.shown_group) for asset in assets}
    declared = {places[asset]: asset.declared for asset in assets}
    with ThreadPoolExecutor(_READERS) as readers:
        known = dict(zip(declared, readers.map(_beginning, declared.values())))
    begun = [asset for asset in assets if asset.streams.keys() <= known[places[asset]].streams]

    def age(asset: StreamAsset) -> tuple[int, bool]:
        beginning = known[places[asset]]
        return beginning.created_ms, not asset.streams.keys() <= beginning.first

    return sorted(begun, key=age)


def has_reserved_table(asset: StreamAsset) -> bool:
    """Return whether its table has the name of the dead letters or of the rebuild of another table."""
    return location_of(asset.declared).lower().endswith((dead_letter_path(""), staging_path("")))


def check_loadable(asset: StreamAsset) -> None:
    """Let Dagster resolve the definitions of the asset, as it does when all definitions are loaded.

    Raises:
        Exception: Dagster refuses them. Resources that the asset requests by key may be missing.
    """
    hooks = (key for hook in asset.hook_defs for key in hook.required_resource_keys)
    keys = {*asset.op.required_resource_keys, *hooks}
    absent = {key: dg.ResourceDefinition.none_resource() for key in keys}
    dg.Definitions.validate_loadable(stream_definitions([asset], resources=absent))


def _claims(asset: StreamAsset) -> Mapping[str, object]:
    """Return what the asset needs in Dagster and in the lake, each with its owner; one thing has one owner."""
    declared, table = asset.declared, location_of(asset.declared)
    # The names of the ops and the jobs of the definitions.
    replay = declared.replay_job_name
    names = (declared.name, declared.job_name, replay, f"{replay}_partition")
    own_tables = (table, staging_path(table))
    tables = (path for one in own_tables for path in (one, dead_letter_path(one)))
    return {
        # A table in the folder of another one claims that folder for no owner.
        **{f"table {folder}": None for folder in folders_above(table)},
        # Several assets may read one stream, which is one asset.
        **{f"key {spec.key.to_user_string()}": spec.metadata.get(STREAM_URL) for spec in asset.streams.values()},
        **dict.fromkeys((f"table {path}" for path in tables), asset),
        **dict.fromkeys((f"name {name}" for name in names), asset),
        f"key {asset.key.to_user_string()}": asset,
    }


def _disputed(claims: Iterable[Mapping[str, object]]) -> frozenset[str]:
    owners: dict[str, set[object]] = defaultdict(set)
    for claimed in claims:
        for what, owner in claimed.items():
            owners[what].add(owner)
    return frozenset(what for what, several in owners.items() if len(several) > 1)


def _beginning(declared: StreamToTable) -> _Beginning:
    """Read how a table began; a table that cannot be read has no streams, because it must not stop other assets."""
    try:
        ledger = declared.ingestion.ledger()
        streams, snapshot = ledger.read().streams, ledger.log.snapshot()
        if not streams or snapshot is None:
            return _Beginning()
        return _Beginning(streams, ledger.first_streams(), snapshot.created_ms)
    except Exception as error:  # noqa: BLE001 - of storage, of the log, or of a variable
        _log.warning("the positions in %s cannot be read: %s", location_of(declared), log_text(error))
        return _Beginning()
