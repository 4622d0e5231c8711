"""Where a driver's blocking calls run: their answers, their threads, and callers who leave."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.driver.threads import MOST_OF_AN_APP, SerialThread, Threads, calling_app

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


async def until(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 10)


async def test_a_call_gives_what_it_returns_or_raises() -> None:
    threads = Threads("test", 2)

    def fail() -> None:
        raise ValueError("no")

    def stop() -> None:
        raise StopIteration

    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        await threads.run(fail)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(stop)
    with pytest.raises(SystemExit):
        await threads.run(sys.exit)
    assert await threads.run(threading.get_ident) != threading.get_ident()
    threads.close()


async def test_an_app_whose_calls_never_end_holds_up_itself_alone() -> None:
    threads = Threads("test", 1)
    begun, go = threading.Semaphore(0), threading.Event()

    def work() -> None:
        begun.release()
        assert go.wait(10)

    async def leaves(app: int) -> None:
        calling_app.set(app)
        with anyio.move_on_after(0.05):
            await threads.run(work)

    async with anyio.create_task_group() as group:
        for _ in range(MOST_OF_AN_APP + 3):  # their callers leave, and two of the calls go on
            group.start_soon(leaves, 7)
    assert [begun.acquire(timeout=0.05) for _ in range(MOST_OF_AN_APP + 1)] == [True, True, False]

    async def runs(app: int) -> int:
        calling_app.set(app)
        return await threads.run(lambda: app)

    async with anyio.create_task_group() as group:
        waiting = anyio.Event()

        async def waits() -> None:
            assert await runs(7) == 7
            waiting.set()

        group.start_soon(waits)
        assert [await runs(app) for app in (0, 8)] == [0, 8]
        assert not waiting.is_set()
        go.set()
    threads.close()


async def test_the_thread_that_was_last_done_is_the_next_to_work() -> None:
    threads = Threads("test", 4)
    first = await threads.run(threading.get_ident)
    assert [await threads.run(threading.get_ident) for _ in range(5)] == [first] * 5
    threads.close()


async def test_no_more_run_at_once_than_somebody_may_wait_for_and_a_caller_who_left_holds_nobody_up() -> None:
    threads = Threads("test", 2)
    begun, go = threading.Semaphore(0), threading.Event()
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        begun.release()
        assert go.wait(10)
        with lock:
            running.pop()

    async with anyio.create_task_group() as callers:
        for _ in range(2):
            callers.start_soon(threads.run, work)
        for _ in range(2):
            assert await anyio.to_thread.run_sync(begun.acquire, True, 10)
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(threads.run, work)
            await anyio.wait_all_tasks_blocked()
            assert len(running) == 2  # the third waits for its turn, and never has it
            waiting.cancel_scope.cancel()
        callers.cancel_scope.cancel()
    # Both threads are still at work although their callers have left; others do not wait for them.
    assert await threads.run(lambda: len(running)) == 2
    assert max(most) == 2
    go.set()
    threads.close()


async def test_what_nobody_waits_for_begins_once_its_caller_is_done() -> None:
    threads = Threads("test", 1)
    done = threading.Event()
    threads.behind(done.set)
    assert not done.wait(0.05)  # the loop is ours until we await
    await until(done)
    threads.close()


async def test_what_fails_behind_an_answer_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads("test", 1)
    told = threading.Event()
    records: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)
            told.set()

    monkeypatch.setattr(logging.getLogger("aionn.driver"), "handlers", [Listener()])

    def fail() -> None:
        raise ValueError("nobody waits for this")

    threads.behind(fail)
    await until(told)  # written by the thread, which need not be the one that the next job gets
    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "nobody waits for this"
    threads.close()


async def test_threads_end_when_they_are_closed_those_at_work_when_they_are_done() -> None:
    threads = Threads("test", 2)
    begun, go = threading.Event(), threading.Event()
    idle = await threads.run(threading.current_thread)

    def work() -> threading.Thread:
        begun.set()
        assert go.wait(10)
        return threading.current_thread()

    busy: list[threading.Thread] = []

    async def call() -> None:
        busy.append(await threads.run(work))

    async with anyio.create_task_group() as callers:
        callers.start_soon(threads.run, lambda: go.wait(10))
        callers.start_soon(call)
        await until(begun)
        threads.close()
        go.set()
    for thread in (idle, *busy):
        await anyio.to_thread.run_sync(thread.join, 10)
        assert not thread.is_alive()


async def test_nothing_of_a_job_is_kept_once_it_is_answered() -> None:
    class Large:
        pass

    thread = SerialThread("test")
    for _ in range(300):  # the thread has no time to let go of anything afterwards
        large: Any = Large()
        gone = weakref.ref(large)
        answer = thread.submit(partial(type, large))
        del large
        assert await answer.wait() is Large
        assert gone() is None
    thread.close()
