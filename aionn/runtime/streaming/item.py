"""What the source of a stream yields, and what the stream makes of it.

Each frame that a source has yielded is counted once: by the burst as computed or failed, else by `Arrivals` as dropped.

Invariant
    An entry is in `_unanswered` from its arrival until it has been counted. A leased frame of an entry that is dropped is released.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from aionn import trace
from aionn.errors import DeadlineError
from aionn.pages.app_layout import AGES, DROPPED, DROPPED_LATE, DROPPED_REJECTED, DROPPED_REPLACED
from aionn.runtime.executing.arguments import Outputs, check_mapping
from aionn.runtime.streaming.connection import BurstConnection, trace_of
from aionn.runtime.streaming.frame import Frame, Leases, contents_of, end_lease, take
from aionn.tasks import Answer, running_loop

_REASONS = {"replaced": DROPPED_REPLACED, "late": DROPPED_LATE, "rejected": DROPPED_REJECTED}


class Item(msgspec.Struct, frozen=True, eq=False):
    """One frame of a stream with a tag, yielded by a source of `Burst.map`.

    Attributes:
        inputs: arrays by name, as for `Burst.compute`, or a frame from `Burst.lease()`.
        tag: any object, such as a time stamp, a picture or a camera. It comes back as `StreamResult.tag`.

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

    def __post_init__(self) -> None:
        check_mapping(self.inputs)


class Entry:
    """One frame of a running stream.

    Attributes:
        seq: its number in its source, from 0.
        inputs: as for `Burst.compute`. tag: of its `Item`, or None.
        arrived_ns: when the source yielded it (CLOCK_MONOTONIC).
        answer: what the consumer of the results awaits, once the frame has been admitted.
    """

    __slots__ = ("_leased", "answer", "arrived_ns", "inputs", "seq", "tag")

    answer: Answer[Outputs]

    def __init__(self, seq: int, given: Mapping[str, Any] | Item, arrived_ns: int, connection: BurstConnection) -> None:
        """Own the frame that `given` may hold. This may run in a source's thread.

        Raises:
            CallerError: the frame belongs to another burst, or has been yielded before.
        """
        inputs = given.inputs if isinstance(given, Item) else given
        self.tag: Any = given.tag if isinstance(given, Item) else None
        # The first look saves a slow one: the class of frames is an abstract base class's.
        self._leased = take(inputs, connection) if type(inputs) is not dict and isinstance(inputs, Frame) else None
        self.inputs = inputs if self._leased is None else self._leased
        self.seq = seq
        self.arrived_ns = arrived_ns

    def admit(self) -> None:
        """Make its `answer`."""
        self.answer = Answer(running_loop())

    @property
    def captured_ns(self) -> int:
        """When it was captured, as the app has noted it in a leased frame, else when it arrived."""
        leased = self._leased
        return self.arrived_ns if leased is None else leased.captured_ns or self.arrived_ns

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

    def __init__(self, connection: BurstConnection) -> None:
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
        age_ns = time.monotonic_ns() - entry.arrived_ns
        self._executor.counts.took(AGES, age_ns)
        return age_ns / 1e9

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Leave an entry to the burst's counts if the driver has answered with `error`. Else drop it."""
        if error in self._executor.failures:
            self._unanswered.discard(entry)
        self.drop_frame(entry, "late" if isinstance(error, DeadlineError) else "failed")

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
