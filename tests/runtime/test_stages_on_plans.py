"""Stages, swaps and just-in-time compilations of models that several devices run in steps. Real driver processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import CompilationError, StageRejected
from aionn.testing import FakeDevice
from tests.runtime.operator_engines import AddEngine, MulEngine, WholeEngine, drivers, expected, three_step_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
WEIGHTS = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(1, 64)
POLICY = aionn.StagePolicy(executions=0, min_gain=None)


@pytest.fixture
def anyio_backend() -> str:
    """One loop is enough: what these tests are about does not depend on it."""
    return "asyncio"


@pytest.fixture
def three() -> Iterator[list[FakeDevice]]:
    with drivers(WholeEngine, AddEngine, MulEngine) as found:
        yield found


def right(outputs: aionn.Outputs, x: np.ndarray = X) -> bool:
    return bool(np.allclose(outputs["y"], expected(x), rtol=1e-6))


@pytest.mark.parametrize("cached", [False, True])
async def test_a_better_stage_that_runs_only_a_part_shares_the_model_with_the_stage_before(
    three: list[FakeDevice], tmp_path: Path, cached: bool
) -> None:
    whole, _, muls = three
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()),
            mode="staged",
            stages=(whole.name, muls.name),
            cache_dir=tmp_path / "cache" if cached else None,
            stage_policy=POLICY,
        )
        async with compilation.burst() as burst:
            assert right(await burst.compute({"x": X}))
            with anyio.fail_after(60):
                await compilation.wait_for_stage(muls.name)
            outputs = await burst.compute({"x": X + 1})
            assert right(outputs, X + 1)
            assert outputs.stage == muls.name
            assert [step.device for step in compilation.plan] == [whole.name, muls.name, whole.name]
            assert compilation.stages[1].made_by == "worker"
            assert burst.statistics()["failed"] == 0


async def test_a_first_stage_that_runs_only_a_part_is_named_after_its_own_device(three: list[FakeDevice]) -> None:
    whole, adds, muls = three
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()), mode="staged", stages=(adds.name, muls.name, whole.name), stage_policy=POLICY
        )
        first = [step.device for step in compilation.plan]
        assert set(first) == {adds.name, muls.name} or set(first) == {adds.name, whole.name}
        assert compilation.stages[0].state == "serving"
        outputs = await compilation.compute({"x": X})
        assert right(outputs)
        assert outputs.stage == adds.name
        with anyio.fail_after(60):
            await compilation.wait_for_stage(whole.name)
        assert (await compilation.compute({"x": X})).stage == whole.name
        assert [stage.state for stage in compilation.stages] == ["replaced", "replaced", "serving"]


async def test_a_stage_of_steps_whose_driver_dies_serves_again_as_the_same_stage(three: list[FakeDevice]) -> None:
    whole, _, muls = three
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()), mode="staged", stages=(whole.name, muls.name), stage_policy=POLICY
        )
        assert right(await compilation.compute({"x": X}))
        with anyio.fail_after(60):
            await compilation.wait_for_stage(muls.name)
        (device,) = (device for device in runtime.devices if device.name == muls.name)
        await device.restart()
        outputs = await compilation.compute({"x": X})
        assert right(outputs)
        assert outputs.stage == muls.name
        assert [step.device for step in compilation.plan] == [whole.name, muls.name, whole.name]


async def test_a_stage_of_steps_that_keeps_failing_leaves_its_place_to_the_stage_before(three: list[FakeDevice]) -> None:
    whole, _, muls = three
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()), mode="staged", stages=(whole.name, muls.name), stage_policy=POLICY
        )
        async with compilation.burst() as burst:
            assert right(await burst.compute({"x": X}))
            with anyio.fail_after(60):
                await compilation.wait_for_stage(muls.name)
            muls.fail("broken", "run")
            failed = 0
            with anyio.fail_after(60):
                while True:
                    try:
                        outputs = await burst.compute({"x": X})
                    except aionn.ExecutionError as error:
                        assert "broken" in str(error)
                        failed += 1
                        await anyio.sleep(0.02)
                        continue
                    break
            assert failed >= 3
            assert (right(outputs), outputs.stage) == (True, whole.name)
            assert compilation.stages[1].state == "rejected"


async def test_a_stage_that_covers_the_model_with_no_other_is_rejected_with_the_node(three: list[FakeDevice]) -> None:
    _, adds, muls = three
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(CompilationError, match="pow_1") as caught:
            await runtime.compile(
                aionn.Model.from_onnx(three_step_model(("Add", "Pow", "Mul"))), mode="staged", stages=(adds.name, muls.name)
            )
        assert caught.value.node == "pow_1"


async def test_a_stage_of_steps_that_is_wrong_is_rejected_by_the_comparison(three: list[FakeDevice]) -> None:
    whole, _, muls = three
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()), mode="staged", stages=(whole.name, muls.name), stage_policy=POLICY
        )
        assert right(await compilation.compute({"x": X}))
        muls.fail("broken", "run")
        with pytest.raises(StageRejected, match="broken"):
            await compilation.wait_for_stage(muls.name, timeout_s=60)
        assert [step.device for step in compilation.plan] == [whole.name]


@pytest.mark.parametrize("first_whole", [False, True])
async def test_a_new_model_with_a_plan_takes_over_open_bursts(three: list[FakeDevice], tmp_path: Path, first_whole: bool) -> None:
    _, adds, muls = three
    devices = (adds.name, muls.name)
    async with aionn.Runtime(start=()) as runtime:
        operators = ("Add", "Sub", "Add") if first_whole else ("Add", "Mul", "Sub")
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model(operators)), devices=devices, cache_dir=tmp_path / "cache"
        )
        assert len(compilation.plan) == (1 if first_whole else 3)
        async with compilation.burst() as burst:
            await burst.compute({"x": X})
            await runtime.swap(compilation, aionn.Model.from_onnx(three_step_model(("Sub", "Mul", "Add"))), timeout_s=60)
            np.testing.assert_allclose((await burst.compute({"x": X}))["y"], (X - WEIGHTS) * WEIGHTS + WEIGHTS, rtol=1e-6)
        assert [step.nodes for step in compilation.plan] == [("sub_0",), ("mul_1",), ("add_2",)]
        await runtime.swap(compilation, aionn.Model.from_onnx(three_step_model(("Add", "Add", "Add"))), timeout_s=60)
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], X + 3 * WEIGHTS, rtol=1e-6)
        assert [step.device for step in compilation.plan] == [adds.name]
