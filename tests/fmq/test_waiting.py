"""Tasks that wait on a queue: they wake when there is something, in turn, and every way out settles them and loses nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from aionn.errors import CallerError, DeadlineError
from aionn.fmq import MessageQueue, MQFlavor, QueueClosedError
from aionn.fmq._ring import wait_for
from tests.fmq.queues import both_ends, duplicated, open_fds, words_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

FAR_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """The writer's end and the reader's: 8 elements of one byte."""
    with both_ends(1, 8) as pair:
        yield pair


Outcomes = dict[str, object]


async def noted(outcomes: Outcomes, name: str, call: Callable[[], Awaitable[object]]) -> None:
    try:
        outcomes[name] = await call()
    except (Exception, asyncio.CancelledError) as error:
        outcomes[name] = error
        if isinstance(error, asyncio.CancelledError):
            raise


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until that is so: the eventfd is an event that `wait_all_tasks_blocked` does not see."""
    with anyio.fail_after(FAR_S):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_who_waits_for_elements_gets_them(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(noted, outcomes, "read", lambda: reader.read_blocking(3))
        await anyio.wait_all_tasks_blocked()
        assert writer.write(b"ab")
        await anyio.wait_all_tasks_blocked()
        assert outcomes == {}
        assert writer.write(b"c")
    assert outcomes == {"read": b"abc"}


async def test_who_waits_for_room_gets_it(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    assert writer.write(b"01234567")
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(noted, outcomes, "write", lambda: writer.write_blocking(b"xyz"))
        await anyio.wait_all_tasks_blocked()
        assert reader.read(2) == b"01"
        await anyio.wait_all_tasks_blocked()
        assert outcomes == {}
        assert reader.read(1) == b"2"
    assert reader.read(8) == b"34567xyz"


async def test_nobody_awake_costs_no_event(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    for _ in range(20):
        assert writer.write(b"abc")
        assert await reader.read_blocking(3) == b"abc"
    for fd in (reader.reader_fd, reader.writer_fd):
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)  # a producer makes a system call only if the consumer sleeps


async def test_waiting_takes_nothing(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(reader.wait_readable, 2)
        await anyio.wait_all_tasks_blocked()
        assert writer.write(b"ab")
    assert reader.read(2) == b"ab"
    await writer.wait_writable(8)


async def test_takers_are_served_in_the_order_they_came(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    order: list[tuple[int, bytes]] = []

    async def take(number: int, count: int) -> None:
        order.append((number, await reader.read_blocking(count)))

    async with anyio.create_task_group() as tasks:
        for number, count in enumerate([3, 1, 2]):
            tasks.start_soon(take, number, count)
            await anyio.wait_all_tasks_blocked()
        assert writer.write(b"ab")  # enough for the second, who must not overtake
        await anyio.wait_all_tasks_blocked()
        assert order == []
        assert writer.write(b"cdef")
    assert order == [(0, b"abc"), (1, b"d"), (2, b"ef")]


async def test_fifty_readers_and_fifty_writers_lose_nothing() -> None:
    with both_ends(4, 3) as (writer, reader):
        taken: list[bytes] = []

        async def take() -> None:
            taken.append(await reader.read_blocking(1, time.monotonic_ns() + int(FAR_S * 1e9)))

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(take)
                tasks.start_soon(writer.write_blocking, number.to_bytes(4, "little"))
        assert sorted(taken) == sorted(number.to_bytes(4, "little") for number in range(50))


async def test_a_cancelled_taker_has_taken_nothing_and_hands_on_its_turn(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        first = anyio.CancelScope()

        async def give_up() -> None:
            with first:
                await noted(outcomes, "first", lambda: reader.read_blocking(2))

        tasks.start_soon(give_up)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(noted, outcomes, "second", lambda: reader.read_blocking(1))
        await anyio.wait_all_tasks_blocked()
        assert writer.write(b"a")
        await anyio.wait_all_tasks_blocked()
        assert outcomes == {}
        first.cancel()
    assert isinstance(outcomes["first"], asyncio.CancelledError)
    assert outcomes["second"] == b"a"


async def test_a_taker_cancelled_after_its_wake_has_taken_nothing(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    task = asyncio.ensure_future(reader.read_blocking(1))
    await anyio.wait_all_tasks_blocked()
    assert writer.write(b"a")
    reader._readers._on_event()  # type: ignore[union-attr]  # the wake, now rather than at the loop's next turn
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await reader.read_blocking(1) == b"a"


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_or_doubled_when_half_of_the_tasks_are_cancelled(seed: int) -> None:
    chance = random.Random(seed)
    with both_ends(2, 4) as (writer, reader):
        taken: list[int] = []
        written: list[int] = []

        async def take(scope: anyio.CancelScope) -> None:
            with scope:
                taken.append(int.from_bytes(await reader.read_blocking(1), "little"))

        async def put(scope: anyio.CancelScope, number: int) -> None:
            with scope:
                await writer.write_blocking(number.to_bytes(2, "little"))
                written.append(number)

        async with anyio.create_task_group() as tasks:
            scopes = []
            for number in range(200):
                scopes.append(anyio.CancelScope())
                if chance.random() < 0.5:
                    tasks.start_soon(take, scopes[-1])
                else:
                    tasks.start_soon(put, scopes[-1], number)
                if chance.random() < 0.3:
                    await anyio.lowlevel.checkpoint()
                if chance.random() < 0.5:
                    chance.choice(scopes).cancel()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()  # whatever side is left over
        rest = reader.read(reader.available_to_read())
        assert rest is not None
        elements = [int.from_bytes(rest[at : at + reader.quantum], "little") for at in range(0, len(rest), reader.quantum)]
        assert sorted([*taken, *elements]) == sorted(written)


async def test_the_last_to_leave_disarms(ends: tuple[MessageQueue, MessageQueue]) -> None:
    _, reader = ends
    with words_of(reader) as words:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader.wait_readable)
                tasks.start_soon(reader.read_blocking, 2)
                await anyio.wait_all_tasks_blocked()
                assert words.reader_armed
                scope.cancel()
        assert not words.reader_armed


async def test_a_stale_wake_arms_again(ends: tuple[MessageQueue, MessageQueue]) -> None:
    """Lesson 5a: the waker swapped a later arming, so the sleeper wakes to an empty queue with its word at 0."""
    writer, reader = ends
    outcomes: Outcomes = {}
    with words_of(reader) as words:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(noted, outcomes, "read", lambda: reader.read_blocking(1))
            await anyio.wait_all_tasks_blocked()
            words.control[0] = 0
            os.eventfd_write(reader.reader_fd, 1)
            await until(lambda: bool(words.reader_armed))
            assert outcomes == {}
            assert writer.write(b"x")
        assert outcomes == {"read": b"x"}


async def test_one_who_is_served_leaves_the_others_armed(ends: tuple[MessageQueue, MessageQueue]) -> None:
    """Lesson 5b: while any waiter sleeps the word is set."""
    writer, reader = ends
    outcomes: Outcomes = {}
    with words_of(reader) as words:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(noted, outcomes, "three", lambda: reader.wait_readable(3))
            tasks.start_soon(noted, outcomes, "one", lambda: reader.wait_readable(1))
            await anyio.wait_all_tasks_blocked()
            assert writer.write(b"a")
            await until(lambda: "one" in outcomes)
            assert "three" not in outcomes
            assert words.reader_armed
            assert writer.write(b"bc")
        assert outcomes == {"one": None, "three": None}


async def test_a_deadline_ends_the_wait_and_not_the_queue(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    started_ns = time.monotonic_ns()
    with pytest.raises(DeadlineError, match="before the deadline"):
        await reader.read_blocking(1, started_ns + 3_000_000)
    assert time.monotonic_ns() >= started_ns + 3_000_000  # never early, whatever clock the loop rounds to
    with pytest.raises(DeadlineError):
        await reader.wait_readable(1, started_ns)
    assert writer.write(b"01234567")
    with pytest.raises(DeadlineError):
        await writer.write_blocking(b"x", started_ns)
    assert await reader.read_blocking(8, started_ns) == b"01234567"  # there already: no need to be in time


async def test_waiting_in_the_second_row_also_ends_at_the_deadline(ends: tuple[MessageQueue, MessageQueue]) -> None:
    _, reader = ends
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(noted, outcomes, "first", lambda: reader.read_blocking(1))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DeadlineError):
            await reader.read_blocking(1, time.monotonic_ns() + 2_000_000)
        assert outcomes == {}
        tasks.cancel_scope.cancel()


async def test_a_peer_that_closes_wakes_everybody_after_the_rest_was_read(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(noted, outcomes, f"read {number}", lambda: reader.read_blocking(1))
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(noted, outcomes, "wait", lambda: reader.wait_readable(4))
        await anyio.wait_all_tasks_blocked()
        assert writer.write(b"ab")
        writer.close()
    assert [outcomes["read 0"], outcomes["read 1"]] == [b"a", b"b"]
    assert isinstance(outcomes["read 2"], QueueClosedError)
    assert isinstance(outcomes["wait"], QueueClosedError)


async def test_a_reader_that_closes_wakes_who_waits_for_room(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    assert writer.write(b"01234567")
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(noted, outcomes, "write", lambda: writer.write_blocking(b"x"))
        tasks.start_soon(noted, outcomes, "wait", lambda: writer.wait_writable(1))
        await anyio.wait_all_tasks_blocked()
        reader.close()
    assert isinstance(outcomes["write"], QueueClosedError)
    assert isinstance(outcomes["wait"], QueueClosedError)


async def test_the_peers_death_is_told_after_the_rest_was_read(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    death = ConnectionResetError("the driver was killed")
    outcomes: Outcomes = {}
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(noted, outcomes, f"read {number}", lambda: reader.read_blocking(2))
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(noted, outcomes, "flag", lambda: reader.reader_flag.wait(0x8))
        await anyio.wait_all_tasks_blocked()
        pieces = writer.begin_write(3)
        assert pieces is not None
        pieces[0][:] = b"abc"
        writer.commit_write(2)  # the third was never published
        reader.end(death)
    assert outcomes["read 0"] == b"ab"
    assert outcomes["read 1"] is death
    assert outcomes["flag"] is death
    with pytest.raises(ConnectionResetError):
        await reader.wait_readable()
    with pytest.raises(ConnectionResetError):
        await reader.wait_writable()


async def test_closing_settles_every_waiter_and_leaves_nothing_open() -> None:
    before = open_fds()
    with both_ends(1, 4) as (queue, peer):
        assert queue.write(b"0123")
        outcomes: Outcomes = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(noted, outcomes, "write", lambda: queue.write_blocking(b"x"))
            tasks.start_soon(noted, outcomes, "read", lambda: queue.wait_writable(2))
            tasks.start_soon(noted, outcomes, "flag", lambda: queue.writer_flag.wait(0x4))
            await anyio.wait_all_tasks_blocked()
            queue.close()
        assert [type(outcome) for outcome in outcomes.values()] == [QueueClosedError] * 3
        assert peer.read(4) == b"0123"
    assert open_fds() == before


async def test_a_side_belongs_to_one_loop(ends: tuple[MessageQueue, MessageQueue]) -> None:
    _, reader = ends
    outcomes: Outcomes = {}

    def elsewhere() -> None:
        try:
            asyncio.run(reader.wait_readable())
        except CallerError as error:
            outcomes["other loop"] = str(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.wait_readable)
        await anyio.wait_all_tasks_blocked()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        tasks.cancel_scope.cancel()
    assert "another event loop" in str(outcomes["other loop"])


def test_a_side_may_be_awaited_in_a_new_loop_when_the_old_one_is_closed() -> None:
    with both_ends(1, 8) as (writer, reader):

        async def ping() -> bytes:
            task = asyncio.ensure_future(reader.read_blocking(1))
            await asyncio.sleep(0)
            assert writer.write(b"x")
            return await task

        assert asyncio.run(ping()) == b"x"
        assert asyncio.run(ping()) == b"x"


async def test_what_can_never_be_there_is_refused_at_once(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    with pytest.raises(CallerError, match="9 elements at once in a queue of 8"):
        await reader.wait_readable(9)
    with pytest.raises(CallerError, match="9 elements at once in a queue of 8"):
        await writer.write_blocking(bytes(9))
    with pytest.raises(CallerError, match="-1 elements"):
        await reader.read_blocking(-1)


async def test_nobody_waits_on_an_unsynchronized_queue() -> None:
    with both_ends(1, 8, flavor=MQFlavor.UNSYNCHRONIZED) as (writer, reader):
        for wait in (reader.wait_readable, writer.wait_writable):
            with pytest.raises(CallerError, match="no eventfds"):
                await wait()
        with pytest.raises(CallerError, match="no eventfds"):
            reader.read_in_thread(1, 1)


async def test_spinning_sees_what_comes_from_another_thread(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    assert reader.spin_until_readable(0) is False
    started = threading.Barrier(2)

    def write() -> None:
        started.wait()
        assert writer.write(b"x")

    thread = threading.Thread(target=write)
    thread.start()
    started.wait()
    deadline = time.monotonic() + FAR_S
    while not reader.spin_until_readable(10_000_000) and time.monotonic() < deadline:
        continue  # on one core the rule is not to spin at all, so this is the poll it leaves to its caller
    thread.join()
    assert reader.read(1) == b"x"


async def test_nobody_spins_for_a_peer_on_the_same_cpu(ends: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = ends
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert writer.write(b"x")  # a commit publishes its CPU
        assert reader.read(1) == b"x"
        started_ns = time.thread_time_ns()
        assert reader.spin_until_readable(1_000_000_000) is False
        assert time.thread_time_ns() - started_ns < 500_000_000
    finally:
        os.sched_setaffinity(0, before)


async def test_closing_ends_a_spin_and_a_sleep_in_other_threads() -> None:
    queue = MessageQueue.create(1, 8)
    outcomes: Outcomes = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            outcomes[name] = call()
        except (CallerError, QueueClosedError) as error:
            outcomes[name] = error

    def spin() -> None:
        while not queue.spin_until_readable(1_000_000_000):
            continue

    threads = [
        threading.Thread(target=note, args=("spin", spin)),
        threading.Thread(target=note, args=("sleep", lambda: queue.read_in_thread(1))),
        threading.Thread(target=note, args=("flag", lambda: queue.reader_flag.wait_in_thread(0x10))),
    ]
    with words_of(queue) as words:
        for thread in threads:
            thread.start()
        while words.control[33] != 0x12:  # both sleepers have told that they wait by futex
            await anyio.lowlevel.checkpoint()
        queue.close()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    assert all(isinstance(outcome, (CallerError, QueueClosedError)) for outcome in outcomes.values())
    assert len(outcomes) == 3


def test_a_forgotten_queue_is_closed_when_it_is_collected() -> None:
    before = open_fds()
    with both_ends(1, 8) as (queue, _):
        forgotten = MessageQueue.attach(duplicated(queue.descriptor()))
        assert forgotten.write(b"x")
        del forgotten
        gc.collect()
        assert queue.read(1) == b"x"
        with pytest.raises(QueueClosedError):
            queue.read(1)
    assert open_fds() == before


def test_a_sleep_without_end_sees_a_signal_that_another_thread_gets() -> None:
    class Rung(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rung

    fd = os.eventfd(0)
    begun, ended, in_time = threading.Event(), threading.Event(), []

    def interrupt() -> None:
        begun.wait()  # then this thread goes on when the other one gives the GIL up, to sleep
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        in_time.append(ended.wait(10))
        os.eventfd_write(fd, 1)

    before = signal.signal(signal.SIGUSR1, ring)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(Rung):
            begun.set()
            wait_for(fd, 0)
        ended.set()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(fd)
    assert in_time == [True]


WOKEN = """
import select, sys
import anyio
from tests.fmq.queues import both_ends

async def main():
    with both_ends(1, 8) as (writer, reader):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.wait_readable)
            await anyio.wait_all_tasks_blocked()
            writer.write(b"x")
            assert select.select([reader.reader_fd], [], [], 0)[0]
        print(select.select([reader.reader_fd], [], [], 0)[0])

anyio.run(main)
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "EOPNOTSUPP"])
def test_a_wake_is_taken_where_the_system_refuses_a_read_that_does_not_wait(error: str) -> None:
    """Emulators and outer sandboxes do. A wake that stayed would come again in each turn of the loop."""
    command = [sys.executable, "-m", "tests.sandbox.outer", f"preadv2={error}", "--", sys.executable, "-c", WOKEN]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
