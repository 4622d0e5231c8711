"""Streams of Silero VAD that share runs, in a real driver: what they compute, and how cancelled, late and bad requests fare."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from prometheus_client import CollectorRegistry

import aionn
from aionn.errors import DeadlineError, DeviceBusyError, ExecutionError
from aionn.metrics import Collector
from tests.real_models import carried

pytestmark = pytest.mark.anyio

RATE = np.array(16000)
BATCH = aionn.Batching(max_rows=16, tolerance="exact")
STREAMS = 12


@pytest.fixture(autouse=True)
def with_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lanes join requests, also in a run of the suite without them."""
    monkeypatch.setenv("AIONN_LANES", "1")


@pytest.fixture
def silero() -> aionn.Model:
    return aionn.Model.from_onnx(carried("silero_batch"))


def window(stream: int, number: int) -> NDArray[np.float32]:
    return (0.3 * np.random.default_rng((stream, number)).standard_normal((1, 576))).astype(np.float32)


def still() -> NDArray[np.float32]:
    return np.zeros((2, 1, 128), np.float32)


class Alone:
    """The same model in this process, one row at a time."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(carried("silero_batch"), options, providers=["CPUExecutionProvider"])

    def run(self, x: NDArray[Any], state: NDArray[Any], rate: NDArray[Any] = RATE) -> tuple[NDArray[Any], NDArray[Any]]:
        output, after = self._session.run(None, {"input": x, "state": state, "sr": rate})
        return output, after


async def together(calls: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(call)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - the driver's page has no event
            await anyio.sleep(0.01)


async def until_joined(compilation: aionn.Compilation, call: Callable[[int], Awaitable[Any]]) -> None:
    """Make rounds of calls until the driver joins four rows or more."""

    async def one(index: int) -> None:
        await call(index)

    for _ in range(400):
        async with anyio.create_task_group() as tasks:
            for index in range(STREAMS):
                tasks.start_soon(one, index)
        if compilation.batching is not None and compilation.batching.most_rows >= 4:
            return
    raise AssertionError(f"the driver joins no rows: {compilation.batching}, {compilation.statistics()}")


async def test_streams_with_states_in_the_driver_compute_what_each_computes_alone(silero: aionn.Model) -> None:
    alone = Alone()
    frames = 60
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)
        assert compilation.batching is not None
        assert compilation.batching.allowed
        assert compilation.batching.axes == {"input": 0, "state": 1, "sr": None}

        async def stream(index: int) -> None:
            state = await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(2, 1, 128))
            await state.copy_from(still())
            expected = still()
            async with compilation.burst() as burst:
                for number in range(frames):
                    x = window(index, number)
                    found = await burst.compute({"input": x, "sr": RATE, "state": state}, outputs={"stateN": state})
                    output, expected = alone.run(x, expected)
                    np.testing.assert_array_equal(found["output"], output)
                np.testing.assert_array_equal(await state.snapshot(), expected)

        await together([lambda index=index: stream(index) for index in range(STREAMS)])  # type: ignore[misc]
        counted = compilation.statistics()
        assert counted["rows"] == STREAMS * frames
        assert max(counted["by_rows"]) > 1  # how many more depends on the machine
        assert sum(counted["by_rows"].values()) == counted["runs"]


async def test_joined_runs_are_seen_in_traces_and_metrics(silero: aionn.Model) -> None:
    registry = CollectorRegistry()
    with aionn.trace.record() as recording:
        async with aionn.Runtime(start=(), name="listening") as runtime:
            registry.register(Collector(runtime))
            compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH, name="voice")

            async def call(index: int) -> None:
                await compilation.compute({"input": window(index, 0), "sr": RATE, "state": still()})

            await until_joined(compilation, call)
            for _ in range(2):
                compilation._parts.bursts.count_joined()  # as once a second
                await together([lambda index=index: call(index) for index in range(STREAMS)])  # type: ignore[misc]
            counted = compilation.statistics()
            await compilation.aclose()
    where = {"runtime": "listening", "model": "voice", "device": "onnxruntime"}
    found = [registry.get_sample_value(f"aionn_joined_{what}_total", where) for what in ("runs", "rows")]
    assert found == [counted["runs"], counted["rows"]]
    spans = [span.attributes for span in recording.spans if span.name == "driver.batch"]
    assert {*spans[0]} >= {"rows", "waited_us", "gather_us", "run_us", "scatter_us"}
    assert sum(int(span["rows"]) for span in spans) == counted["rows"] - counted["by_rows"][1]
    assert all(0 <= int(span["waited_us"]) < 60_000_000 for span in spans)


async def test_random_calls_with_deadlines_and_cancellations_get_right_answers_or_none(silero: aionn.Model) -> None:
    alone = Alone()
    randomness = random.Random(1)
    rounds, answered = 40, 0
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)
        bursts = [compilation.burst(depth=4) for _ in range(4)]
        for burst in bursts:
            await burst.__aenter__()

        async def call(index: int, rate: int, deadline_s: float | None, leaves_s: float | None) -> None:
            nonlocal answered
            x, state = window(index, 0), np.full((2, 1, 128), index / 100, np.float32)
            with anyio.move_on_after(leaves_s):
                try:
                    found = await bursts[index % len(bursts)].compute(
                        {"input": x, "sr": np.array(rate), "state": state}, timeout_s=deadline_s
                    )
                except (DeadlineError, DeviceBusyError):  # busy: those before it miss its deadline already
                    return
                output, after = alone.run(x, state, np.array(rate))
                np.testing.assert_array_equal(found["output"], output)
                np.testing.assert_array_equal(found["stateN"], after)
                answered += 1

        for number in range(rounds):
            async with anyio.create_task_group() as tasks:
                for index in range(25):
                    deadline_s = randomness.choice((None, None, 0.002, 5.0))
                    leaves_s = randomness.choice((None, None, 0.001, 0.005))
                    tasks.start_soon(call, 25 * number + index, 16000, deadline_s, leaves_s)
        for burst in bursts:
            await burst.aclose()
        assert answered > 200
        assert compilation.statistics()["rows_per_run"] > 1


async def test_inputs_that_all_rows_share_separate_requests_that_differ_in_them(silero: aionn.Model) -> None:
    """Streams of 8 and of 16 kHz wait at once. Their windows have the same shape here, so only the rate tells them apart."""
    alone = Alone()
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)

        async def call(index: int) -> None:
            rate = np.array(16000 if index % 3 else 8000)
            x, state = window(index, 0)[:, :288], still()
            found = await compilation.compute({"input": x, "sr": rate, "state": state})
            output, after = alone.run(x, state, rate)
            np.testing.assert_array_equal(found["output"], output)
            np.testing.assert_array_equal(found["stateN"], after)

        await until_joined(compilation, call)
        for _ in range(20):
            await together([lambda index=index: call(index) for index in range(STREAMS)])  # type: ignore[misc]


async def test_a_bad_row_changes_no_other_row_and_gets_its_own_answer(silero: aionn.Model) -> None:
    alone = Alone()
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)
        bad = {0: np.full((1, 576), np.nan, np.float32), 1: np.full((1, 576), 1e30, np.float32)}

        async def call(index: int) -> None:
            x = bad.get(index, window(index, 0))
            if index == 2:
                with pytest.raises(aionn.CallerError):
                    await compilation.compute({"input": x, "sr": RATE})  # no state
                return
            if index == 3:
                with pytest.raises((aionn.CallerError, ExecutionError)):
                    await compilation.compute({"input": x, "sr": RATE, "state": np.zeros((2, 2, 128), np.float32)})
                return
            found = await compilation.compute({"input": x, "sr": RATE, "state": still()})
            output, after = alone.run(x, still())
            np.testing.assert_array_equal(found["output"], output)
            np.testing.assert_array_equal(found["stateN"], after)

        await until_joined(compilation, call)
        for _ in range(20):
            await together([lambda index=index: call(index) for index in range(STREAMS)])  # type: ignore[misc]


async def test_streams_may_read_one_state_and_only_one_may_advance_it(silero: aionn.Model) -> None:
    """A joined run has one request for each buffer of the device. The others follow in the same turn."""
    alone = Alone()
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)

        async def usual(index: int) -> None:
            await compilation.compute({"input": window(index, 0), "sr": RATE, "state": still()})

        await until_joined(compilation, usual)
        state = await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(2, 1, 128))
        before = alone.run(window(0, 0), still())[1]
        await state.copy_from(before)

        async def read(index: int) -> None:
            async with compilation.burst() as burst:
                for number in range(5):
                    found = await burst.compute({"input": window(index, number), "sr": RATE, "state": state})
                    output, after = alone.run(window(index, number), before)
                    np.testing.assert_array_equal(found["output"], output)
                    np.testing.assert_array_equal(found["stateN"], after)

        await together([lambda index=index: read(index) for index in range(STREAMS)])  # type: ignore[misc]
        advanced: list[bool] = []

        async def advance() -> None:
            try:
                await compilation.compute({"input": window(0, 1), "sr": RATE, "state": state}, outputs={"stateN": state})
                advanced.append(True)
            except aionn.CallerError:  # the app's side refuses it while another one is in flight
                advanced.append(False)

        await together([advance for _ in range(6)])
        kept = await state.snapshot()
        expected = before
        for _ in range(sum(advanced)):
            expected = alone.run(window(0, 1), expected)[1]
        np.testing.assert_array_equal(kept, expected)


async def test_the_cache_keeps_what_was_found_out_and_knows_it_by_the_batching(silero: aionn.Model, tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        kinds = []
        for batch in (BATCH, BATCH, aionn.Batching(), None, aionn.Batching(max_rows=8), BATCH):
            compilation = await runtime.compile(silero, devices=("onnxruntime",), cache_dir=tmp_path / "cache", batch=batch)
            kinds.append(compilation.outcomes[0].kind.name)
            found = compilation.batching
            assert (found is None) == (batch is None)
            assert found is None or found.axes == {"input": 0, "state": 1, "sr": None}
            await compilation.aclose()
        assert kinds == ["MISS", "HIT", "MISS", "MISS", "HIT", "HIT"]


async def test_a_driver_that_is_killed_in_joined_runs_ends_each_call_and_the_next_ones_work(silero: aionn.Model) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",), threads=1, batch=BATCH)
        ends: list[str] = []
        killed = anyio.Event()

        async def call(index: int) -> None:
            async with compilation.burst() as burst:
                try:
                    late = False
                    while not late:
                        late = killed.is_set()  # then the next driver answers
                        await burst.compute({"input": window(index, 0), "sr": RATE, "state": still()})
                    ends.append("between two calls")
                except aionn.DriverDiedError:
                    ends.append("died")

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(call, index)
            await until(lambda: compilation.statistics()["rows_per_run"] > 1.2)
            (device,) = [device for device in runtime.devices if device.pid]
            assert device.pid is not None
            os.kill(device.pid, signal.SIGKILL)
            killed.set()
        assert len(ends) == 8
        assert ends.count("died") > 1  # those of one joined run at least
        found = await compilation.compute({"input": window(0, 0), "sr": RATE, "state": still()})
        np.testing.assert_array_equal(found["output"], Alone().run(window(0, 0), still())[0])
        assert compilation.batching is not None
        assert compilation.batching.allowed


async def test_requests_whose_rows_lie_in_device_memory_count_all_their_rows() -> None:
    """Nothing but the buffers shows how many rows these requests have, and the engine makes the output itself."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [16, 16], np.random.default_rng(1).normal(size=256).astype(np.float32))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["some", "others"])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Tanh", ["product"], ["y"])]
    graph = helper.make_graph(nodes, "rows in buffers", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    batch = aionn.Batching(max_rows=8, max_wait_us=500)
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(model), devices=("onnxruntime",), threads=1, batch=batch)

        async def stream(index: int) -> None:
            given = np.random.default_rng(index).normal(size=(3, 16)).astype(np.float32)
            expected = (await compilation.compute({"x": given}))["y"]
            buffer = await compilation.allocate(inputs=("x",), shape=(3, 16))
            await buffer.copy_from(given)
            async with compilation.burst() as burst:
                for _ in range(200):
                    np.testing.assert_allclose((await burst.compute({"x": buffer}))["y"], expected, rtol=1e-4, atol=1e-5)

        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(stream, index)
        assert max(compilation.statistics()["by_rows"]) > 2  # some shared a run: 6 rows stand with 4 to 7
        found = compilation.batching
        assert found is not None
        assert found.allowed, found.reason
        assert max(compilation.statistics()["by_rows"]) < 8
