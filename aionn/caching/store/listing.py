"""List the entries of a cache directory, for people (`aionn cache ls`). Blocking, for threads."""

from __future__ import annotations

import msgspec

from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import Refusal
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.files import is_shortage, refusal_of
from aionn.caching.store.housekeeping import Housekeeping

__all__ = ["EntryInfo", "list_entries"]


class EntryInfo(msgspec.Struct, frozen=True):
    """One entry, for people. `used_s` and `created_s` are wall-clock seconds since the epoch; `used_s` is None if not known."""

    key: bytes
    device: str
    device_version: str
    model_digest: bytes
    generation: int
    size_bytes: int
    saves_s: float
    created_s: float
    used_s: float | None
    declined: bool
    superseded: bool


def list_entries(house: Housekeeping) -> list[EntryInfo] | Refusal:
    """Return all entries with a readable manifest, oldest first."""
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    try:
        with directory, house.indexed():
            return _listed(house, directory)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _listed(house: Housekeeping, directory: CacheDirectory) -> list[EntryInfo]:
    used_s = house.with_index(lambda index: index.used_s()) or {}
    superseded = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    found = []
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
        except OSError as error:
            if is_shortage(error):
                raise
            continue
        if isinstance(manifest, Manifest):
            found.append(
                EntryInfo(
                    key=key,
                    device=manifest.device,
                    device_version=manifest.device_version,
                    model_digest=manifest.model_digest,
                    generation=manifest.generation,
                    size_bytes=manifest.size_bytes,
                    saves_s=manifest.compile_ns / 1e9,
                    created_s=manifest.created_ns / 1e9,
                    used_s=used_s.get(key),
                    declined=manifest.declined,
                    superseded=key in superseded,
                )
            )
    return sorted(found, key=lambda entry: (entry.created_s, entry.key))
