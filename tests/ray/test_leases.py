"""`ModelLeases`: at most so many open models, opened once, never closed under a lease and never used after it. Without Ray and drivers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import aionn
from aionn.ray.leases import ModelLeases

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


async def settled() -> None:
    """Let all tasks go on until each of them waits."""
    await anyio.wait_all_tasks_blocked()


class Opened:
    """A model of `Bench`. `users`: requests that are in it now."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench = bench
        self.name = name
        self.users = 0
        self.closed = False

    async def use(self, work: Callable[[], Awaitable[object]]) -> str:
        assert not self.closed, "use after close"
        self.users += 1
        try:
            await work()
            assert not self.closed, "closed under a request"
            return self.name
        finally:
            self.users -= 1

    async def aclose(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        await self._bench.pause("close", self.name)
        self._bench.live.discard(self)
        if self.name in self._bench.stuck:
            raise RuntimeError("it does not close")


class Bench:
    """Models that open and close when a test says so.

    Attributes:
        live: those that are being opened, open, or being closed. most: how many that were at once.
        opens: how often each was opened. holds: acts that wait, as "open fr" or "close fr", until their event is set.
        fails: names of those that cannot be opened. stuck: names of those that raise while they are closed.
        stubborn: names of those whose opening ignores a cancellation.
    """

    def __init__(self) -> None:
        self.live: set[object] = set()
        self.most = 0
        self.opens: Counter[str] = Counter()
        self.holds: dict[str, asyncio.Event] = {}
        self.fails: set[str] = set()
        self.stuck: set[str] = set()
        self.stubborn: set[str] = set()

    def hold(self, act: str) -> asyncio.Event:
        self.holds[act] = asyncio.Event()
        return self.holds[act]

    async def pause(self, act: str, name: str) -> None:
        if (event := self.holds.get(f"{act} {name}")) is not None:
            await event.wait()
        else:
            await asyncio.sleep(0)

    async def open(self, name: str) -> Opened:
        self.opens[name] += 1
        made = Opened(self, name)
        assert all(getattr(one, "name", "") != name for one in self.live), "a model is open twice"
        self.live.add(made)
        self.most = max(self.most, len(self.live))
        try:
            try:
                await self.pause("open", name)
            except asyncio.CancelledError:
                if name not in self.stubborn:
                    raise
            if name in self.fails:
                raise aionn.CompilationError(f"{name} cannot be compiled")
        except BaseException:
            self.live.discard(made)
            raise
        return made


class Request:
    """A request that holds its lease until `done` is set."""

    def __init__(self, leases: ModelLeases[Opened], name: str) -> None:
        self.done = asyncio.Event()
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._run(leases, name))

    async def _run(self, leases: ModelLeases[Opened], name: str) -> str:
        async with leases.lease(name) as opened:
            self.began.set()
            return await opened.use(self.done.wait)

    async def end(self) -> str:
        self.done.set()
        return await self.task


async def one(leases: ModelLeases[Opened], name: str) -> None:
    async with leases.lease(name) as opened:
        assert opened.name == name


async def test_random_requests_get_their_model_and_four_are_open_at_most() -> None:
    bench, chance = Bench(), random.Random(0)
    leases = ModelLeases(bench.open, 4)
    cancelled = 0

    async def work() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)

    async def caller() -> None:
        nonlocal cancelled
        for _ in range(125):
            name = f"m{chance.randrange(20)}"
            task = asyncio.create_task(run(name))
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            if chance.random() < 0.2:
                task.cancel()
            try:
                assert await task == name
            except asyncio.CancelledError:
                cancelled += 1

    async def run(name: str) -> str:
        async with leases.lease(name) as opened:
            return await opened.use(work)

    async with anyio.create_task_group() as callers:
        for _ in range(16):
            callers.start_soon(caller)
    assert bench.most == 4
    assert cancelled > 50
    assert len(leases.open_models) <= 4
    await leases.aclose(1)
    assert bench.live == set()


async def test_requests_that_miss_at_once_open_the_model_once() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 2), bench.hold("open a")
    requests = [Request(leases, "a") for _ in range(3)]
    await settled()
    opening.set()
    assert [await request.end() for request in requests] == ["a"] * 3
    await one(leases, "a")
    assert bench.opens == {"a": 1}


