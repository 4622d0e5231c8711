"""Opening an entry: a hit with open files, a miss with a publisher, or the note that the device declined.

What `CacheStore.open` returns is an async context manager, and owns what it holds (descriptors, locks, staging). Leaving the block frees
all of it, in any task. A device gets descriptors only from here, and only while the block lasts. A device that wants to write later needs
a new publisher: a file that it kept may belong to another entry by then, or to none.

`Look` is the blocking part, for threads: look at the entry, explain why it is not there, take the right to compile it, stage files for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import msgspec

from aionn import trace
from aionn.caching.manifest import MAX_NAME_LENGTH, MAX_PARTS_BYTES, Manifest, Wanted, reason_to_miss
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, Staged, close_all, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.index import MANIFEST_BYTES
from aionn.caching.store.locks import CompileRight, EntryHold, hold_now, wait_to_hold
from aionn.caching.store.writing import clean, heal, seal, stage_files
from aionn.caching.token import KeyParts, changed_parts, decode_parts, described_change
from aionn.errors import CallerError
from aionn.escapes import escaped
from aionn.hal.interfaces import CacheHandles
from aionn.tasks import run_in_thread

__all__ = ["Declined", "Hit", "HitOwner", "Look", "Miss", "Publisher", "undo"]

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

    async def reopen_as_miss(
        self, refusal: Refusal, *, wait_s: float | None = None, waits: Callable[[], None] | None = None
    ) -> Hit | Miss | Declined:
        """Close this hit, whose contents the device did not take, and open the entry as a miss with that reason.

        The result is a hit again if another process has published a newer generation meanwhile. What the miss publishes replaces the bad
        generation. Otherwise the bad generation stays, so that `verify` can still look at it. `wait_s`, `waits`: as for
        `CacheStore.open`.
        """
        await self._close(used=False)
        trace.count("cache.refused_hit", device=self.outcome.device, reason=refusal.reason.value)
        return await self._owner.open(self._wanted, wait_s=wait_s, refused=(self.manifest.directory, refusal), waits=waits)

    async def aclose(self) -> None:
        await self._close(used=True)

    def leave(self) -> None:
        """Close this hit as `aclose` does, without waiting: the answer of the caller's request need not wait for the disk."""
        if self._open:
            self._open = False
            self._owner.run_later(self.close_here)

    async def _close(self, *, used: bool) -> None:
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
        # Before they are read: a file with a hole may be huge.
        size_bytes = MANIFEST_BYTES + sum(os.fstat(fd).st_size for fd in self._staged.fds if declined is None)
        if self._house.max_bytes is not None and size_bytes > self._house.max_bytes:
            return Refusal(MissReason.TOO_LARGE, f"{size_bytes} bytes, the whole cache may have {self._house.max_bytes}")
        files = () if declined is not None else seal(directory, key, self._staged)
        if declined is None and not any(file.length for file in files):
            declined, files = "the device left the cache files empty", ()
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
            model_name=escaped(self.wanted.model_name, one_line=True)[:MAX_NAME_LENGTH],
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


_UNLOCKED_READS = 3  # of an entry that a process replaces meanwhile through another mount of a read-only directory
_UNUSABLE = {MissReason.NO_PERMISSION, MissReason.NO_SPACE, MissReason.IO_ERROR}
_RELATIVES = 16  # so many entries of a model are looked at to explain a miss


