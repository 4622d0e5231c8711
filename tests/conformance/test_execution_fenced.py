"""Fenced executions on every `IDevice` (HAL 1.3: executeFenced): fences, dependencies, deadlines and timing.

The rows of the acceptance list are VTS' fenced half of GeneratedTests, DeadlineTest and the fenced pairs of TimingTest.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.driver import find_engine
from aionn.errors import AionnError, CallerError
from aionn.hal.interfaces import IDevice, IPreparedModel, PrepareOptions
from aionn.hal.options import CallOptions
from aionn.hal.types import NO_TIMING, UNKNOWN_TIME_US, DataLocation, Dependency, ErrorStatus, FencedResult, Request, RequestArgument
from aionn.memory.region import Region
from aionn.remote.device import Fenced, RemotePreparedModel
from aionn.remote.fences import FAILURE, make_fence, outcome_of, signal_fence
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.conformance.devices import ENGINES, HOLDERS
from tests.leaks import leak_check
from tests.remote.pair import remote_device
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: `test_started` runs on both."""
    return "asyncio", {"use_uvloop": True}


FACTOR = np.linspace(-2, 2, 64, dtype=np.float32)
BYTES = FACTOR.nbytes


def request(shape: tuple[int, ...] = (64,), out_shape: tuple[int, ...] = (64,), out_bytes: int = BYTES) -> Request:
    return Request((RequestArgument(DataLocation(0, 0, BYTES), shape),), (RequestArgument(DataLocation(1, 0, out_bytes), out_shape),))


GOOD = request()


@contextmanager
def fences(count: int) -> Iterator[list[int]]:
    made = [make_fence() for _ in range(count)]
    try:
        yield made
    finally:
        for fd in made:
            os.close(fd)


@dataclass
class Prepared:
    model: IPreparedModel
    input: Region
    output: Region

    async def compute(self) -> Any:
        return await self.model.execute(GOOD, [self.input, self.output])

    async def fenced(self, fence: int, *after: Dependency, what: Request = GOOD, **options: Any) -> FencedResult:
        return await self.model.execute_fenced(what, [self.input, self.output], after, fence, **options)

    @property
    def outputs(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.output.view(), np.float32, 64).copy()


@asynccontextmanager
async def prepared_on(device: IDevice, model: aionn.Model) -> AsyncIterator[Prepared]:
    found = Prepared(await device.prepare_model(model, PrepareOptions()), Region.allocate(4096), Region.allocate(4096))
    np.frombuffer(found.input.view(), np.float32, 64)[:] = np.arange(64)
    try:
        yield found
    finally:
        await found.model.aclose()
        found.input.close()
        found.output.close()


@pytest.fixture(params=["in_process", "in_a_driver"])
def holder(request: pytest.FixtureRequest) -> Any:
    return HOLDERS[request.param]


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    find_engine(ENGINES[request.param])
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def scaled() -> aionn.Model:
    return aionn.Model.from_onnx(scaled_model(FACTOR))


async def test_a_fenced_execution_gives_what_compute_gives_and_signals_its_fence(holder: Any, engine: str, scaled: aionn.Model) -> None:
    """FencedExecution of GeneratedTests, and both pairs of TimingTest: since the launch, and since the dependencies were done."""
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        assert (await it.compute()).status is ErrorStatus.NONE
        expected = it.outputs
        for timed in (False, True):
            with fences(1) as (fence,):
                it.output.view()[:BYTES] = bytes(BYTES)
                assert outcome_of(fence) is None
                found = await it.fenced(fence, measure_timing=timed)
                assert found.result.status is ErrorStatus.NONE
                assert found.failed is None
                assert outcome_of(fence) is True
                np.testing.assert_array_equal(it.outputs, expected)
                if not timed:
                    assert found.result.timing == found.since_launch == NO_TIMING
                    continue
                assert found.since_launch.in_driver_us >= found.result.timing.in_driver_us != UNKNOWN_TIME_US
                assert found.since_launch.on_device_us == found.result.timing.on_device_us


