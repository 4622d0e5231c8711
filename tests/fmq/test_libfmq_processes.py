"""libfmq's two-process tests, row by row (`msgq_test_client.cpp`): i32, 1,024 elements, in one memory descriptor and in two."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aionn.fmq import MessageQueue, MQFlavor, QueueCorruptedError
from aionn.memory.region import Region
from tests.fmq.queues import words_of
from tests.fmq.service import Peer, PeerError, peer

N = 1024
ELEMENT = "i4"
QUANTUM = 4
FAR_S = 30


@pytest.fixture(scope="module")
def service() -> Iterator[Peer]:
    with peer() as process:
        yield process


@pytest.fixture(scope="module")
def second_service() -> Iterator[Peer]:
    with peer() as process:
        yield process


def memory(size_bytes: int) -> int:
    region = Region.allocate(size_bytes)
    fd = os.dup(region.fileno())
    region.close()
    return fd


def made(flavor: MQFlavor, layout: str, service: Peer) -> Iterator[MessageQueue]:
    queue = MessageQueue.create(ELEMENT, N, flavor=flavor, buffer_fd=memory(N * QUANTUM) if layout == "two fds" else None)
    service.attach(queue, ELEMENT)
    yield queue
    queue.close()


@pytest.fixture(params=["one fd", "two fds"])
def sync(request: pytest.FixtureRequest, service: Peer) -> Iterator[MessageQueue]:
    yield from made(MQFlavor.SYNCHRONIZED, request.param, service)


@pytest.fixture(params=["one fd", "two fds"])
def unsync(request: pytest.FixtureRequest, service: Peer) -> Iterator[MessageQueue]:
    yield from made(MQFlavor.UNSYNCHRONIZED, request.param, service)


def elements(count: int, start: int = 0) -> bytes:
    return np.arange(start, start + count).astype(ELEMENT).tobytes()


def far_write(service: Peer, count: int, start: int = 0) -> Any:
    return service.ask("write", count=count, start=start, element=ELEMENT)


def far_read(service: Peer, count: int) -> Any:
    return service.ask("read", count=count, element=ELEMENT)


def soon() -> int:
    return time.monotonic_ns() + FAR_S * 10**9


# ---- blocking: the far side as a thread (futex) and as a task (eventfd) -------------------------------------------------


async def written(queue: MessageQueue, service: Peer, how: str, far_count: int, far_times: int, times: int) -> None:
    """`times` writes of 64 against the far side's reads, which find what was written, then one of the whole queue."""
    service.start("read_blocking", count=far_count, times=far_times, how=how, element=ELEMENT, written=64)
    for _ in range(times):
        await queue.write_blocking(elements(64), soon())
    assert service.answer() == far_times
    await queue.write_blocking(elements(N), soon())
    assert queue.available_to_read() == N


WAYS = ["thread", "asyncio", "uvloop"]


@pytest.mark.anyio
@pytest.mark.parametrize("how", WAYS)
async def test_sync_client_blocking_read_write_1(sync: MessageQueue, service: Peer, how: str) -> None:
    await written(sync, service, how, 64, 1, 1)


@pytest.mark.parametrize("how", WAYS)
def test_sync_client_blocking_read_write_2(sync: MessageQueue, service: Peer, how: str) -> None:
    service.start("read_blocking", count=64, how=how, element=ELEMENT, written=64)
    sync.write_in_thread(elements(64), FAR_S)
    assert service.answer() == 1
    sync.write_in_thread(elements(N), FAR_S)


@pytest.mark.anyio
@pytest.mark.parametrize("how", WAYS)
async def test_sync_client_blocking_read_write_repeat_1(sync: MessageQueue, service: Peer, how: str) -> None:
    await written(sync, service, how, 64, 1024, 1024)


@pytest.mark.anyio
@pytest.mark.parametrize("how", WAYS)
async def test_sync_client_blocking_read_write_repeat_2(sync: MessageQueue, service: Peer, how: str) -> None:
    await written(sync, service, how, 128, 512, 1024)


