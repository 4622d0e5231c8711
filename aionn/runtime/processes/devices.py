"""Driver processes: started, watched, ended, started again. `spawning` makes the process itself.

A driver is started with one end of a socket pair, by posix_spawn and exec, so nothing of the app's loop or threads is
copied into it. It is watched through its pidfd and through the socket. However it ends, what it still said is taken
in first, then the connection's every caller gets `DriverDiedError` (or `DriverHungError` if we had to kill it).

Invariants
    A `DriverProcess` that was started is waited for (`waitid`) exactly once, in `_exited`; after it `exit_code` is set, unless
    the app reaped it itself (SIGCHLD ignored, a stray `os.wait`). Signals go through the pidfd, never to a number that may
    be another process's by now; `_pidfd` is -1 from the moment it is closed.
    The connection has ended before `_ended` is set: whoever saw the process end finds no waiter left.
    `ready` may be awaited by many and cancelled by any: `_started` is set once, by the greeting or by the end.
    One live process per device name; the next `get` after its end starts a new one, one start at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

import anyio

from aionn import trace
from aionn.engines.installed import installed_engines
from aionn.errors import AionnError, CallerError, DeviceUnavailableError, DriverDiedError, DriverHungError, again
from aionn.hal.types import CacheFiles, DeviceType
from aionn.pages import Activity, LayoutError, PageReader
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.control import PROTOCOL, STACKS_SIGNAL, CallBody, ControlError, Ready, Refused
from aionn.remote.device import RemoteDevice
from aionn.remote.failures import error_of
from aionn.runtime.processes.liveness import DEFAULT_HANG_S, Judge, watch
from aionn.runtime.processes.restarts import Restarts
from aionn.runtime.processes.spawning import spawn
from aionn.tasks import Tasks, bounded_shield, leave_in_child, running_loop

logger = logging.getLogger("aionn.runtime")
driver_logger = logging.getLogger("aionn.driver")

GRACE_S = 2.0
"""A driver whose socket has ended may take this long to let go of its device; then it is killed."""

KILL_S = 5.0
"""A killed process is waited for this long: the kernel may be busy freeing its memory. It is then left to init."""

ABORT_S = 1.0  # the same where closing is cancelled: the loop stands still meanwhile

START_S = 60.0
"""A driver must greet within this time: importing an engine from a cold disk takes seconds."""


class DriverProcess:
    """One driver process and the connection to it."""

    def __init__(
        self,
        name: str,
        tasks: Tasks,
        background_threads: int = 0,
        home: str = "",
        state_dir: str = "",
        hang_s: float | None = DEFAULT_HANG_S,
    ) -> None:
        """Start it. Nothing is awaited: it is `ready` once it has greeted.

        `home`: "package.module:Class" of an installed engine, so that the driver need not look for it again.
        `background_threads`: at the lowest priority, on so many CPUs; 0: like the app itself.
        `state_dir`: where the driver keeps its records; empty: in the user's state directory.
        `hang_s`: as for `Runtime`.
        """
        self.name = name
        self._tasks = tasks
        self._loop = running_loop()
        self._started = anyio.Event()
        self._start_error: AionnError | None = None
        self._ended = anyio.Event()
        self._killed_by: AionnError | None = None
        self._broke: Exception | None = None
        self._remote: RemoteDevice | None = None
        self._hang_s = hang_s
        self._page: PageReader | None = None
        self._dismissed = False
        self.ended_ns = 0
        self.worked = False
        self.exit_code: int | None = None
        self.started_ns = time.monotonic_ns()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    self.pid, self._pidfd = spawn(f"{name}={home}" if home else name, name, theirs, background_threads, state_dir)
                except BaseException:
                    ours.close()
                    raise
        except OSError as error:
            raise DeviceUnavailableError(
                name, f"device {name!r} cannot start: its driver process ({sys.executable}) was not made: {error.strerror}"
            ) from error
        self._calls: asyncio.Queue[tuple[int, CallBody, Descriptors] | None] = asyncio.Queue()
        tasks.start_soon(self._answer_calls, name=f"answers to {name}")
        self._loop.add_reader(self._pidfd, self._exited)
        leave_in_child(self)
        tasks.start_soon(self._watch, name=f"watch over {name}")
        self.connection = Connection(ours, self._call, self._socket_ended, self._greeted)

    @property
    def alive(self) -> bool:
        return self.connection.ended_by is None

    @property
    def starting(self) -> bool:
        """Whether it may still become ready."""
        return not self._started.is_set()

    @property
    def failed(self) -> bool:
        """Whether it will never become ready, or has ended."""
        return self._start_error is not None or not self.alive

    @property
    def serving(self) -> RemoteDevice | None:
        """The device, while it is ready."""
        return None if self.failed else self._remote

    async def ready(self) -> RemoteDevice:
        """The device, once the driver has greeted. A cancelled caller leaves it starting.

        Raises:
            DeviceUnavailableError: it told that it cannot serve.
            DriverDiedError: it ended first.
            DriverHungError: it did not greet within START_S and has been killed.
            CallerError: the runtime was closed meanwhile.
        """
        seconds = START_S - (time.monotonic_ns() - self.started_ns) / 1e9
        with anyio.move_on_after(max(0.0, seconds)):
            await self._started.wait()
        if self.starting:
            self.kill(DriverHungError(self.name, START_S))
            with anyio.move_on_after(KILL_S):
                await self._ended.wait()
            self._start_failed(DriverHungError(self.name, START_S))
        if self._start_error is not None:
            raise again(self._start_error)
        assert self._remote is not None
        return self._remote

    def _start_failed(self, error: AionnError) -> None:
        if self.starting:
            self._start_error = error
            self._started.set()

    @property
    def activity(self) -> Activity | None:
        """What it does now; None before it has greeted and after its end."""
        return None if self._page is None else self._page.read()

    def _greeted(self, greeting: Ready | Refused, descriptors: Descriptors) -> None:
        if not self.starting:
            raise ControlError("a driver greets once")
        if isinstance(greeting, Refused):
            self._start_failed(error_of(greeting.failure))
        elif greeting.protocol != PROTOCOL:
            self._start_failed(
                DeviceUnavailableError(
                    self.name,
                    f"device {self.name!r} speaks protocol {greeting.protocol}, this runtime {PROTOCOL}; install matching versions",
                )
            )
        else:
            try:
                self._page = PageReader(descriptors.take())
            except LayoutError as error:
                raise ControlError(str(error)) from error
            self._remote = RemoteDevice(self.connection, greeting, self.name)
            self._started.set()
            trace.span_at("driver.start", self.started_ns, time.monotonic_ns(), device=self.name, pid=self.pid)

    def _call(self, call_id: int, body: CallBody, descriptors: Descriptors) -> None:
        if self._remote is None:
            raise CallerError("a driver may call only after it has greeted")
        self._calls.put_nowait((call_id, body, descriptors))

    async def _answer_calls(self) -> None:
        """Answer what the driver asks, each call in a task. Here, because anyio starts tasks only from within a task: a
        callback of a loop that anyio.run has not brought knows no async library."""
        async with anyio.create_task_group() as answering:
            while (call := await self._calls.get()) is not None:
                assert self._remote is not None
                answering.start_soon(self._remote.answer, *call)

    def _socket_ended(self, error: Exception | None) -> None:
        if error is not None:
            logger.warning("the driver process of device %r broke the protocol and is killed: %s", self.name, error)
            self._broke = error
        # Without its socket a driver is of no use; if it is on its way out already this changes nothing, its exit code included.
        self._signal(signal.SIGKILL)

    def kill(self, reason: AionnError | None) -> None:
        """SIGKILL. Callers get `reason` once the process is gone (None: DriverDiedError). Idempotent. Nothing is logged."""
        if self._ended.is_set():
            return
        self._dismissed = True
        if reason is not None and self._killed_by is None:
            self._killed_by = reason
        self._signal(signal.SIGKILL)

    async def _watch(self) -> None:
        """Kill it if it hangs. With `hang_s` None, only log that it does."""
        await self._started.wait()
        if self._page is not None and self._remote is not None:
            judge = Judge(self._hang_s or DEFAULT_HANG_S, self._remote.type is DeviceType.CPU, time.monotonic_ns())
            # A process in between (a wrapper around Python) would not survive a driver's own signal.
            ask = partial(self._signal, STACKS_SIGNAL) if self._page.pid == self.pid else None
            await watch(self.name, self._page, judge, self._ended, ask, None if self._hang_s is None else self.kill)

    def _signal(self, number: int) -> None:
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return  # it has ended and `_exited` is on its way

    def _forget_pidfd(self) -> None:
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)

    def leave(self) -> None:
        """In a child of fork: the driver is the parent's."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _exited(self) -> None:
        if self._pidfd < 0:
            return
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if status is None:
                return
            self.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        except ChildProcessError:
            pass  # the app has reaped it: that it ended is sure all the same, the pidfd says so
        self._forget_pidfd()
        self.connection.drain()
        error = self._killed_by or self._death()
        if self.alive and not self._dismissed and self._broke is None:
            models = ", ".join(self._remote.models) if self._remote is not None else ""
            driver_logger.warning("%s (process %d; models in it: %s)", error, self.pid, models or "none")
        self._start_failed(error)
        self.connection.end(error)
        self._over()
        trace.count("driver.ended", device=self.name, exit_code=self.exit_code)

    def _over(self) -> None:
        self._calls.put_nowait(None)
        self.ended_ns = time.monotonic_ns()
        self._ended.set()
        page, self._page = self._page, None
        if page is not None:
            self.worked = page.read().finished > 0
            page.close()

    def _death(self) -> DriverDiedError:
        why = ""
        if self._broke is not None:
            why = f"after it had broken the protocol ({self._broke})"
        elif self.starting:
            why = "before it was ready (what it wrote to stderr tells why)"
        return DriverDiedError(self.name, self.exit_code, why)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def _close(self) -> None:
        self._start_failed(CallerError("the runtime was closed"))
        self.connection.end(CallerError("the runtime was closed"))

    def _abort(self) -> None:
        """Kill and reap the process where nobody has waited for its end; give it up if it does not end."""
        if self._ended.is_set():
            return
        self._signal(signal.SIGKILL)
        (waiting := select.poll()).register(self._pidfd, select.POLLIN)
        waiting.poll(ABORT_S * 1000)
        self._exited()
        if not self._ended.is_set():
            logger.error("the driver process %d of device %r does not end, even killed; it is left to the system", self.pid, self.name)
            self._forget_pidfd()
            self._over()


