"""One driver process: started, connected, watched and ended.

A driver is started with one end of a socket pair. It is watched through its pidfd and through the socket. After its end the
last messages that it sent are read first. Then every caller that waits gets `DriverDiedError`, or `DriverHungError` if the
runtime had to kill the driver.

Invariants
    The connection has ended before `_ended` is set, so no caller waits for a process that is known to have ended.
    Many may await `ready`, and each of them may be cancelled. `_started` is set once, by the greeting or by the end.

`Restarts` says when to start a driver again that has died: at once at first, and later each time if it dies again and again.
Without these pauses, an engine that crashes at every start, or a model that crashes its driver at every run, would use up a CPU.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from aionn.errors import AionnError, CallerError, DeviceUnavailableError, DriverDiedError, DriverHungError, again
from aionn.events import DriverEnded, DriverHung, DriverStarted
from aionn.fmq import completed
from aionn.hal.types import DeviceType
from aionn.loopless import running_loop
from aionn.pages.app_page import traced_until_ns
from aionn.pages.layout import Activity, LayoutError
from aionn.pages.page import PageReader
from aionn.remote.calls import HalCall, LogLine
from aionn.remote.connection import ONLY_PEER, Connection, Descriptors, PeerLimits
from aionn.remote.control import GUEST_BODY_BYTES, PROTOCOL, STACKS_SIGNAL, ControlError, Ready, Refused, ServiceReady, error_of
from aionn.remote.device import RemoteDevice
from aionn.runtime.processes.liveness import Hang, Judge, waiting_cpu_ns, watch, watch_start
from aionn.runtime.processes.spawning import DEFAULT_HANG_S, GRACE_S, KILL_S, USUAL, WHEN_IDLE, Settings, Spawned
from aionn.runtime.processes.template import ABORT_S
from aionn.runtime.record import DriverRecord, about
from aionn.tasks import Tasks, bounded_shield

if TYPE_CHECKING:  # most apps have no service
    from aionn.runtime.processes.handed import Handed

logger = logging.getLogger("aionn.driver")

START_S = 60.0
"""A driver must greet within this time: importing an engine from a cold disk takes seconds. While it waits for a CPU, it may take more,
until it has used this much CPU time. So many drivers that are asked for at once on few CPUs all start."""

_CPU_LOOK_S = 5.0
"""Beyond START_S, a start is given up when it has got no CPU time at all for so long."""


class DriverProcess:
    """One driver process and the connection to it.

    Attributes:
        name: of its device.
        connection: to the driver.
        life: when the process started and ended, and whether it has worked.
        refused: whether the driver has reported that it cannot serve. Its end then counts as no death.
    """

    def __init__(
        self,
        name: str,
        tasks: Tasks,
        schedule: str = USUAL,
        home: str = "",
        settings: Settings = Settings(),  # noqa: B008 -- frozen
        spawned: Spawned | Handed | None = None,
        record: DriverRecord | None = None,
    ) -> None:
        """Start the process, without waiting for its greeting (`ready`).

        Args:
            schedule: `USUAL` for the app's priority, `WHEN_IDLE` for SCHED_IDLE, or a number of CPUs for a worker in the background.
            home: "package.module:Class" of an installed engine, so that the driver need not look for the class again.
            settings: of the runtime.
            spawned: the process, if it was started already, or handed over by a service. It is taken over.
            record: what shows the process. None: it is a worker in the background.
        """
        spawned = spawned or Spawned(name, home, schedule, settings)
        self.name = name
        self._started = anyio.Event()
        self._start_error: AionnError | None = None
        self.refused = False
        self._ended = anyio.Event()
        self._killed_by: AionnError | None = None
        self._broke: Exception | None = None
        self._dismissed = False
        self._late: asyncio.TimerHandle | None = None
        self._when_idle = schedule == WHEN_IDLE
        self._remote: RemoteDevice | None = None
        self._page: PageReader | None = None
        self.life = Life(spawned.started_ns, record or DriverRecord(None, name))
        self._child = spawned.child(self._exited)
        self.life.record.spawned(spawned.pid)
        tasks.start_soon(self._watch, settings, name=f"watch over {name}")
        limits = PeerLimits(sent_bytes=GUEST_BODY_BYTES) if self._child.is_shared else ONLY_PEER
        self.connection = Connection(spawned.sock, self._call, self._socket_ended, self._greeted, limits=limits)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the connection has not ended."""
        return self.connection.ended_by is None

    @property
    def failed(self) -> bool:
        """Whether the driver will never become ready, or has ended."""
        return self._start_error is not None or self.connection.ended_by is not None

    @property
    def serving(self) -> RemoteDevice | None:
        """The device, while it is ready."""
        return None if self._start_error is not None or self.connection.ended_by is not None else self._remote

    @property
    def activity(self) -> Activity | None:
        """What the driver does now. None before its greeting and after its end."""
        return None if self._page is None else self._page.read()

    # --- the start ---------------------------------------------------------------------------------------------------

    async def ready(self) -> RemoteDevice:
        """Return the device once the driver has greeted. The start goes on if a caller is cancelled.

        Raises:
            DeviceUnavailableError: the driver reported that it cannot serve.
            DriverDiedError: the driver ended first.
            DriverHungError: the driver did not greet in time (`START_S`) and has been killed.
            CallerError: the runtime was closed meanwhile.
        """
        seconds, cpu_ns = START_S - (time.monotonic_ns() - self.life.started_ns) / 1e9, 0
        with anyio.move_on_after(max(0.0, seconds)):
            await self._started.wait()
        while not self._started.is_set() and cpu_ns < (used_ns := waiting_cpu_ns(self.pid)) < START_S * 1e9:
            cpu_ns = used_ns
            with anyio.move_on_after(_CPU_LOOK_S):
                await self._started.wait()
        if not self._started.is_set():
            self.send_sigkill(DriverHungError(self.name, START_S))
            await self._started.wait()
        if self._start_error is not None:
            raise again(self._start_error)
        assert self._remote is not None
        return self._remote

    def _start_failed(self, error: AionnError) -> None:
        if not self._started.is_set():
            self._start_error, self.refused = error, isinstance(error, DeviceUnavailableError)
            self._started.set()

    def _greeted(self, greeting: Ready | Refused | ServiceReady, descriptors: Descriptors) -> None:
        if self._started.is_set():
            raise ControlError("a driver greets once")
        if isinstance(greeting, ServiceReady):
            raise ControlError("a driver greets as a driver")
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
            page, self._child.page = self._child.page, -1
            if page < 0 and len(greeting.page) != 2:
                raise ControlError("the driver's greeting came without a statistics page")
            asked = -1  # an app may only read the page of a driver of others
            if page < 0:
                page, asked = map(descriptors.take, greeting.page)
            try:
                self._page = PageReader(page, self._child.started_ns or self.life.started_ns, asked)
            except LayoutError as error:
                raise ControlError(str(error)) from error
            if asked >= 0:
                self._page.trace_until(traced_until_ns())
            self._remote = RemoteDevice(self.connection, greeting, self.name, self._child.pidfd)
            self._remote.page = self._page
            self._started.set()
            self.life.record.greeted(greeting.type.name.lower(), self._remote.version)
            took_s = (time.monotonic_ns() - self.life.started_ns) / 1e9
            self.life.record.publish(DriverStarted(device=self.name, pid=self.pid, seconds=took_s))

    # --- while it runs -----------------------------------------------------------------------------------------------

    def _call(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        if self._remote is None:
            raise CallerError("a driver may call only after it has greeted")
        if isinstance(body, LogLine):
            descriptors.close()
            self._remote.log(call_id, body)  # so that it is there when the caller gets the error
        else:
            completed(self._remote.answer(call_id, body, descriptors))  # a burst has its memories at hand, so it waits for nothing

    async def _watch(self, settings: Settings) -> None:
        """Kill the driver if it hangs. With `hang_s` None, only log the hang."""
        hang_s = settings.hang_s

        def hangs(hang: Hang, stack: str) -> None:
            outcome = "hang_s is None, so the driver is not killed" if hang_s is None else "the driver is killed"
            words = "the driver process of device %r, with the models %s, hangs: it %s (%s). Its stacks:\n%s"
            models, extra = _models_of(self._remote), about(device=self.name)
            logger.warning(words, self.name, models, hang.why, outcome, stack or "(none)", extra=extra)
            killed = hang_s is not None
            self.life.record.publish(DriverHung(device=self.name, pid=self.pid, seconds=hang.waited_s, stack=stack, killed=killed))
            if hang_s is not None:
                self.send_sigkill(DriverHungError(self.name, hang.waited_s, stack))

        patience_s = hang_s or DEFAULT_HANG_S
        hang = await watch_start(self.pid, Judge(patience_s, False, time.monotonic_ns()), self._started)
        if hang is not None:
            hangs(hang, "")
        await self._started.wait()
        if self._page is not None and self._remote is not None:
            judge = Judge(patience_s, self._remote.type is DeviceType.CPU, time.monotonic_ns(), self._when_idle)
            # A process in between (a wrapper around Python) would not survive a driver's own signal.
            ask = partial(self._child.signal, STACKS_SIGNAL) if self._page.pid == self.pid and not self._child.is_shared else None
            await watch(self._page, judge, self._ended, ask, hangs, partial(setattr, self.life, "hang"))

    # --- the end -----------------------------------------------------------------------------------------------------

    def send_sigkill(self, reason: AionnError | None) -> None:
        """Send SIGKILL, without a line in the log. May be called again.

        Callers that wait get `reason` once the process has ended, or `DriverDiedError` if `reason` is None. A process that waits for a
        disk or a device may not end. Then they get it after KILL_S.
        """
        if self._ended.is_set():
            return
        self._dismissed = True
        if reason is not None and self._killed_by is None:
            self._killed_by = reason
        self._child.signal(signal.SIGKILL)
        if self._late is None:
            self._late = running_loop().call_later(KILL_S, self._leave_to_system)

    async def wait_ended(self) -> None:
        """Return when the process has ended."""
        await self._ended.wait()

    def _socket_ended(self, error: Exception | None) -> None:
        if error is not None:
            words = "the driver process of device %r, with the models %s, broke the protocol and is killed: %s"
            logger.warning(words, self.name, _models_of(self._remote), error, extra=about(device=self.name))
            self._broke = error
        # A driver without its socket is of no use. If the driver is ending already, the signal changes nothing, not even its exit code.
        self._child.signal(signal.SIGKILL)

    def _exited(self) -> None:
        if not self._child.reap():
            return
        self.connection.drain()
        error = self._killed_by or self._death()
        if self.alive and not self._dismissed and self._broke is None:
            words, notes = "%s (process %d, with the models %s)%s", "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            logger.warning(words, error, self.pid, _models_of(self._remote), notes, extra=about(device=self.name))
        if not self._dismissed and not isinstance(self.connection.ended_by, CallerError):  # else aionn has closed it
            broken = self._broke is not None
            self.life.cause = "protocol" if broken else "signal" if (self._child.exit_code or 0) < 0 else "exit"
        self._settle(error)

    def _settle(self, error: AionnError) -> None:
        """End what waits for the driver."""
        if isinstance(error, DriverHungError):
            self.life.cause = "hung"
        self._start_failed(error)
        self.connection.end(error)
        if self._late is not None:
            self._late.cancel()
        self.life.exit_code, self.life.ended_ns = self._child.exit_code, time.monotonic_ns()
        self._ended.set()
        page, self._page = self._page, None
        if page is not None:
            self.life.worked = page.read().finished > 0
            page.close()
        self.life.record.publish(DriverEnded(device=self.name, pid=self.pid, cause=self.life.cause, exit_code=self.life.exit_code))

    def _death(self) -> DriverDiedError:
        why = ""
        if self._broke is not None:
            why = f"after it had broken the protocol ({self._broke})"
        elif self._child.is_shared:
            why = "(a driver of the service, which may also have ended this app's connection alone)"
        elif not self._started.is_set():
            why = "before it was ready (what it printed says why)"
        error = DriverDiedError(self.name, self._child.exit_code, why)
        if lines := self._child.last_lines:
            error.add_note(f"the last lines that the driver process printed:\n{lines}")
        return error

    def close(self, why: str) -> None:
        """End the connection, so that the driver ends by itself. Callers that wait get a `CallerError`, which says why."""
        self._start_failed(CallerError(why))
        self.connection.end(CallerError(why))
        if self._child.is_shared:
            self.send_sigkill(None)  # it serves others and does not end, so nothing is to wait for

    def kill_and_reap(self) -> None:
        """Kill and reap a process that has not ended yet. Leave it to the system if it does not end within ABORT_S."""
        if self._ended.is_set():
            return
        self._child.signal(signal.SIGKILL)
        self._child.block_until_ended(ABORT_S)
        self._exited()
        self._leave_to_system()

    def _leave_to_system(self) -> None:
        if self._ended.is_set():
            return
        words = "the driver process %d of device %r does not end, even killed; it is left to the system"
        logger.error(words, self.pid, self.name, extra=about(device=self.name))
        self._child.end()
        self._settle(self._killed_by or self._death())


def _models_of(remote: RemoteDevice | None) -> str:
    return ", ".join(remote.models if remote is not None else ()) or "none"


async def end_processes(processes: Sequence[DriverProcess], why: str = "the runtime was closed") -> None:
    """Close the sockets of driver processes, wait for GRACE_S, then kill the processes. Takes bounded time.

    If the caller is cancelled, the processes are killed at once.
    """
    try:
        for process in processes:
            process.close(why)
        for seconds in (GRACE_S, KILL_S):
            with bounded_shield(seconds):
                for process in processes:
                    await process.wait_ended()
            for process in processes:
                process.send_sigkill(None)
    finally:
        for process in processes:
            process.kill_and_reap()


BACKOFF_S = (0.0, 0.1, 1.0, 10.0)
"""The pauses before a start: after one death, after two in a row, after three, and after more."""

STEADY_S = 10.0
"""A driver that has lived for so long, or has finished an execution, begins a new row of deaths."""


class Life(msgspec.Struct):
    """The life of one driver process.

    Attributes:
        started_ns, ended_ns: by CLOCK_MONOTONIC. `ended_ns` is 0 while the process runs.
        worked: whether the driver had finished an execution.
        exit_code: of the process, or minus the signal that ended it. None while it is not known.
        cause: why it ended, as of `aionn.events.DriverEnded`. It counts once the process has ended.
        record: what shows the process.
        hang: why the driver counts as hung now, or None.
    """

    started_ns: int
    record: DriverRecord
    ended_ns: int = 0
    worked: bool = False
    exit_code: int | None = None
    cause: str = "closed"
    hang: Hang | None = None


class Restarts:
    """The deaths of one device's drivers, and the pauses after them.

    Attributes:
        last_exit_code: of the last driver that ended, or None.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._deaths = 0
        self._died_ns = 0
        self._hurry = anyio.Event()
        self.last_exit_code: int | None = None

    @property
    def deaths(self) -> int:
        """How many drivers have died in a row."""
        return self._deaths

    def died(self, life: Life) -> None:
        """Note that a driver has died."""
        self.last_exit_code, self._died_ns = life.exit_code, life.ended_ns
        self._deaths = 1 if life.worked or (life.ended_ns - life.started_ns) / 1e9 >= STEADY_S else self._deaths + 1

    def forgive(self) -> None:
        """End a pause, and start without one."""
        self._deaths = 0
        self._hurry.set()

    async def pause(self) -> None:
        """Wait until a driver may be started. Log the start if a driver has died before."""
        if not self._deaths:
            return
        pause_s = BACKOFF_S[min(self._deaths, len(BACKOFF_S)) - 1]
        left_s = pause_s - (time.monotonic_ns() - self._died_ns) / 1e9
        if left_s > 0:
            self._hurry = anyio.Event()
            with anyio.move_on_after(left_s):
                await self._hurry.wait()
        if self._deaths:
            logger.warning(
                "the driver process of device %r is started again (deaths in a row: %d; the last one with exit code %s)%s",
                self._device,
                self._deaths,
                self.last_exit_code,
                f" and a pause of {pause_s:g} s" if left_s > 0 else "",
                extra=about(device=self._device),
            )
