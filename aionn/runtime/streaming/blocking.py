"""`BlockingBurst`: a burst for a thread that runs no event loop. It is a `Burst` with another way of waiting.

Each has queues, frames and a control connection that are its own (`AttachedDriver`), and waits in native code (`ThreadWaits`). So the
coroutines of `Burst`, `Execution`, `Link` and `Connection` run here as they are, and never suspend. Only what belongs to the runtime's loop
is asked for there (`RuntimeLoop`): the start of a driver, the preparation of the model, a fallback, and what device memory waits for.

Invariants
    One thread at a time is inside, by `_inside`. That thread alone uses and frees what the connection owns.
    What another thread wants is left in `_left`. The thread that is inside does it when it leaves. If no thread is inside, it is done at
    once.
    `link` is to the model that serves, or the next call connects anew.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import _get_running_loop  # as in `burst`
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, again
from aionn.fmq.thread_waits import ThreadWaits, completed
from aionn.hal.types import Result
from aionn.loopless import call_soon_from_anywhere, seconds_until
from aionn.pages.app_layout import SENT, Kind
from aionn.remote.attached import AttachedDriver, ModelGoneError
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments, Outputs, as_array
from aionn.runtime.executing.execution import Call
from aionn.runtime.executing.fallback import Retries
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import Link, LinkOptions, release
from aionn.runtime.serving.serving import Change, CompiledModel, Rest, Serving
from aionn.runtime.session import Session
from aionn.runtime.streaming.burst import burst_over
from aionn.runtime.streaming.connection import BurstConnection, Connections, trace_of

T = TypeVar("T")

DEPTH = 4
"""So many requests may be with the driver: one whose caller waits, and others whose callers have left."""

_ATTEMPTS = 4
"""How often a connection is tried while models are swapped."""

_CLOSED = "the burst was closed while this call waited"
_NOT_OPEN = "the burst is not open; use it inside `with compilation.blocking() as burst`"
_TIDYING_S = 0.01
_BUSY = (
    "another call of this blocking burst is running, and one thread at a time may use it; "
    "open one for each thread: `with compilation.blocking() as burst`"
)
_OWN_LOOP = (
    "this call needs the runtime's event loop, to {what}, and the loop cannot run while its own thread waits here; "
    "call from another thread, or use `await` in this one"
)


class RuntimeLoop:
    """Awaits coroutines in the runtime's loop, for a thread that waits by `waits`. Satisfies `InLoop`."""

    def __init__(self, session: Session, waits: ThreadWaits) -> None:
        self._session = session
        self._waits = waits
        self._asking: Any = None

    @property
    def is_here(self) -> bool:
        """Whether this thread runs the loop."""
        return _get_running_loop() is self._session.loop

    async def __call__(self, work: Coroutine[Any, Any, T], deadline_ns: int | None, what: str = "wait for device memory") -> T:
        """Return the result of `work`, which goes on if this caller leaves.

        Raises:
            CallerError: this thread runs the loop, or the runtime was closed.
            DeadlineError: the result did not come by the deadline.
            BaseException: what `work` raises.
        """
        asking = self._asking = self._waits.create_future()
        late = None
        if deadline_ns is not None:
            error = DeadlineError("the runtime's event loop did not do its part by the deadline; the app may keep it busy")
            late = self._waits.call_later(seconds_until(deadline_ns), asking.set_exception, error)
        try:
            if self.is_here:
                work.close()
                raise CallerError(_OWN_LOOP.format(what=what))
            try:
                self._session.loop.call_soon_threadsafe(self._start, work, asking)
            except RuntimeError as closed:
                work.close()
                raise CallerError("the event loop of this runtime was closed") from closed
            found: T = await asking
            return found
        finally:
            self._asking = None
            if late is not None:
                late.cancel()

    def _start(self, work: Coroutine[Any, Any, T], asking: Any) -> None:
        try:
            self._session.tasks.start_soon(self._answer, work, asking)
        except BaseException as error:
            work.close()
            self._waits.call_soon_threadsafe(asking.set_exception, error)

    async def _answer(self, work: Coroutine[Any, Any, T], asking: Any) -> None:
        answer: Callable[[], None] = partial(asking.set_exception, CallerError("the runtime was closed"))
        try:
            answer = partial(asking.set_result, await work)
        except Exception as error:  # the thread gets it
            answer = partial(asking.set_exception, error)
        finally:
            self._waits.call_soon_threadsafe(answer)

    def end(self, error: BaseException) -> None:
        """End the wait, if there is one."""
        if self._asking is not None:
            self._asking.set_exception(again(error))