async def _end(processes: Sequence[DriverProcess]) -> None:
    """Close their sockets, give them GRACE_S, kill them; kill them at once if the caller is cancelled. Ends in bounded time."""
    try:
        for process in processes:
            process._close()
        for seconds in (GRACE_S, KILL_S):
            with bounded_shield(seconds):
                for process in processes:
                    await process.wait_ended()
            for process in processes:
                process._signal(signal.SIGKILL)
    finally:
        for process in processes:
            process._abort()


class Device:
    """A device that this runtime knows (public face: `runtime.devices`).

    Attributes:
        name: as it is asked for.
        version: of the engine and what its artifacts depend on; None until its driver has run once.
        type: what kind of hardware it uses; None until its driver has run once.
        cache_files: how many cache files of each kind it needs; None until its driver has run once.
        pid: of its driver process; None while none runs.
    """

    def __init__(self, name: str, devices: Devices) -> None:
        self.name = name
        self._devices = devices
        self.version: str | None = None
        self.type: DeviceType | None = None
        self.cache_files: CacheFiles | None = None
        self._process: DriverProcess | None = None
        self._starting = anyio.Lock()
        self._starts = 0
        self._restarts = Restarts(name)

    def __repr__(self) -> str:
        return f"Device(name={self.name!r}, version={self.version!r}, pid={self.pid})"

    def introduced(self, remote: RemoteDevice) -> RemoteDevice:
        """Note what its driver has told of itself."""
        self.version, self.type, self.cache_files = remote.version, remote.type, remote.cache_files
        return remote

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.alive else None

    @property
    def activity(self) -> Activity | None:
        """What its driver does now, and since when (`aionn.pages.Activity`); None while none runs."""
        return self._process.activity if self._process is not None and self._process.alive else None

    async def restart(self) -> None:
        """End its driver process at once, whatever it does, and start a new one.

        Calls that wait for the old one end with `DriverDiedError`. Compilations prepare their models again when they are used next.

        Raises:
            CallerError: the runtime was closed.
            DeviceUnavailableError, DriverDiedError, DriverHungError: the new one cannot be started.
        """
        await self._devices.restart(self)

    def statistics(self) -> dict[str, int | None]:
        """starts: driver processes so far; pid; last_exit_code (None: none has ended); calls_in_flight over the control socket."""
        process = self._process
        last = process.exit_code if process is not None and process.exit_code is not None else self._restarts.last_exit_code
        calls = process.connection.calls_in_flight if process is not None and process.alive else 0
        return {"starts": self._starts, "pid": self.pid, "last_exit_code": last, "calls_in_flight": calls}


