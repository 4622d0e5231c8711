"""`CompileBackend`: where a compile asks for an artifact that another process has compiled. No I/O but closing descriptors.

A compile that finds nothing in its cache may ask a `CompileBackend`: an object store, a farm, a worker process of this machine. The
backend is not trusted. The driver checks the signed statement and the bytes (`caching.statement`, `IDevice.adopt`). An artifact without a
statement is loaded only if the driver's own records have its digests, so the backend cannot make the driver load other bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import PooledModel
from aionn.hal.types import CacheFiles
from aionn.loopless import ClosedByWith


def _ignore_words(words: str) -> None:
    """Ignore the words, as a request does whose progress is not shown."""


@dataclass(frozen=True, slots=True)
class ArtifactRequest:
    """The artifact that a compile asks a backend for.

    Attributes:
        key: of the cache entry, 32 bytes. A statement for another key is refused.
        parts: what the key was made of (`token.encode_parts`).
        device, device_version: the device that will run the model.
        model_digest: `Model.token` of the model, 32 bytes.
        files: how many cache files the device has.
        options: preference, priority, engine options, and the deadline of the compile (`deadline_ns`).
        model: the app's model, which may not have been read yet. `aionn.fleet.content_of` returns its files.
        report: shows in a few words what the backend does, as in `request.report("compiling (attempt 2)")`. `Health`, `CompileStep` and
            `Stage.step` have the words. Call it in the runtime's event loop. After the answer it does nothing.
    """

    key: bytes
    parts: bytes
    device: str
    device_version: str
    model_digest: bytes
    files: CacheFiles
    options: PrepareOptions
    model: PooledModel
    report: Callable[[str], None] = field(default=_ignore_words, compare=False, repr=False)


class Offered(ClosedByWith):
    """An artifact that a backend offers. It owns open files, so its receiver closes it (`with`).

    Attributes:
        signed: the signed statement. None for an artifact that a driver of this machine has compiled and recorded.
        model, data: descriptors of regular files, open for reading, in the device's order. `Offered` owns them.
        compile_ns: nanoseconds that compiling an artifact without a statement took, or 0.
    """

    def __init__(self, signed: bytes | None, model: Sequence[int], data: Sequence[int] = (), *, compile_ns: int = 0) -> None:
        self.signed, self.model, self.data, self.compile_ns = signed, tuple(model), tuple(data), compile_ns
        self._open = True

    def taken(self) -> Offered:
        """Give the descriptors to a new object, which owns them from now on. Closing this one does nothing then."""
        other = Offered(self.signed, self.model, self.data, compile_ns=self.compile_ns)
        other._open, self._open = self._open, False
        return other

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        if self._open:
            self._open = False
            for fd in (*self.model, *self.data):
                os.close(fd)


class CompileBackend(Protocol):
    """Where a compile asks for an artifact that its cache does not have."""

    @property
    def wait_s(self) -> float:
        """How many seconds a compile waits for an answer. Then the model is compiled on this machine."""
        ...

    async def compile(self, request: ArtifactRequest) -> Offered | None:
        """Return an artifact for the request. Returns None if the backend has no such artifact.

        The task is cancelled when the compile does not wait any more. An error counts as None, and is logged.
        """
        ...
