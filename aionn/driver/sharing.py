"""Executables that several prepared models of one device share: a model that is prepared again with the same options needs no new weights.

Each prepared model gets executables of its own (`Executable.share`), which may run beside the others. The weights go with the last of
them. Only an engine whose executables have `share` takes part.

What makes two preparations the same
    Every option except the deadline, and the model's identity: its token, and the digest of constants that have changed since the token
    was made. A model from a cache has the token that its verified files carry.

Use it from the loop. What blocks is marked, and belongs in a thread.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence

from blake3 import blake3

from aionn.driver.artifacts import Description, Loaded
from aionn.errors import AionnError
from aionn.hal.interfaces import Executable, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CACHE_TOKEN_BYTES

__all__ = ["Shared", "Sharing", "identity_of"]


class Shared:
    """An executable that others are made of. Every prepared model that uses it keeps this object alive.

    Attributes:
        executable: run by the model that was prepared first. It has a `share` method.
        digests: of the cache files that it was made of, or of those that it was stored in; empty without files.
    """

    def __init__(self, executable: Executable, identity: bytes, digests: bytes = b"") -> None:
        self.executable = executable
        self.identity = identity
        self.digests = digests

    def executables(self, count: int) -> Sequence[Executable]:
        """Return `count` executables of this one. Blocks, and passes on what the engine raises."""
        return tuple(self.executable.share() for _ in range(count))  # type: ignore[attr-defined]


class Sharing:
    """The executables of one device that can be shared, for as long as a prepared model uses them."""

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[tuple[bytes, PrepareOptions], Shared] = weakref.WeakValueDictionary()

    def find(self, identity: bytes, options: PrepareOptions) -> Shared | None:
        """Return the executable of that model and those options, or None."""
        return self._live.get((identity, _key(options))) if identity else None

    def of(self, options: PrepareOptions) -> list[Shared]:
        """Return all executables of these options."""
        key = _key(options)
        return [shared for (_, others), shared in list(self._live.items()) if others == key]

    def add(self, shared: Shared, options: PrepareOptions) -> None:
        """Offer an executable to later preparations, if its engine can share it."""
        if shared.identity and hasattr(shared.executable, "share"):
            self._live[shared.identity, _key(options)] = shared
