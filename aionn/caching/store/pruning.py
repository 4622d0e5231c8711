"""Prune a cache directory on demand: old versions, damaged entries, rubbish, then the least valuable entries. Blocking, for threads."""

from __future__ import annotations

import msgspec

from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.files import is_shortage, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.writing import empty_trash

__all__ = ["PruneReport", "prune"]


class PruneReport(msgspec.Struct, frozen=True):
    """What pruning did.

    Attributes:
        removed: entries removed.
        freed_bytes: bytes they had.
        in_use: entries that stayed because a process uses them.
        left_bytes: bytes of the entries that are left.
        measurements: stage measurements removed.
    """

    removed: int
    freed_bytes: int
    in_use: int
    left_bytes: int
    measurements: int = 0


def prune(house: Housekeeping, max_bytes: int | None, *, measurements: bool = False) -> PruneReport | Refusal:
    """Remove entries of older driver versions, unreadable ones and what dead processes left. Then evict down to `max_bytes`.

    Stage measurements that are too old are removed, too. With `measurements`, all of them are.
    """
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    if not directory.writable:
        return directory.not_writable
    try:
        with directory, house.indexed():
            return _pruned(house, directory, max_bytes, measurements)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _pruned(house: Housekeeping, directory: CacheDirectory, max_bytes: int | None, measurements: bool) -> PruneReport:
    empty_trash(directory)
    before = house.left_bytes()
    removed = in_use = 0
    doomed = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
            if isinstance(manifest, Manifest) or manifest.reason is MissReason.ABSENT:
                house.clean_if_free(directory, key)
            else:
                doomed.add(key)
        except OSError as error:
            if is_shortage(error):
                raise
            doomed.add(key)
    for key in doomed:
        if house.remove_if_free(directory, key):
            removed += 1
        else:
            in_use += 1
    more_removed, more_in_use = house.evict(directory, max_bytes)
    for key in directory.orphaned_locks():
        house.remove_if_free(directory, key)
    house.note_usage()
    left = house.left_bytes()
    forgotten = house.with_index(lambda index: index.history.forget_measurements(all_of_them=measurements)) or 0
    return PruneReport(removed + more_removed, max(before - left, 0), in_use + more_in_use, left, forgotten)
