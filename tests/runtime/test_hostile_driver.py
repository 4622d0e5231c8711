"""A driver process that lies, breaks off or is silent: its app gets a clear error, in time, and nothing else is harmed by it.

Each lie is told by a real process (`hostile_driver`), beside an honest one that must not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.hal.types import ErrorStatus
from aionn.testing import identity_model
from tests.leaks import leak_check
from tests.runtime import hostile_driver

pytestmark = pytest.mark.anyio

HONEST = "aionn.testing.fake_engine:FakeEngine"
IN_TIME_S = 30.0
ROLES: dict[str, Any] = {"inputs": ("x",), "outputs": ("a",)}


@pytest.fixture(params=[pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """What a loop does with such a socket is tested below (`tests/remote`); here one is enough."""
    return request.param


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (4,), "z": (4,)}, outputs=["a", "b"]))


def inputs() -> dict[str, Any]:
    return {"x": np.arange(4, dtype=np.float32), "z": np.ones(4, np.float32)}


def device(lie: str) -> str:
    return f"{hostile_driver.__name__}:{lie}"


@asynccontextmanager
async def beside_an_honest_one() -> AsyncIterator[aionn.Runtime]:
    """A runtime whose honest driver has opened a burst before and works as it did afterwards. Nothing is left, nothing hangs."""
    with anyio.fail_after(IN_TIME_S):
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await runtime.compile(model(), devices=(HONEST,))
            async with compilation.burst() as burst:
                await burst.compute(inputs())
                pid = next(one.pid for one in runtime.devices if one.name == HONEST)
                yield runtime
                outputs = await burst.compute(inputs())
                np.testing.assert_array_equal(outputs["a"], inputs()["x"])
                assert pid == next(one.pid for one in runtime.devices if one.name == HONEST)
                assert burst.statistics()["connections"] == 1
                del outputs


async def test_an_honest_driver_by_hand_is_believed() -> None:
    """Or the lies below would prove nothing."""
    async with beside_an_honest_one() as runtime:
        compilation = await runtime.compile(model(), devices=(device("honest"),))
        assert set(await compilation.compute(inputs())) == {"a", "b"}
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            for _ in range(3):
                assert set(await burst.compute(inputs())) == {"a", "b"}
                assert set(await burst.compute({**inputs(), "x": state}, outputs={"a": state})) == {"b"}


async def test_greetings_that_are_none() -> None:
    async with beside_an_honest_one() as runtime:
        for lie in hostile_driver.GREETINGS:
            with pytest.raises((aionn.DriverDiedError, aionn.DeviceUnavailableError)) as told:
                await runtime.compile(model(), devices=(device(lie),))
            assert device(lie) in str(told.value), lie


HARMLESS_ANSWERS = {"other_operands", "no_operands", "token_huge", "a_call_that_is_not_its"}
"""The app goes by its own model; a token is the driver's own word for what it has."""


async def test_answers_that_are_none() -> None:
    async with beside_an_honest_one() as runtime:
        for lie in hostile_driver.ANSWERS:
            failed = False
            try:
                compilation = await runtime.compile(model(), devices=(device(lie),))
                async with compilation.burst() as burst:
                    await burst.compute(inputs())
                    state = await compilation.allocate(**ROLES)
                    for _ in range(2):
                        await burst.compute({**inputs(), "x": state}, outputs={"a": state})
            except aionn.AionnError as error:
                failed = True
                assert str(error), lie
            assert failed == (lie not in HARMLESS_ANSWERS), lie


async def test_a_page_in_huge_pages_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with beside_an_honest_one() as runtime:
        with pytest.raises(aionn.DriverDiedError):
            await runtime.compile(model(), devices=(device("a_page_of_huge_pages"),))
    assert "broke the protocol and is killed: a statistics page lies in huge pages" in caplog.text


