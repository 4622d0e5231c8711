"""What `CacheStore.open` hands out: a hit with open files, a miss with a publisher, or the word that the device declined.

Each is an async context manager and owns what it holds (descriptors, locks, staging); leaving the block frees all of it, from whatever
task. A device gets descriptors only from here, and only for as long as the block lasts; one that wants to write later asks for a publisher
of its own at that time (`CacheStore.publisher`), because a file it kept from before may by then be another entry's, or nobody's.
"""

from __future__ import annotations

import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aionn import trace
from aionn.caching.manifest import MAX_PARTS_BYTES, Manifest, Wanted
from aionn.caching.outcomes import CacheOutcome, MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, Staged, close_all, refusal_of
from aionn.caching.store.hop import hop
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.locks import EntryHold, Flight, wait_to_hold
from aionn.errors import CallerError
from aionn.hal.interfaces import CacheHandles

if TYPE_CHECKING:
    from aionn.caching.store.cache import CacheStore

__all__ = ["Declined", "Hit", "Miss", "Publisher"]

_SWITCH_WAIT_S = 30.0  # readers hold an entry while a driver copies its files: well below a second


class _Owned:
    """`async with` over `aclose`."""

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()


class Hit(_Owned):
    """A whole entry, its files open read-write, held shared: neither replaced nor evicted while this is open.

    The files have the lengths and the number that the manifest tells. Their bytes are for the device to verify.
    """

    def __init__(
        self, store: CacheStore, wanted: Wanted, outcome: CacheOutcome, manifest: Manifest, fds: list[int], hold: EntryHold
    ) -> None:
        self.outcome, self.manifest = outcome, manifest
        self._store, self._wanted, self._fds, self._hold = store, wanted, fds, hold
        self._open = True

    @property
    def handles(self) -> CacheHandles:
        """For `IDevice.prepare_model_from_cache`. The hit keeps owning the descriptors."""
        if not self._fds and self.manifest.files:
            raise CallerError("this hit has been closed; open the entry again")
        models = len(self.manifest.model)
        return CacheHandles(tuple(self._fds[:models]), tuple(self._fds[models:]), self.manifest.key)

    @property
    def generation(self) -> int:
        return self.manifest.generation

    async def refuse(self, refusal: Refusal, *, wait_s: float | None = None) -> Hit | Miss | Declined:
        """The device did not take these contents. Closes this hit, and opens the entry as a miss with that reason.

        It is a hit again if another process has published a newer generation meanwhile. The bad generation is replaced by what the
        miss publishes, and otherwise stays: what one device refused, `verify` can still look at.
        """
        await self._give_back(used=False)
        trace.count("cache.refused_hit", device=self.outcome.device, reason=refusal.reason.value)
        return await self._store.open(self._wanted, wait_s=wait_s, refused=(self.manifest.directory, refusal))

    async def aclose(self) -> None:
        await self._give_back(used=True)

    def leave(self) -> None:
        """As `aclose`, but what has to be done for it is done behind the caller's back: a hit's answer need not wait for it."""
        if self._open:
            self._open = False
            self._store.later(self.close_here)

    async def _give_back(self, *, used: bool) -> None:
        if self._open:
            self._open = False
            await hop(partial(self.close_here, used=used))

    def close_here(self, *, used: bool = True) -> None:
        """The same, blocking, in a thread. The use is noted while the entry is still held, and so is still there."""
        fds, self._fds = self._fds, []
        try:
            close_all(fds)
            if used:
                self._store.note_use(self.manifest)
        finally:
            self._hold.release()


class Declined(_Owned):
    """The device said that it does not cache this model, in this version. Prepare without handles."""

    def __init__(self, outcome: CacheOutcome, manifest: Manifest) -> None:
        self.outcome, self.manifest = outcome, manifest

    async def aclose(self) -> None:
        return


