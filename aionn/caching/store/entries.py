"""What `CacheStore.open` returns: a hit with open files, a miss with a publisher, or the note that the device declined.

Each one is an async context manager and owns what it holds (descriptors, locks, staging). Leaving the block frees all of it, in any
task. A device gets descriptors only from here, and only while the block lasts. A device that wants to write later needs a new publisher:
a file that it kept may belong to another entry by then, or to none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from aionn import trace
from aionn.caching.manifest import MAX_PARTS_BYTES, Manifest, Wanted
from aionn.caching.outcomes import CacheOutcome, MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.files import Staged, close_all, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.index import MANIFEST_BYTES
from aionn.caching.store.locks import CompileRight, EntryHold, hold_now, wait_to_hold
from aionn.caching.store.writing import seal
from aionn.errors import CallerError
from aionn.hal.interfaces import CacheHandles
from aionn.tasks import run_in_thread

__all__ = ["Declined", "Hit", "HitOwner", "Miss", "Publisher"]

_SWITCH_WAIT_S = 30.0  # readers hold an entry while a driver copies its files: well below a second


class _Owned:
    """`async with` over `aclose`."""

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()


class HitOwner(Protocol):
    """What a hit needs from the store that opened it."""

    async def open(
        self, wanted: Wanted, *, wait_s: float | None, refused: tuple[str, Refusal] | None, waits: Callable[[], None] | None
    ) -> Hit | Miss | Declined:
        """Open an entry, as `CacheStore.open` does."""
        ...

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` in a thread soon. The caller does not wait for it."""
        ...


class Hit(_Owned):
    """A whole entry with its files open read-write. No process can replace or evict the entry while this is open.

    The files have the number and the lengths that the manifest names. The device verifies their bytes.
    """

    def __init__(
        self,
        owner: HitOwner,
        house: Housekeeping,
        wanted: Wanted,
        outcome: CacheOutcome,
        manifest: Manifest,
        fds: list[int],
        hold: EntryHold,
    ) -> None:
        self.outcome, self.manifest = outcome, manifest
        self._owner, self._house, self._wanted, self._fds, self._hold = owner, house, wanted, fds, hold
        self._open = True

    @property
    def handles(self) -> CacheHandles:
        """The descriptors for `IDevice.prepare_model_from_cache`. The hit keeps owning them."""
        if not self._fds and self.manifest.files:
            raise CallerError("this hit has been closed; open the entry again")
        models = len(self.manifest.model)
        return CacheHandles(tuple(self._fds[:models]), tuple(self._fds[models:]), self.manifest.key)

    async def refuse(
        self, refusal: Refusal, *, wait_s: float | None = None, waits: Callable[[], None] | None = None
    ) -> Hit | Miss | Declined:
        """Close this hit, whose contents the device did not take, and open the entry as a miss with that reason.

        The result is a hit again if another process has published a newer generation meanwhile. What the miss publishes replaces the bad
        generation. Otherwise the bad generation stays, so that `verify` can still look at it. `wait_s`, `waits`: as for
        `CacheStore.open`.
        """
        await self._give_back(used=False)
        trace.count("cache.refused_hit", device=self.outcome.device, reason=refusal.reason.value)
        return await self._owner.open(self._wanted, wait_s=wait_s, refused=(self.manifest.directory, refusal), waits=waits)

    async def aclose(self) -> None:
        await self._give_back(used=True)

    def leave(self) -> None:
        """Close this hit as `aclose` does, without waiting: the answer of the caller's request need not wait for the disk."""
        if self._open:
            self._open = False
            self._owner.run_later(self.close_here)

    async def _give_back(self, *, used: bool) -> None:
        if self._open:
            self._open = False
            await run_in_thread(partial(self.close_here, used=used))

    def close_here(self, *, used: bool = True) -> None:
        """Close this hit in the calling thread. Blocking. The use is noted while the hold still keeps the entry in place."""
        fds, self._fds = self._fds, []
        try:
            close_all(fds)
            if used:
                self._house.with_index(lambda index: index.put(self.manifest, published=False))
        finally:
            self._hold.release()


class Declined(_Owned):
    """The note that this version of the device does not cache this model. Prepare without handles."""

    def __init__(self, outcome: CacheOutcome, manifest: Manifest) -> None:
        self.outcome, self.manifest = outcome, manifest

    async def aclose(self) -> None:
        return


class Miss(_Owned):
    """No usable entry. With a publisher, compile with its handles, then publish. Without a publisher, compile without handles.

    `outcome.save_failure` says why nothing can be stored.
    """

    def __init__(self, outcome: CacheOutcome, publisher: Publisher | None) -> None:
        self.outcome, self.publisher = outcome, publisher

    async def aclose(self) -> None:
        if self.publisher is not None:
            await self.publisher.aclose()


