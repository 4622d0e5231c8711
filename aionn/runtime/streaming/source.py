"""`SourceThread`: iterates the blocking source of a stream, in a daemon thread that the stream owns.

The thread waits for a permit, takes the next item from the source, and leaves it for the loop. With `newest_wins` it needs no permit,
and an item replaces the one that the loop has not seen yet. The loop is woken at most once per item.

A source that blocks while its stream is closed keeps its thread, and nothing else: no lock, and no frame of the burst. When the source
returns at last, the thread closes the generator and ends.

Invariants
    At most one permit is out: from `pull` until the item has arrived.
    `_left` holds at most one entry. If it holds one, a call of `_arrive` is due in the loop.
    Only the thread runs the source's code, in a copy of the context of the caller of `Burst.map`. It reports its end last.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

import anyio

from aionn.errors import ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.runtime.session import Session
from aionn.runtime.streaming.frame import leases_here
from aionn.runtime.streaming.item import Arrivals, Entry
from aionn.tasks import bounded_shield, call_soon_from_anywhere

logger = logging.getLogger("aionn.runtime")

GRACE_S = 0.5
"""A source that is in the middle of an item has this long to return when its stream is closed."""

_END: Any = object()


class Receiver(Protocol):
    """The stream, as far as its source's thread uses it."""

    arrivals: Arrivals

    def arrived(self, entry: Entry) -> None:
        """Take an entry, in the loop."""
        ...


class SourceThread:
    """The thread of one source. Made in the context of the caller of `Burst.map`."""

    def __init__(self, source: Iterable[Any], receiver: Receiver, session: Session, newest_wins: bool) -> None:
        self._source = source
        self._name = getattr(source, "__qualname__", type(source).__qualname__)
        self._receiver = receiver
        self._session = session
        self._newest_wins = newest_wins
        self._context = contextvars.copy_context()
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._asked = False
        self._left: deque[Entry] = deque(maxlen=1)
        self._announced = False
        self._stopped = False
        self._error: BaseException | None = None
        self._done = anyio.Event()
        self._ended = anyio.Event()

    # --- in the loop -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.

        Raises:
            ExecutionError: RESOURCE_EXHAUSTED_TRANSIENT, the system has no thread left.
        """
        thread = threading.Thread(target=self._context.run, args=(self._work,), name=f"aionn source {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._ended.set()
            raise ExecutionError(
                f"no thread could be started for a stream's source {self._name!r} ({error}); end other threads, or give an async source",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            ) from error

    def pull(self) -> None:
        """Permit the next item."""
        if not self._asked:
            self._asked = True
            self._permits.put(True)

    async def exhausted(self) -> None:
        """Return when the source is exhausted. Raise what it, or `Receiver.arrived`, has raised."""
        await self._done.wait()
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        """End the thread. Wait for it no longer than `GRACE_S`: a source that still blocks then is named in one WARNING."""
        self._stopped = True
        self._permits.put(False)
        try:
            with bounded_shield(GRACE_S):
                await self._ended.wait()
        finally:
            if not self._ended.is_set():
                logger.warning(
                    "the source %r still blocks after its stream was closed; its thread stays behind, and ends when the source returns",
                    self._name,
                )

    def _arrive(self) -> None:
        self._announced = False  # before the look: an item that comes after the look announces itself again
        if self._left:
            entry = self._left.popleft()
            self._asked = False
            try:
                self._receiver.arrived(entry)
            except BaseException as error:
                self._note_end(error)

    def _end(self, produced: int, error: BaseException | None) -> None:
        self._receiver.arrivals.count_up_to(produced)
        self._note_end(error)
        self._ended.set()

    def _note_end(self, error: BaseException | None) -> None:
        if self._stopped and error is not None:
            logger.warning("the source %r raised an error after its stream was closed", self._name, exc_info=error)
        elif not self._done.is_set():
            self._error = error
            self._done.set()

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        leases_here.set(self._receiver.arrivals.leases)
        produced = 0
        iterator: Iterator[Any] | None = None
        error: BaseException | None = None
        try:
            iterator = iter(self._source)
            while (self._newest_wins or self._permits.get()) and not self._stopped:
                item = next(iterator, _END)
                arrived_ns = time.monotonic_ns()
                if self._session.inherited:
                    return  # the source has forked, and this is the child
                if item is _END:
                    break
                produced += 1
                self._leave(produced - 1, item, arrived_ns)
                del item  # a thread that blocks holds no frame
        except (StopIteration, StopAsyncIteration) as raised:
            error = RuntimeError(f"the source of this stream raised {type(raised).__name__}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        self._close(iterator)
        call_soon_from_anywhere(self._session.loop, self._end, produced, error)
        del error  # or its traceback would hold this call, and this call the error

    def _leave(self, seq: int, item: Any, arrived_ns: int) -> None:
        if self._stopped:
            return  # the stream has taken its leases back, also that of this item
        self._left.append(self._receiver.arrivals.entry(seq, item, arrived_ns))
        if not self._announced:
            self._announced = True
            call_soon_from_anywhere(self._session.loop, self._arrive)

    def _close(self, iterator: Iterator[Any] | None) -> None:
        if isinstance(iterator, Generator):
            try:
                iterator.close()
            except BaseException:
                logger.warning("the source %r of a stream raised an error while it was closed", self._name, exc_info=True)
