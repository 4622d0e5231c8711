"""libfmq's unit tests, row by row: `mq_test.cpp` and `fmq_unit_tests.cpp`. Elements u8, 2,048 of them, unless a row says otherwise.

Left out: what converts between HIDL and AIDL, and what only compiles. Where libfmq makes an invalid object and a log
line, aionn refuses with `CallerError`; where it calls a corruption handler, aionn raises `QueueCorruptedError`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from aionn.errors import CallerError, DeadlineError, MemoryAllocationError
from aionn.fmq import NOT_EMPTY, NOT_FULL, MessageQueue, MQDescriptor, MQFlavor
from aionn.hal.queues import GrantorDescriptor
from aionn.memory.region import Region
from tests.fmq.queues import both_ends, counting, duplicated, open_fds

N = 2048


def queue_of(flavor: MQFlavor, element: Any = np.uint8, capacity: int = N) -> Iterator[MessageQueue]:
    queue = MessageQueue.create(element, capacity, flavor=flavor)
    yield queue
    queue.close()


@pytest.fixture
def sync() -> Iterator[MessageQueue]:
    yield from queue_of(MQFlavor.SYNCHRONIZED)


@pytest.fixture
def unsync() -> Iterator[MessageQueue]:
    yield from queue_of(MQFlavor.UNSYNCHRONIZED)


def data(count: int) -> bytes:
    return counting(count).tobytes()


def write_in_place(queue: MessageQueue, what: bytes) -> None:
    pieces = queue.begin_write(len(what) // queue.quantum)
    assert pieces is not None
    first, second = pieces
    assert len(first) + len(second) == len(what)
    first[:] = what[: len(first)]
    second[:] = what[len(first) :]
    assert queue.commit_write(len(what) // queue.quantum)


def read_in_place(queue: MessageQueue, count: int) -> bytes:
    pieces = queue.begin_read(count)
    assert pieces is not None
    first, second = pieces
    what = bytes(first) + bytes(second)
    assert len(what) == count * queue.quantum
    assert queue.commit_read(count)
    return what


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work`; what is returned waits for it and gives its result or its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


# ---- bad configurations ---------------------------------------------------------------------------------------------


def test_bad_queue_config_queue_size_too_large() -> None:
    with pytest.raises(CallerError, match="elements of 2 bytes"):
        MessageQueue.create(np.uint16, (2**64 - 1) // 2 + 1)


def test_bad_queue_config_queue_size_too_large_for_aidl() -> None:
    with pytest.raises(CallerError, match="elements of 2 bytes"):
        MessageQueue.create(np.uint16, (2**63 - 1) // 2 + 1)


def foreign_memory(size_bytes: int = 4096 * 4) -> int:
    region = Region.allocate(size_bytes)
    fd = os.dup(region.fileno())
    region.close()
    return fd


def test_bad_queue_config_sanity_check() -> None:
    """libfmq maps all three grantors onto the same bytes and calls that valid; a write would then change its own counter."""
    same = GrantorDescriptor(0, 0, 4096)
    with pytest.raises(CallerError, match="overlap"):
        MessageQueue.attach(MQDescriptor((same, same, same), 2, MQFlavor.SYNCHRONIZED, (foreign_memory(),)))
    apart = tuple(GrantorDescriptor(0, 4096 * index, 4096) for index in range(3))
    queue = MessageQueue.attach(MQDescriptor(apart, 2, MQFlavor.SYNCHRONIZED, (foreign_memory(),)), np.uint16)
    assert queue.write(b"ab")
    assert queue.read(1) == b"ab"
    queue.close()


def test_bad_queue_config_bad_fd_index() -> None:
    parts = (GrantorDescriptor(5, 0, 8), GrantorDescriptor(0, 8, 8), GrantorDescriptor(0, 16, 64))
    with pytest.raises(CallerError, match="fd index 5"):
        MessageQueue.attach(MQDescriptor(parts, 2, MQFlavor.SYNCHRONIZED, (foreign_memory(),)))


def test_bad_queue_config_extent_too_large() -> None:
    parts = (GrantorDescriptor(0, 0, 0xFFFFF041), GrantorDescriptor(0, 8, 8), GrantorDescriptor(0, 16, 64))
    with pytest.raises(CallerError, match="grantor 0"):
        MessageQueue.attach(MQDescriptor(parts, 2, MQFlavor.SYNCHRONIZED, (foreign_memory(),)))


def test_bad_queue_config_look_for_leaked_fds() -> None:
    before = open_fds()
    for _ in range(100):
        with pytest.raises((CallerError, MemoryAllocationError)):
            MessageQueue.create(np.uint32, (2**64 - 1) // 4 - 4096)
    assert open_fds() == before


def test_bad_queue_config_negative_aidl_descriptor(sync: MessageQueue) -> None:
    with pytest.raises(CallerError, match="quantum of -10"):
        MessageQueue.attach(replace(duplicated(sync.descriptor()), quantum=-10))


def test_bad_queue_config_negative_aidl_descriptor_grantor(sync: MessageQueue) -> None:
    descriptor = duplicated(sync.descriptor())
    with pytest.raises(CallerError, match="grantor 0"):
        MessageQueue.attach(replace(descriptor, grantors=(GrantorDescriptor(0, 12, -10), *descriptor.grantors[1:])))


def test_bad_queue_config_mismatched_payload_size() -> None:
    queue = MessageQueue.create(np.uint16, 64)
    MessageQueue.attach(duplicated(queue.descriptor()), np.uint16).close()
    with pytest.raises(CallerError, match="quantum of 8 bytes, the expected element has 2"):
        MessageQueue.attach(replace(duplicated(queue.descriptor()), quantum=8), np.uint16)
    queue.close()


def test_double_fd_failures_invalid_fd() -> None:
    with pytest.raises(CallerError, match="not open"):
        MessageQueue.create(np.uint16, 64, buffer_fd=3000)


def test_double_fd_failures_invalid_fd_size() -> None:
    before = open_fds()
    with pytest.raises(CallerError, match="2048"):
        MessageQueue.create(np.uint16, 1024, buffer_fd=foreign_memory(2048 - 8))
    assert open_fds() == before


def test_double_fd_failures_larger_fd_size() -> None:
    queue = MessageQueue.create(np.uint16, 1024, buffer_fd=foreign_memory(2048 + 8))
    peer = MessageQueue.attach(duplicated(queue.descriptor()), np.uint16)
    assert [part.fd_index for part in queue.descriptor().grantors] == [0, 0, 1, 0, 0]
    assert queue.write(counting(1024, np.uint16))
    assert peer.read(1024) == counting(1024, np.uint16).tobytes()
    peer.close()
    queue.close()


# ---- blocking --------------------------------------------------------------------------------------------------------


def test_blocking_read_writes_small_input_test_1(sync: MessageQueue) -> None:
    sync.writer_flag.wake(NOT_FULL)

    def reader() -> bytes | None:
        assert sync.reader_flag.wait_in_thread(NOT_EMPTY, 5) == NOT_EMPTY
        taken = sync.read(64)
        sync.reader_flag.wake(NOT_FULL)
        return taken

    joined = in_thread(reader)
    assert sync.write(data(64))
    sync.writer_flag.wake(NOT_EMPTY)
    assert joined() == data(64)


def test_blocking_read_writes_small_input_test_2(sync: MessageQueue) -> None:
    joined = in_thread(lambda: sync.read_in_thread(64, 5))
    sync.write_in_thread(data(64), 5)
    assert joined() == data(64)


def test_blocking_read_writes_blocking_time_out_test(sync: MessageQueue) -> None:
    with pytest.raises(DeadlineError):
        sync.reader_flag.wait_in_thread(NOT_EMPTY, 0.05)


def test_blocking_read_writes_short_event_flag_wait_with_wake_test(sync: MessageQueue) -> None:
    sync.writer_flag.wake(NOT_EMPTY)
    assert sync.reader_flag.wait_in_thread(NOT_EMPTY, 1e-9) == NOT_EMPTY


def test_blocking_read_writes_short_event_flag_wait_without_wake_test(sync: MessageQueue) -> None:
    with pytest.raises(DeadlineError):
        sync.reader_flag.wait_in_thread(NOT_EMPTY, 1e-9)


def test_blocking_read_writes_fmq_write_and_read_with_short_event_flag_wait_test(sync: MessageQueue) -> None:
    assert sync.write(data(16))
    sync.writer_flag.wake(NOT_EMPTY)
    assert sync.read_in_thread(16, 1e-9) == data(16)


def test_queue_size_odd_event_flag_test() -> None:
    with both_ends(np.uint8, 2049) as (queue, peer):
        queue.write_in_thread(data(64), 1)
        assert peer.read_in_thread(64, 1) == data(64)


# ---- synchronized ----------------------------------------------------------------------------------------------------


def test_synchronized_read_writes_small_input_test_1(sync: MessageQueue) -> None:
    assert sync.write(data(16))
    assert sync.read(16) == data(16)


def test_synchronized_read_writes_small_input_test_2(sync: MessageQueue) -> None:
    write_in_place(sync, data(16))
    assert read_in_place(sync, 16) == data(16)


def test_synchronized_read_writes_small_input_test_3(sync: MessageQueue) -> None:
    """libfmq: by getSlot. Here: element by element, through the pieces."""
    pieces = sync.begin_write(16)
    assert pieces is not None
    slots = [piece[at : at + 1] for piece in pieces for at in range(len(piece))]
    assert len(slots) == 16
    for value, slot in enumerate(slots):
        slot[0] = value
    sync.commit_write(16)
    assert read_in_place(sync, 16) == data(16)


def test_synchronized_read_writes_read_when_empty_1(sync: MessageQueue) -> None:
    assert sync.available_to_read() == 0
    assert sync.read(2) is None


def test_synchronized_read_writes_read_when_empty_2(sync: MessageQueue) -> None:
    assert sync.begin_read(2) is None


def test_synchronized_read_writes_write_when_full_1(sync: MessageQueue) -> None:
    assert sync.write(data(N))
    assert sync.available_to_write() == 0
    assert not sync.write(b"\x01")
    assert sync.read(N) == data(N)


def test_synchronized_read_writes_write_when_full_2(sync: MessageQueue) -> None:
    assert sync.write(data(N))
    assert sync.begin_write(1) is None


def test_synchronized_read_writes_large_input_test_1(sync: MessageQueue) -> None:
    assert sync.write(data(N))
    assert sync.read(N) == data(N)


def test_synchronized_read_writes_large_input_test_2(sync: MessageQueue) -> None:
    assert sync.available_to_read() == 0
    assert not sync.write(data(4096))
    assert sync.read(4096) is None
    assert sync.available_to_read() == 0


def test_synchronized_read_writes_large_input_test_3(sync: MessageQueue) -> None:
    assert sync.write(data(N))
    assert not sync.write(b"\x01")
    assert sync.read(N) == data(N)


def test_synchronized_read_writes_large_input_test_4(sync: MessageQueue) -> None:
    assert sync.begin_write(4096) is None


def test_synchronized_read_writes_multiple_read(sync: MessageQueue) -> None:
    assert sync.write(data(500))
    assert b"".join(sync.read(100) or b"" for _ in range(5)) == data(500)


def test_synchronized_read_writes_multiple_write(sync: MessageQueue) -> None:
    for start in range(0, 500, 100):
        assert sync.write(data(500)[start : start + 100])
    assert sync.read(500) == data(500)


def test_synchronized_read_writes_read_write_wrap_around_1(sync: MessageQueue) -> None:
    assert sync.write(data(N - 1))
    assert sync.read(N - 1) == data(N - 1)
    assert sync.write(data(N))
    assert sync.read(N) == data(N)


def test_synchronized_read_writes_read_write_wrap_around_2(sync: MessageQueue) -> None:
    write_in_place(sync, data(N - 1))
    assert read_in_place(sync, N - 1) == data(N - 1)
    write_in_place(sync, data(N))
    assert read_in_place(sync, N) == data(N)


# ---- unsynchronized --------------------------------------------------------------------------------------------------


def test_unsynchronized_small_input_test_1(unsync: MessageQueue) -> None:
    assert unsync.write(data(16))
    assert unsync.read(16) == data(16)


def test_unsynchronized_read_when_empty(unsync: MessageQueue) -> None:
    assert unsync.available_to_read() == 0
    assert unsync.read(2) is None


def test_unsynchronized_write_when_full_1(unsync: MessageQueue) -> None:
    assert unsync.write(data(N))
    assert unsync.available_to_write() == 0
    assert unsync.write(b"\x01")
    assert unsync.read(N) is None


def test_unsynchronized_write_when_full_2(unsync: MessageQueue) -> None:
    assert unsync.write(data(N))
    write_in_place(unsync, b"\x01")
    assert unsync.read(N) is None


def test_unsynchronized_large_input_test_1(unsync: MessageQueue) -> None:
    assert unsync.write(data(N))
    assert unsync.read(N) == data(N)


def test_unsynchronized_large_input_test_2(unsync: MessageQueue) -> None:
    assert not unsync.write(data(4096))
    assert unsync.read(4096) is None
    assert unsync.available_to_read() == 0


def test_unsynchronized_large_input_test_3(unsync: MessageQueue) -> None:
    assert unsync.write(data(N))
    assert unsync.write(b"\x01")
    assert unsync.read(N) is None


def test_unsynchronized_multiple_read(unsync: MessageQueue) -> None:
    assert unsync.write(data(500))
    assert b"".join(unsync.read(100) or b"" for _ in range(5)) == data(500)


def test_unsynchronized_multiple_write(unsync: MessageQueue) -> None:
    for start in range(0, 500, 100):
        assert unsync.write(data(500)[start : start + 100])
    assert unsync.read(500) == data(500)


def test_unsynchronized_read_write_wrap_around(unsync: MessageQueue) -> None:
    assert unsync.write(data(N - 1))
    assert unsync.read(N - 1) == data(N - 1)
    assert unsync.write(data(N))
    assert unsync.read(N) == data(N)


def test_unsynchronized_read_more_than_num_messages_max_fails(unsync: MessageQueue) -> None:
    assert unsync.write(data(N))
    assert unsync.read(N + 1) is None


def test_unsynchronized_read_more_than_available_to_read_fails(unsync: MessageQueue) -> None:
    assert unsync.write(data(N // 2))
    assert unsync.read(N // 2 + 1) is None


def test_unsync_overflow_history_read_after_overflow() -> None:
    queue = MessageQueue.create(np.uint16, N, flavor=MQFlavor.UNSYNCHRONIZED)
    assert queue.write(counting(N, np.uint16))
    assert queue.write(np.array([7], np.uint16))
    assert queue.read(1) is None
    assert queue.available_to_read() == N // 2
    newest = np.append(counting(N, np.uint16), np.uint16(7))[-N // 2 :]
    assert queue.read(N // 2) == newest.tobytes()
    queue.close()


def test_unsync_overflow_history_commit_read_after_overflow() -> None:
    queue = MessageQueue.create(np.uint16, N, flavor=MQFlavor.UNSYNCHRONIZED)
    assert queue.write(counting(N, np.uint16))
    assert queue.begin_read(N) is not None
    assert queue.write(np.array([7], np.uint16))
    assert not queue.commit_read(N)
    assert queue.available_to_read() == N // 2
    newest = np.append(counting(N, np.uint16), np.uint16(7))[-N // 2 :]
    assert queue.read(N // 2) == newest.tobytes()
    queue.close()


def test_unsync_overflow_history_single_element_read_after_overflow() -> None:
    queue = MessageQueue.create(np.uint8, 1, flavor=MQFlavor.UNSYNCHRONIZED)
    assert queue.write(b"a")
    assert queue.read(1) == b"a"
    assert queue.write(b"b")
    assert queue.write(b"c")
    assert queue.read(1) is None
    assert queue.write(b"d")
    assert queue.read(1) == b"d"
    queue.close()


def test_rust_interop_test_simple() -> None:
    """Two handles of one queue take turns at reading; attaching the second resets nothing."""
    queue = MessageQueue.create(np.uint8, 500)
    assert queue.write(bytes([200, 201, 202, 203]))
    second = MessageQueue.attach(duplicated(queue.descriptor()))
    assert queue.read(3) == bytes([200, 201, 202])
    assert in_thread(lambda: second.read(1))() == bytes([203])
    second.close()
    queue.close()


# ---- element types ---------------------------------------------------------------------------------------------------


class Parcel(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_double), ("c", ctypes.c_uint8 * 3))


ELEMENTS = [
    (np.bool_, b"\x01"),
    (np.int8, struct.pack("b", -1)),
    (np.uint16, struct.pack("H", 65535)),
    (np.int32, struct.pack("i", -5)),
    (np.int64, struct.pack("q", -(2**60))),
    (np.float32, struct.pack("f", 1.5)),
    (np.float64, struct.pack("d", -2.5)),
    (np.dtype([("x", np.uint8), ("y", np.float32)], align=True), struct.pack("B3xf", 3, 0.5)),
    (np.dtype((np.uint8, (7,))), bytes(range(7))),
    (Parcel, bytes(Parcel(1, 2.0, (ctypes.c_uint8 * 3)(3, 4, 5)))),
    (24, bytes(range(24))),
]


@pytest.mark.parametrize(("element", "value"), ELEMENTS, ids=[str(element) for element, _ in ELEMENTS])
def test_aidl_type_checks_fixed_size_parcelable_test(element: Any, value: bytes) -> None:
    queue = MessageQueue.create(element, 64, flavor=MQFlavor.UNSYNCHRONIZED)
    assert queue.quantum == len(value)
    assert queue.write(value)
    assert queue.read(1) == value
    queue.close()