class Miss(_Owned):
    """Nothing usable. With a publisher: compile with its handles, then publish. Without one: compile without handles;
    `outcome.save_failure` tells why nothing can be stored."""

    def __init__(self, outcome: CacheOutcome, publisher: Publisher | None) -> None:
        self.outcome, self.publisher = outcome, publisher

    async def aclose(self) -> None:
        if self.publisher is not None:
            await self.publisher.aclose()


class Publisher(_Owned):
    """The right to store one entry, and fresh empty files for a driver to fill.

    Nobody else compiles the entry while this is open; readers go on with the generation they have. Ends with `publish`, `decline` or
    `aclose` (abandon), whichever is first; a process that dies abandons.
    """

    def __init__(
        self, house: Housekeeping, directory: CacheDirectory, wanted: Wanted, staged: Staged, flight: Flight, based_on: int
    ) -> None:
        self.wanted, self.based_on = wanted, based_on
        self._house, self._directory, self._staged, self._flight = house, directory, staged, flight
        self._open = True
        self._started_ns = time.monotonic_ns()

    @property
    def handles(self) -> CacheHandles:
        """For `IDevice.prepare_model`. The publisher keeps owning the descriptors."""
        if not self._open:
            raise CallerError("this publisher has ended; ask the store for another")
        models = self.wanted.files.model
        return CacheHandles(self._staged.fds[:models], self._staged.fds[models:], self.wanted.key)

    async def publish(self, *, compile_ns: int | None = None) -> Refusal | None:
        """The driver is done: make what it wrote the entry, whole or not at all. None if that is so now.

        Args:
            compile_ns: what compiling took, for eviction; None: the time since this publisher was opened.

        A driver that wrote nothing has declined. Refused: SUPERSEDED if another generation than `based_on` is there now, BUSY if
        readers do not leave, TOO_LARGE, and whatever the file system says. The caller goes on uncached.
        """
        took_ns = time.monotonic_ns() - self._started_ns if compile_ns is None else compile_ns
        return await self._end(took_ns, None)

    async def decline(self, detail: str = "") -> Refusal | None:
        """The device does not cache this model: remembered until its version changes. None if that is so now."""
        return await self._end(0, detail)

    async def _end(self, compile_ns: int, declined: str | None) -> Refusal | None:
        if not self._open:
            raise CallerError("this publisher has ended; ask the store for another")
        try:
            with trace.span("cache.publish", device=self.wanted.device):
                refusal = await self._switch(compile_ns, declined)
        except OSError as error:
            refusal = refusal_of(error, "publishing a cache entry")
        finally:
            await self.aclose()
        if refusal is not None:
            self._house.warn(refusal)
        trace.count("cache.published" if refusal is None else "cache.publish_failed", device=self.wanted.device)
        return refusal

    async def _switch(self, compile_ns: int, declined: str | None) -> Refusal | None:
        key, directory = self.wanted.key, self._directory
        files = () if declined is not None else await hop(directory.seal, key, self._staged)
        if declined is None and not any(file.length for file in files):
            declined, files = "the device left the cache files empty", ()
        size_bytes = sum(file.length for file in files)
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
        hold = await wait_to_hold(directory.entry_lock(key), "write", _SWITCH_WAIT_S)
        if hold is None:
            return Refusal(MissReason.BUSY, f"readers have held the entry for {_SWITCH_WAIT_S} s")
        try:
            return await hop(self._house.replace, directory, manifest, self.based_on)
        finally:
            hold.release()

    async def aclose(self) -> None:
        if not self._open:
            return
        self._open = False
        close_all(self._staged.fds)
        try:
            # Done though the caller is cancelled (see `hop`), or it would leave its rubbish and, worse, its lock.
            await hop(self._house.finish_staging, self._directory, self.wanted.key)
        finally:
            await self._flight.land()

    @staticmethod
    def drop_staging(publisher: Publisher | Refusal) -> None:
        """Blocking: for a thread that staged files for somebody who has gone. The flight stays the caller's to land."""
        if isinstance(publisher, Publisher) and publisher._open:
            publisher._open = False
            close_all(publisher._staged.fds)
            publisher._house.finish_staging(publisher._directory, publisher.wanted.key)
