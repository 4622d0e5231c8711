"""The native part: one call, one C function over shared words. See ring.h for the protocol.

Every method raises through the subclass's `_refuse(code)`: a closed, corrupted, forked or foreign queue never answers.
"""

from typing import Any, Literal, SupportsIndex, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

Data: TypeAlias = Buffer | NDArray[Any]
"""Contiguous bytes. Arrays are named apart, for before Python 3.12 they do not say that they are buffers."""

CONTROL_BYTES: int

class Ring:
    """One process's handle of one queue.

    Holds the buffers of its parts until `_release`; so nothing is unmapped under it. Counts are elements.
    """

    def __init__(
        self,
        read: Buffer,
        written: Buffer,
        data: Buffer,
        flag: Buffer | None,
        control: Buffer | None,
        quantum: int,
        synchronized: bool,
        reader_fd: int,
        writer_fd: int,
        /,
    ) -> None: ...
    def write(self, data: Data, /) -> bool:
        """Write whole elements, all or nothing, without waiting; wake a sleeping reader. False: not that much room.

        A synchronized queue is full when `available_to_write()` says 0; an unsynchronized one overwrites its oldest elements
        and refuses only more than it can hold.

        Raises:
            CallerError: not a whole number of elements, or the queue cannot be used here.
            QueueClosedError: the peer has closed it. What `end` was given, if the peer is gone.
            QueueCorruptedError: a counter is not what a queue's can be.
        """
    def read(self, count: SupportsIndex, /) -> bytes | None:
        """Take `count` elements, all or nothing, without waiting; wake a sleeping writer. None: not that many there.

        An unsynchronized reader that was overtaken gets None once and goes on with the newest half.

        Raises:
            CallerError, QueueClosedError, QueueCorruptedError: as `write`. Closed counts only once what was written has been read.
        """
    def peek(self, count: SupportsIndex, /) -> bytes | None:
        """Copy `count` elements without taking them."""
    def read_into(self, buffer: Data, /) -> bool:
        """Take as many elements as fill `buffer` (writable, contiguous). False: not that many there."""
    def available_to_read(self) -> int:
        """Elements that can be read now."""
    def available_to_write(self) -> int:
        """Elements that can be written now without overwriting what this handle has not read."""
    def _begin_write(self, count: SupportsIndex, /) -> tuple[int, int, int] | None: ...
    def _begin_read(self, count: SupportsIndex, /) -> tuple[int, int, int] | None: ...
    def commit_write(self, count: SupportsIndex, /) -> bool:
        """Publish the first `count` elements of the begun transaction; wake a sleeping reader.

        Raises:
            CallerError: more than was begun.
        """
    def commit_read(self, count: SupportsIndex, /) -> bool:
        """Take the first `count` elements of the begun transaction; wake a sleeping writer.

        False (unsynchronized only): they were overwritten meanwhile; throw away what was read from them.

        Raises:
            CallerError: more than was begun.
        """
    def arm_reader(self, count: SupportsIndex = 1, mask: int = 0, /) -> bool:
        """Ask to be woken through `reader_fd` at the next commit. True: armed, and fewer than `count` are there: sleep now.

        False: look again, there is something, or the queue is closed or corrupted; not armed. `mask`: bits of the event flag
        word that end the sleep too. A count of 0 waits for those alone. After each wake call this again before sleeping.
        """
    def arm_writer(self, count: SupportsIndex = 1, mask: int = 0, /) -> bool:
        """The same for room to write, through `writer_fd`."""
    def disarm_reader(self) -> None:
        """Nobody sleeps on `reader_fd` any more. A token in flight stays and costs one look too many."""
    def disarm_writer(self) -> None: ...
    def clear_reader_event(self) -> None:
        """Take the token out of `reader_fd`, if there is one. Never blocks, also if the peer wants it to."""
    def clear_writer_event(self) -> None: ...
    def spin_until_readable(self, nanoseconds: int, count: SupportsIndex = 1, /) -> bool:
        """Look for `count` elements for at most so long (and a second), without the GIL. True: look now.

        Publishes this CPU as the reader's. Returns after one look if the writer was last seen on the same CPU.
        """
    def spin_until_writable(self, nanoseconds: int, count: SupportsIndex = 1, /) -> bool:
        """The same for room to write; publishes this CPU as the writer's."""
    def wake_flag(self, mask: int, /) -> None: ...
    def take_flag(self, mask: int, /) -> int: ...
    def peek_flag(self) -> int: ...
    def await_futex(self, mask: int, /) -> None: ...
    def wait_flag(self, mask: int, deadline_ns: int, /) -> int: ...
    def publish_reader_cpu(self) -> int | None:
        """Tell the writer on which CPU this reading thread runs now."""
    def publish_writer_cpu(self) -> int | None: ...
    def reader_cpu(self) -> int | None:
        """Where the reader was last seen; None: not known."""
    def writer_cpu(self) -> int | None: ...
    def _closed_word(self) -> bool: ...
    def _set_closed(self) -> None: ...
    def _set_ended(self) -> None: ...
    def _release(self) -> None: ...