async def test_no_text_of_a_driver_steers_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """Lines of its log, its errors with their notes, the reasons of failed executions, and what it says of itself."""

    def plain(text: str) -> bool:
        return text.replace("\n", "").replace("\t", "").isprintable()

    shown = hostile_driver.STEERING.translate(
        {code: ascii(chr(code))[1:-1] for code in map(ord, hostile_driver.STEERING) if not plain(chr(code))}
    )
    async with beside_an_honest_one() as runtime:
        await runtime.compile(model(), devices=(device("log_lines"),))
        with pytest.raises(aionn.CompilationError) as refused:
            await runtime.compile(model(), devices=(device("a_failure_that_steers"),))
        failing = await runtime.compile(model(), devices=(device("a_failure"),))
        with pytest.raises(aionn.ExecutionError) as failed:
            await failing.compute(inputs())
        for one in runtime.devices:
            assert plain(f"{one.version}{one.runs_on or ''}{one.providers}{one.sandbox}")
        assert [one.version for one in runtime.devices if one.name == device("log_lines")] == [r"1\x1b[31m"]
    first, second = (
        record for record in caplog.records if record.name == f"aionn.driver.{device('log_lines')}" and "forged" in record.getMessage()
    )
    assert first.getMessage() == f"device {device('log_lines')!r}: first\n\t{shown}"
    assert first.aionn_logger == second.aionn_logger == shown  # type: ignore[attr-defined]
    assert len(second.getMessage()) < 8192 + 200
    assert second.getMessage().endswith(f" [{2000 * len(hostile_driver.STEERING)} characters in all]")
    assert shown in str(refused.value)
    assert refused.value.__notes__ == [shown] * 8
    assert r"\x00\x1b[31m" in str(failed.value)
    assert plain(f"{refused.value}{refused.value.reason}{failed.value}{caplog.text}")


async def test_configure_execution_burst_failure_null_transport_and_dead() -> None:
    """No burst, one sentence, and no fallback. `compute` keeps a burst and fails alike, on a new driver where the old one has gone."""
    rows: dict[str, tuple[type[aionn.AionnError], bool]] = {
        "burst_refused": (aionn.ExecutionError, True),
        "burst_of_nothing": (aionn.DriverDiedError, False),
        "burst_cut": (aionn.DriverDiedError, False),
        "burst_dead": (aionn.DriverDiedError, False),
    }
    async with beside_an_honest_one() as runtime:
        for lie, (expected, lives) in rows.items():
            compilation = await runtime.compile(model(), devices=(device(lie),))
            (driver,) = (one for one in runtime.devices if one.name == device(lie))
            pid = driver.pid
            for _ in range(2):
                burst = compilation.burst()
                with pytest.raises(expected) as caught:
                    await burst.__aenter__()
                assert type(caught.value) is expected, lie
                with pytest.raises(aionn.CallerError, match="not open"):
                    await burst.compute(inputs())
                await burst.aclose()
                if lives:
                    assert isinstance(caught.value, aionn.ExecutionError)
                    assert caught.value.status is ErrorStatus.GENERAL_FAILURE
                    assert "not today" in str(caught.value)
                with pytest.raises(expected) as computing:
                    await compilation.compute(inputs())
                assert type(computing.value) is expected, lie
                assert (driver.pid == pid) is lives, lie
                del computing
            del caught
            await compilation.aclose()