class Publisher(_Owned):
    """The right to store one entry, and fresh empty files for a driver to fill.

    While this is open, no other task or process compiles the entry, and readers go on with the generation they have. The first call of
    `publish`, `decline` or `aclose` (abandon) ends it. A process that dies abandons its publishers.

    Attributes:
        right: to compile the entry.
        last_compile_s: what the last compile of the same for any version of the device took, or None if that is not known.
    """

    def __init__(
        self, house: Housekeeping, directory: CacheDirectory, wanted: Wanted, staged: Staged, right: CompileRight, based_on: int
    ) -> None:
        """`based_on` is the generation that stood when the files were made, or 0 for no generation."""
        self.wanted, self.based_on = wanted, based_on
        self._house, self._directory, self._staged, self.right = house, directory, staged, right
        self.last_compile_s: float | None = None
        self._open, self._tidy = True, False
        self._started_ns = time.monotonic_ns()

    @property
    def handles(self) -> CacheHandles:
        """The descriptors for `IDevice.prepare_model`. The publisher keeps owning them."""
        if not self._open:
            raise CallerError("this publisher has ended; open the entry again to get another")
        models = self.wanted.files.model
        return CacheHandles(self._staged.fds[:models], self._staged.fds[models:], self.wanted.key)

    async def publish(self, *, compile_ns: int | None = None) -> Refusal | None:
        """Make what the driver wrote the entry, whole or not at all. Returns None if it is the entry now.

        Args:
            compile_ns: what compiling took, for eviction. None stands for the time since this publisher was opened.

        A driver that wrote nothing has declined. The refusal is SUPERSEDED if another generation than `based_on` is there now, BUSY if
        readers do not leave, TOO_LARGE, or what the file system says. The caller goes on uncached.
        """
        took_ns = time.monotonic_ns() - self._started_ns if compile_ns is None else compile_ns
        return await self._end(took_ns, None)

    async def decline(self, detail: str = "") -> Refusal | None:
        """Remember that the device does not cache this model, until its version changes. Returns None if the store remembers it now."""
        return await self._end(0, detail)

    async def _end(self, compile_ns: int, declined: str | None) -> Refusal | None:
        if not self._open:
            raise CallerError("this publisher has ended; open the entry again to get another")
        try:
            with trace.span("cache.publish", device=self.wanted.device):
                refusal = await run_in_thread(self._publish_here, compile_ns, declined)
                if isinstance(refusal, Manifest):
                    refusal = await self._publish_after_readers(refusal)
        except OSError as error:
            refusal = refusal_of(error, "publishing a cache entry")
        finally:
            await self.aclose()
        if refusal is not None:
            self._house.warn(refusal)
        trace.count("cache.published" if refusal is None else "cache.publish_failed", device=self.wanted.device)
        return refusal

    def _publish_here(self, compile_ns: int, declined: str | None) -> Manifest | Refusal | None:
        """Publish in the calling thread. Returns the manifest if readers hold the entry. Blocking."""
        key, directory = self.wanted.key, self._directory
        files = () if declined is not None else seal(directory, key, self._staged)
        if declined is None and not any(file.length for file in files):
            declined, files = "the device left the cache files empty", ()
        size_bytes = sum(file.length for file in files) + MANIFEST_BYTES
        if self._house.max_bytes is not None and size_bytes > self._house.max_bytes:
            return Refusal(MissReason.TOO_LARGE, f"{size_bytes} bytes, the whole cache may have {self._house.max_bytes}")
        models = self.wanted.files.model
        manifest = Manifest(
            key=key,
            family=self.wanted.family,
            device=self.wanted.device,
            device_version=self.wanted.device_version,
            model_digest=self.wanted.model_digest,
            model=files[:models],
            data=files[models:],
            directory="" if declined is not None else self._staged.directory,
            generation=self.based_on + 1,
            compile_ns=compile_ns,
            created_ns=time.time_ns(),
            declined=declined is not None,
            detail=declined or "",
            parts=self.wanted.parts if len(self.wanted.parts) <= MAX_PARTS_BYTES else b"",
        )
        hold = hold_now(directory.entry_lock(key), "write")
        return manifest if hold is None else self._switch_here(manifest, hold)

    async def _publish_after_readers(self, manifest: Manifest) -> Refusal | None:
        hold = await wait_to_hold(self._directory.entry_lock(manifest.key), "write", _SWITCH_WAIT_S)
        if hold is None:
            return Refusal(MissReason.BUSY, f"readers have held the entry for {_SWITCH_WAIT_S} s")
        try:
            return await run_in_thread(self._switch_here, manifest, hold)
        finally:
            hold.release()

    def _switch_here(self, manifest: Manifest, hold: EntryHold) -> Refusal | None:
        try:
            refusal = self._house.replace(self._directory, manifest, self.based_on)
        finally:
            hold.release()
        self._tidy_here()
        return refusal

    def _tidy_here(self) -> None:
        """Close the files, and remove what is not published. Blocking."""
        self._tidy = True
        close_all(self._staged.fds)
        self._house.finish_staging(self._directory, self.wanted.key)

    async def aclose(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if not self._tidy:
                # A cancelled caller still waits for this thread: else the staging and, worse, the lock would stay.
                await run_in_thread(self._tidy_here)
        finally:
            self.right.release()

    def drop_staging(self) -> None:
        """Remove what a thread staged for a caller that was cancelled. Blocking. The right to compile is the caller's to release."""
        if self._open:
            self._open = False
            self._tidy_here()
