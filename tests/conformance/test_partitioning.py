"""NNAPI's tests of partitioning and of falling back, by their names, through an app and real driver processes.

`SetPartitioning` has no counterpart: a device that the app names is never left out, and without names the fallback is always on. Control
flow is never interpreted, so `FailAfterInterpretedWhile` is about a loop that stays whole on a device. `SimpleModel` is in
`tests/runtime/test_partition.py`, and `SliceModelToEmpty` in `tests/test_cutting.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.errors import CompilationError, ExecutionError
from aionn.runtime.processes.devices import Devices
from aionn.testing import FakeDevice
from tests.runtime.operator_engines import (
    AddEngine,
    CpuMulEngine,
    CpuWholeEngine,
    MulEngine,
    WholeEngine,
    drivers,
    expected,
    three_step_model,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
SHAPE = (2, 8)


@pytest.fixture
def anyio_backend() -> str:
    """One loop is enough: what these tests are about does not depend on it."""
    return "asyncio"


@pytest.fixture
def two() -> Iterator[list[FakeDevice]]:
    with drivers(AddEngine, MulEngine) as found:
        yield found


def names(devices: Sequence[FakeDevice]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)


def model_of(nodes: Sequence[tuple[str, Sequence[str], str]], inputs: Sequence[str], outputs: Sequence[str]) -> aionn.Model:
    """Return a model of nodes (operator, inputs, output) over tensors of one shape, with the constant "w"."""
    graph = helper.make_graph(
        [helper.make_node(operator, list(read), [made], name=f"{operator.lower()}_{made}") for operator, read, made in nodes],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in outputs],
        [numpy_helper.from_array(np.full(SHAPE, 1.25, np.float32), "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return aionn.Model.from_onnx(made.SerializeToString())


def plan_of(compilation: aionn.Compilation, devices: Sequence[FakeDevice]) -> list[int]:
    return [names(devices).index(step.device) for step in compilation.plan]


# --- IntrospectionControlTest ----------------------------------------------------------------------------------------


async def test_partial_model_not_supported(two: list[FakeDevice]) -> None:
    """PartialModelNotSupported: the devices do not cover the model, and no CPU device takes the rest."""
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(CompilationError) as caught:
            await runtime.compile(aionn.Model.from_onnx(three_step_model(("Add", "Pow"))), devices=names(two))
        assert caught.value.node == "pow_1"
        assert {device.name for device in runtime.devices if device.pid is not None} <= set(names(two))


async def test_partial_model_not_supported_order(two: list[FakeDevice]) -> None:
    """PartialModelNotSupportedOrder: each operation goes to the device that said it can run it, in the app's order."""
    async with aionn.Runtime(start=()) as runtime:
        operators = ("Mul", "Mul", "Add", "Mul", "Sub", "Sub", "Div")
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model(operators)), devices=names(two))
        ran = {node: names(two).index(step.device) for step in compilation.plan for node in step.nodes}
        assert ran == {f"{one.lower()}_{at}": int(one in ("Mul", "Div")) for at, one in enumerate(operators)}


async def test_model_need_two_devices(two: list[FakeDevice]) -> None:
    """ModelNeedTwoDevices: two devices together cover the model."""
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=names(two))
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], expected(X), rtol=1e-6)
        assert plan_of(compilation, two) == [0, 1, 0]


# --- PartitioningTest ------------------------------------------------------------------------------------------------


async def test_cpu_between_two_steps_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cpu: [device, CPU, device]."""
    with drivers(AddEngine, CpuMulEngine) as both:
        monkeypatch.setattr(Devices, "installed", property(lambda _: list(names(both))))
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
            assert plan_of(compilation, both) == [0, 1, 0]


async def test_slice_model_gives_each_step_its_inputs_and_outputs(two: list[FakeDevice]) -> None:
    """SliceModel: branches of one device make one step; what crosses is an output of one step and an input of the other."""
    nodes = [("Add", ["a", "w"], "t"), ("Sub", ["b", "w"], "u"), ("Mul", ["t", "u"], "v"), ("Mul", ["t", "w"], "y")]
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model_of(nodes, ["a", "b"], ["v", "y"]), devices=names(two))
        assert plan_of(compilation, two) == [0, 1]
        first, last = compilation.plan
        assert (set(first.inputs), set(first.outputs)) == ({"a", "b"}, {"t", "u"})
        assert (set(last.inputs), set(last.outputs)) == ({"t", "u"}, {"v", "y"})
        a, b = np.ones(SHAPE, np.float32), np.full(SHAPE, 3, np.float32)
        outputs = await compilation.compute({"a": a, "b": b})
        np.testing.assert_allclose(outputs["v"], (a + 1.25) * (b - 1.25), rtol=1e-6)
        np.testing.assert_allclose(outputs["y"], (a + 1.25) * 1.25, rtol=1e-6)


async def test_model_output_as_step_model_input(two: list[FakeDevice]) -> None:
    """ModelOutputAsStepModelInput: an output of the model that a later step reads, too."""
    nodes = [("Add", ["a", "w"], "y"), ("Mul", ["y", "w"], "z")]
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model_of(nodes, ["a"], ["y", "z"]), devices=names(two))
        assert [(step.inputs, step.outputs) for step in compilation.plan] == [(("a",), ("y",)), (("y",), ("z",))]
        a = np.ones(SHAPE, np.float32)
        outputs = await compilation.compute({"a": a})
        np.testing.assert_allclose(outputs["y"], a + 1.25, rtol=1e-6)
        np.testing.assert_allclose(outputs["z"], (a + 1.25) * 1.25, rtol=1e-6)


# --- CompilationCachingTest / PartitioningTest, cache tokens ---------------------------------------------------------


async def cache_keys(devices: Sequence[FakeDevice], cache: Path, model: bytes = b"", **arguments: Any) -> list[bytes]:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(model or three_step_model()), devices=names(devices), cache_dir=cache, **arguments
        )
        return [outcome.key for outcome in compilation.outcomes]


DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "preference": {"preference": "low_power"},
    "app token": {"token": b"2" * 32},
    "partition": {"model": three_step_model(("Add", "Add", "Mul"))},
}


@pytest.mark.parametrize("what", DIFFERENCES)
async def test_cache_tokens_of_steps_differ_by(two: list[FakeDevice], tmp_path: Path, what: str) -> None:
    """CacheToken*: the token of a step depends on the preference, on the app's token, and on the partition."""
    usual: dict[str, Any] = {"token": bytes(32)}
    before = await cache_keys(two, tmp_path / "cache", **usual)
    after = await cache_keys(two, tmp_path / "cache", **{**usual, **DIFFERENCES[what]})
    assert len(set(before)) == len(before) == 3
    assert set(before).isdisjoint(after) or what == "partition"
    assert before != after
    assert await cache_keys(two, tmp_path / "cache", **usual) == before


