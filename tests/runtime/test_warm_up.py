"""`warm_up` and `burst(warm=True)`: the model has run before the app's first execution, and nothing has counted it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import aionn
from aionn.engines.onnxruntime import MOST_OWN_INSTANCES
from aionn.engines.processor import usable_cpus
from aionn.pages.app_layout import Kind, SlotView
from aionn.pages.finding import find_page
from aionn.testing import FakeDevice, identity_model
from tests.runtime.planned_models import chain

pytestmark = pytest.mark.anyio
X = {"input": np.zeros((1, 16), np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


def executed() -> list[SlotView]:
    """The slots of this process that have counted an execution."""
    found = find_page(os.getpid())
    assert found is not None
    with found:
        kinds = (Kind.BURST, Kind.SINGLE, Kind.PAST_BURSTS, Kind.PAST_SINGLES, Kind.COMPILATION, Kind.RUNTIME, Kind.OTHER)
        view = found.read()
        assert view is not None
        slots = [slot for slot in view.slots if slot.kind in kinds]
        return [slot for slot in slots if any(slot.counters[name] for name in ("sent", "computed", "failed", "answered"))]


def finished(runtime: aionn.Runtime, name: str) -> int:
    """Executions that the driver of that name has finished."""
    (device,) = (device for device in runtime.devices if device.name == name)
    activity = device.activity
    assert activity is not None
    return activity.finished


async def test_warm_up_runs_the_model_and_is_counted_nowhere(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        before = finished(runtime, fake.name)
        await compilation.warm_up()
        await compilation.warm_up(runs=3)
        assert finished(runtime, fake.name) - before == 5  # they did run, in the real driver
        use = compilation._parts.compiled.use
        assert (use.executions, use.idle_s, use.least_left_s) == (0, 0.0, None)
        assert executed() == []
        async with compilation.burst() as burst:
            assert burst.statistics()["computed"] == 0
            assert burst.statistics()["copied_bytes"] == 0
            await burst.compute(X)
            assert burst.statistics()["computed"] == 1
        assert [slot.counters["computed"] for slot in executed() if slot.kind in (Kind.BURST, Kind.PAST_BURSTS)] in ([1], [])


async def test_a_warm_burst_has_run_before_its_first_frame(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        before = finished(runtime, fake.name)
        async with compilation.burst(warm=True) as burst:
            assert finished(runtime, fake.name) - before == 1
            assert executed() == []
            await burst.compute(X)
            assert burst.statistics()["computed"] == 1


async def test_a_warm_burst_that_cannot_warm_up_is_closed(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        fake.fail("not with these")
        burst = compilation.burst(warm=True)
        with pytest.raises(aionn.CallerError, match=r"not with these.*warm_up\(inputs=\.\.\.\)"):
            await burst.__aenter__()
        fake.behave()
        with pytest.raises(aionn.CallerError, match="not open"):
            await burst.compute(X)


async def test_warm_up_leaves_samples_and_rhythm_of_a_staged_stream_alone(quick: FakeDevice, best: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(
            model, mode="staged", stages=(quick.name, best.name), stage_policy=aionn.StagePolicy(executions=3)
        )
        compiled = compilation._parts.compiled
        while not compiled.watched:
            await compilation.compute(X)
        executions = compiled.use.executions
        kept = len(compiled.sampling.kept)  # type: ignore[union-attr]
        pauses = list(compiled.use._idle_ns)
        compiled.sampling.due_ns = 0  # type: ignore[union-attr]
        await compilation.warm_up(runs=5)
        assert compiled.use.executions == executions
        assert len(compiled.sampling.kept) == kept  # type: ignore[union-attr]
        assert list(compiled.use._idle_ns) == pauses
        assert {stage.name: stage.state for stage in compilation.stages}[best.name] == "waiting"


async def test_warm_up_compiles_with_mode_jit(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), mode="jit")
        await compilation.warm_up()
        assert compilation.outcomes
        assert executed() == []


async def test_every_instance_is_warmed(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), instances=3, threads=1)
        before = finished(runtime, fake.name)
        await compilation.warm_up(runs=2)
        assert finished(runtime, fake.name) - before == 6


async def test_every_instance_that_the_engine_chose_is_warmed() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",))
        assert compilation.instances is None
        before = finished(runtime, "onnxruntime")
        await compilation.warm_up(runs=3)
        assert finished(runtime, "onnxruntime") - before == 3 * min(usable_cpus(), MOST_OWN_INSTANCES)


@pytest.mark.parametrize("instances", [1, 3])
async def test_a_driver_that_dies_while_it_warms_up_is_an_error_and_replaced(instances: int, fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), instances=instances)
        fake.crash(signal_number=signal.SIGKILL)
        with pytest.raises(aionn.DriverDiedError):
            await compilation.warm_up()
        fake.behave()
        await compilation.warm_up()


async def test_open_dimensions_become_one_and_given_inputs_are_taken(fake: FakeDevice) -> None:
    open_model = aionn.Model.from_onnx(identity_model({"x": (0, 4)}))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(open_model, devices=(fake.name,))
        await compilation.warm_up(runs=1)
        await compilation.warm_up(runs=1, inputs={"x": np.zeros((7, 4), np.float32)})
        with pytest.raises(aionn.CallerError, match="'x'"):
            await compilation.warm_up(inputs={"x": np.zeros((7, 5), np.float32)})
        with pytest.raises(aionn.CallerError, match="runs"):
            await compilation.warm_up(runs=0)


def with_input(element: int, shape: list[int] | None) -> bytes:
    """A model that repeats one input."""
    value = helper.make_tensor_value_info("x", element, shape)
    result = helper.make_tensor_value_info("y", element, shape)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


@pytest.mark.parametrize(
    ("element", "shape", "why"),
    [
        (TensorProto.STRING, [2], "input 'x' is of type string, and only numbers are made up"),
        (TensorProto.FLOAT, None, "input 'x' has no shape in the model, so none can be made up"),
    ],
)
async def test_inputs_that_cannot_be_made_up_are_refused_with_the_way_out(element: int, shape: list[int] | None, why: str) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(with_input(element, shape)), devices=("onnxruntime",))
        with pytest.raises(aionn.CallerError) as caught:
            await compilation.warm_up()
        assert str(caught.value) == f"{why}; give inputs that the model takes with compilation.warm_up(inputs=...)"
        dtype = object if element == TensorProto.STRING else np.float32
        await compilation.warm_up(inputs={"x": np.array(["a", "b"] if dtype is object else [1.0, 2.0], dtype)})
        assert executed() == []


@pytest.mark.usefixtures("surroundings")
async def test_a_plan_over_two_devices_warms_up() -> None:
    async with aionn.Runtime() as runtime:
        devices = ("tests.runtime.partial_engines:RefPart", "tests.runtime.partial_engines:OrtPart")
        compilation = await runtime.compile(aionn.Model.from_onnx(chain(["ref", "ort"])), devices=devices)
        assert len(compilation.plan) == 2
        before = [finished(runtime, device) for device in devices]
        await compilation.warm_up()
        runs = 2 * min(usable_cpus(), MOST_OWN_INSTANCES)  # the instances of the step that has the most
        assert [finished(runtime, device) for device in devices] == [count + runs for count in before]
        assert executed() == []
