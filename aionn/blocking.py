"""The client of a service for threads: `with aionn.blocking.attach(model) as burst: burst.compute(...)`, without an event loop.

A service (`aionn serve`) has the drivers and the prepared models of all apps of a user. `attach` connects to its socket, passes an open
descriptor of the model's file, and gets a connection to a driver that has the model. Frames and queues then lie in memory that this
process and the driver share, so the service takes no part in a call.

    attach          connects, and returns a `BlockingBurst` that is not open yet
    a driver dies   the call that waits raises `DriverDiedError`, and the next one asks the service again
    a service dies  an open burst goes on, as long as its driver lives

This module imports neither asyncio nor anyio.
"""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aionn.errors import AionnError, CallerError, DeadlineError, DeviceUnavailableError, ServiceDiedError, again
from aionn.fmq import completed
from aionn.fmq.thread_waits import ThreadWaits
from aionn.hal.model import PooledModel
from aionn.hal.values import from_messages
from aionn.loopless import checked_name, deadline_of, seconds_until
from aionn.remote.attached import GREETING_S, AttachedDriver
from aionn.remote.attaching import VARIABLE, called_by_service, checked_service, connect, refusal_in, service_path
from aionn.remote.calls import Fd, OpenModel
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import Ready, Refused, ServiceReady
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments
from aionn.runtime.executing.execution import Executor
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import LinkOptions
from aionn.runtime.streaming.blocking import DEPTH, BlockingBurst, BlockingConnection

if TYPE_CHECKING:
    from aionn.graph.files import OpenFile

__all__ = ["attach"]

T = TypeVar("T")