@pytest.mark.anyio
@pytest.mark.parametrize("how", WAYS)
async def test_sync_client_blocking_read_write_repeat_3(sync: MessageQueue, service: Peer, how: str) -> None:
    await written(sync, service, how, 32, 2048, 1024)


@pytest.mark.anyio
async def test_sync_client_blocking_read_write_zero_messages(sync: MessageQueue) -> None:
    await sync.write_blocking(b"")
    assert await sync.read_blocking(0) == b""
    sync.write_in_thread(b"")
    assert sync.read_in_thread(0) == b""


# ---- synchronized ----------------------------------------------------------------------------------------------------


def test_sync_client_small_input_reader_test_1(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 16)
    assert sync.read(16) == elements(16)


def test_sync_client_small_input_reader_test_2(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 16)
    pieces = sync.begin_read(16)
    assert pieces is not None
    assert b"".join(pieces) == elements(16)
    assert sync.commit_read(16)


def test_sync_client_misaligned_write_counter(sync: MessageQueue, service: Peer) -> None:
    with words_of(sync) as words:
        words.written[0] = N * QUANTUM - 1
    with pytest.raises(PeerError, match="QueueCorruptedError"):
        far_write(service, 1)


def test_sync_client_misaligned_write_counter_client_side(sync: MessageQueue, service: Peer) -> None:
    pieces = sync.begin_write(1)
    assert pieces is not None
    assert service.ask("poke_written", value=N * QUANTUM - 1)
    sync.commit_write(1)  # stores its own counter, from before the poke
    assert service.ask("poke_written", value=N * QUANTUM - 1)
    with pytest.raises(QueueCorruptedError):
        sync.write(elements(1))
    with pytest.raises(QueueCorruptedError):
        sync.available_to_write()


def test_sync_client_small_input_writer_test_1(sync: MessageQueue, service: Peer) -> None:
    room = sync.available_to_write()
    assert sync.write(elements(16))
    assert far_read(service, 16) == list(range(16))
    assert sync.available_to_write() == room


def test_sync_client_small_input_writer_test_2(sync: MessageQueue, service: Peer) -> None:
    room = sync.available_to_write()
    pieces = sync.begin_write(16)
    assert pieces is not None
    pieces[0][:] = elements(16)
    sync.commit_write(16)
    assert far_read(service, 16) == list(range(16))
    assert sync.available_to_write() == room


def test_sync_client_read_when_empty(sync: MessageQueue, service: Peer) -> None:
    assert service.ask("available") == [0, N]
    assert sync.available_to_read() == 0
    assert sync.read(2) is None


def test_sync_client_write_when_full(sync: MessageQueue, service: Peer) -> None:
    assert sync.write(elements(N))
    assert sync.available_to_write() == 0
    assert not sync.write(elements(1))
    assert far_read(service, N) == list(range(N))


def test_sync_client_large_input_test_1(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, N)
    assert sync.read(N) == elements(N)


def test_sync_client_large_input_test_2(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 2048) is False
    assert sync.available_to_read() == 0
    assert sync.read(N) is None


def test_sync_client_large_input_test_3(sync: MessageQueue, service: Peer) -> None:
    assert sync.write(elements(N))
    assert not sync.write(elements(1))
    assert far_read(service, N) == list(range(N))


def test_sync_client_multiple_read(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 500)
    assert b"".join(sync.read(100) or b"" for _ in range(5)) == elements(500)


def test_sync_client_multiple_write(sync: MessageQueue, service: Peer) -> None:
    for start in range(0, 500, 100):
        assert sync.write(elements(100, start))
    assert far_read(service, 500) == list(range(500))


