"""`BlockingBurst`: a burst for a thread that runs no event loop. It is a `Burst` with another way of waiting.

Each has queues, frames and a control connection that are its own (`AttachedDriver`), and waits in native code (`ThreadWaits`). So the
coroutines of `Burst`, `Execution`, `Link` and `Connection` run here as they are, and never suspend. A subclass of `BlockingConnection` says
who has the drivers: the app's runtime (`blocking_runtime`), or a service (`aionn.blocking`).

Invariants
    One thread at a time is inside, by `_inside`. That thread alone uses and frees what the connection owns.
    What another thread wants is left in `_left`. The thread that is inside does it when it leaves. If no thread is inside, it is done at
    once.
    `link` is to the model that serves, or the next call connects anew.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from aionn import trace
from aionn.errors import AionnError, CallerError, DriverDiedError, ExecutionError, again
from aionn.fmq import completed
from aionn.fmq.thread_waits import ThreadWaits
from aionn.hal.types import ErrorStatus, Operand
from aionn.remote.attached import AttachedDriver, ModelGoneError
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.executing.execution import Executor
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import Link, LinkOptions, release
from aionn.runtime.executing.retrying import Retries
from aionn.runtime.streaming.any_connection import AnyConnection, trace_of
from aionn.runtime.streaming.burst import burst_over
from aionn.runtime.streaming.frame import Frame, end_lease

if TYPE_CHECKING:
    from aionn.runtime.serving.serving import CompiledModel, Serving

T = TypeVar("T")

DEPTH = 4
"""So many requests may be with the driver: one whose caller waits, and others whose callers have left."""

_ATTEMPTS = 4
"""How often a connection is tried while models are swapped, or drivers die."""

_CLOSED = "the burst was closed while this call waited"
_NOT_OPEN = "the burst is not open, or was closed; open one with `with ... as burst`"
_TIDYING_S = 0.01
_BUSY = "another call of this blocking burst is running, and one thread at a time may use it; open one for each thread"


class _Tidying(threading.Event):
    """A thread that is inside to run what was left, such as a change of drivers. A call waits for it, because it is over soon."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class OwnerOfDrivers(AnyConnection):
    """What the owner of the drivers does for a blocking burst: the app's runtime, or a service."""

    @property
    def inherited(self) -> bool:
        """Whether this process is a child, by `os.fork`, of the one that made the burst."""
        raise NotImplementedError

    def check_process(self) -> None:
        """Return if the burst belongs to this process, and who has the drivers serves it.

        Raises:
            CallerError: it does not.
        """
        raise NotImplementedError

    async def passed(self, deadline_ns: int | None) -> None:
        """Wait while executions are held back."""

    async def live(self, deadline_ns: int | None, gone: Serving | None) -> Serving:
        """Return what serves now. Its driver is started and its model prepared, if they are not.

        `gone` was found without its driver or its model. The owner of the drivers may not know that yet, and is asked.
        """
        raise NotImplementedError

    async def reach(self, deadline_ns: int | None, model: RemotePreparedModel) -> RemotePreparedModel:
        """Return the prepared model that serves as this burst reaches it, over a connection that it has opened by `open_driver`."""
        raise NotImplementedError

    def join(self) -> None:
        """Note that the burst is open."""

    def depart(self) -> None:
        """Give back what the burst has there. Any thread may call this."""

    def end_wait(self, error: CallerError) -> None:
        """End what a call waits for there."""


