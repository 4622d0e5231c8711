"""Locks of an entry: who may read, publish and compile it. Each lock is flock on one file per entry and purpose.

The entry lock is shared by readers, from opening the files until the driver has taken them over. A publisher holds it exclusively while
it replaces the manifest, and a process that removes the entry holds it, too. Its shared side calls flock directly: `filelock` has shared
locks only over an SQLite file. Such a lock costs 0.3 ms, a third of what a hit costs beside the engine's load.

The compile lock is held by the one who compiles, for as long as compiling takes. Tasks of one process queue before the compile
lock. So one wait per process is enough, however many of its tasks want the same entry.

The kernel frees all of these locks when their holder dies. That is how another process takes over.

flock lets readers overlap without end before a writer. So a writer that waits holds a third lock, the turn, and no new reader begins
while the turn is held.

Lock order: compile lock, then turn, then entry lock. The holder of an entry lock waits for no other lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import anyio
import msgspec

from aionn.tasks import run_in_thread

__all__ = ["TURN", "CompileQueues", "CompileRight", "EntryHold", "hold_now", "sole_holder", "wait_to_hold"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # between attempts: a publisher holds an entry for one rename and two fsyncs
TURN = ".turn"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_Mode = Literal["read", "write"]


class EntryHold(msgspec.Struct):
    """A shared or exclusive hold of an entry lock. `release` frees it from any task or thread, and waits for nothing."""

    _fd: int
    _pid: int = msgspec.field(default_factory=os.getpid)

    @classmethod
    def without_a_lock(cls) -> EntryHold:
        """Return a hold for an entry in a directory that cannot be written to."""
        return cls(-1)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            # Closing alone would leave the file locked where a forked child has the descriptor too. The child has no right to unlock it.
            if self._pid == os.getpid():
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _lock(fd: int, mode: _Mode) -> bool:
    """Take the lock if it is free. Return whether it was."""
    if mode == "write":
        from filelock import lock_descriptor  # 9 ms of an app's first hit, which takes no lock for writing

        return lock_descriptor(fd, blocking=False)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hold_file(path: str, mode: _Mode) -> EntryHold | None:
    """Lock the file of that name, made if it is not there. Return None if it is not free.

    An entry's removal unlinks its lock files. A process may have opened a lock file just before. A lock on an unlinked file excludes
    no other process, so the name must still lead to the locked file. While we have the file open, no other file gets its inode number.

    Raises:
        OSError: the lock file cannot be used.
    """
    for _ in range(3):
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        kept = False
        try:
            if not _lock(fd, mode):
                return None
            ours = os.fstat(fd)
            try:
                there = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            kept = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
            if kept:
                return EntryHold(fd)
        finally:
            if not kept:
                os.close(fd)
    return None


def _writer_waits(path: str) -> bool:
    try:
        fd = os.open(path + TURN, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not _lock(fd, "read")
    finally:
        os.close(fd)


def hold_now(path: str, mode: _Mode) -> EntryHold | None:
    """Take an entry lock if it is free, or return None. Does not wait. Taking it for reading also needs that no writer waits.

    Raises:
        OSError: the lock file cannot be used.
    """
    if mode == "read" and _writer_waits(path):
        return None
    return _hold_file(path, mode)


def _release(hold: EntryHold | None) -> None:
    if hold is not None:
        hold.release()


async def wait_to_hold(
    path: str, mode: _Mode, wait_s: float, *, readers: bool = True, waits: Callable[[], None] | None = None
) -> EntryHold | None:
    """Take a lock, waiting for at most `wait_s` seconds. Return None if it did not come free.

    Args:
        readers: whether the lock has readers, before whom a writer needs its turn.
        waits: called before the first pause.
    """
    give_up_at = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    turn: EntryHold | None = None
    try:
        while True:
            hold = await run_in_thread(hold_now, path, mode, undo=_release)
            if hold is not None:
                return hold
            if mode == "write" and readers and turn is None:
                turn = await run_in_thread(_hold_file, path + TURN, mode, undo=_release)
            if waits is not None:
                waits()
                waits = None
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return None
            await anyio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    finally:
        _release(turn)


@contextmanager
def sole_holder(entry_lock: str, compile_lock: str) -> Iterator[bool]:
    """Hold both locks for the body if both are free at once. Yields whether they were. Blocking, without waiting."""
    compiling, entry = hold_now(compile_lock, "write"), None
    try:
        entry = None if compiling is None else hold_now(entry_lock, "write")
        yield entry is not None
    finally:
        _release(entry)
        _release(compiling)


class _Queue(msgspec.Struct):
    turn: anyio.Semaphore = msgspec.field(default_factory=lambda: anyio.Semaphore(1))
    users: int = 0


class CompileRight(msgspec.Struct):
    """The right to compile one entry. `release` or this process's death frees it.

    Attributes:
        hold: the compile lock.
        queues: where other tasks of this process wait for their turn, which this right has. None until they can know of it.
    """

    hold: EntryHold
    path: str
    queues: CompileQueues | None = None

    def release(self) -> None:
        """Let the next one compile. It waits for nothing. Call it in the loop's thread once `queues` is set."""
        queues, self.queues = self.queues, None
        try:
            self.hold.release()
        finally:
            if queues is not None:
                queues.leave(self.path, had_turn=True)


class CompileQueues:
    """Single flight: each compile lock has at most one holder, over all tasks and processes. Tasks of this process queue for it."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def leave(self, path: str, *, had_turn: bool) -> None:
        queue = self._queues[path]
        if had_turn:
            queue.turn.release()
        queue.users -= 1
        if not queue.users:
            del self._queues[path]

    def note(self, right: CompileRight) -> None:
        """Let tasks of this process queue behind a right that a thread has taken. One that has its turn already waits for the lock."""
        if right.path not in self._queues:
            queue = self._queues[right.path] = _Queue(users=1)
            queue.turn.acquire_nowait()
            right.queues = self

    async def acquire(self, path: str, wait_s: float, waits: Callable[[], None] | None = None) -> CompileRight | None:
        """Return the right to compile, or None if its holder still has it after `wait_s` seconds.

        Args:
            waits: called if another task or process has the right, before it is waited for.

        Raises:
            OSError: the lock file cannot be used.
        """
        give_up_at = time.monotonic() + wait_s
        queue = self._queues.setdefault(path, _Queue())
        queue.users += 1
        had_turn = False
        right: CompileRight | None = None
        try:
            try:
                queue.turn.acquire_nowait()
                had_turn = True
            except anyio.WouldBlock:
                if waits is not None:
                    waits()
                    waits = None
                with anyio.move_on_after(wait_s):
                    await queue.turn.acquire()
                    had_turn = True
            if had_turn:
                hold = await wait_to_hold(path, "write", give_up_at - time.monotonic(), readers=False, waits=waits)
                right = None if hold is None else CompileRight(hold, path, self)
        finally:
            if right is None:
                self.leave(path, had_turn=had_turn)
        return right
