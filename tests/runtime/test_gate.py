"""The gate that holds executions back: in the order in which they came, although callers leave and however often it closes."""

from __future__ import annotations

import time

import anyio
import pytest

import aionn
from aionn.runtime.serving.serving import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


class Line:
    """Callers at a gate, numbered; `passed` has them in the order in which they got through."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.passed: list[int] = []

    async def caller(self, number: int, deadline_ns: int | None = None) -> None:
        if self.gate.shut:
            await self.gate.passed(deadline_ns)
        assert not self.gate.closed
        self.passed.append(number)
        await anyio.lowlevel.checkpoint()


async def test_who_comes_while_others_still_pass_queues_behind_them() -> None:
    line = Line()
    line.gate.close()
    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(line.caller, number)
        await anyio.wait_all_tasks_blocked()
        assert line.passed == []
        line.gate.open()
        await line.caller(4)
    assert line.passed == [0, 1, 2, 3, 4]
    assert not line.gate.shut


async def test_a_gate_that_closes_again_holds_those_who_have_not_passed_yet() -> None:
    line = Line()
    line.gate.close()
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(line.caller, number)
        await anyio.wait_all_tasks_blocked()
        line.gate.open()
        line.gate.close()
        await anyio.wait_all_tasks_blocked()
        assert line.passed == []
        tasks.start_soon(line.caller, 3)
        await anyio.wait_all_tasks_blocked()
        line.gate.open()
    assert line.passed == [0, 1, 2, 3]
    assert not line.gate.shut


async def test_one_that_is_cancelled_or_late_lets_the_next_pass() -> None:
    line = Line()
    line.gate.close()
    async with anyio.create_task_group() as tasks, anyio.create_task_group() as leaving:
        leaving.start_soon(line.caller, 0)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(line.caller, 1)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(aionn.DeadlineError):
            await line.caller(2, time.monotonic_ns())
        leaving.cancel_scope.cancel()
        line.gate.open()  # it is the turn of the first one, who leaves
    assert line.passed == [1]
    assert not line.gate.shut
