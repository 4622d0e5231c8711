"""The blob cache that a device hands to its engine with every compilation. It is there for parity with Android's driver cache.

The cache is opened when the engine first uses it. An engine that keeps nothing there costs its driver neither a database nor the
import of one.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from aionn.caching.private_folder import RecordsFolder

if TYPE_CHECKING:
    from aionn.caching.blob_cache import BlobCache


class DeviceBlobs:
    """The blob cache of one version of one device. Satisfies `IBlobCache`."""

    def __init__(self, device: str, version: str, state_directory: str | os.PathLike[str] | RecordsFolder | None) -> None:
        self._device, self._version, self._state_directory = device, version, state_directory
        self._lock = threading.Lock()
        self._cache: BlobCache | None = None
        self._closed = False

    def _opened(self) -> BlobCache | None:
        with self._lock:
            if self._cache is None and not self._closed:
                from aionn.caching.blob_cache import BlobCache  # brings a database, which few engines need

                self._cache = BlobCache(device=self._device, version=self._version, state_directory=self._state_directory)
            return self._cache

    def get(self, key: bytes) -> bytes | None:
        """Return the value that was set under `key`, or None."""
        cache = self._opened()
        return None if cache is None else cache.get(key)

    def set(self, key: bytes, value: bytes) -> bool:
        """Keep `value` under `key`; return whether it is kept."""
        cache = self._opened()
        return cache is not None and cache.set(key, value)

    def delete(self, key: bytes) -> None:
        """Forget `key`, if it is there."""
        cache = self._opened()
        if cache is not None:
            cache.delete(key)

    def close(self) -> None:
        """Close the cache. Later reads find nothing and later writes keep nothing."""
        with self._lock:
            cache, self._cache, self._closed = self._cache, None, True
        if cache is not None:
            cache.close()