class CompiledFromThread:
    """What the executions of a thread report to a `CompiledModel`, whose other methods belong to the runtime's loop."""

    watched = 0  # `BlockingConnection.route` counts

    def __init__(self, compiled: CompiledModel, loop: asyncio.AbstractEventLoop) -> None:
        self._compiled = compiled
        self._loop = loop

    @property
    def sampling(self) -> CompiledFromThread | None:
        return None if self._compiled.sampling is None else self

    @property
    def on_failure(self) -> object:
        return self._compiled.on_failure

    def failed(self, serving: Serving, error: Any, inputs: Mapping[str, Any] | None = None) -> None:
        call_soon_from_anywhere(self._loop, self._compiled.failed, serving, error, inputs)

    def take(self, inputs: Mapping[str, Any]) -> None:
        """Give copies of inputs to what keeps samples. The app may change its arrays before the loop runs."""
        sampling = self._compiled.sampling
        if sampling is not None:
            call_soon_from_anywhere(self._loop, sampling.take, {name: np.array(as_array(name, value)) for name, value in inputs.items()})

    async def take_placed(self, inputs: Mapping[str, Any], placed: Mapping[str, Any]) -> None:
        """Keep no sample: to read device memory takes the loop."""


class FallbackFromThread:
    """Lets the runtime run a call elsewhere that failed. Satisfies `FallsBack`."""

    def __init__(self, fallback: Any, in_loop: RuntimeLoop) -> None:
        self._fallback = fallback
        self._in_loop = in_loop

    async def __call__(self, serving: Serving, error: ExecutionError, result: Result, call: Call) -> Outputs | None:
        if self._in_loop.is_here:
            return None  # the loop cannot run meanwhile
        found: Outputs | None = await self._in_loop(self._fallback(serving, error, result, call), call.options.deadline_ns)
        return found