class Caller:
    """The app's end of an exchange over two queues of 24-byte elements: packets that come again, but for their last element.

    A packet is a body, whose header says how many elements the packet has, and a stamp: the last element, with the request's
    identity and deadline, or the answer's identity and the time it took (aionn/burst/packets.py has the layout). What is not
    exactly a remembered body with its stamp stays in the queue, and nothing here raises for a queue that cannot be used:
    then nothing is done, and `Ring`'s methods tell why. Used in one thread. The queues are kept, and closed by their owner.

    Attributes:
        waits: calls that were answered at once, counted up; to be set back by who reads it.
    """

    waits: int

    def __init__(self, requests: Ring, results: Ring, /) -> None: ...
    def remember(self, body: bytes, value: object, /) -> None:
        """Know that answer from now on as `value`, which must not refer back to this object. The last 16 are known."""
    def forget(self) -> None:
        """Know no answer any more."""
    def call(
        self, body: bytes, identity: int, deadline_ns: int, not_after_ns: int, budget_ns: int, /
    ) -> tuple[Any, int] | Literal[False] | None:
        """Write a request and look for its answer for at most so long (and a second).

        Args:
            not_after_ns: CLOCK_MONOTONIC; from then on nothing is done.

        Returns:
            The value of the answer's body, and the service time it tells. None: written, and what lies in the queue now, if
            anything, is not just a known answer to this request. False: not written.
        """
    def send(self, body: bytes, identity: int, deadline_ns: int, /) -> bool:
        """Write a request, all or nothing. False: not written; no room, or the general way knows why."""
    def take(self) -> list[tuple[Any, int, int]]:
        """Take every known answer up to the first other packet: value, service time, identity."""
    def nudge(self, mask: int, /) -> None:
        """Set these event flag bits of the request queue if its reader sleeps and awaits one of them. A hint: it may be lost."""

class Listener:
    """The driver's end: the same with requests read and answers written.

    Attributes:
        waits, waited_ns: looks that ended with a known request, and what they took in all; to be set back by who reads it.
        looked_ns: since when the last `next` looked for a request; 0: it did not, there was something at once.
        identity, deadline_ns (0: none), began_ns: of the request that `next` took last, and when it did.
    """

    waits: int
    waited_ns: int
    @property
    def identity(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def looked_ns(self) -> int: ...
    @property
    def began_ns(self) -> int: ...
    def __init__(self, requests: Ring, results: Ring, /) -> None: ...
    def remember(self, body: bytes, value: object, /) -> None: ...
    def forget(self) -> None: ...
    def next(self, budget_ns: int, /) -> Any:
        """Take the next request if its body is known and its deadline has not passed: its value. Looks for at most `budget_ns`
        (and a second) while the queue is empty, without the GIL past the first microseconds.

        None: nothing was taken. Either nothing came, or the general way has to look.
        """
    def answer(self, body: bytes, /) -> int:
        """Answer the request that `next` took last: the time it is now (CLOCK_MONOTONIC). 0: no room, or the general way knows why."""
