"""Who listens to the events of a runtime (`aionn.events`): streams for `Runtime.events`, and one function for `compile(on_event=)`.

Invariants
    `Events.publish` runs in the loop's thread, never waits, and never raises.
    A listener that does not keep up loses its oldest events, and `EventStream.lost` counts them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import anyio

from aionn.errors import CallerError
from aionn.events import Event
from aionn.runtime.logs import about

logger = logging.getLogger("aionn.runtime")

MOST_WAITING = 256
"""So many events wait for one listener. Then the oldest is dropped."""


class EventStream:
    """The events of one runtime from now on: `async for event in runtime.events()`. It ends when the runtime is closed.

    Attributes:
        lost: how many events were dropped because this stream was not read.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[Event] = deque()
        self._news = anyio.Event()
        self.lost = 0
        events.streams.add(self)

    def __aiter__(self) -> EventStream:
        return self

    if not TYPE_CHECKING:  # a type checker reports a plain `for` by itself

        def __iter__(self) -> NoReturn:
            raise CallerError("events come one after the other; write `async for event in runtime.events()`, not a plain `for`")

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._events.ended:
                raise StopAsyncIteration
            if self._news.is_set():
                self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.popleft()

    def put(self, event: Event) -> None:
        """Add an event, and drop the oldest one if too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(event)
        self._news.set()

    def wake(self) -> None:
        """Let the reader see that the runtime was closed."""
        self._news.set()


class Events:
    """Who listens to one runtime.

    Attributes:
        streams: get all events from now on, as long as they live.
        ended: whether the runtime was closed, so that no event follows.
    """

    def __init__(self) -> None:
        self.streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.ended = False

    def publish(self, event: Event) -> None:
        """Give an event to all streams."""
        for stream in list(self.streams):
            stream.put(event)

    def end(self) -> None:
        """End all streams."""
        self.ended = True
        for stream in list(self.streams):
            stream.wake()


class Listener:
    """The app's function that is called with each event of one compilation. An error of the function disturbs nothing."""

    def __init__(self, on_event: Callable[[Event], object], compilation: str) -> None:
        self._on_event = on_event
        self._compilation = compilation
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Call the function. Log its first error. A CancelledError that the function raises counts as an error, and cancels nothing."""
        try:
            self._on_event(event)
        except (Exception, asyncio.CancelledError) as error:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "on_event of compilation %r raised %s: %s; later errors of it are not logged, and the compilation goes on",
                    self._compilation,
                    type(error).__name__,
                    error,
                    exc_info=error,
                    extra=about(model=self._compilation),
                )


def checked_on_event(on_event: object) -> Callable[[Event], object] | None:
    """Return `compile(on_event=)`.

    Raises:
        CallerError: it is not a function, or it is an async function.
    """
    if on_event is not None and not callable(on_event):
        raise CallerError(f"on_event={on_event!r}: give a function that takes one event, or None")
    if inspect.iscoroutinefunction(on_event):
        raise CallerError(f"on_event={on_event!r} is an async function; give a plain one, or read runtime.events() in a task")
    return on_event
