"""What a driver process does after `beginning`: find its engine, greet, serve until the client is gone.

The driver ends with its parent, however the parent ends. (One that a service shares among apps goes on for a while, if a burst is
open: `ORPHANED_S`.) The kernel sends SIGKILL when the parent's thread that started the driver
is gone. That signal does not reach a driver in another pid namespace, or with a process in between. There the end of the control
socket ends the driver. The driver leaves nothing that could outlive it: no named memory, no child, no file. (An engine that
writes temporary files by path leaves them in a private folder, which the app removes. No engine of aionn does.)

The log of the driver process goes to the app's log. Lines below WARNING stay here. A text is cut, and so many lines are sent in a second.
One more line says how many were left out; it comes when that second is over, whether or not another line is logged then.

Invariants
    Of each second that begins with a line, at most PER_SECOND lines and the one about the others are sent.
    A line that is left out costs no formatting, so an engine that logs without end takes little time from executions.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import uvloop

import aionn.pages.trace_records  # noqa: F401  # now, while descriptors are free
from aionn import trace
from aionn.driver.beginning import Begun
from aionn.driver.device import EngineDevice
from aionn.driver.registry import entered, find, is_device
from aionn.driver.service import CLEAN_UP_S, DeviceService
from aionn.driver.threads import bound_arenas
from aionn.errors import NO_DESCRIPTOR_LEFT, AionnError, DeviceUnavailableError
from aionn.hal.interfaces import IDevice
from aionn.memory.limits import allocation_error
from aionn.pages.layout import PAGE_BYTES
from aionn.pages.page import DriverPage, until_beat_s
from aionn.remote.control import STACKS_SIGNAL, Refused, encode, failure_of
from aionn.tasks import Tasks, in_thread

ORPHANED_S = 60.0
"""How long a shared driver whose owner has gone serves the bursts that are open. Its apps have found another one by then."""


def _beat(page: DriverPage) -> None:
    """Write the loop's heartbeat, now and from now on."""
    page.beat()
    asyncio.get_running_loop().call_later(until_beat_s(), _beat, page)


def _page(name: str) -> DriverPage:
    """Make this process's page.

    Raises:
        MemoryAllocationError: the system has no memory or no descriptor for it, or a limit of this process forbids it.
    """
    try:
        return DriverPage()
    except OSError as error:
        raise allocation_error(PAGE_BYTES, error, f"device {name!r} cannot start: ") from error


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR_LEFT:
        return f"it has no descriptor left (RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}); raise the limit"
    return str(error)


async def serve(begun: Begun) -> None:
    """Serve one client with the engine that it has asked for, until the client is gone."""
    name, sock = begun.name, begun.sock
    try:
        if begun.refusal:
            raise DeviceUnavailableError(name, begun.refusal)
        page = _page(name)
        made = await in_thread(find, name, begun.home)
    except Exception as error:  # the app gets every reason that keeps the engine from loading
        refusal = error if isinstance(error, AionnError) else DeviceUnavailableError(name, f"device {name!r} cannot start: {_why(error)}")
        sock.setblocking(True)
        with suppress(ConnectionError):  # the app has gone meanwhile
            sock.sendall(encode(Refused(failure_of(refusal)))[0])
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file=page.asked_fd, all_threads=True)
    _beat(page)
    gc.freeze()  # what exists now stays, so no collection needs to look at it again
    gc.enable()
    with trace.about(device=name or made.name), trace.listen(page.write_event):
        await _serve_one(made, begun, page)


class _Tasks(asyncio.TaskGroup):
    """The tasks of this process. One that raises ends them all, and the process."""

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> None:
        self.create_task(work(*args), name=name)


async def _serve_one(made: Any, begun: Begun, page: DriverPage) -> None:
    async with _Tasks() as tasks:
        if is_device(made):
            async with entered(made) as device:
                await _serve_until_gone(device, begun, tasks, page)
        else:
            await _serve_until_gone(EngineDevice(made, tasks, begun.records, page, begun.name, begun.shared), begun, tasks, page)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def _serve_until_gone(device: IDevice, begun: Begun, tasks: Tasks, page: DriverPage) -> None:
    service = DeviceService(device, begun.sock, tasks, (page.fd, page.asked_fd), begun.confinement)
    await service.start()
    lines = LogLines(service.log)
    logging.getLogger("aionn").addHandler(lines)
    await service.ended.wait()
    logging.getLogger("aionn").removeHandler(lines)
    if begun.shared:
        with suppress(TimeoutError):
            await asyncio.wait_for(service.brought.guests_gone(streaming=True), ORPHANED_S)
    with suppress(TimeoutError):
        await asyncio.wait_for(service.aclose(), CLEAN_UP_S)


def main(begun: Begun) -> int:
    """Serve the socket that the parent left open, in a process that `beginning.begin` has prepared. Returns the exit code."""
    bound_arenas()
    uvloop.run(serve(begun))
    return 0


MAX_BYTES = 8192
PER_SECOND = 50
SECOND_S = 1.0


class LogLines(logging.Handler):
    """Hands each line to `send` in the loop, whatever thread logs it.

    Args:
        send: gets the level, the logger's name and the text.
    """

    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._began = -SECOND_S
        self._lines = 0
        self._left_out = 0
        self._logger = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line, or count it as left out. `logging` calls this with the handler's lock held."""
        now = time.monotonic()
        if now - self._began >= SECOND_S:
            self._flush()
            self._began, self._lines = now, 0
        self._lines += 1
        if self._lines <= PER_SECOND:
            self._post(record.levelno, record.name, _cut(self.format(record)))
            return
        self._left_out += 1
        self._logger = record.name
        if self._left_out == 1:
            with suppress(RuntimeError):  # the loop has been closed, and the process ends
                self._loop.call_soon_threadsafe(self._loop.call_later, self._began + SECOND_S - now, self._second_over, self._began)

    def _second_over(self, began: float) -> None:
        self.acquire()
        try:
            if began == self._began:  # else a line has begun another second, and sent how many were left out of this one
                self._flush()
        finally:
            self.release()

    def _flush(self) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            self._post(logging.WARNING, self._logger, f"{left_out} more lines in one second were left out")

    def _post(self, level: int, name: str, text: str) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and the process ends
            self._loop.call_soon_threadsafe(self._send, level, name, text)


def _cut(text: str) -> str:
    """Return a text of at most MAX_BYTES. The end of a traceback says most, so a long text loses its middle."""
    if len(text) <= MAX_BYTES // 4:
        return text
    content = text.encode("utf-8", "replace")
    if len(content) <= MAX_BYTES:
        return text
    between = f"\n[{len(content)} bytes in all]\n"
    begin, end = content[: MAX_BYTES // 4], content[-(MAX_BYTES * 3 // 4 - len(between)) :]
    return begin.decode("utf-8", "ignore") + between + end.decode("utf-8", "ignore")
