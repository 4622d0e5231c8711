"""What a driver process does: tie its life to its parent's, find its engine, greet, serve until the client is gone.

The driver ends with its parent, however the parent ends. The kernel sends SIGKILL when the parent's thread that started the driver
is gone. That signal does not reach a driver in another pid namespace, or with a process in between. There the end of the control
socket ends the driver. The driver leaves nothing that could outlive it: no named memory, no child, no file. (An engine that writes
named files while it compiles leaves them if it is killed just then. No engine of aionn does.)
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from aionn import trace
from aionn.driver.by_hand import entered, is_device
from aionn.driver.device import EngineDevice
from aionn.driver.log_lines import LogLines
from aionn.driver.registry import find
from aionn.driver.schedule import is_schedule, schedule_of
from aionn.errors import AionnError, DeviceUnavailableError
from aionn.hal.interfaces import IDevice
from aionn.pages import BEAT_S, DriverPage
from aionn.remote.control import STACKS_SIGNAL, Refused, encode
from aionn.remote.failures import failure_of
from aionn.remote.service import DeviceService

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
CLEAN_UP_S = 2.0
"""How long a driver may take to free what its client left. Then it ends anyway."""


GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal, systemd, `timeout` or a container's init sends to the whole process group.

The app handles them and may still finish its work. Its drivers end with it.
"""


def bind_to_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, and leave `GROUP_SIGNALS` to the parent.

    The parent starts this process with every signal blocked, so none of them arrives before it is ignored.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed, so this driver would outlive its app; allow it in the sandbox")
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does, because each request in flight may bring descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show. The kernel cuts it to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(f"aionn-{name}")[:15], 0, 0, 0)


def close_inherited(keep: int) -> None:
    """Close what the app left open for its children. A server's listening socket must not stay bound because of a driver.

    Descriptors that this process has opened itself are close-on-exec, so they stay open.
    """
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        try:
            if fd > 2 and fd != keep and os.get_inheritable(fd):
                os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself


def _beat(page: DriverPage) -> None:
    """Write the loop's heartbeat, now and from now on."""
    page.beat()
    asyncio.get_running_loop().call_later(BEAT_S, _beat, page)


async def serve(name: str, home: str, sock: socket.socket, state_directory: str | None) -> None:
    """Serve one client on `sock` with the engine of that name and home (see `find`), until the client is gone."""
    try:
        page = DriverPage()
        made = await anyio.to_thread.run_sync(find, name, home)
    except Exception as error:  # the app gets every reason that keeps the engine from loading
        refusal = error if isinstance(error, AionnError) else DeviceUnavailableError(name, f"device {name!r} cannot start: {error}")
        sock.setblocking(True)
        try:
            sock.sendall(encode(Refused(failure_of(refusal)), 0))
        except ConnectionError:
            return  # the app has gone meanwhile
        return
    faulthandler.register(STACKS_SIGNAL, file=page.fd, all_threads=True)
    _beat(page)
    gc.freeze()  # what exists now stays, so no collection needs to look at it again
    gc.enable()
    with trace.about(device=name or made.name), trace.listen(page.write_event):
        await _serve_one(made, name, sock, page, state_directory)


async def _serve_one(made: Any, name: str, sock: socket.socket, page: DriverPage, state_directory: str | None) -> None:
    async with anyio.create_task_group() as tasks:
        if is_device(made):
            async with entered(made) as device:
                await _serve_until_gone(device, sock, tasks, page)
        else:
            await _serve_until_gone(EngineDevice(made, tasks, state_directory, page, name), sock, tasks, page)
        tasks.cancel_scope.cancel()


async def _serve_until_gone(device: IDevice, sock: socket.socket, tasks: TaskGroup, page: DriverPage) -> None:
    service = DeviceService(device, sock, tasks, page.fd)
    await service.start()
    lines = LogLines(service.log)
    logging.getLogger("aionn").addHandler(lines)
    await service.ended.wait()
    logging.getLogger("aionn").removeHandler(lines)
    with anyio.move_on_after(CLEAN_UP_S, shield=True):
        await service.aclose()


def main(arguments: list[str]) -> int:
    """Serve the socket that the parent left open: `python -m aionn.driver NAME[=HOME] FD [SCHEDULE [STATE_DIR]]`.

    Args:
        arguments: NAME of the device, with HOME ("package.module:Class") if the parent has looked it up. FD, the socket. SCHEDULE is a
            number of CPUs for a driver in the background, 0 for the app's own priority, or "idle" for SCHED_IDLE. `__main__` has
            taken it up. STATE_DIR is where the device keeps its records, by default the user's state directory.
    """
    if len(arguments) not in (2, 3, 4) or not arguments[1].isdigit() or not is_schedule(schedule_of(arguments)):
        usage = "python -m aionn.driver ENGINE[=MODULE:CLASS] SOCKET_FD [CPUS|idle [STATE_DIR]]"
        print(f"usage: {usage}  (started by aionn's runtime; see `aionn devices`)", file=sys.stderr)
        return 2
    name, equals, home = arguments[0].rpartition("=")  # a provider's name may have one, too
    if not equals:
        name, home = home, ""
    fd = int(arguments[1])
    bind_to_parent()
    state_directory = arguments[3] if len(arguments) > 3 else None
    name_process(name)
    close_inherited(fd)
    raise_file_limit()
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        print(f"aionn.driver: descriptor {fd} is not a socket ({error.strerror}); give the one of a control socket", file=sys.stderr)
        return 2
    sock.set_inheritable(False)
    anyio.run(serve, name, home, sock, state_directory, backend_options={"use_uvloop": True})
    return 0