async def test_a_model_that_does_not_open_is_an_error_of_those_who_wait_and_is_not_kept() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 1), bench.hold("open a")
    bench.fails.add("a")
    requests = [Request(leases, "a") for _ in range(2)]
    await settled()
    opening.set()
    errors = await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
    assert [type(error) for error in errors] == [aionn.CompilationError] * 2
    assert errors[0] is not errors[1], "each caller has an error with a traceback of its own"
    assert "a" not in leases
    await one(leases, "b")
    bench.fails.clear()
    await one(leases, "a")
    assert bench.opens == {"a": 2, "b": 1}


async def test_an_opening_goes_on_without_requests_and_the_next_one_uses_it() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 1), bench.hold("open a")
    first, second = Request(leases, "a"), Request(leases, "a")
    await settled()
    for request in (first, second):
        request.task.cancel()
        await settled()
        assert bench.live, "requests do not own the opening"
    third = Request(leases, "a")
    await settled()
    opening.set()
    assert await third.end() == "a"
    assert bench.opens == {"a": 1}


async def test_a_model_that_no_request_waits_for_is_open_later_and_gives_its_place_to_another() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 1), bench.hold("open a")
    gone = Request(leases, "a")
    await settled()
    gone.task.cancel()
    await settled()
    other = Request(leases, "b")
    await settled()
    assert not other.began.is_set(), "or requests for two models could end each other's opening without end"
    opening.set()
    assert await other.end() == "b"
    assert (bench.opens, bench.most) == ({"a": 1, "b": 1}, 1)


async def test_an_opening_without_requests_spares_a_model_in_use_and_not_an_idle_one() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 2), bench.hold("open a")
    used, gone = Request(leases, "c"), Request(leases, "a")
    await settled()
    gone.task.cancel()
    await settled()
    other = Request(leases, "b")
    await settled()
    late = Request(leases, "c")
    await settled()
    assert late.began.is_set(), "b takes the place of a, which no request wants, once a is open"
    assert not other.began.is_set()
    assert [await request.end() for request in (late, used)] == ["c", "c"]
    await other.began.wait()  # c is idle now, so b need not wait for a
    opening.set()
    assert await other.end() == "b"
    assert bench.opens == {"c": 1, "a": 1, "b": 1}


async def test_an_opening_that_fails_without_requests_is_logged_and_gives_its_place_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 1), bench.hold("open a")
    bench.fails.add("a")
    request = Request(leases, "a")
    await settled()
    request.task.cancel()
    await settled()
    opening.set()
    await one(leases, "b")
    assert "model 'a' was not opened, and no request waits for it now: CompilationError: a cannot be compiled" in caplog.text


async def test_an_opening_that_ignores_its_cancellation_is_closed() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    bench.hold("open a")
    bench.stubborn.add("a")
    request = Request(leases, "a")
    await settled()
    await leases.aclose(60)
    assert bench.live == set()
    with pytest.raises(aionn.CallerError, match="being closed"):
        await request.task


async def test_closing_ends_an_opening_that_no_request_waits_for() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    bench.hold("open a")
    request = Request(leases, "a")
    await settled()
    request.task.cancel()
    await settled()
    assert bench.live
    async with asyncio.timeout(60):
        await leases.aclose(60)
    assert bench.live == set()


async def test_a_request_that_is_cancelled_before_the_first_step_of_its_opening_costs_no_place() -> None:
    bench = Bench()
    leases, opening = ModelLeases(bench.open, 1), bench.hold("open a")
    bench.fails.add("a")
    first, waiter = Request(leases, "a"), Request(leases, "b")
    await settled()
    opening.set()
    await asyncio.sleep(0)  # "a" has failed; in the next turn of the loop "b" gets its place,
    waiter.task.cancel()  # and in the same turn the only request for "b" leaves
    await asyncio.sleep(0)
    assert (waiter.task.done(), "b" in leases, bench.opens["b"]) == (True, True, 0), "the case of this test: the opening has not begun"
    results = await asyncio.gather(first.task, waiter.task, return_exceptions=True)
    assert [type(result) for result in results] == [aionn.CompilationError, asyncio.CancelledError]
    async with asyncio.timeout(10):
        await one(leases, "c")
    assert bench.opens == {"a": 1, "b": 1, "c": 1}
    assert bench.most == 1


async def test_closing_ends_an_opening_that_has_not_begun() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    request = Request(leases, "a")
    await asyncio.sleep(0)  # the request has begun, and its model's task has not
    async with asyncio.timeout(10):
        await leases.aclose(0.01)
    with pytest.raises(aionn.CallerError, match="being closed"):
        await request.task
    assert bench.opens == {}


