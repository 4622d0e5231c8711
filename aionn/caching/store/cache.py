"""`CacheStore` is the face of one cache directory: it opens entries, and it lists, verifies and prunes them.

Every blocking act runs in a thread, so the event loop never waits for a disk. Nothing here raises for the state of the disk.
A directory that is missing, read-only, full or unsafe gives a `Miss` without a publisher, and one warning per reason.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TypeVar

from aionn.caching.manifest import Wanted
from aionn.caching.measurements import StageMeasurement
from aionn.caching.outcomes import Refusal
from aionn.caching.store.background import BackgroundWork
from aionn.caching.store.entries import Declined, Hit, Miss
from aionn.caching.store.housekeeping import CacheUsage, Housekeeping
from aionn.caching.store.index import Index
from aionn.caching.store.listing import EntryInfo, list_entries
from aionn.caching.store.opening import Opener
from aionn.caching.store.plans import Plans
from aionn.caching.store.pruning import PruneReport, prune
from aionn.caching.store.threads import run_in_thread
from aionn.caching.store.verifying import BadEntry, verify
from aionn.errors import CallerError

__all__ = ["DEFAULT_MAX_BYTES", "CacheStore"]

T = TypeVar("T")
DEFAULT_MAX_BYTES = 4 << 30


class CacheStore:
    """The app's side of one cache directory. Any number of stores, in any number of processes, may share a directory.

    Attributes:
        plans: how models were cut over several devices.
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
        self._background = BackgroundWork()
        self.plans = Plans(self._background, self._with_index)
        self._opener = Opener(self._house, self._background, wait_s)

    async def aclose(self) -> None:
        """Wait for the blocks of `in_use` and for all threads. Close what `open` returned before, unless such a block holds it.

        When this ends, however it ends, callers that still wait for the disk get `CallerError`. Cancelling the wait is safe: a thread
        that still works in the directory closes what it opened when the disk lets it end.
        """
        try:
            await self._background.finish()
        finally:
            self._house.close()
            self._background.fail_waiting()

    def in_use(self) -> AbstractContextManager[None]:
        """Keep `aclose` waiting for the block, which may still store something."""
        return self._background.in_use()

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
        return await self._background.ask(self._house.fault)

    # --- opening an entry --------------------------------------------------------------------------------------------

    async def glance(self, wanted: Wanted) -> Hit | Declined | None:
        """Return the entry if it is there and whole, or None if `open` must say why not. Close it, as what `open` returns.

        The call waits for the disk only, and not for a publisher of the entry. A cancelled caller does not wait for the disk either.
        So most hits need one thread and no task.
        """
        return await self._opener.glance(wanted)

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
            refused: the directory of a generation that must not be returned again, and why (see `Hit.refuse`).
            waits: called in the loop if another task or process compiles the entry, before it is waited for.

        Close the result (`async with`). Cancelling the wait leaves nothing behind.
        """
        return await self._opener.open(wanted, wait_s=wait_s, refused=refused, waits=waits)

    # --- housekeeping ------------------------------------------------------------------------------------------------

    async def entries(self) -> list[EntryInfo] | Refusal:
        """Return what is stored, oldest first (`aionn cache ls`)."""
        await self._background.settled()
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
        await self._background.settled()
        budget = self.max_bytes if max_bytes is None else max_bytes
        return await run_in_thread(partial(prune, self._house, budget, measurements=measurements))

    # --- what stages measured, and how often models are used ----------------------------------------------------------

    def _with_index(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index of the directory as it is now. Return None if either cannot be used. Blocking."""
        return None if isinstance(self._house.current(), Refusal) else self._house.with_index(act)

    async def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """Return stage measurements, the newest first. Measurements that are too old are left out.

        Args:
            scope: see `History`. None stands for all scopes.
        """
        return await self._background.ask(self._with_index, lambda index: index.history.measurements(scope)) or []

    async def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.remember(scope, measurement))

    def remember_later(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement as `remember` does, without waiting for the disk."""
        self._background.run_later(partial(self._with_index, lambda index: index.history.remember(scope, measurement)))

    async def use(self, model_digest: bytes, within_s: float) -> int:
        """Return how many executions of the model `count_use` has counted within that time."""
        return await self._background.ask(self._with_index, lambda index: index.history.use(model_digest, within_s)) or 0

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions of the model, without waiting for the disk."""
        self._background.run_later(partial(self._with_index, lambda index: index.history.count_use(model_digest, executions)))