class _Tidying(threading.Event):
    """A thread that is inside to run what was left, such as a change of drivers. A call waits for it, because it is over soon."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class _Follows:
    """The change of a blocking burst at a swap: its next call connects to the new model, and the old one is let go."""

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection

    def check(self) -> None: ...
    def commit(self) -> None: ...
    def release_new(self) -> None: ...
    async def release_old(self) -> None:
        self._connection.leave_to_next(self._connection.follow)


class BlockingConnection(BurstConnection):
    """The connection of a blocking burst to whichever driver serves."""

    in_threads = True

    def __init__(self, connections: Connections, options: LinkOptions) -> None:
        kept_model, waits = connections.kept_model, ThreadWaits()
        self._waits = waits
        self._in_loop = RuntimeLoop(kept_model.session, waits)
        shown = connections.executor(DEPTH + 1, Kind.BURST, options.name, waits)
        compiled: Any = CompiledFromThread(kept_model.compiled, kept_model.session.loop)
        executor = replace(
            shown,
            arguments=Arguments(kept_model.model),  # what it learns belongs to its thread
            compiled=compiled,
            in_loop=self._in_loop,
            fallback=None if shown.fallback is None else FallbackFromThread(shown.fallback, self._in_loop),
        )
        super().__init__(kept_model, executor, options)
        self._link_to.keywords["compiled"] = compiled
        self._inside: dict[int, object] = {}
        self._left: deque[Callable[[], None]] = deque()
        self._closing: CallerError | None = None
        self._drivers: list[AttachedDriver] = []
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _release, executor.frames, self._held, self._drivers, waits)
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
                self.session.check_process()
                if not isinstance(other, _Tidying) or other.thread == threading.get_ident():
                    raise CallerError(_BUSY)
                other.wait(_TIDYING_S)  # and look again, because a signal may keep that thread from saying that it has left
            waits = self._waits
            if waits.calls or waits.timers:
                waits.turn()
            return completed(work)
        except AionnError:
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

    def leave_to_next(self, act: Callable[[], None]) -> None:
        """Run `act` when nobody is inside: now, or by the thread that is inside."""
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
            raise CallerError("this burst is open already, or was closed; call compilation.blocking() for another one")
        self._open = True
        call_soon_from_anywhere(self.session.loop, self._compiled.members.add, self)
        try:
            await self._connect(None)
        except BaseException as error:
            self.close(again(error) if isinstance(error, CallerError) else CallerError("the burst could not be opened"))
            raise

    def close(self, why: CallerError) -> None:
        """Close in any thread. A call that waits ends with `why`, at once. What it used is freed by its thread."""
        if self._closing is None and not self.session.inherited:
            self._closing = why
            self._waits.call_soon_threadsafe(self._end_call)
            self.leave_to_next(self._end_all)

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
        self._in_loop.end(error)
        self._disconnect()

    def _end_all(self) -> None:
        if self._finalizer.alive:
            self._end_call()
            self.executor.frames.close()
            self._waits.close()
            self.session.page.release(self.executor.counts)
            call_soon_from_anywhere(self.session.loop, self._compiled.members.discard, self)
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
        self.session.check_process()
        if not self._open:
            raise CallerError(_NOT_OPEN)

    # --- sending -------------------------------------------------------------------------------------------------------

    async def route(self, deadline_ns: int | None) -> Link:
        """Return the link to send over."""
        compiled = self._compiled
        if compiled.watched:
            call_soon_from_anywhere(self.session.loop, compiled.use.count)
        if compiled.gate.shut and not self._in_loop.is_here:
            await self._in_loop(compiled.gate.passed(deadline_ns), deadline_ns)
        link = self.link
        if link is not None and link.alive and link.serving is compiled.serving:
            return link
        return await self._connect(deadline_ns)

    async def _connect(self, deadline_ns: int | None) -> Link:
        attempts = 0
        while True:
            self.check_open()
            self._kept_model.check_not_closed()
            self._disconnect()
            serving = self._compiled.serving
            if serving is None or not serving.alive:
                serving = await self._in_loop(self._kept_model.live(deadline_ns), deadline_ns, "start a driver or prepare the model")
            attempts += 1
            try:
                with trace.span("burst.connect", device=serving.device, stage=serving.stage, **trace_of(self)):
                    link = await self._link_to(serving, reach=partial(self._reach, deadline_ns))
            except ModelGoneError:  # another model serves by now, or does so soon
                if attempts == _ATTEMPTS:
                    raise
                continue
            if serving is self._compiled.serving or attempts == _ATTEMPTS:
                self.install(link)
                return link
            self._held[:] = [link]
            self.link = link

    async def _reach(self, deadline_ns: int | None, model: RemotePreparedModel) -> RemotePreparedModel:
        driver = AttachedDriver(model, self._waits, alone=self._in_loop.is_here)
        self._drivers.append(driver)
        return await driver.open(deadline_ns)

    # --- a swap, and idle time -----------------------------------------------------------------------------------------

    async def prepare(self, better: Serving) -> Change:  # type: ignore[override]  # a swap asks for no more
        return _Follows(self)

    def follow(self) -> None:
        """Let go of a model that does not serve any more."""
        if self.link is not None and self.link.serving is not self._compiled.serving:
            self._disconnect()

    def rest(self) -> Rest | None:
        link = self.link
        if self._inside or (link is not None and link.in_flight):
            return None
        return Rest(self.executor.counts.get(SENT), partial(self.leave_to_next, self._disconnect))

    async def wait_idle(self) -> None:
        """Return at once: the driver keeps a model as long as a client of it does."""


def _release(frames: Frames, held: list[Link], drivers: list[AttachedDriver], waits: ThreadWaits) -> None:
    """Free what a burst has, which the app has dropped. No thread is inside."""
    release(frames, held)
    while drivers:
        drivers.pop().end(CallerError(_CLOSED))
    waits.close()


class BlockingBurst:
    """A burst for threads without an event loop. Made by `Compilation.blocking()`, used in `with`.

    A call waits in its thread, without the GIL. One thread at a time may use it, so open one for each thread.

    Examples:
        >>> with compilation.blocking() as burst:
        ...     outputs = burst.compute({"x": x})
    """

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection
        self._burst = burst_over(connection)

    def __enter__(self) -> BlockingBurst:
        self._connection.run(self._connection.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the burst, in any thread. A call that waits in another thread ends with `CallerError`, and this one does not wait for it."""
        self._connection.close(CallerError(_CLOSED))

    def compute(
        self,
        inputs: Mapping[str, Any],
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

    def statistics(self) -> dict[str, int]:
        """Return counts since the burst was made; see `Burst.statistics`."""
        return self._burst.statistics()


def blocking_burst(connections: Connections, anticipate: bool, name: str) -> BlockingBurst:
    """Return a blocking burst that is not open yet."""
    options = connections.options(DEPTH, anticipate, name)
    connection = BlockingConnection(connections, options)
    connections.add(connection, options)
    return BlockingBurst(connection)