async def test_calls_that_wait_for_one_connection_share_its_failure() -> None:
    """Or each of them would end one more driver."""
    async with beside_an_honest_one() as runtime:
        compilation = await runtime.compile(model(), devices=(device("burst_dead"),))
        with trace.record() as recording:
            failed = await asyncio.gather(*(compilation.compute(inputs()) for _ in range(8)), return_exceptions=True)
        assert [type(error) for error in failed] == [aionn.DriverDiedError] * 8
        assert [span.name for span in recording.spans].count("burst.connect") == 1
        del failed


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_results_that_contradict_the_request(way: str) -> None:
    """Also where outputs are to lie in an app's own memory, or in the driver."""
    async with beside_an_honest_one() as runtime:
        for lie in hostile_driver.RESULTS:
            if lie == "a_negative_shape":
                continue  # a burst's datums have no sign
            compilation = await runtime.compile(model(), devices=(device(lie),))
            async with compilation.burst() as burst, aionn.Memory.allocate(16) as memory:
                compute = burst.compute if way == "burst" else compilation.compute
                with pytest.raises(aionn.AionnError):
                    await compute(inputs())
                with pytest.raises(aionn.AionnError):
                    await compute(inputs(), outputs={"b": memory})
                state = await compilation.allocate(inputs=("x",), outputs=("b",))
                for _ in range(2):
                    with pytest.raises(aionn.AionnError):
                        await compute({**inputs(), "x": state}, outputs={"b": state})
                assert state.shape == (4,), lie
                assert burst.statistics()["in_flight"] == burst.statistics()["pinned_frames"] == 0, lie


async def test_every_status_is_its_own_error_on_both_ways() -> None:
    """The rows of TestExecution: the status as the driver gave it; shapes only where more room would help, and no times."""
    plain, deadline = aionn.ExecutionError, aionn.DeadlineError
    expected: dict[ErrorStatus, type[aionn.AionnError]] = {
        ErrorStatus.DEVICE_UNAVAILABLE: plain,
        ErrorStatus.GENERAL_FAILURE: plain,
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: aionn.OutputInsufficientSizeError,
        ErrorStatus.INVALID_ARGUMENT: aionn.CallerError,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT: deadline,
        ErrorStatus.MISSED_DEADLINE_PERSISTENT: deadline,
        ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: plain,
        ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: plain,
    }
    assert {f"status_{status.name}" for status in expected} == hostile_driver.STATUSES.keys()
    async with beside_an_honest_one() as runtime:
        for status, kind in expected.items():
            compilation = await runtime.compile(model(), devices=(device(f"status_{status.name}"),))
            async with compilation.burst() as burst:
                for compute in (compilation.compute, burst.compute) * 2:
                    for timed in (False, True):
                        with pytest.raises(kind) as caught:
                            await compute(inputs(), measure_timing=timed)
                        error = caught.value
                        assert type(error) is kind, status
                        assert f"told {status.name}" in str(error)
                        assert getattr(error, "status", status) is status
                        assert getattr(error, "transient", None) == ("TRANSIENT" in status.name if kind is deadline else None)
                        assert getattr(error, "shapes", None) == (
                            {"a": (4,), "b": (4,)} if status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE else None
                        )
                        del caught, error
                assert burst.statistics()["connections"] == 1, "a failed execution does not end a burst"
            await compilation.aclose()


async def test_the_times_are_those_that_the_driver_knows() -> None:
    """The rows of TimingTest: both, one or none; none unless they were asked for."""
    async with beside_an_honest_one() as runtime:
        for lie, result in hostile_driver.TIMINGS.items():
            compilation = await runtime.compile(model(), devices=(device(lie),))
            async with compilation.burst() as burst:
                for compute in (compilation.compute, burst.compute) * 2:
                    assert (await compute(inputs())).timing is None, lie
                    assert (await compute(inputs(), measure_timing=True)).timing == result.timing, lie
            await compilation.aclose()


async def test_lies_on_a_bursts_queue() -> None:
    async with beside_an_honest_one() as runtime:
        for lie in hostile_driver.QUEUES:
            compilation = await runtime.compile(model(), devices=(device(lie),))
            async with compilation.burst() as burst:
                failure = ""
                try:
                    for _ in range(3):  # what comes too much is seen by the next
                        await burst.compute(inputs(), timeout_s=0.2 if lie == "silence" else 30)
                except aionn.AionnError as error:
                    failure = str(error)
                # Twice the same answer: the first is the answer, and the burst goes on over new queues.
                assert bool(failure) == (lie != "an_answer_twice"), lie
                assert burst.statistics()["connections"] == (3 if lie == "an_answer_twice" else 1), lie
                assert burst.statistics()["in_flight"] <= (lie == "silence")
