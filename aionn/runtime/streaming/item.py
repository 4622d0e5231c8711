"""What the source of a stream yields, and what the stream makes of it.

Each frame that a source has yielded is counted once: by the burst as computed or failed, else by `Arrivals` as dropped.

`SourceThread` iterates a source that may block, in a daemon thread that the stream owns. The thread waits for a permit, takes the next
item from the source, and leaves it for the loop. With `newest_wins` it needs no permit, and an item replaces the one that the loop has not
seen yet. The loop is woken at most once per item.

A source that blocks while its stream is closed keeps its thread, and nothing else: no lock, and no frame of the burst. When the source
returns at last, the thread closes the generator and ends.

Invariants
    An entry is in `_unanswered` from its arrival until it has been counted. A leased frame of an entry that is dropped is released.
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
from collections.abc import Generator, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Protocol

import anyio
import msgspec

from aionn import trace
from aionn.errors import DeadlineError, DeviceBusyError, ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.loopless import Answer, call_soon_from_anywhere, running_loop
from aionn.pages.app_layout import AGES, DROPPED, DROPPED_LATE, DROPPED_REJECTED, DROPPED_REPLACED
from aionn.runtime.executing.arguments import Outputs, check_mapping
from aionn.runtime.session import Session
from aionn.runtime.streaming.any_connection import AnyConnection, trace_of
from aionn.runtime.streaming.frame import Frame, Leases, contents_of, end_lease, leases_here, take
from aionn.tasks import bounded_shield

_REASONS = {"replaced": DROPPED_REPLACED, "late": DROPPED_LATE, "rejected": DROPPED_REJECTED}


class Item(msgspec.Struct, frozen=True, eq=False):
    """One frame of a stream with a tag, yielded by a source of `Burst.map`.

    Attributes:
        inputs: arrays by name, as for `Burst.compute`, or a frame from `Burst.lease()`.
        tag: any object, such as a time stamp, a picture or a camera. It comes back as `StreamResult.tag`.
        captured_ns: when it was captured, in ns of `time.monotonic_ns`. `StreamResult.age_s` counts from then. 0: from when the source
            yielded it, or from the `captured_ns` of a leased frame.

    Raises:
        CallerError: `inputs` is not a mapping.

    Examples:
        >>> def pictures():  # may block: `map` iterates it in a thread
        ...     for number in range(3):
        ...         yield aionn.Item({"x": x}, tag=number)
        >>> [result.tag async for result in burst.map(pictures())]
        [0, 1, 2]
    """

    inputs: Mapping[str, Any]
    tag: Any = None
    captured_ns: int = 0

    def __post_init__(self) -> None:
        check_mapping(self.inputs)


class Entry:
    """One frame of a running stream.

    Attributes:
        seq: its number in its source, from 0.
        inputs: as for `Burst.compute`. tag: of its `Item`, or None.
        arrived_ns: when the source yielded it (CLOCK_MONOTONIC).
        captured_ns: when it was captured, as its `Item` or its leased frame says, else `arrived_ns`.
            A later time than `arrived_ns` was taken from another clock, so `arrived_ns` stands for it.
        answer: what the consumer of the results awaits, once the frame has been admitted.
    """

    __slots__ = ("_leased", "answer", "arrived_ns", "captured_ns", "inputs", "seq", "tag")

    answer: Answer[Outputs]

    def __init__(self, seq: int, given: Mapping[str, Any] | Item, arrived_ns: int, connection: AnyConnection) -> None:
        """Own the frame that `given` may hold. This may run in a source's thread.

        Raises:
            CallerError: the frame belongs to another burst, or has been yielded before.
        """
        inputs = given.inputs if isinstance(given, Item) else given
        self.tag: Any = None
        captured_ns = 0
        if isinstance(given, Item):
            self.tag, captured_ns = given.tag, given.captured_ns
        # The first look saves a slow one: the class of frames is an abstract base class's.
        self._leased = take(inputs, connection) if type(inputs) is not dict and isinstance(inputs, Frame) else None
        self.inputs = inputs if self._leased is None else self._leased
        self.seq = seq
        self.arrived_ns = arrived_ns
        if self._leased is not None:
            captured_ns = captured_ns or self._leased.captured_ns
        self.captured_ns = captured_ns if 0 < captured_ns <= arrived_ns else arrived_ns

    def admit(self) -> None:
        """Make its `answer`."""
        self.answer = Answer(running_loop())

    def answered(self) -> None:
        """Let `inputs` be what the consumer of the results sees. Of a leased frame that is its contents, which outlive the lease."""
        if self._leased is not None:
            self.inputs = contents_of(self._leased)

    def release(self) -> None:
        """Return its leased frame to the pool. A request in flight keeps a pin until the driver has answered."""
        if self._leased is not None:
            end_lease(self._leased)


class Arrivals:
    """What the source of one stream has yielded so far.

    Attributes:
        leases: the frames that it has leased.
    """

    def __init__(self, connection: AnyConnection) -> None:
        self._connection = connection
        self._executor = connection.executor
        self._produced = 0
        self._unanswered: set[Entry] = set()
        self.leases = Leases()

    def entry(self, seq: int, given: Mapping[str, Any] | Item, arrived_ns: int) -> Entry:
        """Make an entry, perhaps in the source's thread. See `Entry`."""
        return Entry(seq, given, arrived_ns, self._connection)

    def next(self, given: Mapping[str, Any] | Item) -> Entry:
        """Make and add the next entry, in the loop. See `Entry`."""
        try:
            entry = Entry(self._produced, given, time.monotonic_ns(), self._connection)
        except BaseException:
            self.count_up_to(self._produced + 1)
            raise
        self._produced += 1
        self._unanswered.add(entry)
        return entry

    def add(self, entry: Entry) -> None:
        """Add an entry. Those before it that are missing were dropped in the source's thread."""
        self.count_up_to(entry.seq)
        self._produced += 1
        self._unanswered.add(entry)

    def count_up_to(self, produced: int) -> None:
        """Count the frames that the source has yielded up to that number, and that have no entry."""
        for seq in range(self._produced, produced):
            self._count(seq, "replaced")
        self._produced = max(self._produced, produced)

    def computed(self, entry: Entry) -> None:
        """Leave an entry to the burst's counts: its outputs are there."""
        self._unanswered.discard(entry)
        entry.answered()

    def handed_out(self, entry: Entry) -> float:
        """Count how old an entry is now that its result goes to the app. Returns its age in seconds."""
        age_ns = time.monotonic_ns() - entry.captured_ns
        self._executor.counts.took(AGES, age_ns)
        return age_ns / 1e9

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Leave an entry to the burst's counts if the driver has answered with `error`. Else drop it."""
        if error in self._executor.failures:
            self._unanswered.discard(entry)
        late, busy = isinstance(error, DeadlineError), isinstance(error, DeviceBusyError)
        self.drop_frame(entry, "late" if late else "rejected" if busy else "failed")

    def drop_frame(self, entry: Entry, why: str) -> None:
        """Release an entry's frame, and count the entry as dropped unless it has been counted."""
        entry.release()
        if entry in self._unanswered:
            self._unanswered.discard(entry)
            self._count(entry.seq, why)

    def end(self) -> None:
        """Drop what is left, and end the leases of the source."""
        for entry in list(self._unanswered):
            self.drop_frame(entry, "closed")
        self.leases.end()

    def _count(self, seq: int, why: str) -> None:
        reason = _REASONS.get(why)
        if reason is not None:
            self._executor.counts.add(reason, 1)
        self._executor.counts.add(DROPPED, 1)  # last: a reader never finds more drops with a reason than drops
        if trace.active:
            trace.count("stream.dropped", seq=seq, why=why, **trace_of(self._connection))


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
