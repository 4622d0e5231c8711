"""The loops an app may bring: `aionn.run`, its own asyncio or uvloop loop, in the main thread or in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

import aionn
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import leak_check


async def whole_journey(path: Path) -> str:
    """Compile, compute, stream; the name of the loop's module."""
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(path).run(inputs)
    model = aionn.Model.from_onnx(path)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        assert_same(await compilation.compute(inputs), expected)
        async with compilation.burst() as burst:
            assert_same(await burst.compute(inputs), expected)
    return type(asyncio.get_running_loop()).__module__


async def main_that_fails() -> None:
    raise KeyError("mine")


def test_run_brings_uvloop_and_hands_back_what_main_returns(silero_path: Path) -> None:
    with leak_check():
        assert aionn.run(whole_journey, silero_path).startswith("uvloop")


def test_run_hands_on_an_error_of_main_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        aionn.run(main_that_fails)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_app_may_bring_its_own_loop_in_a_thread_of_its_own(silero_path: Path, run: Callable[..., str]) -> None:
    loops: list[str] = []
    with leak_check():
        app = threading.Thread(target=lambda: loops.append(run(whole_journey(silero_path))))
        app.start()
        app.join()
    assert loops[0].split(".")[0] == run.__module__.split(".")[0]


def test_two_runtimes_in_two_loops_do_not_know_each_other(silero_path: Path) -> None:
    done: list[str] = []
    with leak_check():
        apps = [threading.Thread(target=lambda: done.append(aionn.run(whole_journey_alone, silero_path))) for _ in range(2)]
        for app in apps:
            app.start()
        for app in apps:
            app.join()
    assert len(done) == 2


async def whole_journey_alone(path: Path) -> str:
    """As `whole_journey`, without looking for leaks: the other thread's belongings come and go meanwhile."""
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(path).run(inputs)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(path), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            for _ in range(20):
                assert_same(await burst.compute(inputs), expected)
    return "done"