class Devices:
    """All devices of one runtime."""

    def __init__(self, tasks: Tasks, state_dir: str = "", hang_s: float | None = DEFAULT_HANG_S) -> None:
        self._tasks = tasks
        self._state_dir = state_dir
        self._hang_s = hang_s
        self._homes = {name: f"{point.module}:{point.attr}" for name, point in installed_engines().items()}
        self._devices: dict[str, Device] = {name: Device(name, self) for name in self._homes}
        self._workers: set[DriverProcess] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def known(self) -> list[Device]:
        """Installed devices, and others that have run, best first."""
        devices = [device for device in self._devices.values() if device.name in self._homes or device.version is not None]
        return sorted(devices, key=lambda device: _rank(device.name))

    @property
    def installed(self) -> list[str]:
        """Names of the devices that may be chosen when none is asked for, best first."""
        return sorted(self._homes, key=_rank)

    def find(self, name: str) -> Device:
        """The device of that name.

        Raises:
            CallerError: that is no name.
            DeviceUnavailableError: no engine of that name is installed.
        """
        if not isinstance(name, str) or not name:
            raise CallerError(f"device {name!r}: a device is asked for by its name, as in 'onnxruntime'")
        device = self._devices.get(name)
        if device is None:
            if ":" not in name or "\0" in name:
                known = ", ".join(device.name for device in self.known) or "none"
                raise DeviceUnavailableError(name, f"device {name!r} is not installed; installed are: {known}")
            device = self._devices[name] = Device(name, self)
        return device

    async def get(self, name: str) -> RemoteDevice:
        """The live device; its driver process is started if none runs.

        Raises:
            DeviceUnavailableError, DriverDiedError, DriverHungError: it cannot be started.
        """
        device = self.find(name)
        process = device._process
        if process is not None and process.serving is not None:
            self.check_open()
            return device.introduced(process.serving)
        async with device._starting:
            process = device._process
            if process is not None and not process.alive:
                await process.wait_ended()
                device._restarts.died(process.exit_code, process.started_ns, process.ended_ns, process.worked)
                process = device._process = None
            if process is None and not self._closed:
                await device._restarts.pause()
            # No await from here to the start: `aclose` ends what it finds, and a process that is started after it would stay for ever.
            self.check_open()
            if process is None:
                home, state_dir = self._homes.get(name, ""), self._state_dir
                process = device._process = DriverProcess(name, self._tasks, 0, home, state_dir, self._hang_s)
                device._starts += 1
            try:
                remote = await process.ready()
            except BaseException as error:
                if not process.failed:
                    raise  # cancelled: the next caller finds the same process, and those it serves already keep it
                await _end([process])
                if isinstance(error, DriverDiedError | DriverHungError):
                    device._restarts.died(process.exit_code, process.started_ns, process.ended_ns, process.worked)
                device._restarts.last_exit_code, device._process = process.exit_code, None
                raise
            return device.introduced(remote)

    async def restart(self, device: Device) -> None:
        """See `Device.restart`."""
        self.check_open()
        process = device._process
        if process is not None and process.alive:
            process.kill(DriverDiedError(device.name, -signal.SIGKILL, "because the app restarted the device"))
            await process.wait_ended()
        if device._process is process:
            device._process = None
        device._restarts.forgive()
        await self.get(device.name)

    def check_open(self) -> None:
        """Refuse what can no longer be done.

        Raises:
            CallerError: the runtime was closed.
        """
        if self._closed:
            raise CallerError("the runtime was closed")

    def start_worker(self, name: str, threads: int) -> DriverProcess:
        """One more driver process of that device, at the lowest priority and on so many CPUs. Whoever asked for it ends it.

        Raises:
            DeviceUnavailableError: there is no such device, or it cannot be started.
        """
        self.find(name)
        self.check_open()
        process = DriverProcess(name, self._tasks, threads, self._homes.get(name, ""), self._state_dir, self._hang_s)
        # A caller that was cancelled while it waited for its worker's end has not forgotten it.
        self._workers = {worker for worker in self._workers if worker.alive} | {process}
        return process

    def forget_worker(self, process: DriverProcess) -> None:
        """It has ended, or cannot be ended."""
        self._workers.discard(process)

    @property
    def worker_pids(self) -> list[int]:
        """Of the processes that compile in the background now."""
        return [process.pid for process in self._workers if process.alive]

    async def aclose(self) -> None:
        """End every driver process, side by side."""
        self._closed = True
        for device in self._devices.values():
            device._restarts.forgive()
        processes = [device._process for device in self._devices.values() if device._process is not None]
        for worker in self._workers:
            worker.kill(None)  # nothing in it is worth waiting for
        processes += self._workers
        await _end(processes)


_ORDER = ("onnxruntime", "openvino")


def _rank(name: str) -> tuple[int, str]:
    """Best first: the engines measured best, then any other, then the reference."""
    if name in _ORDER:
        return _ORDER.index(name), name
    return len(_ORDER) + (name == "reference"), name
