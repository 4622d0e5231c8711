"""The native part: each call is one C function over shared words. See ring.h for the protocol.

Every method of `Ring` raises through the subclass's `_raise_refusal(code)`, for a closed, corrupted, forked or foreign queue.
"""

from asyncio import Future
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from numpy.typing import NDArray
from typing_extensions import Buffer

T = TypeVar("T")

Data: TypeAlias = Buffer | NDArray[Any]
"""Contiguous bytes. Arrays are named apart, because NumPy declares them as buffers only from Python 3.12 on."""

CONTROL_BYTES: int
"""Size of aionn's own words of a queue."""

LONGEST_KNOWN: int
"""Bytes of the longest packet that `Caller` and `Listener` recognise."""

SOON: int
"""Bit of a request queue's event flag: a request will come soon. A driver's wake-up takes 40 to 70 us here, a copy of 1 MB 20 to 70."""

def wait_for(fd: int, until_ns: int, /) -> None:
    """Sleep without the GIL until a descriptor can be read, or until that time in CLOCK_MONOTONIC. 0 means no end.

    A signal runs its Python handlers in the main thread. Their exceptions are raised here, and otherwise the sleep goes on.
    """

def completed(work: Coroutine[Any, Any, T], /) -> T:
    """Run a coroutine that waits for nothing, or whose waits are those of a `ThreadWaits`, and return its result.

    A bare yield is for other tasks, which only a loop has. Any other yield waits for a loop, and is a `RuntimeError`.
    """

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
    def signal(self) -> None:
        """Make whatever sleeps on `reader_fd` or `writer_fd` look again, in both processes, whatever the shared words say."""
    def wake_flag(self, mask: int, /) -> None: ...
    def take_flag(self, mask: int, /) -> int: ...
    def peek_flag(self) -> int: ...
    def await_futex(self, mask: int, /) -> None: ...
    def wait_flag(self, mask: int, deadline_ns: int, /) -> int: ...
    def _closed_word(self) -> bool: ...
    def _set_closed(self) -> None: ...
    def _set_ended(self) -> None: ...
    def _release(self) -> None: ...

