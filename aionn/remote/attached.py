"""`AttachedDriver`: a driver as one more client of it sees it, over a connection of that client's.

The runtime's connection to the driver introduces the client (`Connection.attach`), from any thread, or a service does. From then on the
two connections share only the end of the driver. The runtime knows best why a driver has ended, so the client waits for the runtime's
error. Then the client's next call is served by another driver, too. If the runtime's loop does not run, or there is no runtime, the client
finds the end by the driver's pidfd.

Invariants
    `connection` ends when the driver has ended, at most `DYING_S` after its pidfd has said so.
    The runtime's connection holds this object by its key, and never what waits for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, ExecutionError, again
from aionn.fmq import completed
from aionn.fmq.thread_waits import ThreadWaits, Timer
from aionn.hal.types import ErrorStatus
from aionn.hal.values import as_messages
from aionn.loopless import is_readable, leave_in_child, seconds_until
from aionn.remote.calls import HalCall, LogLine, Prepared
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import ATTACHED, ControlError, Ready, Refused, ServiceReady, error_of
from aionn.remote.device import RemoteDevice, RemotePreparedModel

PATIENCE_S = 0.05
"""How long the runtime's reason for the end of a connection is waited for, where the driver may live on."""

DYING_S = 5.0
"""A process whose socket has ended takes at most so long to die, and the runtime's loop to see it. One that lives has closed the socket."""

GREETING_S = 10.0
"""A driver that lives greets a new client within this time, unless it hangs."""


class ModelGoneError(ExecutionError):
    """The driver did not have the prepared model any more when the client came."""


class AttachedDriver:
    """One client's connection to a driver, with one prepared model that the runtime has prepared there.

    Attributes:
        connection: of this client.
        prepared: the prepared model as this client reaches it. Set by `open`.
    """

    prepared: RemotePreparedModel

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        pidfd: Callable[[], int],
        prepared: Prepared,
        waits: ThreadWaits,
        main: Connection | None,
        alone: Callable[[], bool],
    ) -> None:
        """
        Args:
            name: of the device. sock: to the driver. pidfd: returns a pidfd of it, or -1. This object owns both from then on.
            prepared: the prepared model, with its number for this client.
            main: the connection of the runtime that has the driver, or None.
            alone: returns whether the runtime's loop cannot run while the calling thread waits, so that its reason is not waited for.
        """
        self._name = name
        self.message = prepared
        self._waits = waits
        self._alone = alone
        self._device: RemoteDevice | None = None
        self._greeting = waits.create_future()
        self._timer: Timer | None = None
        self._main = main
        self.connection = Connection(sock, self._call, self._socket_ended, self._greeted, loop=waits)
        self._pidfd = -1
        try:
            self._pidfd = pidfd()
            leave_in_child(self)
            if self._pidfd >= 0:
                waits.add_reader(self._pidfd, self._process_ended)
            if main is not None:
                main.when_ended(self, partial(waits.call_soon_threadsafe, self.end))
                if main.ended_by is not None:  # it ended while the other thread did that
                    self.end(main.ended_by)
        except BaseException:  # of a signal's handler, before the owner has this object
            self.end(CallerError("this burst connects anew"))
            raise

    async def open(self, deadline_ns: int | None) -> RemotePreparedModel:
        """Return the prepared model, once the driver has greeted.

        Raises:
            ModelGoneError: the driver has freed it meanwhile.
            DeadlineError: the driver did not greet in time.
            AionnError: the driver has ended.
        """
        late = self._waits.call_later(GREETING_S, self._late)
        by = None if deadline_ns is None else self._waits.call_later(seconds_until(deadline_ns), self._late)
        try:
            ready: Ready = await self._greeting
        finally:
            late.cancel()
            if by is not None:
                by.cancel()
        self._device = RemoteDevice(self.connection, ready, self._name)
        self.prepared = RemotePreparedModel(self._device, self.message)
        return self.prepared

    def _late(self) -> None:
        self._greeting.set_exception(
            DeadlineError("the driver did not accept a connection by the deadline; it may still be busy", transient=True)
        )

    def _greeted(self, greeting: Ready | Refused | ServiceReady, descriptors: Descriptors) -> None:
        descriptors.close()
        if isinstance(greeting, ServiceReady):
            raise ControlError("a driver greets as a driver")
        if isinstance(greeting, Refused):
            self._greeting.set_exception(error_of(greeting.failure))
        else:
            self._greeting.set_result(greeting)

    def _call(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        if self._device is None:
            raise CallerError("a driver may call only after it has greeted")
        if isinstance(body, LogLine):
            descriptors.close()
            self._device.log(call_id, body)
        else:
            error = completed(self._device.answer(call_id, body, descriptors))
            if error is not None and not isinstance(error, AionnError):
                raise error  # of a signal's handler, for the call that waits

    # --- the end -------------------------------------------------------------------------------------------------------

    def _socket_ended(self, error: Exception | None) -> None:
        if error is not None:
            self.end(error if isinstance(error, ControlError) else ControlError(f"the connection to the driver failed: {error}"))
        else:  # the socket of a process that dies ends before the process does, and perhaps long before
            self._end_within(PATIENCE_S if self._device is None or self._pidfd < 0 else DYING_S)

    def _process_ended(self) -> None:
        self._waits.remove_reader(self._pidfd)
        self.connection.drain()
        self._end_within(0.0 if self._main is None or self._alone() else DYING_S)

    def _end_within(self, seconds: float) -> None:
        """Wait a moment for the runtime's reason, because the driver has ended, or has closed this connection."""
        if self._timer is not None:
            self._timer.cancel()
        if self.connection.ended_by is None:
            self._timer = self._waits.call_later(seconds, self._end_alone)

    def _end_alone(self) -> None:
        if self._main is not None and self._main.ended_by is not None:
            self.end(again(self._main.ended_by))
            return
        name, code = self._name, None
        if self._pidfd < 0 or not is_readable(self._pidfd):
            why = f"device {name!r} has closed its connection to this burst; the next call connects anew"
            self._greeting.set_exception(ModelGoneError(why, status=ErrorStatus.DEVICE_UNAVAILABLE))
            self.end(ExecutionError(why, status=ErrorStatus.DEVICE_UNAVAILABLE))
            return
        # The runtime may have reaped it and says so soon, or it is another process's child.
        with suppress(ChildProcessError):
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.end(DriverDiedError(name, code))

    def end(self, error: BaseException) -> None:
        """End the connection. Calls that wait get `error`. The driver frees everything of this client."""
        if self._main is not None:
            self._main.cancel_when_ended(self)
        self.connection.end(error)
        self._greeting.set_exception(again(error))
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd >= 0:
            self._waits.remove_reader(self._pidfd)
        self.leave()

    def leave(self) -> None:
        """Close the pidfd, also in a child of fork: the process is the parent's."""
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)


def attached_to(model: RemotePreparedModel, waits: ThreadWaits, alone: Callable[[], bool]) -> AttachedDriver:
    """Become one more client of the driver in which a runtime has a prepared model. `alone` is as for `AttachedDriver`."""
    device = model.device
    sock, message = device.connection.attach(model.number), Prepared(ATTACHED, as_messages(model.inputs), as_messages(model.outputs))
    return AttachedDriver(device.name, sock, device.pidfd, message, waits, device.connection, alone)