def test_sync_client_read_write_wrap_around(sync: MessageQueue, service: Peer) -> None:
    assert far_write(service, N // 2)
    assert sync.read(N // 2) == elements(N // 2)
    assert far_write(service, N)
    assert sync.read(N) == elements(N)


def test_sync_client_read_write_wrap_around_2(sync: MessageQueue, service: Peer) -> None:
    assert sync.write(elements(N // 2))
    assert far_read(service, N // 2) == list(range(N // 2))
    pieces = sync.begin_write(N)
    assert pieces is not None
    first, second = pieces
    assert len(first) == len(second) == N // 2 * QUANTUM
    first[:], second[:] = elements(N)[: len(first)], elements(N)[len(first) :]
    sync.commit_write(N)
    assert far_read(service, N) == list(range(N))


# ---- unsynchronized --------------------------------------------------------------------------------------------------


def test_unsync_client_small_input_reader_test_1(unsync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 16)
    assert unsync.read(16) == elements(16)


def test_unsync_client_small_input_writer_test_1(unsync: MessageQueue, service: Peer) -> None:
    assert unsync.write(elements(16))
    assert far_read(service, 16) == list(range(16))


def test_unsync_client_read_when_empty(unsync: MessageQueue) -> None:
    assert unsync.available_to_read() == 0
    assert unsync.read(2) is None


def test_unsync_client_write_when_full(unsync: MessageQueue, service: Peer) -> None:
    assert unsync.write(elements(N))
    assert unsync.available_to_write() == 0
    assert unsync.write(elements(1))
    assert far_read(service, N) is None


def test_unsync_client_large_input_test_1(unsync: MessageQueue, service: Peer) -> None:
    assert far_write(service, N)
    assert unsync.read(N) == elements(N)


def test_unsync_client_large_input_test_2(unsync: MessageQueue, service: Peer) -> None:
    assert far_write(service, N + 1) is False
    assert unsync.available_to_read() == 0


def test_unsync_client_large_input_test_3(unsync: MessageQueue, service: Peer) -> None:
    assert unsync.write(elements(N))
    assert unsync.write(elements(1))
    assert far_read(service, N) is None
    # What is left there is the newest half; once it is read the far side is level again.
    assert len(far_read(service, N // 2)) == N // 2
    assert unsync.write(elements(N))
    assert far_read(service, N) == list(range(N))


def test_unsync_client_multiple_read(unsync: MessageQueue, service: Peer) -> None:
    assert far_write(service, 500)
    assert b"".join(unsync.read(100) or b"" for _ in range(5)) == elements(500)


def test_unsync_client_multiple_write(unsync: MessageQueue, service: Peer) -> None:
    for start in range(0, 500, 100):
        assert unsync.write(elements(100, start))
    assert far_read(service, 500) == list(range(500))


def test_unsync_client_read_write_wrap_around(unsync: MessageQueue, service: Peer) -> None:
    assert far_write(service, N // 2)
    assert unsync.read(N // 2) == elements(N // 2)
    assert far_write(service, N)
    assert unsync.read(N) == elements(N)


def test_unsync_client_small_input_multiple_reader_test(unsync: MessageQueue, service: Peer, second_service: Peer) -> None:
    second_service.attach(unsync, ELEMENT)
    assert far_write(service, 16)
    assert unsync.read(16) == elements(16)
    assert far_read(second_service, 16) == list(range(16))


def test_unsync_client_overflow_notification_test(unsync: MessageQueue, service: Peer, second_service: Peer) -> None:
    second_service.attach(unsync, ELEMENT)
    assert far_write(service, N)
    assert far_write(service, 1)
    assert unsync.read(N) is None
    assert far_read(second_service, N) is None


def test_unsync_multi_process_multiple_readers_after_overflow(unsync: MessageQueue, service: Peer, second_service: Peer) -> None:
    """libfmq at HEAD dropped all history on overflow; `main`, and aionn, keep the newest half, which is read first here."""
    assert far_write(service, N)
    assert far_write(service, 1)
    assert unsync.read(N) is None
    assert unsync.read(N // 2) is not None
    assert far_write(service, 16)
    assert unsync.read(16) == elements(16)

    second_service.attach(unsync, ELEMENT)  # comes late, and finds itself overtaken
    assert far_read(second_service, 16) is None
    assert len(far_read(second_service, N // 2)) == N // 2
    assert far_write(service, 16)
    assert far_read(second_service, 16) == list(range(16))
    assert unsync.read(16) == elements(16)