class BlockingConnection(OwnerOfDrivers):
    """The connection of a blocking burst to whichever driver serves. A subclass says who has the drivers."""

    def __init__(self, compiled: CompiledModel, executor: Executor, options: LinkOptions, model: str, waits: ThreadWaits) -> None:
        super().__init__(compiled, executor, options, model)
        self._waits = waits
        self._inside: dict[int, object] = {}
        self._left: deque[Callable[[], object]] = deque()
        self._closing: CallerError | None = None
        self._drivers: list[AttachedDriver] = []
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _release, executor.frames, self._held, self._drivers, waits)
        self._finalizer.atexit = False

    # --- who is inside -------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call in this thread. `work` has not begun.

        Raises:
            CallerError: another call runs, or this is a child by `os.fork`.
            BaseException: what the call raises.
        """
        here = object()
        try:
            while (other := self._inside.setdefault(0, here)) is not here:
                self.check_process()
                if not isinstance(other, _Tidying) or other.thread == threading.get_ident():
                    raise CallerError(_BUSY)
                other.wait(_TIDYING_S)  # and look again, because a signal may keep that thread from saying that it has left
            waits = self._waits
            if waits.calls or (waits.timers and waits.timers[0][0] <= monotonic_ns()):
                waits.turn()
            return completed(work)
        except AionnError as error:
            if isinstance(error, ExecutionError) and error.status is ErrorStatus.DEVICE_UNAVAILABLE:
                self.check_process()  # the driver may have ended before this thread heard that the runtime ends
            raise
        except BaseException:
            # A signal's handler may raise between any two steps. So it is not known which frames the driver may still write into.
            if 0 in self._inside and self._inside[0] is here:
                self._left += self._disconnect, self.executor.frames.renew  # an answer may have come that no call counts
            raise
        finally:
            # Python runs the handlers of signals when a call is over. No call stands before `del`, so the mark always goes.
            if 0 in self._inside and self._inside[0] is here:
                del self._inside[0]
                if self._left:
                    self._do_left()
            work.close()  # nothing, if it has ended

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` when no thread is inside: now, or by the thread that is inside."""
        self._left.append(act)
        self._do_left()

    def _do_left(self) -> None:
        while self._left:
            here = _Tidying()
            try:
                if self._inside.setdefault(0, here) is not here:
                    return  # that thread looks here when it leaves
                while self._left:
                    self._left[0]()
                    self._left.popleft()  # an act that a signal interrupts is repeated by the next thread that leaves
            finally:
                if 0 in self._inside and self._inside[0] is here:  # as in `run`
                    del self._inside[0]
                    here.set()

    # --- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._open or self._closing is not None:
            raise CallerError("this burst is open already, or was closed; open another one")
        self._open = True
        self.join()
        try:
            await self._connect(None)
        except BaseException as error:
            self.close(again(error) if isinstance(error, CallerError) else CallerError("the burst could not be opened"))
            raise

    def close(self, why: CallerError) -> None:
        """Close in any thread. A call that waits ends with `why`, at once. What it used is freed by its thread."""
        if self._closing is None and not self.inherited:
            self._closing = why
            self._waits.call_soon_threadsafe(self._end_call)
            self.run_later(self._end_all)

    async def aclose(self) -> None:
        self.end()

    def end(self) -> None:
        """Close, because the compilation or the runtime has closed."""
        self.close(CallerError("the compilation, or its runtime, was closed while this call waited"))

    def _end_call(self) -> None:
        """End what the thread that is inside waits for."""
        error = self._closing
        assert error is not None
        self._open = False
        self.end_wait(error)
        self._disconnect()

    def _end_all(self) -> None:
        if self._finalizer.alive:
            self._end_call()
            self.executor.frames.close()
            self._waits.close()
            self.depart()
            self._finalizer.detach()  # last, so that it frees what a signal has left

    def _disconnect(self) -> None:
        """Give up the link and the connections to drivers. The driver frees its part."""
        link, self.link = self.link, None
        self.count_from_now()
        error = self._closing or CallerError("this burst connects to another driver, or to another model")
        frames = self.executor.frames
        frames.on_gone = None
        if link is not None:
            unanswered = link.in_flight
            link.release(error)
            if unanswered or not link.plain or link.controller.lost:
                frames.renew()
        self._held.clear()
        while self._drivers:
            self._drivers.pop().end(error)

    # --- checks --------------------------------------------------------------------------------------------------------

    def check_here(self) -> None:
        """See before each call that it may run, and that the usual way leads to the model that serves."""
        if not self._open:
            self.check_open()
        link = self.usual[2]
        if link is not None and link.serving is not self._compiled.serving:
            self.count_from_now()

    def check_open(self) -> None:
        self.check_process()
        if not self._open:
            raise CallerError(_NOT_OPEN)

    # --- sending -------------------------------------------------------------------------------------------------------

    async def route(self, deadline_ns: int | None) -> Link:
        """Return the link to send over."""
        compiled = self._compiled
        if compiled.watched or compiled.gate.shut:
            await self.passed(deadline_ns)
        link = self.link
        if link is not None and link.alive and link.serving is compiled.serving:
            return link
        return await self._connect(deadline_ns)

    async def _connect(self, deadline_ns: int | None) -> Link:
        attempts, serving, gone = 0, None, None
        while True:
            self.check_open()
            self._disconnect()
            attempts += 1
            try:
                serving = await self.live(deadline_ns, gone)
                with trace.span("burst.connect", device=serving.device, stage=serving.stage, **trace_of(self)):
                    link = await self._link_to(serving, reach=partial(self.reach, deadline_ns))
            except (ModelGoneError, DriverDiedError) as error:
                # Another model serves by now, or does so soon. Or the driver died, which costs the caller no try, because nothing was sent.
                # One that died before it was reached may have died of the model, and a second one of what it was asked. The caller alone
                # may try those again.
                if attempts == _ATTEMPTS or not self._drivers or (gone and isinstance(error, DriverDiedError)):
                    raise
                gone = serving
                continue
            if serving is self._compiled.serving or attempts == _ATTEMPTS:
                self.install(link)
                return link
            self._held[:] = [link]
            self.link = link

    async def open_driver(self, driver: AttachedDriver, deadline_ns: int | None) -> RemotePreparedModel:
        """Own the connection to a driver from now on. Returns the prepared model there, once the driver has greeted."""
        self._drivers.append(driver)
        return await driver.open(deadline_ns)


