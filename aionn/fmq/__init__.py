"""Fast message queues: elements from one process to another through shared memory, at the price of a few loads and stores.

The design on one page
    `layout`         where the shared words lie, and the checks of a peer's descriptor; libfmq's layout, plus words for aionn
    `ring.h`         the protocol in C11: counters, armed words, event flag word; without Python, tested natively
    `spin.h`         looking at a queue for a while without sleeping, and the rule for how long
    `exchange.h`     packets that come again with another last element
    `rhythm.h`       when the next request of a burst is due, and whether to prepare for it
    `_ring`          the extension module: one C call for each operation (_ring.pyi); each object has its invariants in a header
        `_module.c`      makes the types from the tables of the others
        `_ring.c`        the life of a `Ring`: its buffers, its end, whether a call may use it (ring_object.h)
        `_transfer.c`    elements in and out
        `_waiting.c`     sleeping and waking; coroutines that run to their end in a thread without a loop
        `_exchange.c`    what `Caller` and `Listener` share: exchange.h for Python (exchange_object.h)
        `_flight.c`      the app's requests in flight: sent in order, watched, settled (caller_object.h)
        `_request.c`     sending one of them
        `_caller.c`      `Caller`, the app's end of a burst
        `_listener.c`    `Listener`, the driver's end of one burst (lanes_object.h)
        `_lanes.c`       `Lanes`: which bursts are lent to the threads of one prepared model
        `_lane.c`        `Lane`: one of these threads, which takes, answers and waits
        `_anticipate.c`  lets a lane run the model once before the next request is due
    `message_queue`  `MessageQueue(Ring)`: making, attaching, waiting, ending, closing
    `waiting`        the tasks that wait on one side of one queue; one persistent `add_reader` for all of them; errors of a queue
    `thread_waits`   the same for a thread that runs no event loop: futures, timers and one native sleep over all descriptors
    `event_flag`     `EventFlag`: 32 bits with libfmq's semantics, for threads, libfmq peers and tasks
    `descriptors`    the file descriptors of a queue: their check and their release

Why it is fast: a commit is one store and one fence. A system call is made only if the other side sleeps.
Why it is safe: a peer can be late, dead, broken or hostile. Descriptors are checked before anything is mapped, and
counters at every use. The worst a peer can do is to end its queue (`QueueCorruptedError`), or to wake this side for nothing.
Why no side sleeps through a commit: both sides fence between their store and their look at the other's store. ring.h has
the proof, and a model checker runs it in tests/fmq/test_weak_memory.py. tests/fmq/lane_model.py does so for lanes.
What exists for parity with the reference: the unsynchronized flavour, libfmq's layout, and waiting by futex.
"""

from aionn.fmq._ring import LONGEST_KNOWN, SOON, Caller, Lane, Lanes, Listener, completed
from aionn.fmq.event_flag import EventFlag
from aionn.fmq.layout import NOT_EMPTY, NOT_FULL
from aionn.fmq.message_queue import MessageQueue
from aionn.fmq.waiting import QueueClosedError, QueueCorruptedError
from aionn.hal.queues import MQDescriptor, MQFlavor

__all__ = [
    "LONGEST_KNOWN",
    "NOT_EMPTY",
    "NOT_FULL",
    "SOON",
    "Caller",
    "EventFlag",
    "Lane",
    "Lanes",
    "Listener",
    "MQDescriptor",
    "MQFlavor",
    "MessageQueue",
    "QueueClosedError",
    "QueueCorruptedError",
    "completed",
]
