"""The queue does what a list does: any sequence of calls on both ends, against a plain model."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aionn.fmq import MessageQueue, MQFlavor, QueueClosedError
from tests.fmq.queues import duplicated

COUNTS = st.integers(0, 20)


class QueueMachine(RuleBasedStateMachine):
    """What both flavours share: two ends, numbered elements."""

    flavor = MQFlavor.SYNCHRONIZED
    queue: MessageQueue
    peer: MessageQueue

    @initialize(quantum=st.sampled_from([1, 3, 8, 24, 64]), capacity=st.integers(1, 17))
    def make(self, quantum: int, capacity: int) -> None:
        self.quantum = quantum
        self.capacity = capacity
        self.queue = MessageQueue.create(quantum, capacity, flavor=self.flavor)
        self.peer = MessageQueue.attach(duplicated(self.queue.descriptor()))
        self.sent = 0
        self.closed = False
        self.start()

    def start(self) -> None:
        self.there: deque[bytes] = deque()

    def fresh(self, count: int) -> list[bytes]:
        return [(self.sent + i).to_bytes(8, "little")[: self.quantum].ljust(self.quantum, b"\xee") for i in range(count)]

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()
            self.peer.close()

    def put(self, count: int, in_place: bool) -> bool:
        elements = b"".join(self.fresh(count))
        if not in_place:
            return self.queue.write(elements)
        pieces = self.queue.begin_write(count)
        if pieces is None:
            return False
        first, second = pieces
        assert len(first) + len(second) == len(elements)
        first[:] = elements[: len(first)]
        second[:] = elements[len(first) :]
        return self.queue.commit_write(count)

    def take(self, count: int, how: str) -> bytes | None:
        if how == "in place":
            pieces = self.peer.begin_read(count)
            if pieces is None:
                return None
            taken = bytes(pieces[0]) + bytes(pieces[1])
            return taken if self.peer.commit_read(count) else None
        return self.peer.read(count)


HOW = st.sampled_from(["read", "in place"])


class SynchronizedMachine(QueueMachine):
    """All or nothing, first in first out, never more than the capacity."""

    @precondition(lambda self: not self.closed)
    @rule(count=COUNTS, in_place=st.booleans())
    def write(self, count: int, in_place: bool) -> None:
        fits = count <= self.capacity - len(self.there)
        assert self.put(count, in_place) is fits
        if fits:
            self.there.extend(self.fresh(count))
            self.sent += count

    @rule(count=COUNTS, how=HOW)
    def read(self, count: int, how: str) -> None:
        if count <= len(self.there):
            assert self.peer.peek(count) == b"".join(list(self.there)[:count])
            assert self.take(count, how) == b"".join(self.there.popleft() for _ in range(count))
        elif not self.closed:
            assert self.take(count, how) is None
        else:
            try:
                self.take(count, how)
            except QueueClosedError:
                return
            raise AssertionError("a closed queue gave more than it had")

    @precondition(lambda self: not self.closed)
    @rule(begun=COUNTS, part=st.floats(0, 1))
    def commit_a_part(self, begun: int, part: float) -> None:
        count = int(begun * part)
        pieces = self.queue.begin_write(begun)
        assert (pieces is not None) is (begun <= self.capacity - len(self.there))
        if pieces is not None:
            elements = b"".join(self.fresh(count)).ljust(begun * self.quantum, b"?")
            pieces[0][:] = elements[: len(pieces[0])]
            pieces[1][:] = elements[len(pieces[0]) :]
            self.queue.commit_write(count)
            self.there.extend(self.fresh(count))
            self.sent += count

    @precondition(lambda self: not self.closed)
    @rule(count=st.integers(1, 20))
    def arm(self, count: int) -> None:
        assert self.peer.arm_reader(count) is (len(self.there) < count)
        assert self.queue.arm_writer(count) is (self.capacity - len(self.there) < count)

    @precondition(lambda self: not self.closed and self.sent > 10)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "there"):
            assert self.peer.available_to_read() == len(self.there)
            assert self.peer.available_to_write() == self.capacity - len(self.there)


class UnsynchronizedMachine(QueueMachine):
    """Overwrites; a reader that is overtaken gets nothing once, and then the newest half."""

    flavor = MQFlavor.UNSYNCHRONIZED

    def start(self) -> None:
        self.all: list[bytes] = []
        self.cursor = 0

    @rule(count=COUNTS, in_place=st.booleans())
    def write(self, count: int, in_place: bool) -> None:
        fits = count <= self.capacity
        assert self.put(count, in_place) is fits
        if fits:
            self.all.extend(self.fresh(count))
            self.sent += count

    @rule(count=COUNTS, how=HOW)
    def read(self, count: int, how: str) -> None:
        taken: Any = self.take(count, how)
        if self.sent - self.cursor > self.capacity:
            assert taken is None
            self.cursor = self.sent - self.capacity // 2
        elif count > self.sent - self.cursor:
            assert taken is None
        else:
            assert taken == b"".join(self.all[self.cursor : self.cursor + count])
            self.cursor += count

    @rule(count=st.integers(1, 20), written=st.integers(1, 20))
    def overwritten_while_reading(self, count: int, written: int) -> None:
        pieces = self.peer.begin_read(count)
        lapped = self.sent - self.cursor > self.capacity
        if pieces is None:
            if lapped:
                self.cursor = self.sent - self.capacity // 2
            return
        if written <= self.capacity:
            assert self.put(written, in_place=False)
            self.all.extend(self.fresh(written))
            self.sent += written
        overwritten = self.sent - self.cursor > self.capacity
        assert self.peer.commit_read(count) is not overwritten
        self.cursor = self.sent - self.capacity // 2 if overwritten else self.cursor + count

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "all"):
            assert self.peer.available_to_read() == min(self.sent - self.cursor, self.capacity)


TestSynchronized = SynchronizedMachine.TestCase
TestUnsynchronized = UnsynchronizedMachine.TestCase
TestSynchronized.settings = TestUnsynchronized.settings = settings(max_examples=60, stateful_step_count=40)
