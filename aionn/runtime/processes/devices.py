"""The devices that a runtime has, and the driver process of each.

Invariants
    One live process per `Device`. The next `get` after its end starts a new one, one start at a time.
    A process that was started early is the device's process from the start. No caller has asked for it until `_asked` is set.
    A process that nothing uses any more may be ended (`end_unused`). It is no longer its device's while it ends.
    A name has two devices: the usual one, and one for compilations of low priority (`Device.low_priority`).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec

from aionn.engines.installed import READERS, Homes, not_installed
from aionn.errors import AionnError, CallerError, DeviceUnavailableError, DriverDiedError, DriverHungError
from aionn.hal.options import is_unicode
from aionn.hal.types import CacheFiles, DeviceType, Priority
from aionn.needs import Confinement
from aionn.pages.layout import Activity
from aionn.remote.device import RemoteDevice
from aionn.runtime.health import DeviceHealth
from aionn.runtime.processes.process import DriverProcess, Restarts, end_processes
from aionn.runtime.processes.spawning import EARLY_S, USUAL, WHEN_IDLE, Settings, Spawned
from aionn.runtime.processes.template import end_unused, leave_template, use_template
from aionn.runtime.record import STARTING, DriverRecord, Record, about, current
from aionn.tasks import Tasks, ThreadWork

if TYPE_CHECKING:
    from aionn.caching.offers import CompileBackend
    from aionn.runtime.processes.handed import Handed, ServiceLink

logger = logging.getLogger("aionn.driver")


class DeviceFacts(msgspec.Struct, frozen=True):
    """The facts of `Device` that its driver reports. All are None before the first report."""

    version: str | None = None
    type: DeviceType | None = None
    cache_files: CacheFiles | None = None
    providers: tuple[str, ...] | None = None
    runs_on: str | None = None
    sandbox: Confinement | None = None

    @classmethod
    def of(cls, remote: RemoteDevice) -> DeviceFacts:
        """Return the facts that a driver has greeted with."""
        return cls(remote.version, remote.type, remote.cache_files, remote.providers, remote.runs_on or None, remote.sandbox)

    def log_gaps(self, name: str) -> None:
        """Log what does not confine the driver of the device with that name, unless its app has turned the sandbox off."""
        if self.sandbox is not None and self.sandbox.level != "off" and self.sandbox.lacks:
            words = "the sandbox of device %r does not have everything (aionn devices lists it): %s"
            logger.info(words, name, "; ".join(self.sandbox.lacks), extra=about(device=name))


_ORDER = ("onnxruntime", "openvino")


def rank(name: str) -> tuple[int, str]:
    """Rank the engines that were measured best first, then any other, then the reference."""
    if name in _ORDER:
        return _ORDER.index(name), name
    return len(_ORDER) + (name == "reference"), name


def health_of(name: str, low_priority: bool, process: DriverProcess | None, restarts: Restarts) -> DeviceHealth | None:
    """Return how a device's driver process does. Returns None if no process runs, and none has died."""
    now_ns, deaths = time.monotonic_ns(), restarts.deaths
    if process is None:
        return DeviceHealth(name, low_priority, "starting", None, 0.0, deaths) if deaths else None
    life = process.life
    if not process.alive:
        ended_by = process.connection.ended_by
        seconds = _since(now_ns, life.ended_ns or now_ns)
        return DeviceHealth(name, low_priority, "ended", None, seconds, deaths, "" if ended_by is None else str(ended_by))
    activity, hang = _activity(process), life.hang
    if process.serving is None or activity is None:
        return DeviceHealth(name, low_priority, "starting", process.pid, _since(now_ns, life.started_ns), deaths)
    seconds = _since(now_ns, activity.since_ns or life.started_ns)
    if hang is not None:
        return DeviceHealth(name, low_priority, "hung", process.pid, max(seconds, hang.waited_s), deaths, hang.why)
    return DeviceHealth(name, low_priority, activity.state, process.pid, seconds, deaths)


def _activity(process: DriverProcess) -> Activity | None:
    try:
        return process.activity
    except ValueError:
        return None  # the loop's thread has unmapped the page of a driver that ended just now


def _since(now_ns: int, then_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9)


