"""`MessageQueue`: elements of one size through shared memory, from one process to another.

`write` and `read` are one C call each, never wait, and never lose or split anything. There are three ways to wait on top:
`await wait_readable()` for tasks, `read_in_thread` for threads, `arm_reader` and `reader_fd` for another event loop.
Take one of them per side, since `wait_*` owns the side's eventfd from its first use on. All or nothing has a price.
A writer of m elements and a reader of n that wait at once can block each other. They cannot if the capacity is at least
m + n - 1.

A synchronized queue has one reader and one writer. The unsynchronized flavor exists for parity with libfmq. Its one writer
never waits and overwrites. Each of its readers has a cursor, and loses the older half when the writer overtakes it. Waiting
needs a synchronized queue.

Invariants
    The shared words are touched only through `Ring`, which holds the mapping for as long as it is open.
    A queue owns its descriptors from construction on, also when construction fails.
    Attaching changes nothing in the queue. libfmq resets the counters by default, which would break a queue in use.
    After `close` or `end` no waiter is left. Each has got elements or an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

from aionn.errors import CallerError, DeadlineError, again
from aionn.fmq import layout
from aionn.fmq._ring import Ring
from aionn.fmq.descriptors import check_eventfd, make_eventfds, release
from aionn.fmq.event_flag import EventFlag, deadline_after
from aionn.fmq.layout import Element
from aionn.fmq.waiting import QueueClosedError, QueueCorruptedError, WaitingRoom
from aionn.hal.queues import MQDescriptor, MQFlavor
from aionn.hal.types import MemoryDescription, MemoryKind
from aionn.memory.region import Region

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aionn.fmq._ring import Data

# The refusals of ring_object.h, with the same numbers.
_CLOSED, _CORRUPT, _GONE, _FORKED, _FOREIGN, _BAD_COUNT, _NOT_WHOLE, _NOT_BEGUN, _NO_FLAG = range(1, 10)
_CALLERS_FAULT = {
    _GONE: "this queue has been closed here; make or attach another one",
    _FORKED: "this queue was inherited by fork; attach to its descriptor in the child instead",
    _FOREIGN: "this queue has no eventfds (it is unsynchronized, or a libfmq peer made it); use read_in_thread, or poll",
    _BAD_COUNT: "a count or mask is negative or too large; give 0 or more, and a mask of at most 32 bits",
    _NOT_BEGUN: "more elements were committed than the transaction has begun; call begin_write or begin_read first",
    _NO_FLAG: "this queue has no event flag word, because its maker left it out; make the queue with one",
}


class MessageQueue(Ring):
    """One end of a queue. `write`, `read`, `peek`, `arm_reader` and the other plain calls are in `_ring.pyi`.

    Attributes:
        quantum: bytes of one element.
        capacity: elements the queue can hold, all of them usable.
        flavor: synchronized or unsynchronized.
        reader_fd: eventfd that is readable when the reader must look again, or -1.
        writer_fd: the same for the writer.
    """

    def __init__(self, grantors_from: MQDescriptor, regions: list[Region]) -> None:
        """Take over regions and eventfds of a checked descriptor. Apps call `create` or `attach`."""
        self._closed = True
        self._pid = os.getpid()
        self._regions = regions
        self._descriptor: MQDescriptor | None = grantors_from
        self._ended_by: BaseException | None = None
        self.quantum = grantors_from.quantum
        self.flavor = grantors_from.flavor
        self.capacity = grantors_from.grantors[layout.DATA].extent // self.quantum
        events = layout.event_fds_of(grantors_from)
        self._awaitable = events
        self.reader_fd, self.writer_fd = grantors_from.fds[-2:] if events else (-1, -1)
        views = [region.view() for region in regions]
        parts = [views[part.fd_index][part.offset : part.offset + part.extent] for part in grantors_from.grantors[: layout.CONTROL + 1]]
        self._data = parts[layout.DATA]
        flag, control = [*parts[layout.EVENT_FLAG :], None, None][:2]
        synchronized = self.flavor is MQFlavor.SYNCHRONIZED
        read, written, data = parts[: layout.EVENT_FLAG]
        super().__init__(read, written, data, flag, control, self.quantum, synchronized, self.reader_fd, self.writer_fd)
        self._closed = False

    # A burst awaits neither side, so these are made when they are first used.

    @cached_property
    def _readers(self) -> WaitingRoom | None:
        return WaitingRoom(_ReaderSide(self), self.reader_fd, "elements to read") if self._awaitable else None

    @cached_property
    def _writers(self) -> WaitingRoom | None:
        return WaitingRoom(_WriterSide(self), self.writer_fd, "room to write") if self._awaitable else None

    @cached_property
    def reader_flag(self) -> EventFlag:
        """The event flag, awaited from the reader's side."""
        return EventFlag(self, self._readers, self._raise_if_over)

    @cached_property
    def writer_flag(self) -> EventFlag:
        """The event flag, awaited from the writer's side."""
        return EventFlag(self, self._writers, self._raise_if_over)

    def _made_rooms(self) -> list[WaitingRoom]:
        return [room for side in ("_readers", "_writers") if (room := self.__dict__.get(side)) is not None]

    # ---- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        element: Element,
        capacity: int,
        *,
        flavor: MQFlavor = MQFlavor.SYNCHRONIZED,
        buffer_fd: int | None = None,
        futex_interop: bool = False,
    ) -> MessageQueue:
        """Make an empty queue of `capacity` elements.

        Args:
            element: a NumPy dtype (structured ones too), a ctypes.Structure type, or the bytes of one element.
            buffer_fd: size-sealed memory for the elements, of at least their size; taken over, also on failure. It exists
                for parity with libfmq.
            futex_interop: whether a libfmq process will attach and sleep by futex. Commits set the event flag word from the
                start then. aionn's threads ask for that themselves. Such a peer wakes threads only, never a task.

        Raises:
            CallerError: element, capacity or buffer_fd cannot be used.
            MemoryAllocationError: the memory cannot be had now.
        """
        owned = [] if buffer_fd is None else [buffer_fd]
        regions: list[Region] = []
        try:
            quantum = layout.quantum_of(element)
            grantors, header_bytes = layout.grantors_for(quantum, capacity, buffer_apart=buffer_fd is not None)
            regions.append(Region.allocate(header_bytes))
            if buffer_fd is not None:
                owned.clear()
                regions.append(Region.attach(buffer_fd, MemoryDescription(MemoryKind.ASHMEM, grantors[layout.DATA].extent)))
            descriptor = MQDescriptor(grantors, quantum, MQFlavor(flavor))
            if descriptor.flavor is MQFlavor.SYNCHRONIZED:
                owned += make_eventfds(layout.EVENT_FDS, header_bytes)
            fds = (*map(Region.fileno, regions), *owned)
            queue = cls(MQDescriptor(grantors, quantum, descriptor.flavor, fds), regions)
        except BaseException:
            release(regions, owned)
            raise
        if futex_interop:
            queue.await_futex(layout.NOT_FULL | layout.NOT_EMPTY)
        return queue

    @classmethod
    def attach(cls, descriptor: MQDescriptor, element: Element | None = None) -> MessageQueue:
        """Use the queue that its maker sent. Take over `descriptor.fds`, also on failure. Change nothing in the queue.

        Args:
            element: the expected element; None takes plain bytes of `descriptor.quantum`.

        Raises:
            CallerError: the descriptor or its memory is not a queue's, or the element has another size. The message says why.
            MappingError, MemoryAllocationError: as `Region.attach`. The memory is sealed against writing, or has holes that
                cannot be filled.
        """
        owned = list(dict.fromkeys(descriptor.fds))
        regions: list[Region] = []
        try:
            if len(owned) != len(descriptor.fds):
                raise CallerError("queue descriptor: a file descriptor stands in it twice; send each once")
            sizes = layout.memory_bytes_of(descriptor)
            quantum = layout.quantum_of(descriptor.quantum if element is None else element)
            if quantum != descriptor.quantum:
                raise CallerError(f"queue descriptor: a quantum of {descriptor.quantum} bytes, the expected element has {quantum}")
            for fd in descriptor.fds[len(sizes) :]:
                check_eventfd(fd)
            for fd, size_bytes in zip(descriptor.fds, sizes, strict=False):
                owned.remove(fd)  # the region's from here on
                regions.append(Region.attach(fd, MemoryDescription(MemoryKind.ASHMEM, size_bytes)))
            return cls(descriptor, regions)
        except BaseException:
            release(regions, owned)
            raise

    def descriptor(self) -> MQDescriptor:
        """Return what a peer needs to attach. The queue keeps its fds, so send duplicates (SCM_RIGHTS makes them).

        Raises:
            CallerError: the queue has been closed, or has forgotten its memory's descriptors.
        """
        if self._closed:
            self._raise_refusal(_GONE)
        if self._descriptor is None:
            raise CallerError("this queue has closed the descriptors of its memory, so no further peer can attach; make another queue")
        return self._descriptor

    @property
    def inode(self) -> int:
        """The inode number of the queue's memory, which names the queue in both processes."""
        return self._regions[0].inode()[1]

    def forget_descriptor(self) -> None:
        """Close the descriptors of the memory, which stays mapped: no further peer will attach. The eventfds stay open. Idempotent."""
        self._descriptor = None
        for region in self._regions:
            region.forget_descriptor()

    # ---- transactions ---------------------------------------------------------------------------------------------

    def begin_write(self, count: int) -> tuple[memoryview, memoryview] | None:
        """Return room for `count` elements, in place, as two views. The second one is empty unless the room wraps.

        Returns None if there is less room. Fill both views, then call `commit_write`, and do not use them after that.
        """
        return self._pieces(self._begin_write(count))

    def begin_read(self, count: int) -> tuple[memoryview, memoryview] | None:
        """Return the next `count` elements, in place and read-only, as two views. Call `commit_read` after that.

        Returns None if fewer are there. The peer can change these bytes at any time, so copy them before you check them.
        """
        pieces = self._pieces(self._begin_read(count))
        return None if pieces is None else (pieces[0].toreadonly(), pieces[1].toreadonly())

    def _pieces(self, place: tuple[int, int, int] | None) -> tuple[memoryview, memoryview] | None:
        if place is None:
            return None
        at, first, second = place
        return self._data[at : at + first], self._data[:second]

    # ---- waiting: tasks ---------------------------------------------------------------------------------------------

    async def wait_readable(self, count: int = 1, deadline_ns: int | None = None, *, or_flag: int = 0) -> None:
        """Wait until `count` elements can be read, or a bit of `or_flag` is set in the event flag word. Take nothing.

        Raises:
            DeadlineError: CLOCK_MONOTONIC passed `deadline_ns`.
            QueueClosedError, or the error given to `end`: fewer are there, and no more will come.
            QueueCorruptedError: a shared counter has an impossible value.
            CallerError: more than the capacity, another event loop, or a queue without eventfds.
        """

        def there() -> bool:
            return self.available_to_read() >= count or bool(or_flag and self.peek_flag() & or_flag)

        await self._room(self._readers, count).until(lambda: self._may(there), count, mask=or_flag, deadline_ns=deadline_ns)

    async def wait_writable(self, count: int = 1, deadline_ns: int | None = None) -> None:
        """Wait until there is room for `count` elements. Reserve nothing. Raises as `wait_readable`."""

        def attempt() -> bool | None:
            self._raise_if_over()
            return self.available_to_write() >= count or None

        await self._room(self._writers, count).until(attempt, count, deadline_ns=deadline_ns)

    async def read_blocking(self, count: int, deadline_ns: int | None = None) -> bytes:
        """Take `count` elements as soon as they are there; several tasks are served in the order they came.

        A cancelled task has taken nothing. Raises as `wait_readable`.
        """
        return await self._room(self._readers, count).until(lambda: self.read(count), count, deadline_ns=deadline_ns, taker=True)

    async def write_blocking(self, data: Data, deadline_ns: int | None = None) -> None:
        """Write as soon as there is room for all of it; several tasks write in the order they came.

        A cancelled task has written nothing. Raises as `wait_readable`.
        """
        writers = self._writers
        if writers is not None and not writers.takers and self.write(data):
            return  # the usual case, which is cheaper without a waiter
        count = self._elements_in(data)
        await self._room(self._writers, count).until(lambda: self.write(data) or None, count, deadline_ns=deadline_ns, taker=True)

    # ---- waiting: threads ---------------------------------------------------------------------------------------------

    def read_in_thread(self, count: int, timeout_s: float | None = None) -> bytes:
        """Read as `read_blocking`, for a thread. It sleeps by futex, without the GIL (libfmq: readBlocking). One thread per side.

        Raises:
            DeadlineError: fewer came in `timeout_s` seconds. A last attempt was made.
            QueueClosedError, QueueCorruptedError: as `wait_readable`.
            CallerError: as `wait_readable`, or the queue has no event flag word.
        """
        self._check_count(count)
        taken: bytes = self._by_futex(lambda: self.read(count), layout.NOT_EMPTY, timeout_s)
        return taken

    def write_in_thread(self, data: Data, timeout_s: float | None = None) -> None:
        """Write as `write_blocking`, for a thread. Raises as `read_in_thread`."""
        self._elements_in(data)
        self._by_futex(lambda: self.write(data) or None, layout.NOT_FULL, timeout_s)

    def _by_futex(self, attempt: Callable[[], Any], bit: int, timeout_s: float | None) -> Any:
        result = attempt()
        if result is not None:
            return result
        if self.flavor is not MQFlavor.SYNCHRONIZED:
            self._raise_refusal(_FOREIGN)
        deadline_ns = deadline_after(timeout_s)
        # From here on, commits set the bit. The next attempt sees what was committed before.
        self.await_futex(bit)
        while (result := attempt()) is None:
            if 0 <= deadline_ns <= time.monotonic_ns():
                raise DeadlineError(f"the queue's peer made no progress within {timeout_s} s; it may be busy, try again later")
            self.wait_flag(bit, deadline_ns)
        return result

    # ---- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Mark the peer as gone. The rest of the queue can still be read, then `error` is raised, also in every waiter. Idempotent."""
        if self._ended_by is not None or self._closed:
            return
        self._ended_by = error
        self._set_ended()
        for room in self._made_rooms():
            room.wake_all()

    def close(self) -> None:
        """Notify the peer, fail this side's waiters with QueueClosedError, and release descriptors and mapping. Idempotent.

        Call it in the thread of the event loop that awaits the queue. Only its writer closes an unsynchronized queue for
        the others. In a child of fork, only the child's copies are released.
        """
        if self._closed:
            return
        self._closed = True
        inherited = os.getpid() != self._pid
        if not inherited:
            self._set_closed()
            for room in self._made_rooms():
                room.close()
        self._release()
        self._data = memoryview(b"")
        release(self._regions, [fd for fd in (self.reader_fd, self.writer_fd) if fd >= 0])
        self.reader_fd = self.writer_fd = -1

    @property
    def closed(self) -> bool:
        """Return whether this end has been closed here."""
        return self._closed

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.capacity} x {self.quantum} bytes, {self.flavor.name.lower()}"
        return f"<MessageQueue {state}>"

    # ---- refusals -------------------------------------------------------------------------------------------------------

    def _raise_refusal(self, code: int) -> NoReturn:
        """Raise the error for a refusal of `Ring`, which calls this with its code."""
        if code == _CLOSED:
            if self._ended_by is not None:
                raise again(self._ended_by)
            raise QueueClosedError("the queue's peer has closed it, and all its elements have been read; make a new queue")
        if code == _CORRUPT:
            raise QueueCorruptedError(
                f"a counter of the queue of {self.capacity} x {self.quantum} bytes is impossible, so its peer is broken; make a new queue"
            )
        if code == _NOT_WHOLE:
            raise CallerError(f"the data is not a whole number of elements of {self.quantum} bytes; give whole elements")
        raise CallerError(_CALLERS_FAULT[code])

    def _raise_if_over(self) -> None:
        if self._closed_word():
            self._raise_refusal(_CLOSED)

    def _may(self, condition: Callable[[], bool]) -> bool | None:
        """Return True, or None to wait. At the queue's end look once more, because a last commit may lie between the two looks."""
        if condition():
            return True
        if self._closed_word():
            if condition():
                return True
            self._raise_refusal(_CLOSED)
        return None

    def _room(self, room: WaitingRoom | None, count: int) -> WaitingRoom:
        self._check_count(count)
        return self._raise_refusal(_FOREIGN) if room is None else room

    def _check_count(self, count: int) -> None:
        if not 0 <= count <= self.capacity:
            raise CallerError(f"{count} elements at once in a queue of {self.capacity} can never be there; use a larger queue")

    def _elements_in(self, data: Data) -> int:
        count, rest = divmod(memoryview(cast("Buffer", data)).nbytes, self.quantum)
        if rest:
            self._raise_refusal(_NOT_WHOLE)
        self._check_count(count)
        return count


class _ReaderSide:
    """The side of a queue that its waiting readers need."""

    def __init__(self, queue: MessageQueue) -> None:
        # The bound C functions, so that no Python frame runs between a wake and the shared words.
        self.arm = queue.arm_reader
        self.disarm = queue.disarm_reader
        self.clear_event = queue.clear_reader_event
        self._available = queue.available_to_read
        self._over = queue._closed_word
        self._flag = queue.peek_flag

    def satisfied(self, count: int, mask: int) -> bool:
        try:
            return (0 < count <= self._available()) or bool(mask and mask & self._flag()) or self._over()
        except (QueueCorruptedError, CallerError):
            return True  # the next look raises the error


class _WriterSide(_ReaderSide):
    """The side of a queue that its waiting writers need."""

    def __init__(self, queue: MessageQueue) -> None:
        super().__init__(queue)
        self.arm = queue.arm_writer
        self.disarm = queue.disarm_writer
        self.clear_event = queue.clear_writer_event
        self._available = queue.available_to_write