_PATIENCE_S = 10.4
"""The driver is asked about a request that is unanswered for longer."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHILD = "this burst belongs to the process that attached it, of which this one is a child; call aionn.blocking.attach in this process"


def attach(
    model: str | os.PathLike[str] | bytes,
    *,
    name: str | None = None,
    devices: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    service: str | os.PathLike[str] | None = None,
) -> BlockingBurst:
    """Return a blocking burst to a driver of the service, for one thread at a time. Use it in `with`, or call its `close`.

    The call waits until the service has the model prepared. The first app of a model waits for its compilation.

    Args:
        model: the path of a model's file, or its bytes. The service gets descriptors, also of the files beside it, and no path.
        name: of the model and of the burst, for people. None is the name of the file.
        devices: the devices that may serve, the best first. None leaves the choice to the service.
        options: how the model is prepared, by name; as the service says.
        timeout_s: seconds for this call. None waits for as long as the model takes.
        service: the path of the service's socket. None is what `AIONN_SERVICE` says, else the usual one of this user.

    Raises:
        CallerError: an argument is wrong, or the file cannot be read.
        DeviceUnavailableError: no service of this user listens there, or a device is not available.
        ServiceDiedError: the service ended meanwhile. The same call may be made again.
        CompilationError: the model cannot be prepared.
        DeadlineError: the model was not prepared in time.

    Examples:
        >>> with aionn.blocking.attach("detector.onnx") as burst:
        ...     outputs = burst.compute({"x": x})
    """
    deadline_ns = deadline_of(timeout_s)
    names = _checked_devices(devices)
    if not isinstance(model, str | os.PathLike | bytes):
        raise CallerError(f"attach: expected the path of a model or its bytes, got {type(model).__name__}")
    if name is None and not isinstance(model, bytes):
        name = os.path.basename(model) or None
    shown = checked_name("attach", name)
    try:
        encoded = msgspec.msgpack.encode(dict(options)) if options else b""
    except (TypeError, ValueError, OverflowError) as error:
        raise CallerError(f"attach: options={options!r}: {error}; give text, numbers and lists by name") from None
    path = _socket_path(service)
    client = _ServiceClient(path, _opened(model), (shown, names, encoded))
    try:
        try:
            client.offer = completed(client.ask(deadline_ns))
        except CallerError:
            # The service opens no path, so it lacks the weights that lie beside the model. Few models have some.
            if isinstance(model, bytes) or not client.open_beside(model):
                raise
            client.offer = completed(client.ask(deadline_ns))
        return BlockingBurst(_ServiceConnection(client, shown))
    except BaseException:
        client.close()
        raise


def _checked_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    if devices is None:
        return ()
    if isinstance(devices, str) or not devices or not all(isinstance(device, str) and device for device in devices):
        raise CallerError(f"attach: devices={devices!r}; give names in a tuple, or None for the service's choice")
    return tuple(devices)


def _socket_path(service: str | os.PathLike[str] | None) -> str:
    """Return where the service's socket is.

    Raises:
        CallerError: nothing says where, or what says so is wrong.
        DeviceUnavailableError: `AIONN_SERVICE` is "off".
    """
    said = (os.environ.get(VARIABLE) or "auto") if service is None else service
    if said == "off":
        raise DeviceUnavailableError("", f"{VARIABLE} is 'off', so this app uses no service; give the path of its socket as service=")
    return service_path() if said == "auto" else checked_service(said)[0]


def _opened(model: str | os.PathLike[str] | bytes) -> int:
    """Return an open descriptor of a model's bytes, which the caller owns."""
    if isinstance(model, bytes):
        fd = os.memfd_create("aionn-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            left = memoryview(model)
            while left:
                left = left[os.write(fd, left) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd
    path = os.fspath(model)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not hold the thread
    except (OSError, ValueError) as error:
        raise CallerError(f"attach: {path!r} cannot be read ({error}); give the path of a model, or its bytes") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CallerError(f"attach: {path!r} is not a regular file; give the path of a model, or its bytes")
    return fd


class _Serving:
    """The prepared model of one driver, as this client reaches it. It stands for a `Serving` of a runtime."""

    def __init__(self, prepared: RemotePreparedModel, model: PooledModel) -> None:
        self.prepared = prepared
        self.model = model
        self.stage = self.device = prepared.device.name
        self.lost = False

    @property
    def alive(self) -> bool:
        return self.prepared.device.connection.ended_by is None


class _ServiceClient:
    """One thread's connection to the service, and the model that it asks for. `close` gives back all of it.

    Attributes:
        waits: what the thread waits by.
        offer: a driver that the service has offered and that is not used yet.
    """

    def __init__(self, path: str, file: int, asked: tuple[str, tuple[str, ...], bytes]) -> None:
        self._path = path
        self._file = file
        self._asked = asked
        self._beside: Mapping[str, OpenFile] = {}
        self._connection: Connection | None = None
        self.offer: AttachedDriver | None = None
        try:
            self.waits = ThreadWaits()
        except BaseException:
            os.close(file)
            raise

    def open_beside(self, model: str | os.PathLike[str]) -> bool:
        """Open the files beside the model, for the service. Returns whether there are some."""
        from aionn.graph.digest import files_beside

        with suppress(CallerError):  # the service has said what is wrong
            self._beside = files_beside(model)
        return bool(self._beside)

    async def ask(self, deadline_ns: int | None) -> AttachedDriver:
        """Return a driver that has the model prepared. The caller opens and ends it.

        Raises:
            DeviceUnavailableError: no service listens.
            AionnError: what the service answers.
        """
        connection = self._connection
        if connection is None or connection.ended_by is not None:
            connection = await self._connect(deadline_ns)
        beside = tuple((name, Fd(file.fileno())) for name, file in self._beside.items())
        opened, descriptors = await connection.call(OpenModel(Fd(self._file), *self._asked, beside), deadline_ns=deadline_ns)
        try:
            with descriptors.take_socket(opened.socket) as sock:
                pidfd = partial(descriptors.take, opened.pidfd)
                return AttachedDriver(opened.device, sock.dup(), pidfd, opened.prepared, self.waits, None, lambda: True)
        finally:
            descriptors.close()

    async def _connect(self, deadline_ns: int | None) -> Connection:
        if seconds_until(deadline_ns) == 0.0:
            raise DeadlineError("the service was not asked, because the deadline has come")
        self._greeting = greeting = self.waits.create_future()
        connection = self._connection = Connection(connect(self._path), called_by_service, self._ended, self._greeted, loop=self.waits)
        late = self.waits.call_later(GREETING_S if deadline_ns is None else min(GREETING_S, seconds_until(deadline_ns)), self._late)
        try:
            await greeting
        except BaseException as error:
            connection.end(again(error) if isinstance(error, AionnError) else CallerError("the service was not waited for"))
            raise
        finally:
            late.cancel()
        return connection

    def _late(self) -> None:
        self._greeting.set_exception(DeadlineError(f"the service at {self._path} did not greet by the deadline; it may hang"))

    def _greeted(self, greeting: Ready | Refused | ServiceReady, descriptors: Descriptors) -> None:
        descriptors.close()
        refusal = refusal_in(greeting, self._path)
        if refusal is None:
            self._greeting.set_result(None)
        else:
            self._greeting.set_exception(refusal)

    def _ended(self, error: Exception | None) -> None:
        why = f"the service at {self._path} has ended" if error is None else f"the connection to the service failed: {error}"
        died = ServiceDiedError(f"{why}; the next call asks for it again")
        self._greeting.set_exception(died)
        if self._connection is not None:
            self._connection.end(died)

    def end(self, error: AionnError) -> None:
        """End the connection to the service. A call that waits there gets `error`."""
        if self._connection is not None:
            self._connection.end(error)
            self._greeting.set_exception(again(error))
        if self.offer is not None:
            offer, self.offer = self.offer, None
            offer.end(again(error))

    def close(self) -> None:
        """Give back everything. No thread waits here."""
        self.end(CallerError("the burst was closed while this call waited"))
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        for beside in self._beside.values():
            beside.close()
        self.waits.close()


async def _no_loop(work: Coroutine[Any, Any, T], deadline_ns: int | None) -> T:
    work.close()
    raise CallerError("a burst of a service has no event loop to wait for device memory in; use arrays, or await the call in a Runtime")


class _ServiceConnection(BlockingConnection):
    """The connection of a burst to a driver that the service has."""

    def __init__(self, client: _ServiceClient, name: str) -> None:
        assert client.offer is not None
        message = client.offer.message
        operands = from_messages(message.inputs), from_messages(message.outputs)
        model = PooledModel(graph=b"", inputs=operands[0], outputs=operands[1], operations=(), constants=(), pools=(), token=b"")
        executor = Executor(Arguments(model), Frames(DEPTH + 1, client.waits), None, in_loop=_no_loop)
        served: Any = SimpleNamespace(serving=None, watched=0, gate=SimpleNamespace(shut=False))
        super().__init__(served, executor, LinkOptions(DEPTH, False, _PATIENCE_S, name=name), name, client.waits)
        self._client = client
        self._model = model
        self._pid = os.getpid()
        self._dropped = weakref.finalize(self, client.close)
        self._dropped.atexit = False

    @property
    def inherited(self) -> bool:
        return os.getpid() != self._pid

    def check_process(self) -> None:
        if self.inherited:
            raise CallerError(_CHILD)

    async def live(self, deadline_ns: int | None, gone: Any) -> Any:
        offer, self._client.offer = self._client.offer, None
        driver = offer or await self._client.ask(deadline_ns)
        self._compiled.serving = serving = _Serving(await self.open_driver(driver, deadline_ns), self._model)  # type: ignore[assignment]
        return serving

    async def reach(self, deadline_ns: int | None, model: RemotePreparedModel) -> RemotePreparedModel:
        return model

    def depart(self) -> None:
        self._client.close()
        self._dropped.detach()

    def end_wait(self, error: CallerError) -> None:
        self._client.end(error)
