"""Drivers of a service: an app is handed a connection to one, in place of starting one.

Invariants
    Such a driver is another process's child. Its end is seen by its pidfd, and its exit code is not known.
    An app cannot end it. Where it would kill a driver that it has started, it ends its connection (`HandedChild.signal`).
    A call that needs the service connects anew if the last connection has ended, once, and says so if that fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from aionn.errors import AionnError, DeadlineError, DeviceUnavailableError, ServiceDiedError
from aionn.loopless import is_readable, leave_in_child, running_loop
from aionn.remote.attaching import called_by_service, connect, refusal_in
from aionn.remote.calls import ConnectDriver, ConnectedDriver, DigestModel, Fd, HalCall
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import Ready, Refused, ServiceReady
from aionn.runtime.processes.child import Child
from aionn.runtime.processes.spawning import WHEN_IDLE, Settings, needs_as_text

if TYPE_CHECKING:
    from aionn.graph.digest import Place
    from aionn.graph.files import OpenFile

A = TypeVar("A")

logger = logging.getLogger("aionn.service")

GREETING_S = 5.0
"""A service that lives greets within this time."""


ANSWER_S = 90.0
"""A service that lives answers within this time: it starts a driver, perhaps after a pause."""


class HandedChild(Child):
    """The process of a driver that belongs to a service. What would end a process of the app's own lets this one go."""

    is_shared = True

    def __init__(self, pid: int, pidfd: int, page: int, started_ns: int, exited: Callable[[], None]) -> None:
        """Take over the descriptors. `exited` is called when the process has ended, or when the app lets it go."""
        self.pid = pid
        self.exit_code = None
        self._pidfd = pidfd
        self.page, self.started_ns = page, started_ns
        self._exited = exited
        self._let_go = False
        self._loop = running_loop()
        self._loop.add_reader(pidfd, exited)
        leave_in_child(self)

    @property
    def last_lines(self) -> str:
        """What it prints goes to the service."""
        return ""

    def signal(self, number: int) -> None:
        """Let the process go where the app would kill its own. Other signals are not for a process of others."""
        if number == signal.SIGKILL and not self._let_go:
            self._let_go = True
            self._loop.call_soon(self._exited)

    def reap(self) -> bool:
        """Return whether the process has just been found to have ended, or was let go."""
        if self._pidfd < 0:
            return False
        if not self._let_go and not is_readable(self._pidfd):
            return False
        self.end()
        return True

    def block_until_ended(self, seconds: float) -> None:
        """Do nothing: a process that was let go need not end."""

    def end(self) -> None:
        """Close the pidfd."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        self.leave()

    def leave(self) -> None:
        """Close the descriptors, also in a child of fork."""
        for fd in (self._pidfd, self.page):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self.page = -1


class Handed:
    """A driver that the service has handed to this app. Its owner makes a child of it, or calls `end`. As `Spawned`.

    Attributes:
        pid: of the driver process.
        started_ns: when it was handed over, from which its greeting is waited for. The process may be much older.
        sock: the app's end of its connection with the driver.
    """

    exports = ""

    def __init__(self, driver: ConnectedDriver, descriptors: Descriptors) -> None:
        self.pid, self.started_ns = driver.pid, time.monotonic_ns()
        self._since_ns = driver.started_ns
        self.sock = descriptors.take_socket(driver.socket)
        self._fds = [descriptors.take(driver.pidfd), descriptors.take(driver.page)]
        leave_in_child(self)

    def child(self, exited: Callable[[], None]) -> HandedChild:
        """Return the process, which takes over the descriptors. The socket is the caller's from now on."""
        (pidfd, page), self._fds = self._fds, []
        return HandedChild(self.pid, pidfd, page, self._since_ns, exited)

    def end(self) -> None:
        """Let the driver go, unless it was taken over."""
        if self._fds:
            self.sock.close()
            self.leave()

    def leave(self) -> None:
        """Close the descriptors in a child of fork."""
        while self._fds:
            os.close(self._fds.pop())


