"""The native part: each call is one C function over shared words. See ring.h for the protocol.

Every method of `Ring` raises through the subclass's `_refuse(code)`, for a closed, corrupted, forked or foreign queue.
"""

from collections.abc import Callable
from typing import Any, Literal, SupportsIndex, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

Data: TypeAlias = Buffer | NDArray[Any]
"""Contiguous bytes. Arrays are named apart, because NumPy declares them as buffers only from Python 3.12 on."""

CONTROL_BYTES: int

class Ring:
    """One process's handle of one queue.

    It holds the buffers of its parts until `_release`, so nothing is unmapped under it. Counts are elements.
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
        """Write whole elements, all or nothing, without waiting. Wake a sleeping reader. Returns False if there is less room.

        A synchronized queue is full when `available_to_write()` returns 0. An unsynchronized queue overwrites its oldest
        elements, and refuses only more than it can hold.

        Raises:
            CallerError: not a whole number of elements, or the queue cannot be used here.
            QueueClosedError: the peer has closed the queue. If the peer is gone, the error given to `end` instead.
            QueueCorruptedError: a counter has an impossible value.
        """
    def read(self, count: SupportsIndex, /) -> bytes | None:
        """Take `count` elements, all or nothing, without waiting. Wake a sleeping writer. Returns None if fewer are there.

        An unsynchronized reader that the writer has overtaken gets None once and goes on with the newest half.

        Raises:
            CallerError, QueueClosedError, QueueCorruptedError: as `write`, but the end counts only after the last element.
        """
    def peek(self, count: SupportsIndex, /) -> bytes | None:
        """Copy `count` elements without taking them. Returns None if fewer are there."""
    def read_into(self, buffer: Data, /) -> bool:
        """Take as many elements as fill `buffer` (writable, contiguous). Returns False if fewer are there."""
    def available_to_read(self) -> int:
        """Return how many elements can be read now."""
    def available_to_write(self) -> int:
        """Return how many elements can be written now without overwriting elements that this handle has not read."""
    def _begin_write(self, count: SupportsIndex, /) -> tuple[int, int, int] | None: ...
    def _begin_read(self, count: SupportsIndex, /) -> tuple[int, int, int] | None: ...
    def commit_write(self, count: SupportsIndex, /) -> bool:
        """Publish the first `count` elements of the begun transaction. Wake a sleeping reader.

        Raises:
            CallerError: more than was begun.
        """
    def commit_read(self, count: SupportsIndex, /) -> bool:
        """Take the first `count` elements of the begun transaction. Wake a sleeping writer.

        Returns False (unsynchronized only) if the writer has overwritten them meanwhile. Throw their copies away then.

        Raises:
            CallerError: more than was begun.
        """
    def arm_reader(self, count: SupportsIndex = 1, mask: int = 0, /) -> bool:
        """Ask for a wake through `reader_fd` at the next commit.

        Returns True if the side is armed and fewer than `count` elements are there: sleep now. Returns False, not armed, if
        there is something to see, which includes a closed or corrupted queue: look again. Bits of the event flag word in
        `mask` end the sleep too. A count of 0 waits for those alone. After each wake, call this again before sleeping.
        """
    def arm_writer(self, count: SupportsIndex = 1, mask: int = 0, /) -> bool:
        """Arm as `arm_reader`, for room to write, through `writer_fd`."""
    def disarm_reader(self) -> None:
        """End the arming, because no task sleeps on `reader_fd` any more. A token in flight stays and costs one look too many."""
    def disarm_writer(self) -> None: ...
    def clear_reader_event(self) -> None:
        """Take the token out of `reader_fd`, if there is one. A hostile peer cannot make this call block."""
    def clear_writer_event(self) -> None: ...
    def spin_until_readable(self, nanoseconds: int, count: SupportsIndex = 1, /) -> bool:
        """Look for `count` elements for at most so long, at most a second, without the GIL. Returns True for "look now".

        Publish this CPU as the reader's. Return after one look if the writer was last seen on the same CPU.
        """
    def wake_flag(self, mask: int, /) -> None: ...
    def take_flag(self, mask: int, /) -> int: ...
    def peek_flag(self) -> int: ...
    def await_futex(self, mask: int, /) -> None: ...
    def wait_flag(self, mask: int, deadline_ns: int, /) -> int: ...
    def publish_writer_cpu(self) -> int | None:
        """Publish for the reader on which CPU this writing thread runs now, and return it."""
    def reader_cpu(self) -> int | None:
        """Return the CPU on which the reader was last seen, or None if it is not known."""
    def writer_cpu(self) -> int | None: ...
    def _closed_word(self) -> bool: ...
    def _set_closed(self) -> None: ...
    def _set_ended(self) -> None: ...
    def _release(self) -> None: ...

class Caller:
    """The app's end of an exchange over two queues of 24-byte elements: packets that come again with another last element.

    A packet is a body and a stamp. The body's header says how many elements the packet has. The stamp is the last element.
    It holds the request's identity and deadline, or the answer's identity and the time it took. aionn/burst/packets.py has
    the layout. Any packet that is not a remembered body with its stamp stays in the queue.

    No method here raises for a queue that cannot be used. It does nothing then, and `Ring`'s methods raise the reason. Use it
    in one thread. It keeps the queues alive, and their owner closes them.

    Attributes:
        waits: calls that were answered at once, counted up. Its reader sets it back to 0.
    """

    waits: int

    def __init__(self, requests: Ring, results: Ring, /) -> None: ...
    def remember(self, body: bytes, value: object, /) -> None:
        """Know that answer from now on as `value`, which must not refer back to this object.

        At most 4096 bodies are known. When one more comes, all others are forgotten.
        """
    def forget(self) -> None:
        """Forget all bodies."""
    def call(
        self, body: bytes, identity: int, deadline_ns: int, not_after_ns: int, budget_ns: int, /
    ) -> tuple[Any, int] | Literal[False] | None:
        """Write a request and look for its answer for at most `budget_ns`, at most a second.

        Args:
            not_after_ns: CLOCK_MONOTONIC. From then on the call does nothing.

        Returns:
            The value of the answer's body, and its service time. None if the request was written, but the queue does not
            hold exactly one known answer to it. False if the request was not written.
        """
    def send(self, body: bytes, identity: int, deadline_ns: int, /) -> bool:
        """Write a request, all or nothing. Returns False if it was not written. `Ring.write` finds out why."""
    def take(self) -> list[tuple[Any, int, int]]:
        """Take every known answer up to the first other packet. Returns (value, service time, identity) of each."""
    def nudge(self, mask: int, /) -> None:
        """Set these event flag bits of the request queue if its reader sleeps and awaits one of them. The hint may be lost."""

class Listener:
    """The driver's end of an exchange, as `Caller`. Lanes read its requests and write its answers while it is lent to them.

    Attributes:
        lent: whether it is lent now.
        running: requests that lanes run now.
        taken, answered: how many requests lanes have taken and answered so far.
    """

    @property
    def lent(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def taken(self) -> int: ...
    @property
    def answered(self) -> int: ...
    def __init__(self, requests: Ring, results: Ring, window_ns: int, /) -> None:
        """`window_ns`: how long a lane looks for the next request before it sleeps, if recent waits were shorter. 0: it never looks."""
    def remember(self, body: bytes, value: object, serial: bool = False, /) -> None:
        """Know that request from now on as `value`, which must not refer back to this object.

        Args:
            serial: such a request never runs beside another one of this burst.
        """
    def find(self, body: bytes, /) -> Any:
        """Return the value of a body, or None if it is not known."""
    def forget(self) -> None:
        """Forget all bodies."""
    def held(self) -> list[tuple[bytes, int, int]]:
        """Return the answers for which the queue had no room, in order, once: body, identity, service time. Call it when it is returned."""

class Lanes:
    """Bursts that are served by the threads of one executable; see _lanes.c. Every method returns at once.

    Attributes:
        stopped: whether `stop` was called.
        sleeping: how many lanes wait without looking.
        lent: how many bursts are lent.
    """

    @property
    def stopped(self) -> bool: ...
    @property
    def sleeping(self) -> int: ...
    @property
    def lent(self) -> int: ...
    def __init__(self) -> None:
        """Raises `OSError` without a free descriptor."""
    def lend(self, listener: Listener, returned: Callable[[], object], /) -> bool:
        """Serve the known packets of a burst from now on. Returns False if its queue is closed, or the lanes are stopped.

        `returned` is called once, by any thread that holds the GIL, when the burst is not lent any more and no lane runs a request of it.

        Raises:
            OSError: the system cannot watch one more queue.
        """
    def recall(self, listener: Listener, /) -> None:
        """Take no more requests of a burst. Does nothing if it is not lent."""
    def announce(self) -> None:
        """Make one call of `Lane.next` return None, for a job that its thread takes elsewhere."""
    def stop(self) -> None:
        """Give every burst back, and let every `Lane.next` return None."""

class Lane:
    """One thread of `Lanes`. Only that thread uses it.

    Attributes:
        identity, deadline_ns: of the request that `next` returned last. A deadline of 0 means no deadline.
    """

    @property
    def identity(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    def __init__(self, lanes: Lanes, /) -> None: ...
    def next(self, answer: bytes | None, /) -> Any:
        """Answer the request that the call before has returned, wait for the next one, and return the value of its body.

        Args:
            answer: the body of the answer. None after None.

        Returns:
            None if a job waits, or the lanes are stopped.
        """