class Device:
    """A device that this runtime knows (public face: `runtime.devices`).

    Attributes:
        name: the name by which an app chooses it.
        pid: of its driver process. None while no driver process runs.
        low_priority: the same device for compilations with `priority="low"`. Their driver is another process, which gets only CPU time
            that no other process wants. It has its own `pid`, `activity`, `statistics` and `restart`. None for such a device itself.
    """

    def __init__(self, name: str, devices: Devices, usual: Device | None = None) -> None:
        """`usual`: the device of usual priority, for a device of low priority."""
        self.name = name
        self._devices = devices
        self._usual = usual
        self.low_priority = Device(name, devices, self) if usual is None else None
        self._facts = DeviceFacts()
        self._process: DriverProcess | None = None
        self._starting = anyio.Lock()
        self._asked = anyio.Event()
        self._starts = 0
        self._kept = 0
        self._met: RemoteDevice | None = None
        self._restarts = Restarts(name)

    def __repr__(self) -> str:
        low = "" if self._usual is None else ", priority='low'"
        return f"Device(name={self.name!r}, version={self.version!r}, pid={self.pid}{low})"

    @property
    def version(self) -> str | None:
        """Of the engine and what its artifacts depend on. None until its driver has run once."""
        return self._facts.version

    @property
    def type(self) -> DeviceType | None:
        """What kind of hardware it uses. None until its driver has run once."""
        return self._facts.type

    @property
    def cache_files(self) -> CacheFiles | None:
        """How many cache files of each kind it needs. None until its driver has run once."""
        return self._facts.cache_files

    @property
    def providers(self) -> tuple[str, ...] | None:
        """Names that may follow the engine's name and a colon, as in "onnxruntime:cuda". None until its driver has run once."""
        return self._facts.providers

    @property
    def runs_on(self) -> str | None:
        """What its engine computes with, in words. None until its driver has run once, or if the engine does not say so."""
        return self._facts.runs_on

    @property
    def sandbox(self) -> Confinement | None:
        """What confines its driver process, and what does not. None until its driver has run once."""
        return self._facts.sandbox

    @property
    def pid(self) -> int | None:
        """The number of its driver process, or None while no driver process runs."""
        return self._process.pid if self._process is not None and self._process.alive else None

    @property
    def activity(self) -> Activity | None:
        """What its driver does now, and since when (`aionn.pages.Activity`). None while no driver process runs."""
        return self._process.activity if self._process is not None and self._process.alive else None

    async def restart(self) -> None:
        """End its driver process at once, and start a new one. A driver process of `low_priority` that runs is restarted, too.

        Calls that wait for the old one end with `DriverDiedError`. Compilations prepare their models again when they are used next.

        Raises:
            CallerError: the runtime was closed; or the driver is one of a service, which other apps use, too; or this is another process
                or another event loop.
            DeviceUnavailableError, DriverDiedError, DriverHungError: the new one cannot be started.
        """
        for device in (self, self.low_priority):
            if device is self or (device is not None and device.pid is not None):
                await self._devices.restart(device)

    @property
    def health(self) -> DeviceHealth | None:
        """How its driver process does, in `Health.devices`. None if no driver process runs, and none is needed. Any thread may ask."""
        return health_of(self.name, self._usual is not None, self._process, self._restarts)

    def statistics(self) -> dict[str, int | None]:
        """Return figures about its driver processes.

        Returns:
            "starts": the number of driver processes so far.
            "pid": of the driver process that runs, or None.
            "last_exit_code": of the last driver process that ended, or None.
            "calls_in_flight": calls over the control socket that the driver has not answered.
        """
        process = self._process
        last = None if process is None else process.life.exit_code
        if last is None:
            last = self._restarts.last_exit_code
        calls = process.connection.calls_in_flight if process is not None and process.alive else 0
        return {"starts": self._starts, "pid": self.pid, "last_exit_code": last, "calls_in_flight": calls}


def introduced(device: Device, remote: RemoteDevice) -> RemoteDevice:
    """Note what a driver has reported about its device."""
    devices = [each for each in (device, device._usual) if each is not None]
    known, facts = [each._facts.sandbox for each in devices], DeviceFacts.of(remote)
    for each in devices:
        each._facts = facts
    device._met = remote
    if facts.sandbox not in known:  # once for each device, and not at each start
        facts.log_gaps(device.name)
    return remote


