"""The workflow of opening an entry: look, wait for another compiler or become the one who compiles, look again, stage files.

The event loop's part is here. `looking` has the blocking part, which runs in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from aionn import trace
from aionn.caching.manifest import Manifest, Wanted
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store.background import BackgroundWork
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.entries import Declined, Hit, Miss, Publisher
from aionn.caching.store.files import refusal_of
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.locks import CompileQueues, CompileRight, wait_to_hold
from aionn.caching.store.looking import Look, stage
from aionn.caching.store.threads import run_in_thread

__all__ = ["Opener"]

_Opened = TypeVar("_Opened", bound=Hit | Miss | Declined)
_Acquire = Callable[[str], Awaitable[CompileRight | None]]
_log = logging.getLogger("aionn.caching")
_READ_WAIT_S = 5.0  # a publisher holds the entry for one rename and two fsyncs
_UNUSABLE = {MissReason.NO_PERMISSION, MissReason.NO_SPACE, MissReason.IO_ERROR}


class Opener:
    """Opens the entries of one store. A hit uses it to be opened again (see `entries.HitOwner`)."""

    def __init__(self, house: Housekeeping, background: BackgroundWork, wait_s: float) -> None:
        self._house, self._background, self._wait_s = house, background, wait_s
        self._queues = CompileQueues()

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` in a thread soon. The caller does not wait for it."""
        self._background.run_later(act)

    def note_use(self, manifest: Manifest) -> None:
        """Note that an entry, which is held, was of use. Blocking."""
        self._house.with_index(lambda index: index.put(manifest, published=False))

    async def glance(self, wanted: Wanted) -> Hit | Declined | None:
        """See `CacheStore.glance`."""
        look = Look(self._house, self, wanted)
        with trace.span("cache.glance", device=wanted.device):
            found = await self._background.ask(look.run, undo=_close_unused)
        return None if isinstance(found, Refusal) else _reported(found)

    async def open(
        self,
        wanted: Wanted,
        *,
        wait_s: float | None = None,
        refused: tuple[str, Refusal] | None = None,
        waits: Callable[[], None] | None = None,
    ) -> Hit | Miss | Declined:
        """See `CacheStore.open`."""
        started = time.monotonic()
        wait_s = self._wait_s if wait_s is None else wait_s
        with trace.span("cache.lookup", device=wanted.device):
            found = await self._look(Look(self._house, self, wanted, refused))
        if isinstance(found, Refusal):
            acquire = partial(self._queues.acquire, wait_s=wait_s, waits=waits)
            return _reported(await self._open_missing(wanted, refused, found, started, acquire))
        return _reported(found)

    async def _open_missing(
        self, wanted: Wanted, refused: tuple[str, Refusal] | None, why: Refusal, started: float, acquire: _Acquire
    ) -> Hit | Miss | Declined:
        """Open an entry that a first look did not find, because of `why`. `acquire`: waits for the right to compile."""
        directory = self._house.directory
        if directory is None or not directory.writable:
            failure = why if directory is None else directory.not_writable
            self._house.warn(failure)
            return _miss(wanted, why, started, save_failure=failure)
        try:
            right = await acquire(directory.compile_lock(wanted.key))
        except OSError as error:
            failure = refusal_of(error, f"compile lock in {self._house.path}")
            self._house.warn(failure)
            return _miss(wanted, failure, started, save_failure=failure)
        if right is None:
            busy = Refusal(MissReason.BUSY, f"another process or task still compiles it after {time.monotonic() - started:.1f} s")
            return _miss(wanted, busy, started, save_failure=busy)
        return await self._open_alone(directory, wanted, refused, right, started)

    async def _open_alone(
        self, directory: CacheDirectory, wanted: Wanted, refused: tuple[str, Refusal] | None, right: CompileRight, started: float
    ) -> Hit | Miss | Declined:
        """Look again and stage files, as the one who may compile the entry."""
        found: Hit | Declined | Refusal | None = None
        publisher: Publisher | Refusal | None = None
        try:
            # Another compiler may have published during the wait, or between the first look and our turn.
            found = await self._look(Look(self._house, self, wanted, refused, started))
            if isinstance(found, Hit | Declined):
                return found
            publisher = await run_in_thread(stage, self._house, directory, wanted, right, undo=Publisher.drop_staging)
        finally:
            if not isinstance(publisher, Publisher):
                await self._release(right, found)
        if isinstance(publisher, Publisher):
            return _miss(wanted, found, started, publisher=publisher)
        self._house.warn(publisher)
        reason = found if found.reason not in _UNUSABLE else publisher
        return _miss(wanted, reason, started, save_failure=publisher)

    async def _release(self, right: CompileRight, found: Hit | Declined | Refusal | None) -> None:
        try:
            await right.release()
        except BaseException:
            # A caller that is cancelled here never gets what was found.
            if isinstance(found, Hit):
                self.run_later(partial(_close_unused, found))
            raise

    async def _look(self, look: Look) -> Hit | Declined | Refusal:
        """Look at the entry, and once more when its publisher has ended."""
        found = await run_in_thread(look.run, undo=_close_unused)
        directory = self._house.directory
        if not isinstance(found, Refusal) or found.reason is not MissReason.BUSY or directory is None or not directory.writable:
            return found
        try:
            hold = await wait_to_hold(directory.entry_lock(look.wanted.key), "read", _READ_WAIT_S)
        except OSError as error:
            return refusal_of(error, f"entry lock in {self._house.path}")
        if hold is None:
            return found
        kept = False
        try:
            found = await run_in_thread(look.run, hold, undo=_close_unused)
            kept = isinstance(found, Hit)
        finally:
            if not kept:
                hold.release()
        return found


def _close_unused(found: Hit | Declined | Refusal) -> None:
    """Close what a thread opened for a caller that was cancelled meanwhile."""
    if isinstance(found, Hit):
        found.close_here(used=False)


def _miss(wanted: Wanted, why: Refusal, started: float, *, publisher: Publisher | None = None, save_failure: Refusal | None = None) -> Miss:
    outcome = CacheOutcome(
        CacheOutcomeKind.MISS,
        why.reason,
        wanted.device,
        why.detail,
        key=wanted.key,
        waited_s=time.monotonic() - started,
        save_failure=save_failure,
        differs=why.differs,
    )
    return Miss(outcome, publisher)


def _reported(result: _Opened) -> _Opened:
    """Count and log the outcome, then return `result`."""
    outcome = result.outcome
    reason = outcome.reason.value if outcome.reason else ""
    trace.count(f"cache.{outcome.kind.value}", device=outcome.device, reason=reason)
    _log.debug("cache %s for device %s: %s %s", outcome.kind.value, outcome.device, reason, outcome.detail)
    return result