def _release(frames: Frames, held: list[Link], drivers: list[AttachedDriver], waits: ThreadWaits) -> None:
    """Free what a burst has, which the app has dropped. No thread is inside."""
    release(frames, held)
    while drivers:
        drivers.pop().end(CallerError(_CLOSED))
    waits.close()


class BlockingBurst:
    """A burst for threads without an event loop. Made by `Compilation.blocking()` or `aionn.blocking.attach()`, used in `with`.

    A call waits in its thread, without the GIL. One thread at a time may use it, so open one for each thread.

    Examples:
        >>> with compilation.blocking() as burst:
        ...     outputs = burst.compute({"x": x})
    """

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection
        self._burst = burst_over(connection)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __enter__(self) -> BlockingBurst:
        return self.open()

    def open(self) -> BlockingBurst:
        """Open the burst, and return it, where no `with` fits. `close` must follow.

        Raises:
            CallerError: it is open already, or was closed; or it needs the runtime's event loop, and is opened in its thread.
            AionnError: what keeps the driver from serving it, as in `Burst.compute`.
        """
        self._connection.run(self._connection.open())
        return self

    def close(self) -> None:
        """End the burst, in any thread. A call that waits in another thread ends with `CallerError`, and this one does not wait for it."""
        self._connection.close(CallerError(_CLOSED))

    @contextmanager
    def frame(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Iterator[Frame]:
        """Give shared memory to write one request's inputs into: `with burst.frame() as frame`, then `burst.compute(frame)`.

        Args:
            shapes: of inputs with open dimensions, by name; the others' are known.

        Raises:
            CallerError: a shape is missing or does not fit the model, the burst is closed, or another thread is in a call of it.
            MemoryAllocationError: there is no memory for one more frame of these shapes.
        """
        frame = self._burst.frame(shapes)
        try:
            yield self._connection.run(frame.__aenter__())
        finally:
            self._connection.run_later(partial(end_lease, frame))

    def compute(
        self,
        inputs: Mapping[str, Any] | Frame,
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
        retry: int | Retries = 0,
    ) -> Outputs:
        """Run the model once and wait for its outputs, in this thread.

        Arguments, result and errors are those of `Burst.compute`. Beside them:

        Raises:
            CallerError: another thread is in a call of this burst. Or the call needs the runtime's event loop and is made in its thread:
                to start a driver, to prepare the model, or to wait for device memory.
            BaseException: what the handler of a signal raises in the main thread, such as `KeyboardInterrupt`. The burst stays usable, and
                its next call connects anew.
        """
        call = self._burst.compute(inputs, outputs=outputs, measure_timing=measure_timing, timeout_s=timeout_s, retry=retry)
        return self._connection.run(call)

    @property
    def inputs(self) -> Mapping[str, Operand]:
        """The model's inputs by name."""
        return self._connection.executor.arguments.model.inputs

    @property
    def outputs(self) -> Mapping[str, Operand]:
        """The model's outputs by name."""
        return self._connection.executor.arguments.model.outputs

    def statistics(self) -> dict[str, int]:
        """Return counts since the burst was made; see `Burst.statistics`."""
        return self._burst.statistics()