class Caller:
    """The app's end of an exchange over two queues of 24-byte elements, and its requests in flight.

    A packet is a body and a stamp. The body's header says how many elements the packet has. The stamp is the last element.
    It holds the request's identity and deadline, or the answer's identity and the time it took. aionn/burst/packets.py has
    the layout. An answer that is not a remembered body with the stamp of a request in flight stays in the queue.

    No method here raises for a queue that cannot be used. It does nothing then, and `Ring`'s methods raise the reason. Use it
    in the thread of its loop. It keeps the queues alive, and their owner closes them. The garbage collector visits it.

    Attributes:
        brisk: whether this end stays awake while it waits, because recent waits were short.
        in_flight: requests sent and not answered.
        answers, answers_at_once: requests that a look has settled, and that were answered in the call that sent them.
        sleeps: how often this end has armed its queue.
        yield_by_ns: from then on the loop must run before a call looks for its answer.
        sleep_fd: what a call sleeps on in a thread without a loop, or -1. It must be readable when the result queue's descriptor is.
        yield_ns, inline_ns: how long after the loop has run that is, and how long such a call looks.
    """

    inline_ns: int
    sleep_fd: int
    yield_ns: int
    yield_by_ns: int
    @property
    def brisk(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def answers(self) -> int: ...
    @property
    def answers_at_once(self) -> int: ...
    @property
    def sleeps(self) -> int: ...
    def __init__(self, requests: Ring, results: Ring, /) -> None: ...
    def begin(
        self,
        depth: int,
        window_ns: int,
        calls: tuple[
            Callable[[], Any],
            Callable[..., object] | None,
            Callable[[], None],
            Callable[[], None],
            Callable[[int], None],
            Callable[[], int],
        ],
        counts: Buffer | None = None,
        burst: int = 0,
        patience_ns: int = 0,
        /,
    ) -> None:
        """Set what this end needs before its first request. Without it every method does nothing.

        Args:
            depth: how many requests may be in flight. Further ones wait here, in order.
            window_ns: how long this end may stay awake. 0 means never.
            calls: the loop's `create_future` and `call_soon`, and four functions. The third one takes everything out of the result queue,
                and calls `answered`. The fourth one is called when a request that waits cannot be sent. The fifth one gets the time at
                which `late` must be called. The sixth one returns when the frame of a traced request was captured, or 0.
                They must not raise. In a thread without a loop, None stands for `call_soon`. A call then looks for its answer for up to
                `inline_ns` without the GIL, if no other such call of the process looks. Then it sleeps on `sleep_fd`.
            counts: a slot of a statistics page (`aionn.pages.BurstSlot`).
            burst: names the burst in trace records.
            patience_ns: a request that is unanswered for longer is overdue; see `late`. 0: none ever is.
        """
    def remember(self, body: bytes, value: object, /) -> None:
        """Know that answer from now on as `value`, which must not refer back to this object.

        At most 4096 bodies are known. When one more comes, all others are forgotten.
        """
    def forget(self) -> None:
        """Forget all bodies."""
    def post(
        self, places: dict[str, NDArray[Any]], inputs: Mapping[str, Any], body: bytes, deadline_ns: int, /
    ) -> tuple[Any, int] | Future[tuple[Any, int] | None] | None:
        """Copy each input into its place, and send the request as `send` does.

        Returns None, with nothing sent, also if the inputs are not a dictionary of exactly these names, with arrays of exactly the
        places' dtypes and shapes.
        """
    def send(
        self, body: bytes, settled: Callable[[Any], object] | None, deadline_ns: int, /
    ) -> tuple[Any, int] | Future[tuple[Any, int] | None] | None:
        """Send a request, or let it wait for its turn.

        Args:
            settled: called once, with the value of the answer, or with None if there will be none. Not called if nothing is sent.
            deadline_ns: CLOCK_MONOTONIC. 0 means no deadline.

        Returns:
            The value of the answer's body, and its service time. Or a future of them, whose result is None if the burst ends. A caller
            that stops waiting for the future calls `leave`. Or None if the request cannot be sent.
        """
    def start(self, body: bytes, settled: Callable[[Any], object], deadline_ns: int, after: int, /) -> int | None:
        """Send a request that no caller awaits, and return its identity. Returns None, and calls nothing, if it cannot be sent now.

        Args:
            settled: as for `send`.
            deadline_ns: from then on the driver does not begin it. This end sets no timer for it. 0 means no deadline.
            after: the request that must succeed before, as `after_request` in packets.py returns it, or 0.
        """
    def make_late(self, identity: int, /) -> None:
        """Make a request late that the driver has not taken, so that it is answered and never run. The lower 32 bits name it.

        If the driver is sure to see that, `settled` is called with None now, and not with the answer.
        """
    def leave(self, future: Future[Any], settled: Callable[[Any], object] | None, /) -> bool:
        """Stop waiting for an answer. A request that has not been sent is dropped. One that the driver has not taken becomes late.

        If the driver is sure to see that, the `settled` that `send` got is called with None now, and not with the answer, and the next
        request may take its place. Returns True if the driver may still run it. Then `settled` is called when it is settled, unless
        `send` got one.
        """
    def answered(self, identity: int, service_ns: int, value: object, /) -> bool:
        """Settle a request with an answer that was not known. Returns False if no such request is in flight."""
    def unanswered(self, identity: int, /) -> bool:
        """Return whether a request with that identity is in flight."""
    def late(self) -> tuple[int, list[tuple[Future[Any], bool]], tuple[int, int]]:
        """Take in the answers that have come. Find the requests that are late, and the oldest one if it is overdue.

        Returns:
            When to call this again, or 0. Each future whose deadline has passed, with whether its request was sent. The identity of an
            overdue request and when it was sent, or zeros. A request is reported again after another `patience_ns`.
        """
    def idle(self) -> Future[None] | None:
        """Return a future that is done when the newest request is settled. Returns None if there is no request."""
    def event(self) -> None:
        """Settle all answers that have come. To be called when the result queue's descriptor can be read."""
    def nudge(self, mask: int, /) -> None:
        """Set these event flag bits of the request queue if its reader sleeps and awaits one of them. The hint may be lost."""
    def end(self) -> int:
        """Settle all requests without an answer, and do nothing from then on. Returns how many of them were in flight."""

class Listener:
    """The driver's end of an exchange, as `Caller`. Lanes read its requests and write its answers while it is lent to them.

    Attributes:
        lent: whether it is lent now.
        blocked: whether an answer had no room in the queue; see `held`.
        running: requests that lanes run now.
        taken, answered: how many requests lanes have taken and answered so far.
        warm_ups: how many warm runs lanes have begun so far.
        foreseen: how many requests came while a lane looked for them after a warm run.
    """

    @property
    def lent(self) -> bool: ...
    @property
    def blocked(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def taken(self) -> int: ...
    @property
    def answered(self) -> int: ...
    @property
    def warm_ups(self) -> int: ...
    @property
    def foreseen(self) -> int: ...
    def __init__(self, requests: Ring, results: Ring, window_ns: int, burst: int = 0, anticipate: bool = False, /) -> None:
        """
        Args:
            window_ns: how long a lane looks for the next request before it sleeps, if recent waits were shorter. 0: it never looks.
            burst: the number of this burst in traces.
            anticipate: let lanes make warm runs before requests are due (rhythm.h). Never with a window of 0.
        """
    def remember(self, body: bytes, value: object, serial: bool = False, kind: int = 0, /) -> None:
        """Know that request from now on as `value`, which must not refer back to this object.

        Args:
            serial: such a request never runs beside another one of this burst.
            kind: requests of one kind may be joined into one run (`Lane.join`). 0 joins with no other request.
        """
    def find(self, body: bytes, /) -> Any:
        """Return the value of a body, or None if it is not known."""
    def has(self, identity: int, /) -> bool:
        """Return whether lanes have taken a request with that identity and not written its answer."""
    def forget(self) -> None:
        """Forget all bodies."""
    def held(self) -> list[tuple[bytes, int, int]]:
        """Return the answers for which the queue had no room, in order, once: body, identity, service time. Call it when no lane runs
        a request of this burst.
        """
    def beside(self, siblings: dict[int, Listener] | None, number: int, /) -> None:
        """Join the listeners of the same client under that number, so that requests of one burst may wait for requests of another.

        None leaves them again, at the end of the burst. Requests that wait for one of this burst are forfeited then.
        """
    def may_run(self, after: int, /) -> bool:
        """Return whether the request that `after` names has succeeded, as far as is known."""
    def note(self, identity: int, succeeded: bool, /) -> None:
        """Note that a request is over that no lane has run. A lane notes its requests by itself, from the status in the answer."""
    def when_idle(self, callback: Callable[[], object], /) -> bool:
        """Return True if no lane runs a request of this burst. Else call back once when that is so, from any thread.

        Call it while the burst is not lent. A second callback replaces the first.
        """

class Lanes:
    """Bursts that are served by the threads of one prepared model; see lanes_object.h. Every method returns at once.

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

        `returned` is called once, by any thread that holds the GIL, when the burst is not lent any more. Lanes may still run requests.

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
    def __init__(self, lanes: Lanes, slot: Buffer | None = None, /) -> None:
        """`slot`: of the statistics page, which shows each request from `next` to `next`."""
    def join(self, most: int, run_ns: int, until_ns: int, /) -> list[Any] | None:
        """Take further requests of the same kind as the one that `next` has returned. Return the values of their bodies.

        One request of each burst is taken in turn. None: a lane is free, which takes such a request at once.

        Args:
            most: how many to take, 63 at most.
            run_ns: how long the joined run may take. A request whose deadline comes before stays in its queue.
            until_ns: wait for requests until then, in CLOCK_MONOTONIC, while there are fewer and some burst has none in hand. 0: do not.
        """
    def next(self, answer: bytes | list[bytes] | None, /) -> Any:
        """Answer the request that the call before has returned, wait for the next one, and return the value of its body.

        Args:
            answer: the body of the answer, or after `join` a list with that of each request in turn. None after None. After a warm run,
                what `warm_up` has returned.

        Returns:
            None if a job waits, or the lanes are stopped. For a warm run, `warm_up` of a value: the next call gets whether that ran.
        """
