"""`CacheStore`: look an entry up, let one compile it, keep the directory within its budget.

Every blocking act is one hop to a thread; the event loop never waits for a disk. Nothing here raises for the state of the disk: a
directory that is missing, read-only, full or unsafe gives a `Miss` without a publisher and one warning per reason.
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
from typing import Any, TypeVar

import anyio

from aionn import trace
from aionn.caching.manifest import Manifest, Wanted, reason_to_miss
from aionn.caching.measurements import StageMeasurement
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, close_all, refusal_of
from aionn.caching.store.entries import Declined, Hit, Miss, Publisher
from aionn.caching.store.hop import hop
from aionn.caching.store.housekeeping import BadEntry, EntryInfo, Housekeeping, PruneReport
from aionn.caching.store.index import Index
from aionn.caching.store.locks import EntryHold, Flight, Flights, hold_now, wait_to_hold
from aionn.errors import CallerError
from aionn.tasks import Answer, running_loop

__all__ = ["DEFAULT_MAX_BYTES", "CacheStore"]

T = TypeVar("T")
_Opened = TypeVar("_Opened", bound=Hit | Miss | Declined)
_log = logging.getLogger("aionn.caching")
DEFAULT_MAX_BYTES = 4 << 30
_READ_WAIT_S = 5.0  # a publisher holds the entry for one rename and two fsyncs
_UNLOCKED_READS = 3  # of an entry that somebody replaces meanwhile through another mount of a read-only directory
_UNUSABLE = {MissReason.NO_PERMISSION, MissReason.NO_SPACE, MissReason.IO_ERROR}


class CacheStore:
    """The app's side of one cache directory. Any number of stores, in any number of processes, may share a directory."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = DEFAULT_MAX_BYTES,
        wait_s: float = 120.0,
        old_versions_kept_s: float = 7 * 86400.0,
    ) -> None:
        """Nothing is touched before the first `open`.

        Args:
            directory: made if it is missing; must be this account's own and writable by nobody else.
            max_bytes: budget of all entries; beyond it the least valuable go. None: no budget.
            wait_s: how long `open` waits for another compiler of the same entry before it lets the caller compile for itself.
            old_versions_kept_s: an entry of a device's older version goes after that time without use.
        """
        path = os.fspath(directory)
        if not path:
            raise CallerError("the cache directory is an empty path; give a directory, or None for no caching")
        if max_bytes is not None and max_bytes < 0:
            raise CallerError(f"a cache budget of {max_bytes} bytes: give at least 0, or None for no budget")
        self.wait_s = wait_s
        self._house = Housekeeping(path, max_bytes, old_versions_kept_s)
        self._flights = Flights()
        self._users: set[anyio.Event] = set()
        self._behind: set[asyncio.Future[Any]] = set()
        self._glancing: set[Answer[Hit | Declined | None]] = set()

    async def aclose(self) -> None:
        """Wait for all that `in_use` holds and for what goes on behind callers' backs. What `open` handed out otherwise must be closed
        before. Whoever still waits for a `glance` when this ends, however it ends, gets `CallerError`. Cancelling the wait is safe: what
        is still at work in the directory closes it behind itself, whenever the disk lets that end.
        """
        try:
            while self._users:
                await next(iter(self._users)).wait()
            await self._settled()
        finally:
            self._house.close()
            for waiting in self._glancing:
                waiting.fail(CallerError("the cache store was closed"))

    def later(self, act: Callable[[], None]) -> None:
        """Run `act` in a thread, behind the caller's back. The store waits for it before it closes, lists or prunes."""
        loop = running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._behind.add(done)

        def begin() -> None:
            try:
                loop.run_in_executor(None, act).add_done_callback(end)
            except RuntimeError:  # the loop ends and takes no more threads: better here than never
                end(None)
                act()

        def end(acted: asyncio.Future[None] | None) -> None:
            self._behind.discard(done)
            done.set_result(None)
            if acted is not None:
                acted.result()  # the loop's exception handler tells of what nobody else can

        # Not at once: the thread would take the interpreter from the caller whose answer is not to wait for it.
        loop.call_soon(begin)

    async def _settled(self) -> None:
        while self._behind:
            await asyncio.wait(self._behind)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold `aclose` up for the block: something may still be stored."""
        ended = anyio.Event()
        self._users.add(ended)
        try:
            yield
        finally:
            self._users.discard(ended)
            ended.set()

    async def __aenter__(self) -> CacheStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    @property
    def path(self) -> str:
        return self._house.path

    @property
    def max_bytes(self) -> int | None:
        """The budget."""
        return self._house.max_bytes

    def warn(self, refusal: Refusal) -> None:
        """Log what kept the cache from being used: one warning per reason, however often it comes."""
        self._house.warn(refusal)

    # --- housekeeping ------------------------------------------------------------------------------------------------

    async def entries(self) -> list[EntryInfo] | Refusal:
        """What is stored, oldest first (`aionn cache ls`)."""
        await self._settled()
        return await hop(self._house.entries)

    def verify(self) -> AsyncIterator[BadEntry]:
        """Reads every file and yields every entry that could not serve (`aionn cache verify`)."""
        return self._house.verify()

    async def prune(self, max_bytes: int | None = None, *, measurements: bool = False) -> PruneReport | Refusal:
        """Remove entries of older driver versions, damaged ones and rubbish, then the least valuable ones down to
        `max_bytes` (None: the store's own budget). What is in use stays. `measurements`: forget all stage measurements, too."""
        await self._settled()
        return await hop(partial(self._house.prune, self.max_bytes if max_bytes is None else max_bytes, measurements=measurements))

    def _with_index(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index of the directory as it is now; None if either cannot be used. Blocking."""
        return None if isinstance(self._house.current(), Refusal) else self._house.with_index(act)

    async def _asked(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index in a thread. A cancelled caller does not wait for the disk; the store does, before it closes."""
        asking = running_loop().run_in_executor(None, self._with_index, act)
        self._behind.add(asking)

        def asked(_: object) -> None:
            self._behind.discard(asking)
            asking.exception()  # its caller has it, or has left

        asking.add_done_callback(asked)
        return await asyncio.shield(asking)

    # --- what stages measured, and how often models are used ----------------------------------------------------------

    async def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """Stage measurements of one scope (see `Index.remember`), or all, the newest first. Those that are too old are left out."""
        return await self._asked(lambda index: index.measurements(scope)) or []

    async def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement. A directory that cannot be written to keeps none."""
        await hop(self._with_index, lambda index: index.remember(scope, measurement))

    def remember_later(self, scope: bytes, measurement: StageMeasurement) -> None:
        """The same in a thread, without waiting for it."""
        self.later(lambda: self._with_index(lambda index: index.remember(scope, measurement)))

    async def use(self, model_digest: bytes, within_s: float) -> int:
        """How often the model was executed within that time, as far as `count_use` was told."""
        return await self._asked(lambda index: index.use(model_digest, within_s)) or 0

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions, in a thread, without waiting for it."""
        self.later(lambda: self._with_index(lambda index: index.count_use(model_digest, executions)))

    def note_use(self, manifest: Manifest) -> None:
        """An entry that is held was of use. Blocking."""
        self._house.with_index(lambda index: index.put(manifest, published=False))

    # --- opening an entry --------------------------------------------------------------------------------------------

    async def glance(self, wanted: Wanted) -> Hit | Declined | None:
        """The entry if it is there, whole, and not being published now; None: `open` says why not. To be closed, as what `open` gives.

        Waits for nobody but the disk, and who is cancelled does not wait for that: what the thread finds then is given back behind his
        back. So most hits do with one thread's work and no task of their own.
        """
        looking = running_loop().run_in_executor(None, self._look_in_thread, wanted, None, None, None)
        waiting: Answer[Hit | Declined | None] = Answer(running_loop())

        def looked(_: object) -> None:
            self._behind.discard(looking)
            try:
                found = looking.result()
            except BaseException as error:
                waiting.fail(error)
            else:
                if not waiting.settled:
                    waiting.set(None if isinstance(found, Refusal) else found)
                elif isinstance(found, Hit):
                    self.later(partial(found.close_here, used=False))

        self._behind.add(looking)
        self._glancing.add(waiting)
        looking.add_done_callback(looked)
        try:
            with trace.span("cache.glance", device=wanted.device):
                found = await waiting.wait()
        except BaseException:
            if isinstance(waiting.result, Hit):  # it came together with the cancellation
                self.later(partial(waiting.result.close_here, used=False))
            waiting.abandon()
            raise
        finally:
            self._glancing.discard(waiting)
        return None if found is None else self._told(found)

    async def open(
        self, wanted: Wanted, *, wait_s: float | None = None, refused: tuple[str, Refusal] | None = None
    ) -> Hit | Miss | Declined:
        """Look the entry up; on a miss, become the one who compiles it, or wait for the one who does.

        Args:
            wanted: the key, and what the entry must tell of itself.
            wait_s: at most this long for another compiler, in seconds; None: the store's. Past it: MISS, BUSY, no publisher.
            refused: a generation that must not be handed out again, and why (see `Hit.refuse`).

        The result is to be closed (`async with`). Cancelling the wait leaves nothing behind.
        """
        started = time.monotonic()
        with trace.span("cache.lookup", device=wanted.device):
            found = await self._look(wanted, refused)
        if isinstance(found, Hit | Declined):
            return self._told(found)
        directory = self._house.directory
        if directory is None:
            self._house.warn(found)
            return self._told(self._miss(wanted, found, started, save_failure=found))
        if not directory.writable:
            self._house.warn(directory.not_writable)
            return self._told(self._miss(wanted, found, started, save_failure=directory.not_writable))
        try:
            flight = await self._flights.board(directory.compile_lock(wanted.key), self.wait_s if wait_s is None else wait_s)
        except OSError as error:
            failure = refusal_of(error, f"compile lock in {self.path}")
            self._house.warn(failure)
            return self._told(self._miss(wanted, failure, started, save_failure=failure))
        if flight is None:
            busy = Refusal(MissReason.BUSY, f"another process or task still compiles it after {time.monotonic() - started:.1f} s")
            return self._told(self._miss(wanted, busy, started, save_failure=busy))
        try:
            # Somebody else may have published while we waited, or between our look and our turn.
            found = await self._look(wanted, refused, waited_since=started)
            if isinstance(found, Hit | Declined):
                await flight.land()
                return self._told(found)
            publisher = await self._stage(directory, wanted, flight)
        except BaseException:
            await flight.land()
            raise
        if isinstance(publisher, Refusal):
            await flight.land()
            self._house.warn(publisher)
            reason = found if found.reason not in _UNUSABLE else publisher
            return self._told(self._miss(wanted, reason, started, save_failure=publisher))
        return self._told(self._miss(wanted, found, started, publisher=publisher))

    async def publisher(self, wanted: Wanted, *, based_on: int | None = None) -> Publisher | Refusal:
        """Fresh files for an artifact that is made later than its preparation (JIT, a better stage). Does not wait.

        Args:
            based_on: the generation that the new artifact improves, 0 for none; refused as SUPERSEDED if another is there. None:
                whatever is there now.

        Returns:
            A publisher to be closed, or BUSY while somebody else compiles the entry, or what the file system says.
        """
        directory = await hop(self._house.current)
        if isinstance(directory, Refusal):
            self._house.warn(directory)
            return directory
        if not directory.writable:
            return directory.not_writable
        try:
            flight = await self._flights.board(directory.compile_lock(wanted.key), 0.0)
        except OSError as error:
            return refusal_of(error, f"compile lock in {self.path}")
        if flight is None:
            return Refusal(MissReason.BUSY, "another process or task compiles this entry now")
        try:
            publisher = await self._stage(directory, wanted, flight, based_on)
        except BaseException:
            await flight.land()
            raise
        if isinstance(publisher, Refusal):
            await flight.land()
        return publisher

    def _told(self, result: _Opened) -> _Opened:
        outcome = result.outcome
        reason = outcome.reason.value if outcome.reason else ""
        trace.count(f"cache.{outcome.kind.value}", device=outcome.device, reason=reason)
        _log.debug("cache %s for device %s: %s %s", outcome.kind.value, outcome.device, reason, outcome.detail)
        return result

    def _miss(
        self, wanted: Wanted, why: Refusal, started: float, *, publisher: Publisher | None = None, save_failure: Refusal | None = None
    ) -> Miss:
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

    async def _look(
        self, wanted: Wanted, refused: tuple[str, Refusal] | None, waited_since: float | None = None
    ) -> Hit | Declined | Refusal:
        found = await hop(self._look_in_thread, wanted, refused, None, waited_since, undo=_let_go)
        directory = self._house.directory
        if not isinstance(found, Refusal) or found.reason is not MissReason.BUSY or directory is None or not directory.writable:
            return found
        try:
            hold = await wait_to_hold(directory.entry_lock(wanted.key), "read", _READ_WAIT_S)
        except OSError as error:
            return refusal_of(error, f"entry lock in {self.path}")
        if hold is None:
            return found
        kept = False
        try:
            found = await hop(self._look_in_thread, wanted, refused, hold, waited_since, undo=_let_go)
            kept = isinstance(found, Hit)
        finally:
            if not kept:
                hold.release()
        return found

    # --- in a thread -------------------------------------------------------------------------------------------------

    def _look_in_thread(
        self, wanted: Wanted, refused: tuple[str, Refusal] | None, hold: EntryHold | None, waited_since: float | None
    ) -> Hit | Declined | Refusal:
        directory = self._house.current()
        if isinstance(directory, Refusal):
            return directory
        try:
            with directory:
                found = self._look_at_entry(directory, wanted, refused, hold, waited_since)
                for _ in range(_UNLOCKED_READS - 1):
                    if directory.writable or not isinstance(found, Refusal) or found.reason is not MissReason.BUSY:
                        break
                    found = self._look_at_entry(directory, wanted, refused, hold, waited_since)
                return found
        except OSError as error:
            return refusal_of(error, f"cache entry {wanted.key.hex()[:16]}")

    def _look_at_entry(
        self,
        directory: CacheDirectory,
        wanted: Wanted,
        refused: tuple[str, Refusal] | None,
        hold: EntryHold | None,
        waited_since: float | None,
    ) -> Hit | Declined | Refusal:
        # A first look without the lock: most misses never need its file.
        found = directory.find(wanted.key)
        if isinstance(found, Refusal):
            return self._house.explained(directory, wanted, found) if found.reason is MissReason.ABSENT else found
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
            waited_s = 0.0 if waited_since is None else time.monotonic() - waited_since
            if manifest.declined:
                outcome = CacheOutcome(CacheOutcomeKind.DECLINED, None, wanted.device, manifest.detail, key=wanted.key, waited_s=waited_s)
                return Declined(outcome, manifest)
            if refused is not None and refused[0] == manifest.directory:
                return refused[1]
            fds, lengths = directory.open_files(found, os.O_RDWR if directory.writable else os.O_RDONLY)
            if not directory.writable and not directory.is_still(wanted.key, found):
                return Refusal(MissReason.BUSY, "the entry was replaced while its files were opened")
            refusal = reason_to_miss(manifest, wanted, lengths)
            if refusal is not None:
                return refusal
            outcome = CacheOutcome(
                CacheOutcomeKind.HIT, None, wanted.device, key=wanted.key, waited_s=waited_s, saved_s=manifest.compile_ns / 1e9
            )
            kept = True
            return Hit(self, wanted, outcome, manifest, fds, held)
        finally:
            found.close()
            if not kept:
                close_all(fds)
                if hold is None and held is not None:
                    held.release()

    async def _stage(self, directory: CacheDirectory, wanted: Wanted, flight: Flight, based_on: int | None = None) -> Publisher | Refusal:
        return await hop(self._stage_in_thread, directory, wanted, flight, based_on, undo=Publisher.drop_staging)

    def _stage_in_thread(self, directory: CacheDirectory, wanted: Wanted, flight: Flight, based_on: int | None) -> Publisher | Refusal:
        try:
            with directory:
                directory.heal(wanted.key)
                manifest = directory.manifest(wanted.key)
                generation = manifest.generation if isinstance(manifest, Manifest) else 0
                if based_on is not None and based_on != generation:
                    return Refusal(MissReason.SUPERSEDED, f"generation {generation} is stored, the new artifact was to replace {based_on}")
                self._house.with_index(lambda index: index.note_staging(wanted.key))
                # We hold the compile lock: whatever else lies in the entry belongs to the dead.
                directory.clean(wanted.key)
                staged = directory.stage(wanted.key, wanted.files)
        except OSError as error:
            return refusal_of(error, f"new files in {self.path}")
        return Publisher(self._house, directory, wanted, staged, flight, generation)


def _let_go(found: Hit | Declined | Refusal) -> None:
    """What a thread found for a caller that has been cancelled meanwhile."""
    if isinstance(found, Hit):
        found.close_here(used=False)
