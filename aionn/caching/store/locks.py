"""Who may read, publish and compile an entry: `filelock`'s locks, one file per entry and purpose.

The entry lock (`ReadWriteLock`) is shared by readers from opening the files until the driver has taken them over, and exclusive for the
moment in which a manifest is replaced or an entry removed. The compile lock (`FileLock`, flock) is held by the one who compiles, for as
long as that takes; the kernel frees both when their holder dies, which is how somebody else takes over. Tasks of one process
queue before the compile lock, so that a process waits for another with one wait, however many of its tasks want the same.

Lock order: compile lock, then entry lock; nobody who holds an entry lock waits for a compile lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio
from filelock import AsyncFileLock, AsyncReadWriteLock, FileLock, ReadWriteLock, Timeout

from aionn.caching.store.hop import hop
from aionn.tasks import bounded_shield

__all__ = ["EntryHold", "Flight", "Flights", "hold_now", "sole_holder", "wait_to_hold"]

_RELEASE_S = 5.0  # closing a descriptor or an SQLite connection; far more than it takes


@dataclass(slots=True)
class EntryHold:
    """A shared or exclusive hold of an entry lock. `release` frees it from any task or thread; blocking."""

    _lock: ReadWriteLock | AsyncReadWriteLock | None

    @property
    def waited_for(self) -> bool:
        """Whether `wait_to_hold` took it: `release_here` does not free such a one."""
        return isinstance(self._lock, AsyncReadWriteLock)

    async def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        # Shielded, or a cancelled reader would keep writers out for as long as the process lives.
        with bounded_shield(_RELEASE_S):
            if isinstance(lock, AsyncReadWriteLock):
                await lock.close()
            else:
                await hop(lock.close)

    def release_here(self) -> None:
        """The same, blocking, for a hold of `hold_now`; another stays."""
        if isinstance(self._lock, ReadWriteLock):
            lock, self._lock = self._lock, None
            lock.close()


def _identity(path: str) -> tuple[int, int]:
    """The lock file's identity; it is made if it is not there.

    An entry's removal unlinks its lock files. Whoever opened one before must not believe in a lock that nobody else can meet, so the
    identity is compared before and after: while we hold the file open, its number is not given to another.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    status = os.stat(path, follow_symlinks=False)
    return status.st_dev, status.st_ino


def hold_now(path: str, mode: Literal["read", "write"]) -> EntryHold | None:
    """Take an entry lock if it is free; None if it is not. Blocking, but not for long.

    Raises:
        OSError: the lock file cannot be used.
    """
    for _ in range(3):
        before = _identity(path)
        lock = ReadWriteLock(path, is_singleton=False)
        try:
            (lock.acquire_read if mode == "read" else lock.acquire_write)(blocking=False)
            if _identity(path) == before:
                return EntryHold(lock)
        except Timeout:
            lock.close()
            return None
        except BaseException:
            lock.close()
            raise
        lock.close()
    return None


def _waiting_lock(path: str) -> AsyncReadWriteLock:
    return AsyncReadWriteLock(path, is_singleton=False)


def _shut_down(lock: AsyncReadWriteLock) -> None:
    # It holds nothing; its executor has not started a thread, and its connection goes with the last reference.
    lock.executor.shutdown(wait=False)


async def wait_to_hold(path: str, mode: Literal["read", "write"], wait_s: float) -> EntryHold | None:
    """Take an entry lock, waiting for at most `wait_s` seconds; None if it did not come free."""
    give_up_at = time.monotonic() + wait_s
    while True:
        before = await hop(_identity, path)
        # In a thread, for its constructor opens the database.
        lock = await hop(_waiting_lock, path, undo=_shut_down)
        hold = EntryHold(lock)
        held = False
        try:
            await (lock.acquire_read if mode == "read" else lock.acquire_write)(timeout=max(give_up_at - time.monotonic(), 0.0))
            held = await hop(_identity, path) == before
            if held:
                return hold
        except Timeout:
            return None
        finally:
            if not held:
                await hold.release()


@contextmanager
def sole_holder(entry_lock: str, compile_lock: str) -> Iterator[bool]:
    """Hold both locks for the body if both are free at once; whether they were. Blocking, without waiting."""
    with ExitStack() as stack:
        compiling = FileLock(compile_lock, mode=0o600)
        try:
            # RuntimeError is how filelock tells that this thread itself holds it.
            compiling.acquire(blocking=False)
        except (Timeout, RuntimeError):
            yield False
            return
        stack.callback(compiling.release)
        entry = hold_now(entry_lock, "write")
        if entry is None:
            yield False
            return
        stack.callback(entry.release_here)
        yield True


@dataclass(slots=True)
class _Queue:
    turn: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1))
    users: int = 0


@dataclass(slots=True)
class Flight:
    """The right to compile one entry. Freed by `land`, or by this process's death."""

    _flights: Flights
    _path: str
    _lock: AsyncFileLock | None

    async def land(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            with bounded_shield(_RELEASE_S):
                await lock.release()
        finally:
            self._flights.leave(self._path, had_turn=True)


class Flights:
    """Single flight: at most one holder per compile lock, over all tasks and processes."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def leave(self, path: str, *, had_turn: bool) -> None:
        queue = self._queues[path]
        if had_turn:
            queue.turn.release()
        queue.users -= 1
        if not queue.users:
            del self._queues[path]

    async def board(self, path: str, wait_s: float) -> Flight | None:
        """The right to compile, or None if its holder still has it after `wait_s` seconds.

        Raises:
            OSError: the lock file cannot be used.
        """
        give_up_at = time.monotonic() + wait_s
        queue = self._queues.setdefault(path, _Queue())
        queue.users += 1
        had_turn = False
        flight: Flight | None = None
        try:
            try:
                queue.turn.acquire_nowait()
                had_turn = True
            except anyio.WouldBlock:
                with anyio.move_on_after(wait_s):
                    await queue.turn.acquire()
                    had_turn = True
            if had_turn:
                lock = AsyncFileLock(path, mode=0o600)
                await lock.acquire(timeout=max(give_up_at - time.monotonic(), 0.0))
                flight = Flight(self, path, lock)
        except Timeout:
            return None
        finally:
            if flight is None:
                self.leave(path, had_turn=had_turn)
        return flight