class Look(msgspec.Struct, frozen=True):
    """One look for one entry.

    Attributes:
        owner: what a hit is opened again with.
        refused: the directory of a generation that must not be returned, and why.
        since: when the caller asked, in `time.monotonic` seconds.
        waited: whether another compiler of the entry was waited for.
    """

    house: Housekeeping
    owner: HitOwner
    wanted: Wanted
    refused: tuple[str, Refusal] | None = None
    since: float = msgspec.field(default_factory=time.monotonic)
    waited: bool = False

    def open_now(self) -> Hit | Miss | Declined | None:
        """Return the entry, or a miss with the right to compile it. None if another process or task publishes or compiles it now."""
        found = self.run()
        if not isinstance(found, Refusal):
            return found
        if found.reason is MissReason.BUSY:
            return None
        directory = self.writable(found)
        if isinstance(directory, Miss):
            return directory
        path = directory.compile_lock(self.wanted.key)
        opened: Hit | Miss | Declined | None = None
        right: CompileRight | None = None
        try:
            hold = hold_now(path, "write")
            if hold is None:
                return None
            right = CompileRight(hold, path)
            again = self.run()  # another compiler may have published between the first look and the lock
            if not isinstance(again, Refusal):
                opened = again
            elif again.reason is not MissReason.BUSY:
                opened = self.staged(directory, right, again)
            return opened
        except OSError as error:
            return self.unlockable(error)
        finally:
            if right is not None and not (isinstance(opened, Miss) and opened.publisher is not None):
                right.release()

    def writable(self, why: Refusal) -> CacheDirectory | Miss:
        """Return the directory, or the miss if nothing can be stored in it. `why`: the entry cannot serve."""
        directory = self.house.directory
        if directory is not None and directory.writable:
            return directory
        failure = why if directory is None else directory.not_writable
        self.house.warn(failure)
        return self.missed(why, save_failure=failure)

    def unlockable(self, error: OSError) -> Miss:
        """Return the miss if the lock file cannot be used."""
        failure = refusal_of(error, f"compile lock in {self.house.path}")
        self.house.warn(failure)
        return self.missed(failure, save_failure=failure)

    def staged(self, directory: CacheDirectory, right: CompileRight, why: Refusal) -> Miss:
        """Return the miss with fresh files for a driver to fill. Without files, it says why. The caller holds the right to compile."""
        publisher = _stage(self.house, directory, self.wanted, right)
        if isinstance(publisher, Publisher):
            return self.missed(why, publisher=publisher)
        self.house.warn(publisher)
        return self.missed(why if why.reason not in _UNUSABLE else publisher, save_failure=publisher)

    def missed(self, why: Refusal, *, publisher: Publisher | None = None, save_failure: Refusal | None = None) -> Miss:
        """Return the miss for that reason."""
        outcome = CacheOutcome(
            CacheOutcomeKind.MISS,
            why.reason,
            self.wanted.device,
            why.detail,
            key=self.wanted.key,
            waited_s=time.monotonic() - self.since,
            save_failure=save_failure,
            differs=why.differs,
        )
        return Miss(outcome, publisher)

    def run(self, hold: EntryHold | None = None) -> Hit | Declined | Refusal:
        """Return the entry, or why it cannot serve. BUSY means that a process is publishing it.

        Args:
            hold: the entry lock, if the caller has it. A hit owns it from then on. Any other result leaves it to the caller.
        """
        directory = self.house.current()
        if isinstance(directory, Refusal):
            return directory
        try:
            with directory:
                found = self._at_entry(directory, hold)
                for _ in range(_UNLOCKED_READS - 1):
                    if directory.writable or not isinstance(found, Refusal) or found.reason is not MissReason.BUSY:
                        break
                    found = self._at_entry(directory, hold)
                return found
        except OSError as error:
            return refusal_of(error, f"cache entry {self.wanted.key.hex()[:16]}")

    def _at_entry(self, directory: CacheDirectory, hold: EntryHold | None) -> Hit | Declined | Refusal:
        wanted = self.wanted
        # A first look without the lock: most misses never need the lock's file.
        found = directory.find(wanted.key)
        if isinstance(found, Refusal):
            return _explained(self.house, directory, wanted, found) if found.reason is MissReason.ABSENT else found
        held = hold
        fds: list[int] = []
        kept = False
        try:
            if held is None:
                held = hold_now(directory.entry_lock(wanted.key), "read") if directory.writable else EntryHold.without_a_lock()
            if held is None:
                return Refusal(MissReason.BUSY, "the entry is being published")
            if not directory.is_still(wanted.key, found):
                found.close()
                again = directory.find(wanted.key)
                if isinstance(again, Refusal):
                    return again
                found = again
            manifest = found.manifest
            refusal = reason_to_miss(manifest, wanted)
            if refusal is not None:
                return refusal
            waited_s = time.monotonic() - self.since if self.waited else 0.0
            if manifest.declined:
                outcome = CacheOutcome(CacheOutcomeKind.DECLINED, None, wanted.device, manifest.detail, key=wanted.key, waited_s=waited_s)
                return Declined(outcome, manifest)
            if self.refused is not None and self.refused[0] == manifest.directory:
                return self.refused[1]
            fds, lengths = found.open_files(os.O_RDWR if directory.writable else os.O_RDONLY)
            if not directory.writable and not directory.is_still(wanted.key, found):
                return Refusal(MissReason.BUSY, "the entry was replaced while its files were opened")
            refusal = reason_to_miss(manifest, wanted, lengths)
            if refusal is not None:
                return refusal
            outcome = CacheOutcome(
                CacheOutcomeKind.HIT, None, wanted.device, key=wanted.key, waited_s=waited_s, saved_s=manifest.compile_ns / 1e9
            )
            kept = True
            return Hit(self.owner, self.house, wanted, outcome, manifest, fds, held)
        finally:
            found.close()
            if not kept:
                close_all(fds)
                if hold is None and held is not None:
                    held.release()


