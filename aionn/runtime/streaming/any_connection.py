"""`AnyConnection`: what an open burst has in the driver that serves: its link and its frames. For bursts of a loop and of threads.

Invariants
    `_held` holds `link` for the finalizer.
    `usual` is set only while no swap and no comparison watches, so a usual frame never passes a shut gate.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from aionn.loopless import call_soon_from_anywhere
from aionn.memory.pool import FramePool, MemoryFrame
from aionn.pages.app_layout import CONNECTIONS
from aionn.runtime.executing.arguments import FrameLayout, Shapes
from aionn.runtime.executing.execution import Channel, Executor, between_bytes
from aionn.runtime.executing.link import Link, LinkOptions, open_link

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aionn.runtime.serving.serving import CompiledModel
    from aionn.runtime.session import Session

_NOTHING = (None, None, None)


class AnyConnection:
    """One burst's connection to whichever driver serves.

    Attributes:
        executor: what its executions have in common.
        link: to the driver that serves; None before the first.
        usual: layout, frames and link of the request before, while the next one may take the short way. Mostly it has the same shapes.
        model: the name of what is computed, for traces.
        when_closed: called when the burst is closed: its streams end.
        session: of the runtime, if there is one.
        loop: of the runtime, in which its calls are made. None where threads make them.
        running_loop: returns the loop that runs in this thread, or always None where threads make the calls.
    """

    session: Session
    loop: AbstractEventLoop | None = None
    running_loop: Callable[[], object] = type(None)

    def __init__(self, compiled: CompiledModel, executor: Executor, options: LinkOptions, model: str) -> None:
        self._compiled = compiled
        self._options = options
        self._link_to = partial(open_link, compiled=compiled, executor=executor, options=options)
        self.executor = executor
        self.link: Link | None = None
        self.usual: tuple[FrameLayout, FramePool, Link] | tuple[None, None, None] = _NOTHING
        self.model = model
        self.when_closed: set[Callable[[], None]] = set()
        self._open = False
        self._held: list[Link] = []

    async def open(self) -> None:
        """Connect to the driver that serves."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End the burst."""
        raise NotImplementedError

    def check_here(self) -> None:
        """Say what is wrong with a call that comes where it cannot run, or return."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Return if the burst may be used.

        Raises:
            CallerError: it is not open, or this is another process or another event loop.
        """
        raise NotImplementedError

    async def route(self, deadline_ns: int | None) -> Link:
        """Return the link to send over. It is the right one until the next await."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the burst was closed, or is not open yet."""
        return not self._open

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` in a task that the runtime owns. It must handle its errors."""
        self.check_open()
        self.session.tasks.start_soon(work)

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` where the burst's frames may be touched. Any thread may call this, and a collected object."""
        call_soon_from_anywhere(self.session.loop, act)

    async def lease(self, shapes: Shapes) -> tuple[FrameLayout, MemoryFrame]:
        """Return a leased frame for inputs of these shapes, and its layout."""
        self.check_open()
        layout = self.executor.arguments.layout(shapes)
        frame = await self.executor.frames.lease(layout, between_bytes(self._compiled.serving, layout))
        if self._options.anticipate and self.link is not None:
            self.link.nudge()  # a request over this frame mostly follows
        return layout, frame

    def expect(self, layout: FrameLayout, channel: Channel | None) -> None:
        """Let the next request of the same shapes take the short way, if the last one went over this link.

        It must not overtake executions that still pass the gate.
        """
        link = self.link
        if link is not None and link is channel and link.plain and not self._compiled.watched and not self._compiled.gate.shut:
            self.usual = layout, self.executor.frames.pool(layout), link

    def install(self, link: Link) -> Link | None:
        """Use `link` from now on. Returns the link that is to be closed: the one before, or `link` itself if the burst was closed."""
        if not self._open:
            return link
        before, self.link = self.link, link
        self._held[:] = [link]
        self.executor.frames.on_gone = link.forget_memory
        link.forget_outdated()
        self.executor.counts.add(CONNECTIONS, 1)
        if self.executor.shown is not None:
            self.executor.shown.on(link.serving.device, link.serving.stage)
        return before

    def count_from_now(self) -> None:
        """Leave the short way, which counts nothing."""
        self.usual = _NOTHING


def trace_of(connection: AnyConnection) -> dict[str, Any]:
    """Return what a trace says of a burst."""
    return {"model": connection.model, "burst": connection._options.name}