class ServiceLink:
    """An app's connection to the service. Use it in the runtime's loop."""

    def __init__(self, path: str, lost: Callable[[], None] = lambda: None) -> None:
        """`lost` is called when the connection has ended: what the service has handed out goes on, and new work needs another service."""
        self.path = path
        self._lost = lost
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._attached = False

    async def attach(self) -> Connection:
        """Return the connection, which is made anew if the last one has ended.

        Raises:
            DeviceUnavailableError: no service of this protocol listens, and the app was never attached.
            ServiceDiedError: the same, and the app was attached before.
        """
        async with self._connecting:
            found = self._connection
            if found is not None and found.ended_by is None:
                return found
            try:
                self._connection = await self._greeted()
            except DeviceUnavailableError as error:
                if not self._attached:
                    raise
                raise ServiceDiedError(f"the service has ended ({error}); ask again when a service runs") from error
            words = "attached again to the service at %s" if self._attached else "attached to the service at %s"
            logger.info(words, self.path)
            self._attached = True
            return self._connection

    async def _greeted(self) -> Connection:
        greeting: asyncio.Future[None] = running_loop().create_future()

        def settle(error: AionnError | None) -> None:
            if not greeting.done():
                greeting.set_result(None) if error is None else greeting.set_exception(error)

        def greeted(message: Ready | Refused | ServiceReady, descriptors: Descriptors) -> None:
            descriptors.close()
            settle(refusal_in(message, self.path))

        def ended(error: Exception | None) -> None:
            why = "it has ended" if error is None else f"it broke the protocol ({error})"
            died = ServiceDiedError(f"the service at {self.path} does not answer any more: {why}; ask again")
            settle(DeviceUnavailableError("", f"the service at {self.path} ended the connection; ask again"))
            lost = connection.ended_by is None
            connection.end(died)
            if lost and connection is self._connection:
                self._lost()

        connection = Connection(connect(self.path), called_by_service, ended, greeted)
        try:
            async with asyncio.timeout(GREETING_S):
                await greeting
        except TimeoutError:
            connection.end(ServiceDiedError("it did not greet"))
            raise DeviceUnavailableError("", f"the service at {self.path} did not greet within {GREETING_S:g} s; restart it") from None
        except BaseException as error:
            connection.end(error if isinstance(error, AionnError) else ServiceDiedError("the app has left"))
            raise
        return connection

    async def driver(self, name: str, schedule: str, settings: Settings) -> Handed:
        """Return a connection to the driver of a device with these settings. The service starts it if it has none.

        Raises:
            DeviceUnavailableError, DriverDiedError, DriverHungError: the service cannot start it.
            ServiceDiedError: the service has ended, and no other one listens; or it does not answer.
        """
        needs = needs_as_text(settings.needs.get(name)).encode()
        # A worker in the background is a guest of the driver that runs when a CPU is idle.
        body = ConnectDriver(name, schedule == WHEN_IDLE, settings.sandbox, settings.threads, dict(settings.environment), needs)
        try:
            try:
                driver, descriptors = await self._call(body)
            except ServiceDiedError:  # another service may just have taken its place
                driver, descriptors = await self._call(body)
        except DeadlineError:
            why = f"the service at {self.path} did not answer for {ANSWER_S:g} s; if it stands still, end its process and start it anew"
            raise ServiceDiedError(why) from None
        try:
            return Handed(driver, descriptors)
        finally:
            descriptors.close()

    async def _call(self, body: HalCall[A]) -> tuple[A, Descriptors]:
        connection = await self.attach()
        return await connection.call(body, deadline_ns=time.monotonic_ns() + int(ANSWER_S * 1e9))

    async def digests(self, files: Mapping[str, OpenFile]) -> dict[Place, bytes]:
        """Return the digest of each range of a model's files, which the service reads once for all apps. Nothing where it does not.

        Args:
            files: by location, the model's own under "". Perhaps none.
        """
        if not files:
            return {}
        beside = tuple((location, Fd(file.fileno())) for location, file in files.items() if location)
        body = DigestModel(Fd(files[""].fileno()), beside)
        try:
            found, descriptors = await self._call(body)
        except AionnError as error:
            logger.debug("this app digests a model by itself, because the service did not: %s", error)
            return {}
        descriptors.close()
        return {(location, offset, length): digest for location, offset, length, digest in found}

    def end(self) -> None:
        """End the connection with the service. The connections to its drivers are their processes'."""
        if self._connection is not None:
            self._connection.end(ServiceDiedError("the runtime was closed"))
