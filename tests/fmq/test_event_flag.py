"""The event flag word: libfmq's semantics for threads, and the same bits awaited by tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import anyio
import pytest

from aionn.errors import CallerError, DeadlineError
from aionn.fmq import NOT_EMPTY, MessageQueue, QueueClosedError
from aionn.fmq.event_flag import deadline_after
from tests.fmq.queues import both_ends, words_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


@pytest.fixture
def ends() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    with both_ends(1, 8) as pair:
        yield pair


def test_bits_are_taken_by_who_waits_for_them_and_others_stay(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    writer.writer_flag.wake(0x4 | 0x8 | 0x10)
    assert reader.reader_flag.wait_in_thread(0x4 | 0x8 | 0x20, 1) == 0x4 | 0x8
    with pytest.raises(DeadlineError):
        reader.reader_flag.wait_in_thread(0x4 | 0x8, 0)
    assert reader.reader_flag.wait_in_thread(0x10, 0) == 0x10


def test_a_deadline_is_so_many_seconds_from_now() -> None:
    before_ns = time.monotonic_ns()
    assert before_ns <= deadline_after(3600.0) - 3600 * 10**9 <= time.monotonic_ns()
    assert deadline_after(None) == -1


def test_waking_for_nothing_does_nothing(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, _ = ends
    writer.writer_flag.wake(0)
    with words_of(writer) as words:
        assert words.flag[0] == 0


@pytest.mark.parametrize("mask", [0, -1, 2**30, 2**31, 2**32])
async def test_a_mask_without_a_free_bit_is_refused(ends: tuple[MessageQueue, MessageQueue], mask: int) -> None:
    _, reader = ends
    with pytest.raises(CallerError, match="mask"):
        reader.reader_flag.wait_in_thread(mask, 1)
    with pytest.raises(CallerError, match="mask"):
        await reader.reader_flag.wait(mask)


def test_a_thread_sleeps_until_it_is_woken(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    for _ in range(300):
        taken: list[int] = []
        thread = threading.Thread(target=lambda into=taken: into.append(reader.reader_flag.wait_in_thread(0x4, 30)))
        thread.start()
        writer.writer_flag.wake(0x4)
        thread.join()
        assert taken == [0x4]


def test_a_deadline_is_not_early(ends: tuple[MessageQueue, MessageQueue]) -> None:
    _, reader = ends
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        reader.reader_flag.wait_in_thread(0x4, 0.02)
    assert time.monotonic() - started >= 0.02


async def test_a_task_awaits_bits_from_either_side(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    got: dict[str, int] = {}

    async def wait(name: str, queue_flag: object, mask: int) -> None:
        assert hasattr(queue_flag, "wait")
        got[name] = await queue_flag.wait(mask)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "reader", reader.reader_flag, 0x4 | 0x8)
        tasks.start_soon(wait, "writer", writer.writer_flag, 0x10)
        await anyio.wait_all_tasks_blocked()
        writer.writer_flag.wake(0x8)
        reader.reader_flag.wake(0x10 | 0x20)
    assert got == {"reader": 0x8, "writer": 0x10}
    with words_of(reader) as words:
        assert words.flag[0] == 0x20
        assert words.reader_armed == words.writer_armed == 0


async def test_bits_that_are_set_already_need_no_sleep(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    writer.writer_flag.wake(0x4)
    assert await reader.reader_flag.wait(0x4, deadline_ns=0) == 0x4
    with pytest.raises(DeadlineError):
        await reader.reader_flag.wait(0x4, deadline_ns=time.monotonic_ns() + 1_000_000)


async def test_a_cancelled_task_has_taken_no_bit(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.reader_flag.wait, 0x4)
        await anyio.wait_all_tasks_blocked()
        writer.writer_flag.wake(0x4)
        tasks.cancel_scope.cancel()
    assert await reader.reader_flag.wait(0x4) == 0x4


async def test_waiting_for_bits_and_for_elements_go_together(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    got: list[object] = []

    async def bits() -> None:
        got.append(await reader.reader_flag.wait(0x4))

    async def elements() -> None:
        got.append(await reader.read_blocking(1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bits)
        tasks.start_soon(elements)
        await anyio.wait_all_tasks_blocked()
        assert writer.write(b"x")
        while len(got) < 1:
            await anyio.lowlevel.checkpoint()
        writer.writer_flag.wake(0x4)
    assert got == [b"x", 0x4]


def test_commits_leave_the_word_alone_until_a_thread_has_waited(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    with words_of(writer) as words:
        assert writer.write(b"ab")
        assert reader.read(1) == b"a"
        assert words.flag[0] == 0
        assert reader.read_in_thread(1, 1) == b"b"
        assert writer.write(b"c")
        assert words.flag[0] == 0  # it did not have to wait
        assert reader.read(1) == b"c"
        with pytest.raises(DeadlineError):
            reader.read_in_thread(1, 0)
        assert writer.write(b"d")
        assert words.flag[0] == NOT_EMPTY
        assert reader.read(1) == b"d"
        assert words.flag[0] == NOT_EMPTY  # no end waits for room by futex


def test_the_peers_close_ends_a_wait_for_any_bit(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            reader.reader_flag.wait_in_thread(0x40)
        except QueueClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with words_of(reader) as words:
        while not words.control[33]:
            continue
        writer.close()
    thread.join()
    assert len(ended) == 1