async def test_a_request_that_is_cancelled_while_it_waits_for_a_place_opens_nothing() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    holder = Request(leases, "a")
    await holder.began.wait()
    waiter = Request(leases, "b")
    await settled()
    waiter.task.cancel()
    await settled()
    await one(leases, "a")  # it does not wait for a place that is not needed any more
    assert await holder.end() == "a"
    assert bench.opens == {"a": 1}


async def test_a_model_in_use_is_closed_after_its_requests_and_before_the_next_one_is_opened() -> None:
    bench = Bench()
    leases, closing = ModelLeases(bench.open, 1), bench.hold("close a")
    first = Request(leases, "a")
    await first.began.wait()
    other, late = Request(leases, "b"), Request(leases, "a")
    await settled()
    assert not late.began.is_set(), "requests that overlap could keep the place without end"
    assert await first.end() == "a"
    await settled()
    assert bench.opens == {"a": 1}, "the place is taken until the model is closed"
    closing.set()
    assert await other.end() == "b"
    assert await late.end() == "a"
    assert bench.opens == {"a": 2, "b": 1}
    assert bench.most == 1


async def test_a_model_that_was_chosen_to_leave_stays_if_another_place_comes_free() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 2)
    first, second = Request(leases, "a"), Request(leases, "b")
    await settled()
    other, late = Request(leases, "c"), Request(leases, "a")
    await settled()
    assert not late.began.is_set()
    assert await second.end() == "b"
    await late.began.wait()
    assert [await request.end() for request in (other, late, first)] == ["c", "a", "a"]
    assert bench.opens == {"a": 1, "b": 1, "c": 1}


async def test_a_long_lease_does_not_keep_short_ones_in_their_place() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 2)
    long, short = Request(leases, "a"), Request(leases, "b")
    await settled()
    new = Request(leases, "c")  # "a" is chosen to leave
    second = Request(leases, "b")
    await settled()
    assert await short.end() == "b"
    late, third = Request(leases, "a"), Request(leases, "b")  # requests for "b" overlap
    await settled()
    assert late.began.is_set(), "a stays"
    assert await second.end() == "b"
    await settled()
    assert new.began.is_set()
    assert [await request.end() for request in (new, third, late, long)] == ["c", "b", "a", "a"]
    assert bench.opens == {"a": 1, "b": 2, "c": 1}
    assert bench.most == 2


async def test_the_model_that_was_leased_least_recently_is_closed() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 2)
    for name in "abac":
        await one(leases, name)
    assert list(leases.open_models) == ["a", "c"]
    assert bench.opens == {"a": 1, "b": 1, "c": 1}


async def test_a_model_that_fails_to_close_gives_its_place_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    bench.stuck.add("a")
    await one(leases, "a")
    await one(leases, "b")
    assert "model 'a' was not closed: RuntimeError: it does not close" in caplog.text


async def test_closing_waits_for_leases_and_ends_requests_that_wait_for_a_model() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 3)
    bench.hold("open b")
    going, other, opening, waiting = (Request(leases, name) for name in "adbc")
    await settled()
    late = Request(leases, "a")  # "a" was chosen to leave, for "c"
    await settled()
    closing = asyncio.create_task(leases.aclose(60))
    for request in (opening, waiting, late):
        with pytest.raises(aionn.CallerError, match="being closed"):
            await request.task
    await settled()
    assert not closing.done()
    assert {getattr(one, "name", "") for one in bench.live} == {"a", "d"}
    assert [await request.end() for request in (going, other)] == ["a", "d"]
    await closing
    assert bench.live == set()
    with pytest.raises(aionn.CallerError, match="being closed"):
        await one(leases, "a")
    await leases.aclose(60)
    assert bench.opens == {"a": 1, "b": 1, "d": 1}


async def test_closing_does_not_wait_longer_than_it_may() -> None:
    bench = Bench()
    leases = ModelLeases(bench.open, 1)
    request = Request(leases, "a")
    await request.began.wait()
    await leases.aclose(0.01)
    assert bench.live == set()
    with pytest.raises(AssertionError, match="closed under a request"):
        await request.end()


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "4"])
def test_a_wrong_number_of_models_is_refused(most: Any) -> None:
    with pytest.raises(aionn.CallerError, match="max_models"):
        ModelLeases(Bench().open, most)
