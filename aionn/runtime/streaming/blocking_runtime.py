"""A blocking burst to a driver of the app's runtime: what it asks of the runtime's loop, from its thread.

The start of a driver, the preparation of the model, a fallback, and what device memory waits for belong to that loop (`RuntimeLoop`).
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop  # as in `connection`
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from aionn.errors import CallerError, DeadlineError, ExecutionError, again
from aionn.fmq.thread_waits import ThreadWaits
from aionn.hal.types import Result
from aionn.loopless import call_soon_from_anywhere, seconds_until
from aionn.pages.app_layout import SENT, Kind
from aionn.remote.attached import attached_to
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments, Outputs, as_array
from aionn.runtime.executing.execution import Call
from aionn.runtime.executing.link import LinkOptions
from aionn.runtime.serving.serving import Change, CompiledModel, Rest, Serving
from aionn.runtime.session import Session
from aionn.runtime.streaming.blocking import DEPTH, BlockingBurst, BlockingConnection
from aionn.runtime.streaming.connection import Connections

T = TypeVar("T")

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
            if self.is_here():
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

    watched = 0  # `RuntimeConnection.passed` counts

    def __init__(self, compiled: CompiledModel, loop: asyncio.AbstractEventLoop) -> None:
        self._compiled = compiled
        self._loop = loop

    @property
    def held_back(self) -> bool:
        """Whether a swap has begun: it waits for executions that used device memory before, and not for those that see this.

        In the loop's own thread the swap cannot go on meanwhile. It sees what was used.
        """
        return self._compiled.gate.shut and _get_running_loop() is not self._loop

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
        if self._in_loop.is_here():
            return None  # the loop cannot run meanwhile
        found: Outputs | None = await self._in_loop(self._fallback(serving, error, result, call), call.options.deadline_ns)
        return found


class _Follows:
    """The change of a blocking burst at a swap: its next call connects to the new model, and the old one is let go."""

    def __init__(self, connection: RuntimeConnection) -> None:
        self._connection = connection

    def check(self) -> None: ...
    def commit(self) -> None: ...
    def release_new(self) -> None: ...
    async def release_old(self) -> None:
        self._connection.run_later(self._connection.follow)


class RuntimeConnection(BlockingConnection):
    """The connection of a blocking burst to whichever driver of the runtime serves. It follows a swap to another one (`Member`)."""

    needs_gap = False
    running_loop = staticmethod(_get_running_loop)  # a call in a thread that runs a loop is checked

    def __init__(self, connections: Connections, options: LinkOptions) -> None:
        kept_model, waits = connections.kept_model, ThreadWaits()
        self._kept_model = kept_model
        self.session = kept_model.session
        self._in_loop = RuntimeLoop(kept_model.session, waits)
        shown = connections.executor(DEPTH + 1, Kind.BURST, options.name, waits)
        self._seen = compiled = CompiledFromThread(kept_model.compiled, kept_model.session.loop)
        executor = replace(
            shown,
            arguments=Arguments(kept_model.model),  # what it learns belongs to its thread
            compiled=compiled,
            in_loop=self._in_loop,
            fallback=None if shown.fallback is None else FallbackFromThread(shown.fallback, self._in_loop),
        )
        super().__init__(kept_model.compiled, executor, options, kept_model.record.name, waits)
        self._link_to.keywords["compiled"] = compiled

    @property
    def inherited(self) -> bool:
        return self.session.inherited

    def check_process(self) -> None:
        self.session.check_process()

    async def passed(self, deadline_ns: int | None) -> None:
        compiled = self._compiled
        if compiled.watched:
            call_soon_from_anywhere(self.session.loop, compiled.use.count)
        if self._seen.held_back:
            await self._in_loop(compiled.gate.passed(deadline_ns), deadline_ns)

    async def live(self, deadline_ns: int | None, gone: Serving | None) -> Serving:
        self._kept_model.check_not_closed()
        serving = self._compiled.serving
        if serving is None or serving is gone or not serving.alive:
            serving = await self._in_loop(self._kept_model.live(deadline_ns), deadline_ns, "start a driver or prepare the model")
        return serving

    async def reach(self, deadline_ns: int | None, model: RemotePreparedModel) -> RemotePreparedModel:
        return await self.open_driver(attached_to(model, self._waits, self._in_loop.is_here), deadline_ns)

    def join(self) -> None:
        call_soon_from_anywhere(self.session.loop, self._compiled.members.add, self)

    def depart(self) -> None:
        self.session.page.release(self.executor.counts)
        call_soon_from_anywhere(self.session.loop, self._compiled.members.discard, self)

    def end_wait(self, error: CallerError) -> None:
        self._in_loop.end(error)

    # --- a swap, and idle time -----------------------------------------------------------------------------------------

    async def prepare(self, better: Serving) -> Change:
        return _Follows(self)

    def follow(self) -> None:
        """Let go of a model that does not serve any more."""
        if self.link is not None and self.link.serving is not self._compiled.serving:
            self._disconnect()

    def rest(self) -> Rest | None:
        link = self.link
        if self._inside or (link is not None and link.in_flight):
            return None
        return Rest(self.executor.counts.get(SENT), partial(self.run_later, self._disconnect))

    async def wait_idle(self) -> None:
        """Return at once: the driver keeps a model as long as a client of it does."""


def blocking_burst(connections: Connections, anticipate: bool, name: str) -> BlockingBurst:
    """Return a blocking burst that is not open yet."""
    options = connections.options(DEPTH, anticipate, name)
    connection = RuntimeConnection(connections, options)
    connections.add(connection, options)
    return BlockingBurst(connection)
