"""Both ends of a burst where the interpreter has no memory: `MemoryError` or the usual outcome, and each request is settled once."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from aionn.burst.executors import Bodies, Bound
from aionn.burst.packets import decode_result, result_identity_datum
from aionn.burst.spin_policy import APP_WINDOW_NS
from aionn.hal.types import ErrorStatus, Result
from tests.burst.test_exchange import BODY, RESULTS, Calls, Ends, exchange
from tests.fmq.test_native_objects import in_child

testcapi: Any = pytest.importorskip("_testcapi")
pytestmark = [pytest.mark.own_process, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

ALLOCATIONS = 40
"""More than any of these calls makes."""


def answer(ends: Ends, identity: int) -> None:
    assert ends.results_written.write(RESULTS[0] + result_identity_datum(identity, 2**40))


def fails(call: Callable[[], object], allocation: int) -> bool:
    """Call with one allocation that fails. Return whether the call has failed.

    Only in a child of fork. No tracer looks on. Beside that of the coverage, 1 child of 40 crashed, and without it none of 40.
    """
    sys.settrace(None)
    used = [[] for _ in range(100)], [(number,) for number in range(3000)], [float(number) for number in range(200)]  # type: ignore[var-annotated]
    testcapi.set_nomemory(allocation, allocation + 1)
    try:
        call()
    except MemoryError:
        return True
    finally:
        testcapi.remove_mem_hooks()
        del used  # else objects that were freed before would serve as memory
    return False


@pytest.mark.parametrize("method", ["send", "event", "late", "leave", "idle", "end"])
def test_a_call_without_memory_fails_plainly_and_settles_each_request_once(method: str) -> None:
    def use() -> int:
        sys.unraisablehook = lambda _: None
        failed = 0
        for allocation in range(ALLOCATIONS):
            with exchange() as ends:
                Calls(ends.caller)
                ends.caller.remember(RESULTS[0], "fine")
                settled: list[deque[object]] = [deque() for _ in range(3)]  # their first entry takes no memory
                sent = [ends.caller.send(BODY, one.append, 1) for one in settled[:2]]
                answer(ends, 1)
                arguments: dict[str, Any] = {"send": (BODY, settled[2].append, 1), "leave": (sent[1], None)}
                failed += fails(partial(getattr(ends.caller, method), *arguments.get(method, ())), allocation)
                ends.caller.event()
                ends.caller.end()
                assert [len(one) for one in settled[:2]] == [1, 1]
                assert len(settled[2]) <= 1
        return failed

    assert in_child(use) or method in ("event", "leave", "end")


def test_an_answer_that_comes_at_once_and_finds_no_memory_is_a_memory_error() -> None:
    def use() -> int:
        failed = 0
        for allocation in range(ALLOCATIONS):
            with exchange() as ends:
                Calls(ends.caller, window_ns=APP_WINDOW_NS)
                ends.caller.remember(RESULTS[0], "fine")
                ends.caller.inline_ns, ends.caller.yield_by_ns = 1, 2**62
                answer(ends, 1)
                settled: deque[object] = deque()
                lost = fails(partial(ends.caller.send, BODY, settled.append, 0), allocation)
                failed += lost and ends.caller.answers_at_once
                if ends.caller.answers_at_once:
                    assert list(settled) == [None if lost else "fine"]
        return failed

    assert in_child(use) > 0


def test_a_lane_without_memory_for_an_answer_says_so_and_goes_on() -> None:
    class Full(Bodies):
        def of(self, result: Result) -> bytes:
            raise MemoryError

    class Runs:
        serial = False
        kind = 0

        def run(self, lane: object, measure_timing: bool) -> Result:
            return Result(ErrorStatus.NONE)

        async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
            raise AssertionError("a lane calls `run`")

        def warm_up(self, lane: object) -> bool:
            raise AssertionError("a lane calls `run`")

    body = Bound(Runs(), False, Full())(None)
    assert decode_result(body + result_identity_datum(7, 1)).result.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
