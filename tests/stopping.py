"""Stopping and killing a driver at a known moment."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import aionn


def stop(pid: int) -> None:
    """Stop a process and return when each of its threads stands. The signal alone leaves a thread on another CPU time for an answer."""
    os.kill(pid, signal.SIGSTOP)
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # this thread was ending
            while b") T" not in Path(f"/proc/{pid}/task/{thread}/stat").read_bytes():
                os.sched_yield()


async def kill_under(pid: int, call: Callable[[], Coroutine[Any, Any, Any]]) -> aionn.DriverDiedError:
    """Kill a driver while `call` waits for its answer. Return the error of the call."""
    stop(pid)
    task = asyncio.get_running_loop().create_task(call())
    await anyio.wait_all_tasks_blocked()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aionn.DriverDiedError) as died:
        await task
    return died.value


_FCNTL = {"x86_64": "72", "aarch64": "25"}[platform.machine()]
"""The kernel's number of fcntl, in which `FakeDevice.hang(with_gil=True)` waits."""


async def holds_the_gil(pid: int) -> None:
    """Return when a thread of the driver hangs with the GIL held. What the engine announces comes a moment before."""

    def waits(thread: str) -> bool:
        return Path(f"/proc/{pid}/task/{thread}/syscall").read_text(encoding="ascii").split()[0] == _FCNTL

    with anyio.fail_after(20):
        while not any(map(waits, os.listdir(f"/proc/{pid}/task"))):  # noqa: ASYNC110  (its system call has no event)
            await anyio.sleep(0.001)
