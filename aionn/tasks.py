"""Tasks, threads and their ends: owned task groups, plain exceptions and bounded shields.

A caller who enters one of aionn's `async with` blocks has started no task and must be able to write `except DriverDiedError`.
So `ungrouped` undoes anyio's wrapping, and `each` raises the first error of several acts. `OwnedTasks` is a task group that any task of
the loop may open and close. Blocking work runs in threads: `run_in_thread` waits for its thread, and `ThreadWork` leaves it.

`Runtime.open` imports this module before it starts a driver, so anyio is imported where it is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aionn.errors import CallerError, DeadlineError
from aionn.loopless import Answer, is_ours, running_loop, seconds_until

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import anyio
    from anyio.abc import TaskGroup

logger = logging.getLogger("aionn.runtime")

T = TypeVar("T")


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the one exception of a task group as itself. Put it around exactly one task group.

    A group of two or more exceptions passes unchanged, so that no exception is lost. A group that the body raised stays a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        only = group.exceptions[0]
        context = only.__context__
        try:
            raise only
        finally:
            only.__context__ = context  # the traceback must not mention a group that the caller must not see


async def each(acts: Iterable[Callable[[], Awaitable[object]]], at_once: int = 8) -> None:
    """Run coroutine functions, several at once. The first error cancels the others and is raised alone."""
    import anyio

    found = list(acts)
    waiting = iter(found)
    errors: list[Exception] = []

    async def in_turn() -> None:
        try:
            for act in waiting:
                await act()
        except Exception as error:  # one cause, such as the death of a driver, fails many acts, and a caller wants one error
            errors.append(error)
            tasks.cancel_scope.cancel()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for _ in found[:at_once]:
                tasks.start_soon(in_turn)
    if errors:
        raise errors[0]


@contextmanager
def bounded_shield(seconds: float) -> Iterator[anyio.CancelScope]:
    """Finish the body within that time, even if the caller is cancelled."""
    import anyio

    with anyio.move_on_after(seconds, shield=True) as scope:
        yield scope


@contextmanager
def ending_by(deadline_ns: int | None, what: str) -> Iterator[None]:
    """End the body at a deadline (CLOCK_MONOTONIC), as if its caller had left. With None it has no deadline.

    Raises:
        DeadlineError: the deadline ended the body. `what` begins the sentence.
    """
    if deadline_ns is None:
        yield
        return
    import anyio

    with anyio.move_on_after(seconds_until(deadline_ns)) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{what} by the deadline; the driver may still be busy with it")


class Tasks(Protocol):
    """Where tasks are started: an `OwnedTasks`, or a task group of anyio."""

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> object: ...


def start_in(group: TaskGroup, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> None:
    """Start a task in a task group of anyio, from a task or from a callback of the loop.

    anyio asks sniffio which library runs, if a package of the app brings it. In a callback sniffio finds none by itself.
    """
    library = getattr(sys.modules.get("sniffio"), "current_async_library_cvar", None)
    said = None if library is None else library.set("asyncio")
    try:
        group.start_soon(work, *args, name=name)
    finally:
        if library is not None:
            library.reset(said)


class OwnedTasks:
    """A task group in a separate task. Any task of the loop may open it, start tasks in it and close it.

    A task group ends with the task that entered it, and that task must leave it. So a task made for the group enters it, and a
    cancellation of the tasks that open or close the group does not reach it. `closing` runs however the group ends.

    Invariants
        `closing` runs once, before the group's tasks are cancelled. It must end in bounded time, also when it is cancelled.
        A task that raises ends the group. Its error is logged and kept in `failure`, and `aclose` raises it once.
        A task that ends with `CancelledError` ends nothing else.
        Nothing of this runs in a child of `os.fork`.

    Attributes:
        failure: the error of the task that has ended the group, or None.
    """

    def __init__(self, closing: Callable[[], Awaitable[None]], name: str) -> None:
        self._closing = closing
        self._name = name
        self._pid = os.getpid()
        self._stands = asyncio.Event()
        self._asked = asyncio.Event()
        self._group: TaskGroup | None = None
        self._owner: asyncio.Task[None] | None = None
        self._members: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.failure: BaseException | None = None

    async def open(self) -> None:
        """Open the group, and return when tasks can be started. A caller that is cancelled meanwhile ends the group."""
        self._owner = running_loop().create_task(self._live(), name=self._name)
        _forget_at_loop_end(self._owner)
        try:
            await self._stands.wait()
        except BaseException:
            self._asked.set()
            raise

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> None:
        """Start a task.

        Raises:
            CallerError: the group has ended.
        """
        if self._group is None:
            raise CallerError("the runtime was closed")
        start_in(self._group, self._guarded, work, args, name=name)

    async def aclose(self, wait_s: float) -> None:
        """End the group, and wait at most `wait_s` seconds for its end. A cancelled caller leaves at once, and the end goes on.

        A task of the group does not wait, because the group's end waits for that task.

        Raises:
            BaseException: the error that has ended the group, if there was one.
        """
        self._asked.set()
        if self._owner is None or os.getpid() != self._pid or asyncio.current_task() in self._members:
            return
        with bounded_shield(wait_s):
            await asyncio.wait([self._owner])
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    async def _live(self) -> None:
        import anyio

        try:
            async with anyio.create_task_group() as group:
                self._group = group
                self._stands.set()
                try:
                    await self._asked.wait()
                finally:
                    try:
                        if os.getpid() == self._pid:
                            await self._closing()
                    finally:
                        self._group = None
                        group.cancel_scope.cancel()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._group = None
            self._stands.set()

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
        task = asyncio.current_task()
        assert task is not None
        _forget_at_loop_end(task)
        self._members.add(task)
        try:
            await work(*args)
        except asyncio.CancelledError:
            return  # the group sees a task that ends normally; anyio would cancel all other tasks with it

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                self._fail(part)
        elif not isinstance(error, KeyboardInterrupt | SystemExit):  # the loop has raised them already
            self.failure = self.failure or error
            logger.error("a task of the %s failed, and ends it", self._name, exc_info=error)


def _forget_at_loop_end(task: asyncio.Task[None]) -> None:
    """Keep asyncio from complaining about this task if an app closes its loop without `aclose`."""
    setattr(task, "_log_destroy_pending", False)  # noqa: B010  (asyncio's own switch, which its stubs do not name)


_MOST_THREADS = 128
"""So many acts of one loop may wait for disks that hang, before other acts have to wait for them."""

_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


def in_thread(act: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Begin `act(*arguments)` in a thread of aionn's pool for this loop.

    The loop's default executor has few threads, and the app uses it too. A disk that hangs must hold up neither the app nor other compiles.
    """
    loop = asyncio.get_running_loop()
    pool = _pools.get(loop)
    if pool is None:
        from concurrent.futures import ThreadPoolExecutor

        pool = _pools[loop] = ThreadPoolExecutor(_MOST_THREADS, "aionn")
    return loop.run_in_executor(pool, partial(act, *arguments))


