"""`Service`: hands drivers to the apps of one user.

An app asks for the driver of a device with its settings. Drivers with the same settings are shared. The service sends the driver one end of
a new socket pair as a guest's, and the app the other end.

Invariants
    An app gets its connection with a driver, and descriptors that it may only read. No text of one app reaches another one.
    What a guest has in a driver is freed when its connection ends, and when its process ends, also if a child of it holds the connection.
    A model that the service prepares for a client is given up with it. A client that waits for the same model then prepares it.
    A driver that has had no guest for `IDLE_DRIVER_S` is ended.
    A service that was taken over accepts no app, and ends with its drivers' last guests. If the other one does not serve, it goes on.
    Drivers that have guests at the end of the service are not ended: they serve open bursts for a while, and end by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import anyio
import msgspec

from aionn.engines.installed import with_descriptors
from aionn.errors import AionnError, CallerError, DriverDiedError, QuotaError, ServiceDiedError
from aionn.hal.types import ErrorStatus, Priority
from aionn.hal.values import as_messages
from aionn.needs import Confinement
from aionn.pages.layout import RELEASE
from aionn.pages.page import until_beat_s
from aionn.remote.attaching import connect, peer_of, pidfd_of_peer
from aionn.remote.calls import (
    ConnectDriver,
    ConnectedDriver,
    DigestModel,
    Drain,
    DriverFacts,
    EndGuest,
    Evict,
    Fd,
    Guests,
    HalCall,
    ListShared,
    Opened,
    OpenModel,
    Prepared,
    Quarantine,
    ReadService,
    ServiceFacts,
    TakenOver,
    TakeOver,
)
from aionn.remote.connection import Connection, Descriptors, PeerLimits
from aionn.remote.control import ATTACHED, PROTOCOL, ControlError, Refused, ServiceReady, failure_of
from aionn.remote.device import RemoteDevice
from aionn.runtime.open_runtime import OpenRuntime
from aionn.runtime.processes.devices import Device, serving
from aionn.runtime.processes.starter import Starter
from aionn.runtime.runtime import TO_OPEN, import_needed
from aionn.service.drivers import Drivers
from aionn.service.listening import Listening
from aionn.service.models import KeptModels
from aionn.service.quarantine import Suspects
from aionn.tasks import OwnedTasks

T = TypeVar("T")
logger = logging.getLogger("aionn.service")

IDLE_DRIVER_S = 30.0
LOOK_S = 9.0
"""The service looks for drivers that nothing uses at the first heartbeat after so long, so that an idle service wakes once a second."""

MOST_APPS = 256
MOST_OF_A_PROCESS = 64
"""How many connections one process has, so that it leaves some to others."""

MOST_CALLS = 64
"""How many calls of one app are answered at a time."""

MOST_DESCRIPTORS = 512
"""How many descriptors the calls of one app hold while they are answered."""

LIMITS = PeerLimits(messages_per_second=1000, message_bytes=1 << 20)
MOST_DRIVERS = 64
TAKE_OVER_S = 10.0
"""A service that takes over greets within this time, or the other one goes on."""

_ACCEPTS_PER_WAKE = 16
"""After so many new apps, those that are attached have their turn."""

NO_ROOM_S = 1.0
"""A service that has no descriptor left looks again for new apps after so long."""

CLOSE_S = 10.0


class App:
    """One app that is attached: its connection, and its process.

    Attributes:
        pid: of its process, or 0 where that is in no pid namespace seen from here.
        number: by which drivers know the app: its process's, so that all its connections count for one app. Else a negative one.
        descriptors: how many its calls hold now.
    """

    def __init__(self, service: Service, sock: socket.socket, connections: int) -> None:
        self.pid, _ = peer_of(sock)
        self.number = self.pid or -connections
        self._service = service
        self._pidfd = pidfd_of_peer(sock)
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._process_ended)
        self._in_flight = self.descriptors = 0
        self._working: set[anyio.CancelScope] = set()
        self.connection = Connection(sock, self._call, self._socket_ended, limits=LIMITS)
        self.connection.greet(ServiceReady(PROTOCOL, RELEASE))

    def _call(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        if self._in_flight >= MOST_CALLS:
            raise CallerError(f"the service answers {MOST_CALLS} calls of this app now, which is the most; wait for some of them")
        _check_descriptors((app.descriptors for app in self._service.apps if app.number == self.number), len(descriptors))
        self._service.tasks.start_soon(self._answer, call_id, body, descriptors, name=type(body).__name__)
        self._in_flight += 1
        self.descriptors += len(descriptors)

    async def _answer(self, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        count = len(descriptors)
        try:
            await self._service.answer(self, call_id, body, descriptors)
        except Exception as error:  # every call is answered, and none ends the service
            if not isinstance(error, AionnError):
                logger.exception("a call of app %d failed", self.pid)
            self.connection.reply_failure(call_id, error)
        finally:
            self._in_flight -= 1
            self.descriptors -= count
            descriptors.close()

    @contextmanager
    def while_attached(self) -> Iterator[None]:
        """Cancel the body when the app goes."""
        with anyio.CancelScope() as scope:
            self._working.add(scope)
            try:
                yield
            finally:
                self._working.discard(scope)

    def _socket_ended(self, error: Exception | None) -> None:
        """Forget the app. Its connections with drivers are its own, and end by themselves."""
        if error is not None:
            logger.warning("the service ends the connection of app %d: %s", self.pid, error)
        self.connection.end(error if isinstance(error, AionnError) else ControlError("the app has gone"))
        self._service.remove(self)

    def _process_ended(self) -> None:
        """Free what the app had in drivers: a child that it has forked may hold its sockets open."""
        self.connection.end(ControlError("the app has gone"))
        self._service.remove(self)
        self._service.end_guest(self.number)

    def end(self) -> None:
        """End the connection, and the work that only this app waits for."""
        self.connection.end(ControlError("the service has ended"))
        for scope in self._working:
            scope.cancel()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)


class Service:
    """See the module. Use it in its loop: `serve` until `end`.

    Args:
        listening: it takes over the socket.
        state_dir, starter: as `Settings` has them.
        sandbox: what confines this process.

    Attributes:
        tasks: where calls of apps are answered.
        leaves_drivers: whether drivers go on after the end, for guests. The process must then end without closing its runtimes.
    """

    def __init__(
        self,
        listening: Listening,
        state_dir: str = "",
        starter: Starter | None = None,
        sandbox: Confinement = Confinement(),  # noqa: B008 -- frozen
    ) -> None:
        self._listening: Listening | None = listening
        self._drivers = Drivers(state_dir, starter)
        self._sandbox = sandbox
        self._began_s = time.monotonic()
        self.apps: set[App] = set()
        self._connections = 0  # so far
        self._idle: WeakKeyDictionary[RemoteDevice, tuple[float, bool]] = WeakKeyDictionary()
        self._suspects = Suspects()
        self._models = KeptModels()
        self._watched: WeakSet[RemoteDevice] = WeakSet()
        self._stop = asyncio.Event()
        self._handing_over = False
        self._draining = anyio.CancelScope()
        self.leaves_drivers = False
        self.tasks = OwnedTasks(self._close, "service")

    async def serve(self) -> None:
        """Serve apps until `end`, or until the last guest has gone after another service has taken over."""
        import_needed(TO_OPEN)
        await self.tasks.open()
        try:
            self._listen()
            while not self._stop.is_set():
                with anyio.move_on_after(LOOK_S + until_beat_s()):
                    await self._stop.wait()
                    break
                await self._end_unused()
                if (listening := self._listening) is not None and not listening.reachable:
                    logger.warning("the socket %s has been removed, so this service ends with its last guest", listening.path)
                    self._step_back(listening)
            if self._listening is None:
                with self._draining:
                    await _drain(self._drivers.devices())
        finally:
            await self.tasks.aclose(CLOSE_S)

    def end(self) -> None:
        """Let `serve` return. Called again, it does not wait for guests any longer."""
        if self._stop.is_set():
            self._draining.cancel()
        self._stop.set()

    def _socket(self) -> socket.socket:
        if self._listening is None:
            raise CallerError("another service has taken over; ask again")
        return self._listening.sock

    # --- apps --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listening is not None and self._listening.sock.fileno() >= 0 and not self._handing_over:
            asyncio.get_running_loop().add_reader(self._listening.sock.fileno(), self._accept)

    def _accept(self) -> None:
        self._socket().setblocking(False)  # a process that was to take over may have changed it
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                sock, _ = self._socket().accept()
            except BlockingIOError:
                return
            except OSError as error:
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket().fileno())  # the app stays in the queue, so the loop would come back at once
                loop.call_later(NO_ROOM_S, self._listen)
                logger.warning("an app cannot attach now: %s", error.strerror)
                return
            self._attach(sock)

    def _attach(self, sock: socket.socket) -> None:
        pid, uid = peer_of(sock)
        if uid not in (os.getuid(), 0):
            logger.warning("user %d may not use the service of user %d; process %d was turned away", uid, os.getuid(), pid)
            sock.close()
            return
        sock.setblocking(False)
        of_process = sum(app.pid == pid for app in self.apps) if pid else 0  # other pid namespaces have no number
        if len(self.apps) >= MOST_APPS or of_process >= MOST_OF_A_PROCESS:
            who = f"{MOST_APPS} apps are attached" if of_process < MOST_OF_A_PROCESS else f"process {pid} is attached {of_process} times"
            refusal = CallerError(f"{who} to this service, which is the most; end one of them")
            connection = Connection(sock, _ignore, lambda error: None)
            connection.greet(Refused(failure_of(refusal)))
            connection.end(refusal)
            return
        self._connections += 1
        self.apps.add(App(self, sock, self._connections))

    def remove(self, app: App) -> None:
        """Forget an app that has gone."""
        self.apps.discard(app)
        app.end()

    def end_guest(self, number: int) -> None:
        """Free what an app had in the drivers."""
        for _, device in self._drivers.devices():
            if (remote := serving(device)) is not None:
                remote.connection.post(EndGuest(number))

    async def answer(self, app: App, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        """Answer a call of an app. The caller closes the descriptors.

        Raises:
            AionnError: the answer.
        """
        match body:
            case ConnectDriver():
                await self._connect(app, call_id, body)
            case OpenModel():
                with app.while_attached():  # else a driver would go on compiling
                    await self._open(app, call_id, body, descriptors)
            case DigestModel():
                descriptors.check_arrived()
                with app.while_attached():
                    app.connection.reply(call_id, await self._models.digests(body, app.number))
            case ReadService():
                app.connection.reply(call_id, await self._facts())
            case Evict(key=key):
                app.connection.reply(call_id, await self._evict(key))
            case TakeOver():
                await self._hand_over(app, call_id)
            case _:
                raise CallerError(f"a service does not answer {type(body).__name__}; a driver does")

    async def _connect(self, app: App, call_id: int, body: ConnectDriver) -> None:
        async with self._drivers.using(body) as opened:
            self._socket()  # another service may have taken over meanwhile
            device = opened.devices.find(body.device, Priority.LOW if body.when_idle else Priority.MEDIUM)
            if device.pid is None and sum(each.pid is not None for _, each in self._drivers.devices()) >= MOST_DRIVERS:
                raise CallerError(
                    f"this service has {MOST_DRIVERS} drivers, which is the most; use devices that have one, or end some apps"
                )
            remote = await opened.devices.live(device)
            # An app may see the end of a driver before this process does. So the driver is asked for a sign of life.
            while await _asked(device, Guests()) is None:
                remote = await opened.devices.live(device)
            self._watch(remote)
            pid, page, pidfd = device.pid, -1, -1
            try:
                with with_descriptors("what hands a driver over to an app"):
                    pidfd = remote.pidfd()
                    if pid is None or pidfd < 0 or remote.page is None:
                        raise ServiceDiedError(f"the driver of device {body.device!r} ended just now; ask again")
                    page = remote.page.for_reading()
                    with remote.connection.attach(0, app.number) as sock:
                        app.connection.reply(call_id, ConnectedDriver(Fd(sock.fileno()), Fd(pidfd), Fd(page), pid, remote.page.started_ns))
            finally:
                _close_open(pidfd, page)

    async def _open(self, app: App, call_id: int, body: OpenModel, descriptors: Descriptors) -> None:
        descriptors.check_arrived()
        async with self._drivers.using(ConnectDriver("", False, "auto", 0, {})) as opened:
            prepared = await self._models.prepared(opened, body, app.number)
            self._socket()
            remote = prepared.device
            self._watch(remote)
            pidfd = remote.pidfd()
            try:
                if pidfd < 0:
                    raise DriverDiedError(remote.name, None)
                with remote.connection.attach(prepared.number, app.number) as sock:
                    message = Prepared(ATTACHED, as_messages(prepared.inputs), as_messages(prepared.outputs), instances=prepared.instances)
                    app.connection.reply(call_id, Opened(Fd(sock.fileno()), Fd(pidfd), message, remote.name))
            finally:
                _close_open(pidfd)

    async def _evict(self, key: str) -> int:
        """Free what no app holds. Returns how many executables went."""
        count = 0
        for _, device in self._drivers.devices():
            count += await _asked(device, Evict(key)) or 0
        return count

    # --- drivers -----------------------------------------------------------------------------------------------------

    def _watch(self, remote: RemoteDevice) -> None:
        """Let a driver that gets a guest refuse what is in quarantine, and note what it ran if it dies."""
        self._idle.pop(remote, None)
        if remote in self._watched:
            return
        self._watched.add(remote)
        remote.connection.when_ended(self, partial(self._driver_ended, remote))
        if refused := self._suspects.refused:
            remote.connection.post(Quarantine(refused))

    def _driver_ended(self, remote: RemoteDevice, error: BaseException) -> None:
        if isinstance(error, CallerError) or remote.page is None or not self._suspects.died(remote.page.suspect_keys()):
            return
        for _, device in self._drivers.devices():
            if (other := serving(device)) is not None and other is not remote:
                other.connection.post(Quarantine(self._suspects.refused))

    async def _facts(self) -> ServiceFacts:
        drivers = []
        for _, device in self._drivers.devices():
            guests = await _asked(device, Guests())
            models = await _asked(device, ListShared())
            if guests is not None and models is not None and device.pid is not None:
                known = tuple(msgspec.structs.replace(each, guest=max(0, each.guest)) for each in guests)
                drivers.append(DriverFacts(device.name, device.pid, device.low_priority is None, known, models))
        seconds = time.monotonic() - self._began_s
        return ServiceFacts(os.getpid(), RELEASE, seconds, tuple(app.pid for app in self.apps), tuple(drivers), self._sandbox)

    async def _end_unused(self) -> None:
        """Give up models that no client has asked for in a while, and end drivers that have had no guest and no model for a while.

        Guests come through this service. So one that has none is left alone for that while, and an idle service sleeps.
        """
        self._models.give_up_unused()
        now_s = time.monotonic()
        for opened, device in self._drivers.devices():
            if (remote := serving(device)) is None:
                continue
            since_s, unused = self._idle.get(remote, (-math.inf, False))
            if now_s - since_s < IDLE_DRIVER_S:
                continue
            self._idle[remote] = now_s, False  # until a guest comes, also while this call waits
            if await _asked(device, Guests()) != ():
                self._idle.pop(remote, None)
            elif not await _asked(device, ListShared()) and remote in self._idle:
                if unused:
                    opened.devices.end_unused(device.name, Priority.LOW if device.low_priority is None else Priority.MEDIUM)
                self._idle[remote] = now_s, True

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _hand_over(self, app: App, call_id: int) -> None:
        """Let the service that has asked listen from now on. If it does not serve soon, this one goes on."""
        self._socket()
        listening = self._listening
        assert listening is not None
        if listening.lock < 0:
            raise CallerError("systemd has made this service's socket; restart the unit (systemctl --user restart aionn)")
        if self._handing_over:
            raise CallerError("another service is taking over now; ask that one")
        app.connection.reply(call_id, TakenOver(Fd(listening.sock.fileno()), Fd(listening.lock)))
        asyncio.get_running_loop().remove_reader(listening.sock.fileno())
        self._handing_over = True
        try:
            serves = await _greets(self._drivers.starter.connect if self._drivers.starter else partial(connect, listening.path))
        finally:
            self._handing_over = False
        if not serves:
            logger.warning("process %d has asked for the socket and does not serve, so this service goes on", app.pid)
            self._listen()
            return
        logger.info("service %d takes over; this one ends with its last guest", app.pid)
        self._step_back(listening, app)

    def _step_back(self, listening: Listening, successor: App | None = None) -> None:
        """Listen no more, and end with the last guest."""
        asyncio.get_running_loop().remove_reader(listening.sock.fileno())
        self._listening = None
        listening.leave()
        for other in list(self.apps):
            if other is not successor:
                self.remove(other)  # it attaches to another service when it needs a driver
        self.end()

    async def _close(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.sock.fileno())
            self._listening.leave() if self._handing_over else self._listening.end()
        for app in list(self.apps):
            self.remove(app)
        for _, device in self._drivers.devices():
            if await _asked(device, Guests()):
                self.leaves_drivers = True
                logger.info("drivers serve the streams of their apps for some time")
                return
        await self._drivers.aclose()


async def _greets(connects: Callable[[], socket.socket]) -> bool:
    """Return whether a service accepts a connection within a while."""
    try:
        with connects() as sock:
            sock.setblocking(False)
            async with asyncio.timeout(TAKE_OVER_S):
                return bool(await asyncio.get_running_loop().sock_recv(sock, 1))
    except (AionnError, OSError):  # a timeout is an OSError, too
        return False


async def _asked(device: Device, call: HalCall[T]) -> T | None:
    """Return the answer of a device's driver, or None if it has no driver, or one that has ended meanwhile."""
    remote = serving(device)
    if remote is None:
        return None
    try:
        answer, _ = await remote.connection.call(call)
    except AionnError:
        return None
    return answer


def _close_open(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


async def _drain(devices: Iterable[tuple[OpenRuntime, Device]]) -> None:
    """Wait until no driver has a guest any more."""
    async with anyio.create_task_group() as draining:
        for _, device in devices:
            draining.start_soon(_asked, device, Drain())


def _check_descriptors(held: Iterable[int], more: int) -> None:
    """Return if the calls of an app, which hold so many on its connections, may hold so many more.

    Raises:
        QuotaError: they may not.
    """
    used = sum(held)
    if more and used + more > MOST_DESCRIPTORS:
        raise QuotaError(
            f"the calls of this app would hold {used + more} descriptors in the service, which takes {MOST_DESCRIPTORS}; wait for some",
            status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            what="descriptors",
            limit=MOST_DESCRIPTORS,
            used=used,
        )


def _ignore(call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
    descriptors.close()