async def test_cache_tokens_of_steps_differ_by_device_version(two: list[FakeDevice], tmp_path: Path) -> None:
    """CacheTokenDifferentDeviceVersions: only the steps of the device that changed."""
    before = await cache_keys(two, tmp_path / "cache", token=bytes(32))
    two[1].tell(version="2")
    after = await cache_keys(two, tmp_path / "cache", token=bytes(32))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


# --- FailingDriverTest -----------------------------------------------------------------------------------------------


async def test_failing_driver_simple_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """FailingDriverTest.SimplePlan: the whole model falls back to the CPU."""
    with drivers(WholeEngine, CpuWholeEngine) as (failing, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [failing.name, cpu.name]))
        failing.fail("broken", "run")
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
            outputs = await compilation.compute({"x": X})
            assert outputs.device == cpu.name
            np.testing.assert_allclose(outputs["y"], expected(X), rtol=1e-6)


async def test_failing_driver_after_a_loop_does_not_loop_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """FailingDriverTest.FailAfterInterpretedWhile: where every device fails, the call ends with the first error."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["state", "w"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, SHAPE),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("next", TensorProto.FLOAT, SHAPE)],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "go_first", "x"], ["y"], name="loop", body=body)],
        "looping",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [
            numpy_helper.from_array(np.array(3, np.int64), "times"),
            numpy_helper.from_array(np.array(True), "go_first"),
            numpy_helper.from_array(np.ones(SHAPE, np.float32), "w"),
        ],
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    with drivers(WholeEngine, CpuWholeEngine) as (failing, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [failing.name, cpu.name]))
        x = np.zeros(SHAPE, np.float32)
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(content))
            np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x + 3)
            failing.fail("broken", "run")
            cpu.fail("broken, too", "run")
            with pytest.raises(ExecutionError, match="broken"):
                await compilation.compute({"x": x}, timeout_s=20)


# --- RandomPartitioningTest ------------------------------------------------------------------------------------------


def random_model(seed: int) -> aionn.Model:
    chance = random.Random(seed)
    inputs = [f"x{index}" for index in range(chance.randint(1, 3))]
    known = [*inputs, "w"]
    nodes = []
    for index in range(chance.randint(20, 100)):
        operator = chance.choice(("Add", "Sub", "Mul", "Max", "Min", "Abs", "Neg", "Tanh"))
        read = [chance.choice(known[-12:]) for _ in range(1 if operator in ("Abs", "Neg", "Tanh") else 2)]
        nodes.append((operator, read, f"t{index}"))
        known.append(f"t{index}")
    read_names = {name for _, read, _ in nodes for name in read}
    outputs = [made for _, _, made in nodes if made not in read_names or chance.random() < 0.1]
    return model_of(nodes, inputs, outputs)


class FirstRandom(WholeEngine):
    operators = frozenset({"Add", "Max", "Neg", "Tanh"})
    variable = f"{WholeEngine.variable}_1"


class SecondRandom(WholeEngine):
    operators = frozenset({"Sub", "Min", "Abs", "Tanh"})
    variable = f"{WholeEngine.variable}_2"


class ThirdRandom(WholeEngine):
    operators = frozenset({"Mul", "Neg", "Abs", "Max"})
    variable = f"{WholeEngine.variable}_3"


async def test_random_partitioning_gives_what_one_device_gives(tmp_path: Path) -> None:
    """RandomPartitioningTest: up to 100 operations over three devices, compiled, from the cache, and over a burst."""
    with drivers(WholeEngine, FirstRandom, SecondRandom, ThirdRandom) as (whole, *parts):
        async with aionn.Runtime(start=()) as runtime:
            for seed in range(4):
                model = random_model(seed)
                inputs = {name: np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32) for name in model.inputs}
                right = await (await runtime.compile(model, devices=(whole.name,))).compute(inputs)
                for turn in range(2):
                    compilation = await runtime.compile(model, devices=names(parts), cache_dir=tmp_path / "cache")
                    assert len(compilation.plan) > 2, "the model was cut"
                    found = await compilation.compute(inputs)
                    async with compilation.burst() as burst:
                        again = await burst.compute(inputs)
                        for name in right:
                            np.testing.assert_array_equal(found[name], right[name], err_msg=f"seed {seed}, turn {turn}")
                            np.testing.assert_array_equal(again[name], right[name], err_msg=f"seed {seed}, turn {turn}")
                        del again
                    await compilation.aclose()
