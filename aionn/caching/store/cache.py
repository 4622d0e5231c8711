"""`CacheStore` is the face of one cache directory: it opens entries, and it lists, verifies and prunes them.

Every blocking act runs in a thread, so the event loop never waits for a disk. Nothing here raises for the state of the disk.
A directory that is missing, read-only, full or unsafe gives a `Miss` without a publisher, and one warning per reason.

A disk may hang. So no caller has to wait for it: a cancelled caller leaves at once, and the thread's result is undone later.
The store waits for all of these threads before it closes, lists or prunes.

An act of the store is several system calls with locks, fsync and rename between them. They are relative to a directory's descriptor.
One thread for the whole act costs one turn of the event loop. `aiofiles` takes a thread for each call and opens by path alone.
So the store uses `aiofiles` only where it reads a file through (`verify`).

`Remembered` is what a directory keeps beside its entries, in the file of its index (`History`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TypeVar

import anyio

from aionn import trace
from aionn.caching.manifest import Wanted
from aionn.caching.measurements import StageMeasurement
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import refusal_of
from aionn.caching.store.housekeeping import BadEntry, CacheUsage, EntryInfo, Housekeeping, PruneReport, list_entries, prune, verify
from aionn.caching.store.index import Index
from aionn.caching.store.locks import CompileQueues, wait_to_hold
from aionn.caching.store.opening import Declined, Hit, Look, Miss, undo
from aionn.errors import CallerError
from aionn.tasks import ThreadWork, run_in_thread

__all__ = ["DEFAULT_MAX_BYTES", "CacheStore", "Remembered"]

T = TypeVar("T")


class Remembered:
    """What one store remembers: how models were cut over several devices, what stages measured, and how often models are used."""

    def __init__(self, house: Housekeeping, work: ThreadWork) -> None:
        self._house = house
        self._work = work

    def _with_index(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index of the directory as it is now. Return None if either cannot be used. Blocking."""
        return None if isinstance(self._house.current(), Refusal) else self._house.with_index(act)

    async def plan(self, scope: bytes) -> bytes | None:
        """Return the plan that is kept under that scope, or None."""
        return await self._work.ask(self._with_index, lambda index: index.history.plan(scope))

    async def keep_plan(self, scope: bytes, body: bytes) -> None:
        """Keep a plan, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.keep_plan(scope, body))

    async def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """Return stage measurements, the newest first. Measurements that are too old are left out.

        Args:
            scope: see `History`. None stands for all scopes.
        """
        return await self._work.ask(self._with_index, lambda index: index.history.measurements(scope)) or []

    async def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.remember(scope, measurement))

    def remember_later(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement as `remember` does, without waiting for the disk."""
        self._work.run_later(partial(self._with_index, lambda index: index.history.remember(scope, measurement)))

    async def use(self, model_digest: bytes, within_s: float) -> int:
        """Return how many executions of the model `count_use` has counted within that time."""
        return await self._work.ask(self._with_index, lambda index: index.history.use(model_digest, within_s)) or 0

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions of the model, without waiting for the disk."""
        self._work.run_later(partial(self._with_index, lambda index: index.history.count_use(model_digest, executions)))


_Opened = TypeVar("_Opened", bound=Hit | Miss | Declined)
_log = logging.getLogger("aionn.caching")
_READ_WAIT_S = 5.0  # a publisher holds the entry for one rename and two fsyncs
DEFAULT_MAX_BYTES = 4 << 30


class CacheStore(ThreadWork):
    """The app's side of one cache directory. Any number of stores, in any number of processes, may share a directory.

    Attributes:
        remembered: plans of models that were cut, measurements of stages, and how often models are used.
        max_bytes: the budget of all entries, or None. It stays as it was made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        wait_s: float = 120.0,
        old_versions_kept_s: float = 7 * 86400.0,
    ) -> None:
        """Make a store. The first `open` is the first to touch the disk.

        Args:
            directory: made if it is missing. It must belong to this account, and no other account may write to it.
            max_bytes: budget of all entries. Beyond it the store removes the least valuable ones. None stands for no budget.
            wait_s: how long `open` waits for another compiler of the same entry. After that the caller compiles for itself.
            old_versions_kept_s: an entry of a device's older version is removed after that time without use.
        """
        path = os.fspath(directory)
        if not path:
            raise CallerError("the cache directory is an empty path; give a directory, or None for no caching")
        if max_bytes is not None and max_bytes < 0:
            raise CallerError(f"the cache budget is {max_bytes} bytes; give at least 0, or None for no budget")
        self.wait_s, self.max_bytes = wait_s, max_bytes
        self._house = Housekeeping(path, max_bytes, old_versions_kept_s)
        super().__init__()
        self._users: set[anyio.Event] = set()
        self.remembered = Remembered(self._house, self)
        self._queues = CompileQueues()

    async def aclose(self) -> None:
        """Wait for the blocks of `in_use` and for all threads. Close what `open` returned before, unless such a block holds it.

        When this ends, however it ends, callers that still wait for the disk get `CallerError`. Cancelling the wait is safe: a thread
        that still works in the directory closes what it opened when the disk lets it end.
        """
        try:
            while self._users:
                await next(iter(self._users)).wait()
            await self.wait_idle()
        finally:
            self._house.close()
            self.fail_waiting(CallerError("the cache store was closed"))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `aclose` waiting for the block, which may still store something."""
        ended = anyio.Event()
        self._users.add(ended)
        try:
            yield
        finally:
            self._users.discard(ended)
            ended.set()

    async def wait_idle(self) -> None:
        """Wait until no thread works."""
        while self.running:
            await asyncio.wait(self.running)

    async def __aenter__(self) -> CacheStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    @property
    def path(self) -> str:
        return self._house.path

    @property
    def usage(self) -> CacheUsage:
        """What the directory holds, as this process has seen it last. It is read without touching the disk."""
        return self._house.usage

    def warn(self, refusal: Refusal) -> None:
        """Log why the cache was not used. Each reason is logged once per store."""
        self._house.warn(refusal)

    async def fault(self) -> Refusal | None:
        """Return why the cache is of no use: it holds no entry, and none can be stored. None if it may be of use."""
        return await self.ask(self._house.fault)

    # --- opening an entry --------------------------------------------------------------------------------------------

    async def glance(self, wanted: Wanted) -> Hit | Declined | None:
        """Return the entry if it is there and whole, or None. Close it, as what `open` returns. Nothing is made in the directory."""
        found = await self.ask(Look(self._house, self, wanted).run, undo=undo)
        return None if isinstance(found, Refusal) else _reported(found)

    async def open_now(self, wanted: Wanted) -> Hit | Miss | Declined | None:
        """Open an entry as `open` does, or return None if `open` would have to wait for another task or process.

        The call waits for the disk only, and a cancelled caller does not. So most compiles need one thread and no task: on a miss, the same
        thread takes the right to compile, looks again and stages files.
        """
        with trace.span("cache.lookup", device=wanted.device):
            found = await self.ask(Look(self._house, self, wanted).open_now, undo=undo)
        if found is None:
            return None
        if isinstance(found, Miss) and found.publisher is not None:
            self._queues.note(found.publisher.right)
        return _reported(found)

    async def open(
        self,
        wanted: Wanted,
        *,
        wait_s: float | None = None,
        refused: tuple[str, Refusal] | None = None,
        waits: Callable[[], None] | None = None,
    ) -> Hit | Miss | Declined:
        """Look the entry up. On a miss, become the one who compiles it, or wait for the one who does.

        Args:
            wanted: the key, and what the entry must say about itself.
            wait_s: how long to wait for another compiler, in seconds. None stands for the store's `wait_s`. After that time the result
                is a MISS with reason BUSY and without a publisher.
            refused: the directory of a generation that must not be returned again, and why (see `Hit.reopen_as_miss`).
            waits: called in the loop if another task or process compiles the entry, before it is waited for.

        Close the result (`async with`). Cancelling the wait leaves nothing behind. Try `open_now` first, which takes fewer threads.
        """
        look = Look(self._house, self, wanted, refused, waited=True)
        with trace.span("cache.lookup", device=wanted.device):
            return _reported(await self._open_in_turn(look, self.wait_s if wait_s is None else wait_s, waits))

    async def _open_in_turn(self, look: Look, wait_s: float, waits: Callable[[], None] | None) -> Hit | Miss | Declined:
        found = await self._look(look)
        if not isinstance(found, Refusal):
            return found
        directory = look.writable(found)
        if isinstance(directory, Miss):
            return directory
        try:
            left_s = wait_s - (time.monotonic() - look.since)
            right = await self._queues.acquire(directory.compile_lock(look.wanted.key), left_s, waits)
        except OSError as error:
            return look.unlockable(error)
        if right is None:
            busy = Refusal(MissReason.BUSY, f"another process or task still compiles it after {time.monotonic() - look.since:.1f} s")
            return look.missed(busy, save_failure=busy)
        miss: Miss | None = None
        try:
            # Another compiler may have published during the wait.
            again = await self._look(look)
            if not isinstance(again, Refusal):
                return again
            miss = await run_in_thread(look.staged, directory, right, again, undo=_drop_staging)
            return miss
        finally:
            if miss is None or miss.publisher is None:
                right.release()

    async def _look(self, look: Look) -> Hit | Declined | Refusal:
        """Look at the entry, and once more when its publisher has ended."""
        found = await run_in_thread(look.run, undo=undo)
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
            found = await run_in_thread(look.run, hold, undo=undo)
            kept = isinstance(found, Hit)
        finally:
            if not kept:
                hold.release()
        return found

    # --- housekeeping ------------------------------------------------------------------------------------------------

    async def entries(self) -> list[EntryInfo] | Refusal:
        """Return what is stored, oldest first (`aionn cache ls`)."""
        await self.wait_idle()
        return await run_in_thread(list_entries, self._house)

    def verify(self) -> AsyncIterator[BadEntry]:
        """Read every file, and yield every entry that could not serve (`aionn cache verify`)."""
        return verify(self._house)

    async def prune(self, max_bytes: int | None = None, *, measurements: bool = False) -> PruneReport | Refusal:
        """Remove entries of older driver versions, damaged ones and rubbish, then the least valuable ones down to `max_bytes`.

        Entries in use stay.

        Args:
            max_bytes: None stands for the store's budget.
            measurements: remove all stage measurements, too.
        """
        await self.wait_idle()
        budget = self.max_bytes if max_bytes is None else max_bytes
        return await run_in_thread(partial(prune, self._house, budget, measurements=measurements))


def _drop_staging(miss: Miss) -> None:
    if miss.publisher is not None:
        miss.publisher.drop_staging()


def _reported(result: _Opened) -> _Opened:
    """Count and log the outcome, then return `result`."""
    outcome = result.outcome
    reason = outcome.reason.value if outcome.reason else ""
    trace.count(f"cache.{outcome.kind.value}", device=outcome.device, reason=reason)
    _log.debug("cache %s for device %s: %s %s", outcome.kind.value, outcome.device, reason, outcome.detail)
    return result
