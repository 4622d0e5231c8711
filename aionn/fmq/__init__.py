"""Fast message queues: elements from one process to another through shared memory, at the price of a few loads and stores.

The design on one page
    `layout`         where the shared words lie; what a peer's descriptor must be like. libfmq's layout, plus words of our own.
    `ring.h`         the protocol in C11: counters, armed words, event flag word. No Python in it; tested natively. `spin.h`:
                     looking at a queue for a while without sleeping.
    `_ring`          `Ring`: ring.h for Python, one C call per operation.
    `exchange.h`     packets that come again, but for their last element; `Caller` and `Listener` are it for Python (`_exchange.c`).
    `message_queue`  `MessageQueue(Ring)`: making, attaching, waiting, ending, closing.
    `waiting`        the tasks that wait on one side of one queue; one persistent `add_reader` for all of them.
    `event_flag`     `EventFlag`: 32 bits with libfmq's semantics, for threads, libfmq peers and tasks.
    `descriptors`    the file descriptors of both: what a peer's eventfd must be, and letting go of all, once.
    `errors`         what a queue refuses with.

Why it is fast: a commit is one store and one fence; a system call is made only if the other side sleeps.
Why it is safe: a peer can be late, dead, broken or hostile. Descriptors are checked before anything is mapped, counters
at every use; the worst a peer can do is to end its own queue (`QueueCorruptedError`), or to wake us for nothing.
Why nobody sleeps through a commit: both sides fence between their own store and their look at the other's
(ring.h, and the model checker that runs it in tests/fmq/test_weak_memory.py).
"""

from aionn.fmq._ring import Caller, Listener
from aionn.fmq.errors import QueueClosedError, QueueCorruptedError
from aionn.fmq.event_flag import EventFlag
from aionn.fmq.layout import NOT_EMPTY, NOT_FULL
from aionn.fmq.message_queue import MessageQueue
from aionn.hal.types import MQDescriptor, MQFlavor

__all__ = [
    "NOT_EMPTY",
    "NOT_FULL",
    "Caller",
    "EventFlag",
    "Listener",
    "MQDescriptor",
    "MQFlavor",
    "MessageQueue",
    "QueueClosedError",
    "QueueCorruptedError",
]
