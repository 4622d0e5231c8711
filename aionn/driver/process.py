"""What a driver process does after `beginning`: find its engine, greet, serve until the client is gone.

The driver ends with its parent, however the parent ends. The kernel sends SIGKILL when the parent's thread that started the driver
is gone. That signal does not reach a driver in another pid namespace, or with a process in between. There the end of the control
socket ends the driver. The driver leaves nothing that could outlive it: no named memory, no child, no file. (An engine that
writes temporary files by path leaves them in a private folder, which the app removes. No engine of aionn does.)
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import resource
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from aionn import trace
from aionn.driver.beginning import Begun
from aionn.driver.device import EngineDevice
from aionn.driver.log_lines import LogLines
from aionn.driver.registry import entered, find, is_device
from aionn.driver.service import DeviceService
from aionn.errors import AionnError, DeviceUnavailableError
from aionn.hal.interfaces import IDevice
from aionn.memory.limits import NO_DESCRIPTOR_LEFT, allocation_error
from aionn.pages.layout import PAGE_BYTES
from aionn.pages.page import BEAT_S, DriverPage
from aionn.remote.control import STACKS_SIGNAL, Refused, encode
from aionn.remote.failures import failure_of

CLEAN_UP_S = 2.0
"""How long a driver may take to free what its client left. Then it ends anyway."""


def _beat(page: DriverPage) -> None:
    """Write the loop's heartbeat, now and from now on."""
    page.beat()
    asyncio.get_running_loop().call_later(BEAT_S, _beat, page)


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
        made = await anyio.to_thread.run_sync(find, name, begun.home)
    except Exception as error:  # the app gets every reason that keeps the engine from loading
        refusal = error if isinstance(error, AionnError) else DeviceUnavailableError(name, f"device {name!r} cannot start: {_why(error)}")
        sock.setblocking(True)
        try:
            sock.sendall(encode(Refused(failure_of(refusal)))[0])
        except ConnectionError:
            return  # the app has gone meanwhile
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file=page.fd, all_threads=True)
    _beat(page)
    gc.freeze()  # what exists now stays, so no collection needs to look at it again
    gc.enable()
    with trace.about(device=name or made.name), trace.listen(page.write_event):
        await _serve_one(made, begun, page)


async def _serve_one(made: Any, begun: Begun, page: DriverPage) -> None:
    async with anyio.create_task_group() as tasks:
        if is_device(made):
            async with entered(made) as device:
                await _serve_until_gone(device, begun, tasks, page)
        else:
            await _serve_until_gone(EngineDevice(made, tasks, begun.records, page, begun.name), begun, tasks, page)
        tasks.cancel_scope.cancel()


async def _serve_until_gone(device: IDevice, begun: Begun, tasks: TaskGroup, page: DriverPage) -> None:
    service = DeviceService(device, begun.sock, tasks, page.fd, begun.confinement)
    await service.start()
    lines = LogLines(service.log)
    logging.getLogger("aionn").addHandler(lines)
    await service.ended.wait()
    logging.getLogger("aionn").removeHandler(lines)
    with anyio.move_on_after(CLEAN_UP_S, shield=True):
        await service.aclose()


def main(begun: Begun) -> int:
    """Serve the socket that the parent left open, in a process that `beginning.begin` has prepared. Returns the exit code."""
    anyio.run(serve, begun, backend_options={"use_uvloop": True})
    return 0