class Devices:
    """All devices of one runtime.

    Attributes:
        by_name: every device that a caller has asked for.
        tasks: where the tasks of driver processes are started.
        disk: threads that digest and read models, and the callers that wait for them.
        homes: where the installed engines are.
        check_use: raises a `CallerError` where the app may not use the runtime. `Runtime.open` sets it.
        record: what the runtime shows of itself, or None without a runtime.
        settings: of all driver processes.
        service: the service whose drivers are used, or None for drivers of this app.
        backend: where a miss asks for an artifact before it compiles, or None.
    """

    def __init__(self, tasks: Tasks, settings: Settings = Settings(), record: Record | None = None) -> None:  # noqa: B008 -- frozen
        self.tasks = tasks
        self.disk = ThreadWork()
        self.record = record
        self.backend: CompileBackend | None = None
        self.check_use: Callable[[], None] = self.check_open
        self.settings = settings
        self.homes = Homes()
        self.by_name: dict[str, Device] = {}
        self._workers: set[DriverProcess] = set()
        self._ending: set[DriverProcess] = set()
        self._retired: dict[DriverProcess, Device] = {}
        self._closed = False
        self._turn = anyio.Lock()
        self.service = _link_of(self) if settings.service else None
        use_template(self)

    @property
    def has_drivers(self) -> bool:
        """Whether a driver process is alive or ends just now."""
        return bool(self._ending or self.worker_pids) or any(
            device.pid is not None for usual in self.by_name.values() for device in (usual, usual.low_priority) if device is not None
        )

    @property
    def closed(self) -> bool:
        """Whether the runtime was closed."""
        return self._closed

    @property
    def known(self) -> list[Device]:
        """The installed devices and others that have run, best first."""
        have_run = [device for device in self.by_name.values() if device.version is not None]
        return sorted({*map(self.find, self.homes.engines), *have_run}, key=lambda device: rank(device.name))

    @property
    def installed(self) -> list[str]:
        """The names of the devices that serve an app which names no device, best first. They may read ONNX."""
        return sorted(self.homes.engines.keys() - set(READERS.values()), key=rank)

    def find(self, name: str, priority: Priority = Priority.MEDIUM) -> Device:
        """Return the device of that name, for compilations of that priority.

        An installed engine's name may be followed by a colon and a provider, in any case.

        Raises:
            CallerError: `name` is not a text, or empty.
            DeviceUnavailableError: no engine of that name is installed.
        """
        if not isinstance(name, str) or not name:
            raise CallerError(f"device {name!r}: give the name of a device, as in 'onnxruntime'")
        device = self.by_name.get(name) or self.by_name.get(key := self.homes.key(name))
        if device is None:
            _, colon, provider = name.partition(":")
            if not (provider if colon else self.homes.home(name)) or "\0" in name or not is_unicode(name):
                raise DeviceUnavailableError(name, not_installed(name, [device.name for device in self.known]))
            device = self.by_name[key] = Device(name, self)
        return (device.low_priority if priority is Priority.LOW else None) or device

    async def get(self, name: str, priority: Priority = Priority.MEDIUM) -> RemoteDevice:
        """Return the live device for compilations of that priority. Start its driver process if it has none.

        Raises:
            DeviceUnavailableError, DriverDiedError, DriverHungError: the driver process cannot be started.
        """
        return await self.live(self.find(name, priority))

    @contextmanager
    def kept(self, name: str, priority: Priority) -> Iterator[Device]:
        """Yield the device for compilations of that priority. Its driver process is not ended as unused during the body.

        Raises: as `find`.
        """
        device = self.find(name, priority)
        device._kept += 1
        try:
            yield device
        finally:
            device._kept -= 1

    def end_unused(self, name: str, priority: Priority) -> None:
        """End the device's driver process if nothing is prepared, allocated or under way in it. The next `get` starts another one.

        Call it in a task of the runtime. The end of the process is awaited in the background. It does not count as a death.
        """
        device = self.find(name, priority)
        if device._process is not None and _end_if_unused(self, device, device._process):
            device._process = None
            device._restarts.forgive()

    async def _end(self, device: Device, process: DriverProcess) -> None:
        try:
            await end_processes([process], "the driver process was ended, because nothing was prepared in it")
        finally:
            self._ending.discard(process)
            device._restarts.last_exit_code = process.life.exit_code
        words = "the driver process %d of device %r was ended, because no compilation needs it now"
        logger.info(words, process.pid, device.name, extra=about(device=device.name))

    async def live(self, device: Device) -> RemoteDevice:
        """Return the live device. Its driver process is started if it has none.

        Raises: as `get`.
        """
        process = device._process
        device._asked.set()
        remote = None if process is None else process.serving
        if remote is not None:
            self.check_open()
            return remote if remote is device._met else introduced(device, remote)
        current.get().enter(device.name, STARTING)
        async with device._starting:
            process = device._process
            if process is not None and not process.alive:
                await process.wait_ended()
                if not process.refused:
                    device._restarts.died(process.life)
                process = device._process = None
            handed: Handed | None = None
            try:
                if process is None and not self._closed:
                    await device._restarts.pause()
                    if self.service is not None:
                        handed = await self.service.driver(device.name, _schedule_of(device), self.settings)
                # A start blocks the loop for some milliseconds. The lock lets the loop turn between two starts.
                async with self._turn:
                    # No await from here to the start: `aclose` ends the processes that it finds, and nothing would end a later one.
                    self.check_open()
                    if process is None:
                        process = self._started(device, handed)
                        handed = None
            finally:
                if handed is not None:
                    handed.end()
            try:
                remote = await process.ready()
            except BaseException as error:
                if not process.failed:
                    raise  # cancelled: the next caller finds the same process, and other callers may use it already
                await end_processes([process])
                if isinstance(error, DriverDiedError | DriverHungError):
                    device._restarts.died(process.life)
                device._restarts.last_exit_code, device._process = process.life.exit_code, None
                raise
            return introduced(device, remote)

    def _started(self, device: Device, spawned: Spawned | Handed | None = None) -> DriverProcess:
        schedule = _schedule_of(device)
        home = self.homes.home(device.name)
        record = None if self.record is None else DriverRecord(self.record, device.name, device.low_priority is None)
        process = device._process = DriverProcess(device.name, self.tasks, schedule, home, self.settings, spawned, record)
        device._starts += 1
        return process

    def start_early(self, names: Sequence[str], spawned: dict[str, Spawned]) -> None:
        """Start the drivers of these devices without waiting. The log records what cannot start.

        Args:
            spawned: processes that were started already, by name. They are taken over and removed.
        """
        for name in names:
            try:
                device = self.find(name)
                if self.service is not None:
                    self.tasks.start_soon(_ask_early, self, device, name=f"early start of {name}")
                    continue
                process = self._started(device, spawned.pop(name, None))
            except DeviceUnavailableError as error:
                logger.warning("the early start of a driver failed: %s", error, extra=about(device=name))
            else:
                self.tasks.start_soon(_watch_early, device, process, name=f"early start of {name}")

    async def restart(self, device: Device) -> None:
        """See `Device.restart`."""
        self.check_use()
        process = device._process
        if process is not None and process.alive and self.service is not None:
            raise CallerError(
                f"the driver of device {device.name!r} is the service's, which other apps use, too, so this app cannot restart it; "
                "`aionn serve --replace` starts other ones"
            )
        if process is not None and process.alive:
            if process.serving is not None:
                process.serving.restarted = True
            process.send_sigkill(DriverDiedError(device.name, -signal.SIGKILL, "because the app restarted the device"))
            await process.wait_ended()
        if process is not None:
            device._restarts.last_exit_code = process.life.exit_code
        if device._process is process:
            device._process = None
        device._restarts.forgive()
        await self.live(device)

    def check_open(self) -> None:
        """Raise a `CallerError` if the runtime was closed."""
        if self._closed:
            raise CallerError("the runtime was closed")

    def bounded_threads(self, threads: int) -> int:
        """Return that number of threads, or what `Runtime(threads=)` allows if that is less."""
        return min(threads, self.settings.threads or threads)

    async def start_worker(self, name: str, threads: int) -> DriverProcess:
        """Start one more driver process of that device at low priority, on `threads` CPUs. The caller must end it.

        With `threads` 0 it gets the app's priority and all CPUs. A service gives one more connection to the driver that runs when a CPU is
        idle, or to the usual one.

        Raises:
            DeviceUnavailableError: the device is not installed, or its driver process cannot be started.
        """
        name = self.find(name).name
        handed: Handed | None = None
        if self.service is not None:
            handed = await self.service.driver(name, WHEN_IDLE if threads else USUAL, self.settings)
        try:
            self.check_open()
            process = DriverProcess(name, self.tasks, str(threads), self.homes.home(name), self.settings, handed)
            handed = None
        finally:
            if handed is not None:
                handed.end()
        self._workers = {worker for worker in self._workers if worker.alive} | {process}
        return process

    def forget_worker(self, process: DriverProcess) -> None:
        """Forget a worker that has ended, or that cannot be ended."""
        self._workers.discard(process)

    @property
    def worker_pids(self) -> list[int]:
        """The numbers of the processes that compile in the background now."""
        return [process.pid for process in self._workers if process.alive]

    async def aclose(self) -> None:
        """End every driver process, side by side."""
        self._closed = True
        devices = devices_of(self)
        for device in devices:
            device._restarts.forgive()
        processes = [device._process for device in devices if device._process is not None]
        unasked = [device._process for device in devices if device._process is not None and not device._asked.is_set()]
        for worker in (*self._workers, *unasked):
            worker.send_sigkill(None)  # nothing in it is worth waiting for
        processes += [*self._workers, *self._ending, *self._retired]
        if self.service is not None:
            self.service.end()
        try:
            await end_processes(processes)
        finally:
            leave_template(self)
            end_unused()
            self.disk.fail_waiting(CallerError("the runtime was closed"))


