"""`ModelLeases`: a limited number of open models, each of which stays open while a request holds a lease on it.

This module knows nothing of Ray. A model is named by a text. Its first lease opens it, and it stays open for later leases. When another
model needs its place, the model that was leased least recently is closed, after its last lease has ended.

A model goes through these states. It takes a place in all of them but the first.

    waiting     for a place
    opening     a task opens it, once for all requests that have come, and goes on if they leave
    open        it can be leased; it is idle while it has no lease
    leaving     it has leases, and is closed when they have ended; new requests for it wait
    ending      a task closes it, or stops opening it because all models are being closed; new requests for it wait
    gone

Requests do not own the opening of a model. So a request whose deadline is shorter than the opening finds the model open if it comes again,
unless another model has waited for the place.
A model keeps its place until it is open, although no request waits for it any more. If it lost the place to another model, two models whose
requests have such deadlines could end each other's opening without end.

If a model waits for a place, and no model is idle, one open model is chosen to leave. Without that choice, requests that overlap could keep
a place without end. If another place comes free first, the model that was chosen stays. If all leases of another model have begun since the
choice, that model is chosen instead: the leases of the first one are longer, and may be streams.

Invariants
    `_entries` holds each model that is not gone, the least recently leased one first. It holds a model once, so no model is open twice.
    A model that waits is in `_waiting`, too. All others have a place, and they are at most `most`.
    Only a model that is being opened, that is open, or that a task is ending, can be without a lease.
    A model that has failed to open is gone before its requests get the error. The next request for it tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from aionn.errors import CallerError, again
from aionn.loopless import checked_count

logger = logging.getLogger("aionn.ray")


class _Closable(Protocol):
    async def aclose(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class _State(Enum):
    WAITING = auto()
    OPENING = auto()
    OPEN = auto()
    LEAVING = auto()
    ENDING = auto()
    GONE = auto()


class _Entry(Generic[T]):
    """A model.

    Attributes:
        opened: the open model, or the error of opening it. Requests await it through `asyncio.shield`, so one that leaves ends nothing.
        leases: the numbers of the requests that hold a lease, or wait until the model is open, in the order in which they came.
        settled: is set when the model is gone, when it stays although it was chosen to leave, and when all models are being closed.
        task: opens the model, and later another one closes it. None while the model waits for a place.
    """

    __slots__ = ("leases", "name", "opened", "settled", "state", "task")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = _State.WAITING
        self.opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.leases: dict[int, None] = {}
        self.settled = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    def fail(self, error: BaseException) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # if all requests have left, the loop must not report the error as never retrieved


class ModelLeases(Generic[T]):
    """A limited number of open models.

    Args:
        open_model: opens the model of that name. Only `aclose` cancels it.
        most: how many models are open, being opened or being closed at once.
    """

    def __init__(self, open_model: Callable[[str], Awaitable[T]], most: int) -> None:
        self._open_model = open_model
        self._most = checked_count("max_models", most, 1)
        self._entries: dict[str, _Entry[T]] = {}
        self._waiting: list[_Entry[T]] = []
        self._leased = 0  # the number of the last request
        self._chosen_at = 0  # its value when a model was last chosen to leave
        self._closed = False
        self._freed = asyncio.Event()

    def __contains__(self, name: object) -> bool:
        """Return whether the model is open, or was asked for."""
        return name in self._entries

    @property
    def open_models(self) -> dict[str, T]:
        """The models that are open, by name, the least recently leased one first."""
        states = (_State.OPEN, _State.LEAVING)
        return {name: entry.opened.result() for name, entry in self._entries.items() if entry.state in states}

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[T]:
        """Keep a model open for the body. Wait for a place, and until the model is open.

        A task that takes a second lease inside of the first may wait without end, because all places may belong to such tasks.

        Raises:
            CallerError: the models are being closed.
            Exception: as `open_model`.
        """
        entry, number = await self._entered(name)
        try:
            try:
                opened = await asyncio.shield(entry.opened)
            except Exception as error:
                raise again(error) from None
            yield opened
        finally:
            self._left(entry, number)

    async def aclose(self, wait_s: float) -> None:
        """Close all models. Requests that wait for a model end with `CallerError`. May be called again.

        Args:
            wait_s: seconds for leases to end. A model is closed after that time, even if it is leased.
        """
        self._closed = True
        for entry in list(self._entries.values()):
            entry.settled.set()  # requests that wait for it end
            if entry.state in (_State.WAITING, _State.OPENING):
                entry.fail(_closing())
                self._end_opening(entry)
            elif entry.state is _State.OPEN:
                entry.state = _State.LEAVING
                if not entry.leases:
                    self._close(entry, entry.opened.result())
        if not await self._emptied(wait_s):
            for entry in list(self._entries.values()):
                if entry.state is _State.LEAVING:
                    self._close(entry, entry.opened.result())
            await self._emptied(None)

    async def _emptied(self, wait_s: float | None) -> bool:
        """Wait until all models are gone. Returns False if some are not after `wait_s` seconds."""
        try:
            async with asyncio.timeout(wait_s):
                while self._entries:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return False
        return True

    # --- requests ----------------------------------------------------------------------------------------------------------

    async def _entered(self, name: str) -> tuple[_Entry[T], int]:
        """Count a request for a model. Nothing is awaited after the count, so a request that is cancelled here was not counted."""
        while True:
            if self._closed:
                raise _closing()
            entry = self._entries.pop(name, None)
            if entry is None:
                entry = _Entry(name)
                self._waiting.append(entry)
            self._entries[name] = entry  # as the last one
            if entry.state not in (_State.LEAVING, _State.ENDING):
                break
            await entry.settled.wait()
        self._leased = number = self._leased + 1
        entry.leases[number] = None
        self._share_places()
        return entry, number

    def _left(self, entry: _Entry[T], number: int) -> None:
        del entry.leases[number]
        if not entry.leases:
            if entry.state is _State.WAITING:
                self._end_opening(entry)
            elif entry.state is _State.LEAVING:
                self._close(entry, entry.opened.result())
        self._share_places()

    # --- places ------------------------------------------------------------------------------------------------------------

    def _share_places(self) -> None:
        """Open the models that have waited longest, and make others leave for those that have no place yet."""
        if self._closed:
            return
        while self._waiting and len(self._entries) - len(self._waiting) < self._most:
            entry = self._waiting.pop(0)
            entry.state = _State.OPENING
            entry.task = asyncio.create_task(self._opening(entry), name=f"open {entry.name}")
            entry.task.add_done_callback(partial(self._opened, entry))
        needed = len(self._waiting) - sum(entry.state is _State.ENDING for entry in self._entries.values())
        for entry in list(self._entries.values()):
            if needed > 0 and entry.state is _State.OPEN and not entry.leases:
                self._close(entry, entry.opened.result())
                needed -= 1
        unwanted = sum(entry.state is _State.OPENING and not entry.leases for entry in self._entries.values())
        self._choose_who_leaves(needed > unwanted)  # those will be idle, and no model in use has to make way for what they bring

    def _choose_who_leaves(self, needed: bool) -> None:
        """Have one model that is in use leave, if a place is needed. Otherwise the one that was chosen stays."""
        chosen = [entry for entry in self._entries.values() if entry.state is _State.LEAVING]
        since = self._chosen_at if chosen else 0
        quick = next((one for one in self._entries.values() if one.state is _State.OPEN and next(iter(one.leases), 0) > since), None)
        if needed and quick is not None:
            quick.state = _State.LEAVING
            self._chosen_at = self._leased
        elif needed:
            return
        for entry in chosen:
            entry.state = _State.OPEN
            entry.settled.set()
            entry.settled = asyncio.Event()

    def _end_opening(self, entry: _Entry[T]) -> None:
        """End a model that is not open yet."""
        if entry.task is None:
            self._waiting.remove(entry)
            self._free_place(entry)
        else:
            entry.state = _State.ENDING  # it keeps its place until its task has ended
            entry.task.cancel()

    def _close(self, entry: _Entry[T], opened: T) -> None:
        entry.state = _State.ENDING
        entry.task = asyncio.create_task(self._ending(entry, opened), name=f"close {entry.name}")

    async def _opening(self, entry: _Entry[T]) -> T:
        return await self._open_model(entry.name)

    def _opened(self, entry: _Entry[T], task: asyncio.Task[T]) -> None:
        """Go on after a task that has opened a model. A task that was cancelled before its first step has ended, too."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            if error is not None and not entry.leases and entry.state is _State.OPENING:
                logger.warning("model %r was not opened, and no request waits for it now: %s: %s", entry.name, type(error).__name__, error)
            self._free_place(entry)
            entry.fail(error if isinstance(error, Exception) else _closing())
        elif entry.state is _State.ENDING:  # it was open before it could be cancelled
            self._close(entry, task.result())
        else:
            entry.state = _State.OPEN
            entry.opened.set_result(task.result())
            self._share_places()

    async def _ending(self, entry: _Entry[T], opened: T) -> None:
        try:
            await opened.aclose()
        except Exception as error:
            logger.error("model %r was not closed: %s: %s", entry.name, type(error).__name__, error)
        finally:
            self._free_place(entry)

    def _free_place(self, entry: _Entry[T]) -> None:
        """Give the place of a model to the next one, and let requests that waited for its end go on."""
        entry.state = _State.GONE
        del self._entries[entry.name]
        entry.settled.set()
        self._freed.set()
        self._share_places()


def _closing() -> CallerError:
    return CallerError("the models are being closed, so this one cannot be used any more")
