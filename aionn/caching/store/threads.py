"""Run one blocking act in a thread, and wait until the thread has ended.

An act of the store is several system calls with locks, fsync and rename between them. They are relative to a directory's descriptor.
One thread for the whole act costs one turn of the event loop. `aiofiles` takes a thread for each call and opens by path alone.
So the store uses `aiofiles` only where it reads a file through (`verify`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio

from aionn.tasks import is_ours, running_loop

__all__ = ["run_in_thread"]

T = TypeVar("T")


async def run_in_thread(act: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
    """Run `act(*arguments)` in a thread, and return its result.

    A cancelled caller waits for the thread, because the thread works on files and locks that the caller is about to free.
    If the task itself was cancelled (`Task.cancel`), the cancellation is raised after that wait. Before, `undo(result)` has run,
    so what the thread opened does not stay open. A cancelled anyio scope strikes at the caller's next await, when the caller
    already owns the result.

    A child of fork has the loop and its tasks, but none of the threads, and the files are its parent's. In a child this call raises
    `CancelledError`.
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
        await run_in_thread(undo, result)
    raise cancelled