async def attach(devices: Devices) -> None:
    """Attach to the service of the settings, if they name one.

    Raises:
        DeviceUnavailableError: none listens there, and the settings do not allow drivers that this app starts.
    """
    if devices.service is not None:
        try:
            await devices.service.attach()
        except DeviceUnavailableError as error:
            if not devices.settings.may_lack_service:
                raise
            logger.info("this app starts its own drivers: %s", error)
            devices.service = None


def serving(device: Device) -> RemoteDevice | None:
    """Return the live device, or None if its driver process does not serve now."""
    return None if device._process is None else device._process.serving


def devices_of(devices: Devices) -> list[Device]:
    """Return every device that has been asked for, with those of low priority."""
    return [device for usual in devices.by_name.values() for device in (usual, usual.low_priority) if device is not None]


def _link_of(devices: Devices) -> ServiceLink:
    from aionn.runtime.processes.handed import ServiceLink  # most apps start their drivers

    return ServiceLink(devices.settings.service, partial(_pass_over, devices))


def _pass_over(devices: Devices) -> None:
    """Let later compilations find drivers of another service. Those of the service that has ended serve what they hold."""
    for device in devices_of(devices):
        process, device._process = device._process, None
        if process is not None and process.alive:
            devices._retired[process] = device


def end_retired(devices: Devices) -> None:
    """Let the drivers of a service that was replaced go, once the app has nothing in them. The service waits for that."""
    for process, device in list(devices._retired.items()):
        if not process.alive or _end_if_unused(devices, device, process):
            del devices._retired[process]