async def test_an_execution_begins_when_all_its_dependencies_are_done(holder: Any, engine: str, scaled: aionn.Model) -> None:
    """Own fences and descriptors of others. Since the launch the wait counts, since the fence it does not."""
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        with fences(3) as (first, second, fence):
            found: list[FencedResult] = []

            async def run() -> None:
                found.append(await it.fenced(fence, Dependency(first, is_event=True), Dependency(second), measure_timing=True))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for signalled in (first, second):
                    with anyio.move_on_after(0.02):
                        await anyio.wait_readable(fence)
                    assert outcome_of(fence) is None, "it has not begun"
                    signal_fence(signalled, succeeded=True)
                await anyio.wait_readable(fence)
            (answer,) = found
            assert answer.result.status is ErrorStatus.NONE
            assert outcome_of(fence) is True
            assert answer.since_launch.in_driver_us >= answer.result.timing.in_driver_us


@pytest.mark.parametrize("when", ["before", "while it waits"])
async def test_a_failed_dependency_fails_the_execution(holder: Any, engine: str, scaled: aionn.Model, when: str) -> None:
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        with fences(3) as (good, bad, fence):
            signal_fence(good, succeeded=True)
            if when == "before":
                signal_fence(bad, succeeded=False)
            it.output.view()[:BYTES] = bytes(BYTES)

            async def fail_it() -> None:
                with anyio.move_on_after(0.01):
                    await anyio.wait_readable(fence)
                signal_fence(bad, succeeded=False)

            async with anyio.create_task_group() as tasks:
                if when != "before":
                    tasks.start_soon(fail_it)
                answer = await it.fenced(fence, Dependency(good, is_event=True), Dependency(bad, is_event=True))
            assert answer.failed == 1
            assert answer.result.status is ErrorStatus.GENERAL_FAILURE
            assert "dependency 1" in answer.result.message
            assert outcome_of(fence) is False
            assert not it.outputs.any(), "it has not begun"


async def test_a_foreign_fence_only_says_that_it_is_done(holder: Any, engine: str, scaled: aionn.Model) -> None:
    """Its counter means nothing here, and it is not taken."""
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        with fences(2) as (foreign, fence):
            os.eventfd_write(foreign, FAILURE)
            answer = await it.fenced(fence, Dependency(foreign), Dependency(foreign))
            assert answer.result.status is ErrorStatus.NONE
            assert os.eventfd_read(foreign) == FAILURE


WAYS = ("sync", "fenced", "fenced after a fence that comes", "fenced after a fence that never comes")


async def test_deadlines(holder: Any, engine: str, scaled: aionn.Model) -> None:
    """VTS DeadlineTest: NONE or MISSED_DEADLINE_* for the first two, and only NONE for unlimited."""
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        for way in WAYS:
            for left_ns in (0, 5_000_000, None):
                if left_ns is not None or not way.endswith("never comes"):
                    await meets_its_deadline(it, way, left_ns)


async def meets_its_deadline(it: Prepared, way: str, left_ns: int | None) -> None:
    missed = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
    with fences(2) as (dependency, fence):
        if way.endswith("that comes"):
            signal_fence(dependency, succeeded=True)
        after = (Dependency(dependency, is_event=True),) if "after" in way else ()
        deadline_ns = None if left_ns is None else time.monotonic_ns() + left_ns
        if way == "sync":
            result = await it.model.execute(GOOD, [it.input, it.output], False, deadline_ns)
        else:
            result = (await it.fenced(fence, *after, deadline_ns=deadline_ns)).result
            assert outcome_of(fence) is (result.status is ErrorStatus.NONE)
        if left_ns is None:
            assert result.status is ErrorStatus.NONE
        elif left_ns == 0 or way.endswith("never comes"):
            assert result.status in missed
        else:
            assert result.status in {ErrorStatus.NONE, *missed}


