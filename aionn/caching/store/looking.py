"""The blocking part of opening an entry: look at it, explain why it is not there, take the right to compile it, stage files for it.

Everything here runs in threads.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import msgspec

from aionn.caching.manifest import Manifest, Wanted, reason_to_miss
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.entries import Declined, Hit, HitOwner, Miss, Publisher
from aionn.caching.store.files import close_all, refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.locks import CompileRight, EntryHold, hold_now
from aionn.caching.store.writing import clean, heal, stage_files
from aionn.caching.token import KeyParts, changed_parts, decode_parts, described_change
from aionn.errors import CallerError

__all__ = ["Look", "undo"]

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