def _end_if_unused(devices: Devices, device: Device, process: DriverProcess) -> bool:
    """Begin to end a process in which the device has nothing. Returns whether it ends."""
    remote = process.serving
    if remote is None or device._kept or devices._closed or not remote.unused:
        return False
    devices._ending.add(process)
    devices.tasks.start_soon(devices._end, device, process, name=f"end of {device.name}")
    return True


async def _ask_early(devices: Devices, device: Device) -> None:
    try:
        await devices.live(device)
    except AionnError as error:
        logger.warning("the early start of a driver failed: %s", error, extra=about(device=device.name))


def _schedule_of(device: Device) -> str:
    return WHEN_IDLE if device.low_priority is None else USUAL


async def _watch_early(device: Device, process: DriverProcess) -> None:
    """Log why a driver cannot start, unless a caller has asked for it and gets the error. End a driver that no caller asks for."""
    with anyio.move_on_after(EARLY_S):
        try:
            await process.ready()
            await device._asked.wait()
        except AionnError as error:
            if process.refused and not device._asked.is_set():
                logger.warning("the early start of a driver failed: %s", error, extra=about(device=device.name))
        return
    async with device._starting:
        if device._asked.is_set() or device._process is not process or not process.alive:
            return
        await end_processes([process])
        device._restarts.last_exit_code, device._process = process.life.exit_code, None