async def test_the_release_of_the_model_ends_the_wait(holder: Any, engine: str, scaled: aionn.Model) -> None:
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        with fences(2) as (never, fence):
            found: list[FencedResult] = []

            async def run() -> None:
                found.append(await it.fenced(fence, Dependency(never)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                await it.model.aclose()
            assert found[0].result.status is ErrorStatus.INVALID_ARGUMENT
            assert "released" in found[0].result.message
            assert outcome_of(fence) is False


async def test_a_cancelled_caller_ends_the_wait_and_leaves_nothing(holder: Any, engine: str, scaled: aionn.Model) -> None:
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        with fences(2) as (never, fence):
            with anyio.move_on_after(0.02) as scope:
                await it.fenced(fence, Dependency(never))
            assert scope.cancelled_caught
            assert outcome_of(fence) is False
            signal_fence(never, succeeded=True)
            assert (await it.compute()).status is ErrorStatus.NONE


async def test_an_output_that_does_not_fit_leaves_the_fence_to_the_caller(holder: Any, engine: str) -> None:
    """The caller sends the request again with more room and the same fence, so those who wait see one execution."""
    model = aionn.Model.from_onnx(identity_model({"x": ("n",)}))
    async with leak_check(), holder(engine) as device, prepared_on(device, model) as it:
        with fences(1) as (fence,):
            short = await it.fenced(fence, what=request(out_shape=(0,), out_bytes=16))
            assert short.result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
            assert short.result.output_shapes[0].dimensions == (64,)
            assert not short.result.output_shapes[0].is_sufficient
            assert outcome_of(fence) is None
            again = await it.fenced(fence, what=request(out_shape=(0,)))
            assert again.result.status is ErrorStatus.NONE
            assert outcome_of(fence) is True
            np.testing.assert_array_equal(it.outputs, np.arange(64))


async def test_a_request_that_is_refused_signals_a_failure(holder: Any, engine: str, scaled: aionn.Model) -> None:
    """ValidateRequest removeInput, removeOutput, and a location beyond its pool, over the fenced path."""
    bad = (Request((), GOOD.outputs), Request(GOOD.inputs, ()), request(out_bytes=8192))
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        for what in bad:
            with fences(1) as (fence,):
                answer = await it.fenced(fence, what=what)
                assert answer.result.status is ErrorStatus.INVALID_ARGUMENT
                assert answer.result.message
                assert outcome_of(fence) is False


async def test_descriptors_that_are_no_fences_are_refused(holder: Any, engine: str, scaled: aionn.Model, tmp_path: Any) -> None:
    async with leak_check(), holder(engine) as device, prepared_on(device, scaled) as it:
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        listener, sender = os.pipe()
        try:
            with pytest.raises(CallerError, match="not an eventfd"):
                await it.fenced(sender)
            os.set_blocking(listener, False)
            with pytest.raises(BlockingIOError):
                os.read(listener, 8)  # nothing was written into what is not a fence
            with fences(1) as (fence,):
                answer = await it.fenced(fence, Dependency(file, is_event=True))
                assert answer.result.status in (ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE)
                assert outcome_of(fence) is False
        finally:
            for fd in (file, listener, sender):
                os.close(fd)
        assert (await it.compute()).status is ErrorStatus.NONE


async def test_the_end_of_the_driver_signals_a_failure(fake: FakeDevice) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (64,)}))
    async with HOLDERS["in_a_driver"](fake.name) as device, prepared_on(device, model) as it:  # type: ignore[attr-defined]
        with fences(2) as (never, fence):

            async def kill() -> None:
                with anyio.move_on_after(0.02):
                    await anyio.wait_readable(fence)
                device.connection.end(aionn.DriverDiedError("fake", -9))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                with pytest.raises(AionnError):
                    await it.fenced(fence, Dependency(never))
            assert outcome_of(fence) is False


async def test_a_cancellation_that_is_read_together_with_its_execution_ends_it_before_it_runs(scaled: aionn.Model) -> None:
    async with remote_device(find_engine("reference")) as device, prepared_on(device, scaled) as it:
        with fences(1) as (fence,):
            ended: list[FencedResult | BaseException] = []
            over = anyio.Event()

            def settled(found: FencedResult | BaseException) -> None:
                ended.append(found)
                over.set()

            assert isinstance(it.model, RemotePreparedModel)
            stop = it.model.start_fenced(Fenced(GOOD, [it.input, it.output], (), fence), CallOptions(), settled)
            stop()  # both frames lie in the socket before the driver's end reads
            with anyio.fail_after(20):
                await over.wait()
            (found,) = ended
            assert isinstance(found, FencedResult)
            assert found.result.status is ErrorStatus.INVALID_ARGUMENT
            assert not it.outputs.any()