def end_threads() -> None:
    """End the threads of this loop's pool that are idle, and the others when their act ends. The next act gets a new pool."""
    pool = _pools.pop(running_loop(), None)
    if pool is not None:
        pool.shutdown(wait=False)


async def run_in_thread(act: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
    """Run `act(*arguments)` in a thread, and return its result.

    A cancelled caller waits for the thread, because the thread works on files and locks that the caller is about to free.
    If the task itself was cancelled (`Task.cancel`), the cancellation is raised after that wait. Before, `undo(result)` has run,
    so what the thread opened does not stay open. A cancelled anyio scope strikes at the caller's next await, when the caller
    already owns the result.

    A child of fork has the loop and its tasks, but none of the threads, and the files are its parent's. In a child this call raises
    `CancelledError`.
    """
    import anyio

    loop = running_loop()
    if not is_ours(loop):
        raise asyncio.CancelledError("this directory is in use by the parent process")
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        future = in_thread(act, *arguments)
        while True:
            try:
                result = await asyncio.shield(future)
                break
            except asyncio.CancelledError as error:
                if future.cancelled() or not is_ours(loop):
                    raise
                cancelled = error
    if cancelled is None:
        return result
    if undo is not None:
        await run_in_thread(undo, result)
    raise cancelled


async def in_time(
    tasks: Tasks, work: Callable[[], Awaitable[T]], seconds: float | None, late: Callable[[T], Awaitable[None]] | None
) -> T | None:
    """Return the result of `work`, or None if `work` takes longer than `seconds`.

    `work` runs as a task of the runtime's. A thread in it may wait for a disk that hangs, and the caller need not wait for that
    thread. When the runtime closes, the call ends with `CallerError`.

    Args:
        seconds: how long to wait. None waits for the end.
        late: gets a result that comes too late, or whose caller was cancelled. `work` is then cancelled. If `late` is None, `work`
            goes on after the caller has stopped waiting.
    """
    import anyio

    answer: Answer[T] = Answer(running_loop())
    scope = anyio.CancelScope()

    async def run() -> None:
        try:
            with scope:
                result = await work()
                if not answer.done:
                    answer.set(result)
                elif late is not None:
                    await late(result)
        except Exception as error:
            answer.fail(error)
        except BaseException:
            answer.fail(CallerError("the runtime was closed"))
            raise

    tasks.start_soon(run, name="cache")
    try:
        with anyio.move_on_after(seconds):
            return await answer.wait()
    except BaseException:
        if late is not None:
            scope.cancel()
            if answer.result is not None:  # the result came together with the cancellation
                await late(answer.result)
        raise
    result = answer.result
    answer.cancel()
    if result is None and late is not None:
        scope.cancel()
    return result


class ThreadWork:
    """Threads that work for callers which need not wait for them: a disk may hang, and a cancelled caller leaves at once.

    Attributes:
        running: one future for each thread that works.
        waiting: what callers wait for.
    """

    def __init__(self) -> None:
        self.running: set[asyncio.Future[Any]] = set()
        self.waiting: set[asyncio.Future[Any]] = set()

    async def ask(self, act: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
        """Run `act(*arguments)` in a thread and return its result. A cancelled caller leaves at once; `undo(result)` then runs later.

        Raises:
            CallerError: what the thread works for was closed, and the thread has not ended.
        """
        asking = in_thread(act, *arguments)
        waiting: asyncio.Future[T] = asking.get_loop().create_future()

        def answered(_: object) -> None:
            self.running.discard(asking)
            error = asking.exception()
            if not waiting.done():
                if error is None:
                    waiting.set_result(asking.result())
                else:
                    waiting.set_exception(error)
            elif error is None and undo is not None:
                self.run_later(partial(undo, asking.result()))

        self.running.add(asking)
        self.waiting.add(waiting)
        asking.add_done_callback(answered)
        try:
            return await waiting
        except BaseException:
            came = waiting.done() and not waiting.cancelled() and waiting.exception() is None  # together with the cancellation
            if came and undo is not None:
                self.run_later(partial(undo, waiting.result()))
            waiting.cancel()
            raise
        finally:
            self.waiting.discard(waiting)

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` in a thread soon. The caller does not wait for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.add(done)

        def begin() -> None:
            try:
                in_thread(act).add_done_callback(end)
            except RuntimeError:  # the process ends and takes no more threads: better here than never
                end(None)
                act()

        def end(acted: asyncio.Future[Any] | None) -> None:
            self.running.discard(done)
            done.set_result(None)
            if acted is not None:
                acted.result()  # an error goes to the loop's exception handler, because no caller is left to get it

        # Not at once: the thread would take the interpreter from the caller, whose answer must not wait for `act`.
        done.get_loop().call_soon(begin)

    def fail_waiting(self, error: CallerError) -> None:
        """Raise `error` in every caller that still waits in `ask`."""
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_exception(error)
