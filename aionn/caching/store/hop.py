"""One blocking act in a thread, waited for until it is done.

The store's acts are several system calls each, relative to a directory's descriptor, with locks, fsync and rename between them: one
hop per act costs one turn of the loop. `aiofiles` hops for each call and opens by path alone; it is used where a file is simply
read through (`verify`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio

from aionn.tasks import is_ours, running_loop

__all__ = ["hop"]

T = TypeVar("T")


async def hop(act: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
    """Run `act(*arguments)` in a thread.

    A cancelled caller waits for the thread: it works on files and locks that the caller is about to free. If the
    cancellation is the task's own (`Task.cancel`) it is raised after that, and `undo(result)` has run, so that what the thread
    opened does not stay open. A cancelled anyio scope strikes at the caller's next await, when it already owns the result.

    A child of fork has the loop and its tasks, but none of the threads, and the files are its parent's: there every hop is cancelled.
    """
    loop = running_loop()
    if not is_ours(loop):
        raise asyncio.CancelledError("this directory is in use by the parent process")
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        future = loop.run_in_executor(None, partial(act, *arguments))
        while True:
            try:
                result = await asyncio.shield(future)
                break
            except asyncio.CancelledError as error:
                if future.cancelled() or not is_ours(loop):
                    raise
                cancelled = error
    if cancelled is None:
        return result
    if undo is not None:
        await hop(undo, result)
    raise cancelled
