"""Queues whose descriptor, counters, control words, elements and eventfds a peer chooses."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aionn.errors import AionnError, CallerError, MemoryAllocationError
from aionn.fmq import MessageQueue, MQDescriptor, MQFlavor, layout
from aionn.hal.queues import GrantorDescriptor
from aionn.memory.region import MappingError
from tests.fmq.queues import words_of
from tests.fuzz.choices import Choices

_QUANTA = (1, 3, 8, 24)


def counter_seeds() -> list[bytes]:
    mixed = bytes([2, 20, 0, 3, 5, 8, 4, 0, 60, 1, 16, 7, 2, 60, 1, 0, 17, 1, 255] * 4)
    return [bytes(64), bytes(range(200)), mixed, b"\x03\x10\x01" + b"\x20\x30\x01" * 20]


def counters(data: bytes) -> None:
    """Every call on a queue, between pokes at its shared words: elements, nothing, or one of our errors."""
    choices = Choices(data)
    quantum, capacity = choices.of(_QUANTA), 1 + choices.below(70)
    flavor = MQFlavor.UNSYNCHRONIZED if choices.below(4) == 3 else MQFlavor.SYNCHRONIZED
    queue = MessageQueue.create(quantum, capacity, flavor=flavor)
    events = (queue.reader_fd, queue.writer_fd)
    try:
        with words_of(queue) as words:
            for _ in range(48):
                if not choices.left:
                    break
                act = choices.byte()
                if act < 64:
                    counter = choices.of((words.read, words.written))
                    near = choices.of((0, int(words.read[0]), int(words.written[0])))
                    span = choices.of((0, 1, quantum, capacity * quantum, choices.number()))
                    counter[0] = (near + choices.of((1, -1)) * span) % 2**64
                elif act < 80:
                    words.control[choices.below(len(words.control))] = choices.number() % 2**32
                elif act < 90:
                    words.flag[0] = choices.number() % 2**32
                elif act < 100:
                    words.data[choices.below(len(words.data))] = choices.byte()
                elif act < 112 and events[0] >= 0:
                    _poke_event(choices.of(events), choices)
                else:
                    call(queue, choices)
    finally:
        queue.close()


def _poke_event(fd: int, choices: Choices) -> None:
    """The peer has the eventfds too: it may fill them, drain them, and make them block."""
    blocking = os.get_blocking(fd)
    os.set_blocking(fd, False)  # it is the queue that must not hang, not who pokes at it
    with suppress(BlockingIOError):
        if choices.below(2):
            os.eventfd_read(fd)
        else:
            os.eventfd_write(fd, min(choices.number() % 2**64, 2**64 - 2))
    os.set_blocking(fd, blocking if choices.byte() < 128 else not blocking)


def call(queue: MessageQueue, choices: Choices) -> None:
    """One call, and what its answer must look like."""
    count = choices.of((0, 1, 2, queue.capacity, queue.capacity + 1, choices.below(80), choices.number()))
    few = count if 0 <= count <= 80 else 81
    calls: list[Callable[[], Any]] = [
        lambda: queue.write(bytes(queue.quantum * few)),
        lambda: _taken(queue, queue.read(count), count),
        lambda: _taken(queue, queue.peek(count), count),
        lambda: queue.begin_write(count),
        lambda: queue.begin_read(count),
        lambda: queue.commit_write(count),
        lambda: queue.commit_read(count),
        lambda: queue.arm_reader(count, choices.number() % 2**32),
        lambda: queue.arm_writer(count),
        queue.disarm_reader,
        queue.disarm_writer,
        lambda: _bounded(queue, queue.available_to_read()),
        lambda: _bounded(queue, queue.available_to_write()),
        queue.clear_reader_event,
        queue.clear_writer_event,
        lambda: queue.spin_until_readable(0),
        lambda: queue.reader_flag.wake(choices.number()),
        lambda: queue.await_futex(choices.byte()),
        lambda: queue.wait_flag(1 + choices.below(255), 0),
        lambda: queue.write(bytes(choices.below(200))),
    ]
    with suppress(AionnError):
        choices.of(calls)()


def _taken(queue: MessageQueue, elements: bytes | None, count: int) -> None:
    assert elements is None or len(elements) == count * queue.quantum


def _bounded(queue: MessageQueue, elements: int) -> None:
    assert 0 <= elements <= queue.capacity, elements


# ---- descriptors ------------------------------------------------------------------------------------------------------


def descriptor_seeds() -> list[bytes]:
    return [bytes(40), bytes([0, 0, 5, 0, 9] * 12), bytes(range(256)), bytes([200] * 60), bytes([7, 1, 2, 0, 255, 100, 8] * 10)]


def descriptors(data: bytes) -> None:
    """Any grantors over any kind of memory: attached and harmless, or refused as documented; nothing stays open."""
    choices = Choices(data)
    before = len(os.listdir("/proc/self/fd"))
    grantors, header_bytes = layout.grantors_for(8, 16)
    parts = [[part.fd_index, part.offset, part.extent] for part in grantors]
    for _ in range(choices.below(5)):
        part = choices.of(parts)
        part[choices.below(3)] = choices.number()
    if choices.byte() > 240:
        parts = parts[: choices.below(6)]
    if choices.byte() > 240:
        parts.append([choices.number(), choices.number(), choices.number()])
    quantum = 8 if choices.byte() < 224 else choices.number()
    flavor = choices.of((MQFlavor.SYNCHRONIZED, MQFlavor.SYNCHRONIZED, MQFlavor.UNSYNCHRONIZED))
    twist = choices.byte()
    memories = [memory(choices, header_bytes) for _ in range(1 if twist < 192 else choices.below(4))]
    events = 2 if flavor is MQFlavor.SYNCHRONIZED and len(parts) > layout.CONTROL else 0
    events = events if choices.byte() < 240 else choices.below(4)
    event_fds = [os.eventfd(0, os.EFD_CLOEXEC) if choices.byte() < 240 else memory(choices, header_bytes) for _ in range(events)]
    fds = (*memories, *event_fds)
    descriptor = MQDescriptor(tuple(GrantorDescriptor(*part) for part in parts), quantum, flavor, fds)
    try:
        queue = MessageQueue.attach(descriptor, choices.of((None, None, 8, 16)))
    except (CallerError, MappingError, MemoryAllocationError):
        pass
    else:
        for _ in range(12):
            if choices.left:
                call(queue, choices)
        queue.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor stays open, or one that is not its own was closed"


def memory(choices: Choices, size_bytes: int) -> int:
    """A descriptor that a peer may send as memory."""
    kind = choices.byte()
    if kind > 248:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.close(write)
        return read
    if kind > 244:
        return os.eventfd(0, os.EFD_CLOEXEC)
    if kind > 240:
        return os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes if kind < 176 else choices.below(4 * size_bytes))
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if kind < 200 else choices.below(32)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    if kind > 236:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        return own
    return fd
