"""Decides which of the streams that patterns find become assets.

Any client that can create a stream chooses its name. So a new stream must neither take the place of an existing asset
nor stop other assets from loading.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from spark_jobs.batches.rebuild import staging_path
from spark_jobs.dead_letters.table import dead_letter_path
from spark_jobs.table_location import folders_above
from stream_assets.asset import StreamAsset
from stream_assets.definitions_builder import location_of
from stream_assets.stream_to_table import StreamToTable
from stream_assets.translator import STREAM_URL
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import log_text

_IMPLICIT_JOB = "__ASSET_JOB"
"""The name of the job that Dagster makes of all assets."""
_log = logging.getLogger(__name__)


def conflicting(named: Sequence[StreamAsset], found: Sequence[StreamAsset]) -> frozenset[StreamAsset]:
    """Return the found assets that have no place beside the others.

    Of found assets that cannot be loaded together, the one whose table has positions of its stream has a place, unless
    several have them; the others have none. Beside an asset that the user names, no conflicting one has a place.

    Args:
        named: the assets whose streams the user names.
        found: the assets whose streams a pattern found.
    """
    claims = {asset: _claims(asset) for asset in (*named, *found)}
    fixed = [{f"name {_IMPLICIT_JOB}": _IMPLICIT_JOB}, *(claims[asset] for asset in named)]
    disputed = _disputed([*fixed, *(claims[asset] for asset in found)])
    rivals = [asset for asset in found if not disputed.isdisjoint(claims[asset])]
    streams = {(location_of(asset.declared), asset.declared.shown_group): asset.declared for asset in rivals}
    known = {place: _known_streams(declared) for place, declared in streams.items()}
    established = [
        asset
        for asset in rivals
        if asset.streams.keys() <= known[location_of(asset.declared), asset.declared.shown_group]
    ]
    still_disputed = _disputed([*fixed, *(claims[asset] for asset in established)])
    kept = {asset for asset in established if still_disputed.isdisjoint(claims[asset])}
    return frozenset(asset for asset in rivals if asset not in kept)


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


def _known_streams(declared: StreamToTable) -> frozenset[str]:
    """Return the streams of which the table has positions of the group; none if they cannot be read."""
    try:
        state = declared.ingestion.ledger().read()
    except Exception as error:  # noqa: BLE001 - a table must not stop the assets of others
        _log.warning("the positions in %s cannot be read: %s", location_of(declared), log_text(error))
        return frozenset()
    names = (*state.identities, *(shard.stream for shard in state.shards))
    return frozenset(split_epoch(name)[0] for name in names)
