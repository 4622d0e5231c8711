"""Work of a cache store that goes on after its caller has left: threads, and the callers that still wait for one.

A disk may hang. So no caller has to wait for it: a cancelled caller leaves at once, and the thread's result is undone later.
The store waits for all of these threads before it closes, lists or prunes.

An act of the store is several system calls with locks, fsync and rename between them. They are relative to a directory's descriptor.
One thread for the whole act costs one turn of the event loop. `aiofiles` takes a thread for each call and opens by path alone.
So the store uses `aiofiles` only where it reads a file through (`verify`).

Used by `cache`, in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aionn.tasks import ThreadWork

__all__ = ["BackgroundWork"]


class BackgroundWork(ThreadWork):
    """The threads, the waiting callers and the users of one store."""

    def __init__(self) -> None:
        super().__init__()
        self._users: set[anyio.Event] = set()

    def __bool__(self) -> bool:
        """Return whether a thread still works."""
        return bool(self.running)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `finish` waiting for the block, which may still store something."""
        ended = anyio.Event()
        self._users.add(ended)
        try:
            yield
        finally:
            self._users.discard(ended)
            ended.set()

    async def settled(self) -> None:
        """Wait until no thread works."""
        while self.running:
            await asyncio.wait(self.running)

    async def finish(self) -> None:
        """Wait for the blocks of `in_use`, then for all threads."""
        while self._users:
            await next(iter(self._users)).wait()
        await self.settled()
