"""`run`: an async main function, run to its end on uvloop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from aionn.errors import CallerError

T = TypeVar("T")


def run(main: Callable[..., Awaitable[T]], *args: object) -> T:
    """Run an async function to its end on uvloop, as `asyncio.run` does on asyncio's loop. Its result or error is handed on.

    Where stdin, stdout or stderr is closed, as in some daemons, /dev/null takes its place. Otherwise a file of uvloop's may get one of
    those numbers, over which uvloop aborts the process.

    Raises:
        CallerError: `main` is not a function, but the coroutine that a call of it returned, for example.
        RuntimeError: an event loop runs in this thread already.
    """
    given: object = main
    if not callable(given):
        if isinstance(given, Coroutine):
            given.close()  # or Python would warn that it was never awaited
            raise CallerError("aionn.run takes the async function and calls it; write aionn.run(main) in place of aionn.run(main())")
        raise CallerError(f"aionn.run takes an async function and its arguments, got {type(given).__name__}; write aionn.run(main)")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # as it must be
    else:
        raise RuntimeError("aionn.run was called while an event loop runs in this thread; await the function there")
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    from uvloop import new_event_loop

    async def wait() -> T:
        return await main(*args)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(wait())