def _explained(house: Housekeeping, directory: CacheDirectory, wanted: Wanted, absent: Refusal) -> Refusal:
    """Return why nothing is stored under a key, if a similar key has an entry. Return `absent` otherwise."""
    before = house.with_index(lambda index: index.other_version(wanted.family, wanted.device_version))
    if before is not None:
        detail = f"stored by driver {before!r}, now {wanted.device_version!r}"
        return Refusal(MissReason.OTHER_DRIVER_VERSION, detail, ("device_version",))
    try:
        now = decode_parts(wanted.parts)
    except CallerError:
        return absent
    nearest: KeyParts | None = None
    for key in house.with_index(lambda index: index.of_model(wanted.model_digest, _RELATIVES)) or []:
        with suppress(OSError, CallerError):
            manifest = directory.manifest(key)
            if isinstance(manifest, Manifest) and not manifest.declined:
                parts = decode_parts(manifest.parts)
                if nearest is None or len(changed_parts(parts, now)) < len(changed_parts(nearest, now)):
                    nearest = parts
    if nearest is None:
        return absent
    detail = f"{absent.detail}, but for this model: {described_change(nearest, now)}"
    return Refusal(absent.reason, detail, changed_parts(nearest, now))


def _stage(house: Housekeeping, directory: CacheDirectory, wanted: Wanted, right: CompileRight) -> Publisher | Refusal:
    """Make fresh files for a driver to fill. The caller holds the right to compile the entry."""
    try:
        with directory:
            heal(directory, wanted.key)
            manifest = directory.manifest(wanted.key)
            generation = manifest.generation if isinstance(manifest, Manifest) else 0
            house.with_index(lambda index: index.note_staging(wanted.key))
            # We hold the compile lock, so whatever else lies in the entry belongs to processes that have ended.
            clean(directory, wanted.key)
            staged = stage_files(directory, wanted.key, wanted.files)
    except OSError as error:
        return refusal_of(error, f"new files in {house.path}")
    publisher = Publisher(house, directory, wanted, staged, right, generation)
    publisher.last_compile_s = house.with_index(lambda index: index.compile_s(wanted.family))
    return publisher


def undo(found: Hit | Miss | Declined | Refusal | None) -> None:
    """Close what a thread opened for a caller that was cancelled meanwhile, and that has no right to compile itself. Blocking."""
    if isinstance(found, Hit):
        found.close_here(used=False)
    elif isinstance(found, Miss) and found.publisher is not None:
        try:
            found.publisher.drop_staging()
        finally:
            found.publisher.right.release()
