"""Executions that fail on one device and are run once more on a CPU device. Real driver processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.caching import CacheOutcomeKind
from aionn.errors import CallerError, DeadlineError, DriverDiedError, ExecutionError, OutputInsufficientSizeError
from aionn.runtime.processes.devices import Devices
from aionn.runtime.runtime import Mode
from aionn.runtime.serving.serving import Serving
from aionn.testing import FakeDevice, identity_model
from tests.runtime.operator_engines import (
    AddEngine,
    CpuAddEngine,
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


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDevice]]:
    """An accelerator that runs whole models, and a CPU device behind it."""
    with drivers(WholeEngine, CpuWholeEngine) as found:
        monkeypatch.setattr(Devices, "installed", property(lambda _: [device.name for device in found]))
        yield found


def right(outputs: aionn.Outputs, x: np.ndarray = X) -> bool:
    return bool(np.allclose(outputs["y"], expected(x), rtol=1e-6))


def other(x: np.ndarray) -> np.ndarray:
    """Return what the model computes whose operators are the other way round."""
    w = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(1, 64)
    return (x - w) * w + w


async def runs(device: FakeDevice, runtime: aionn.Runtime) -> bool:
    return any(known.name == device.name and known.pid is not None for known in runtime.devices)


@pytest.mark.parametrize("mode", ["eager", "jit"])
async def test_an_execution_that_fails_is_computed_by_the_cpu_which_takes_over(
    pair: list[FakeDevice], mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()), mode=mode, cache_dir=tmp_path / "cache")
        with trace.record() as seen:
            async with compilation.burst() as burst:
                outputs = await burst.compute({"x": X})
                assert right(outputs)
                assert (outputs.device, compilation.device) == (cpu.name, cpu.name)
                for turn in range(3):  # the usual frames, and an app's frame
                    assert right(await burst.compute({"x": X + turn}), X + turn)
                async with burst.frame() as frame:
                    frame["x"][...] = X * 3
                    assert right(await burst.compute(frame), X * 3)
                counts = burst.statistics()
        assert (counts["failed"], counts["fell_back"], counts["computed"]) == (1, 1, 4)
        fell = [event.attributes for event in seen.counters if event.name == "execution.fell_back"]
        assert [(one["device"], one["to"]) for one in fell] == [(first.name, cpu.name)]
        assert [outcome.device for outcome in compilation.outcomes] == [cpu.name]
        assert compilation.outcomes[0].kind is CacheOutcomeKind.MISS
        assert [step.device for step in compilation.plan] == [cpu.name]
        assert right(await compilation.compute({"x": X}))
    (warned,) = [record for record in caplog.records if "computed in its place" in record.getMessage()]
    assert warned.levelname == "WARNING"
    assert "broken" in warned.getMessage()


async def test_a_stream_goes_on_over_a_device_that_begins_to_fail(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run", after=5)
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        async with compilation.burst(depth=3) as burst:
            found = [result async for result in burst.map(({"x": X * turn} for turn in range(40)), depth=3)]
        assert [result.seq for result in found] == list(range(40))
        assert all(right(result.outputs, X * turn) for turn, result in enumerate(found))
        assert [result.outputs.device for result in found][-1] == cpu.name
        assert found[0].outputs.device == first.name


async def test_calls_that_fail_at_the_same_time_share_one_fallback(pair: list[FakeDevice]) -> None:
    first, _ = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        with trace.record() as seen:
            async with anyio.create_task_group() as tasks:

                async def call(turn: int) -> None:
                    assert right(await compilation.compute({"x": X + turn}), X + turn)

                for turn in range(12):
                    tasks.start_soon(call, turn)
        assert [event.name for event in seen.counters].count("compile.cache") == 1


async def test_named_devices_never_fall_back(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(first.name, cpu.name))
        for _ in range(2):
            with pytest.raises(ExecutionError, match="broken") as caught:
                await compilation.compute({"x": X})
            assert not hasattr(caught.value, "__notes__")
        assert not await runs(cpu, runtime)


async def test_inputs_that_fail_everywhere_get_the_first_error_and_prepare_nothing_again(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    cpu.fail("broken, too", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        with trace.record() as seen:
            for _ in range(3):
                with pytest.raises(ExecutionError, match="broken") as caught:
                    await compilation.compute({"x": X})
                assert "too" not in str(caught.value)
                (note,) = caught.value.__notes__
                assert "broken, too" in note
                assert cpu.name in note
        assert [event.name for event in seen.counters].count("compile.cache") == 1
        assert compilation.device == first.name
        cpu.behave()  # an input that works there takes over after all
        assert (await compilation.compute({"x": X})).device == cpu.name
        await compilation.aclose()


async def test_a_fallback_that_cannot_be_prepared_is_tried_once(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    cpu.fail("out of luck", "compile")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        with trace.record() as seen:
            for _ in range(3):
                with pytest.raises(ExecutionError, match="broken"):
                    await compilation.compute({"x": X})
        assert [event.name for event in seen.counters].count("execution.no_fallback") == 1


async def test_a_fallback_that_fails_later_does_not_go_round_in_a_circle(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        assert right(await compilation.compute({"x": X}))
        cpu.fail("broken, too", "run")
        with trace.record() as seen, pytest.raises(ExecutionError, match="broken, too"):
            await compilation.compute({"x": X})
        assert "compile.cache" not in [event.name for event in seen.counters]


async def test_a_fallback_that_served_is_prepared_again_after_its_drivers_death(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        assert right(await compilation.compute({"x": X}))
        (device,) = (device for device in runtime.devices if device.name == cpu.name)
        await device.restart()
        outputs = await compilation.compute({"x": X})
        assert right(outputs)
        assert outputs.device == cpu.name


NEVER: dict[str, tuple[Callable[[FakeDevice], None], type[Exception]]] = {
    "death": (lambda device: device.crash("run"), DriverDiedError),
    "deadline": (lambda device: device.hang("run"), DeadlineError),
}


@pytest.mark.parametrize("trouble", NEVER)
async def test_a_death_and_a_deadline_never_fall_back(pair: list[FakeDevice], trouble: str) -> None:
    first, cpu = pair
    bring, kind = NEVER[trouble]
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        bring(first)
        with pytest.raises(kind):
            await compilation.compute({"x": X}, timeout_s=0.3 if kind is DeadlineError else None)
        first.behave()
        assert not await runs(cpu, runtime)
        with pytest.raises(CallerError):
            await compilation.compute({"x": X.astype(np.int32)})
        assert not await runs(cpu, runtime)


async def test_an_execution_with_device_memory_never_falls_back(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        memory = await compilation.allocate(inputs=("x",))
        await memory.copy_from(X)
        first.fail("broken", "run")
        with pytest.raises(ExecutionError, match="broken"):
            await compilation.compute({"x": memory})
        assert not await runs(cpu, runtime)
        await memory.aclose()


async def test_an_output_without_room_never_falls_back(pair: list[FakeDevice]) -> None:
    """The device says so after its run, because the shape of the output is open. Another device would find no more room."""
    _, cpu = pair
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": ("n",)}, outputs=["y"])))
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute):
                with aionn.Memory.allocate(16) as small, pytest.raises(OutputInsufficientSizeError) as caught:
                    await compute({"x": X[0]}, outputs={"y": small})
                assert caught.value.shapes == {"y": (64,)}
                assert not await runs(cpu, runtime)
                del caught


async def test_the_fallback_keeps_the_calls_deadline(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    cpu.hang("compile")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        with pytest.raises(DeadlineError), anyio.fail_after(20):
            await compilation.compute({"x": X}, timeout_s=0.3)
        cpu.behave()  # the preparation goes on, and serves the next call
        assert (await compilation.compute({"x": X})).device == cpu.name


async def test_the_fallback_writes_where_the_app_wants_its_outputs(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        with aionn.Memory.allocate(X.nbytes) as wanted, aionn.Memory.allocate(X.nbytes) as given:
            given.view()[:] = X.tobytes()
            outputs = await compilation.compute({"x": given}, outputs={"y": wanted}, measure_timing=True)
            assert outputs.device == cpu.name
            assert outputs.timing is not None
            np.testing.assert_allclose(np.frombuffer(bytes(wanted.view()), np.float32).reshape(1, 64), expected(X), rtol=1e-6)
            del outputs


async def test_an_apps_frame_that_fails_is_computed_elsewhere(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        async with compilation.burst() as burst, burst.frame() as frame:
            frame["x"][...] = X
            outputs = await burst.compute(frame)
            assert (right(outputs), outputs.device) == (True, cpu.name)


async def test_a_usual_frame_that_fails_late_is_computed_elsewhere(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    first.fail("broken", "run", after=4)
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        async with compilation.burst() as burst:
            devices = []
            for turn in range(8):
                outputs = await burst.compute({"x": X * turn}, timeout_s=30)
                assert right(outputs, X * turn)
                devices.append(outputs.device)
        assert devices == [first.name] * 4 + [cpu.name] * 4


async def test_only_the_failing_step_of_a_plan_moves_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(AddEngine, MulEngine, CpuMulEngine) as (adds, muls, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [adds.name, muls.name, cpu.name]))
        muls.fail("broken", "run")
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
            before = [step.device for step in compilation.plan]
            outputs = await compilation.compute({"x": X})
            assert right(outputs)
            assert before == [adds.name, muls.name, adds.name]
            assert [step.device for step in compilation.plan] == [adds.name, cpu.name, adds.name]
            assert outputs.device == f"{adds.name}+{cpu.name}"
            assert right(await compilation.compute({"x": X + 1}), X + 1)
            (device,) = (device for device in runtime.devices if device.name == cpu.name)
            await device.restart()
            assert (await compilation.compute({"x": X})).device == f"{adds.name}+{cpu.name}"


async def test_every_step_that_fails_moves_to_the_cpu_and_prepares_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(AddEngine, MulEngine, CpuAddEngine) as (adds, muls, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [adds.name, muls.name, cpu.name]))
        adds.fail("broken", "run")
        cpu.fail("broken, too", "run", after=1)
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
            assert [step.device for step in compilation.plan] == [adds.name, muls.name, adds.name]
            counts = []
            for _ in range(3):
                with trace.record() as seen, pytest.raises(ExecutionError, match="broken") as caught:
                    await compilation.compute({"x": X})
                assert f"device '{cpu.name}+{muls.name}' was tried, too" in caught.value.__notes__[0]
                counts.append([event.name for event in seen.counters].count("compile.cache"))
            assert counts == [6, 0, 0]
            cpu.behave()
            outputs = await compilation.compute({"x": X})
            assert right(outputs)
            assert outputs.device == compilation.device == f"{cpu.name}+{muls.name}"
            assert [step.device for step in compilation.plan] == [cpu.name, muls.name, cpu.name]


async def test_calls_beside_each_other_move_all_steps_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(AddEngine, MulEngine, CpuAddEngine) as (adds, muls, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [adds.name, muls.name, cpu.name]))
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
            assert right(await compilation.compute({"x": X}))
            adds.fail("broken", "run", after=5)
            async with compilation.burst(depth=4) as burst, anyio.create_task_group() as tasks:

                async def call(turn: int) -> None:
                    compute = burst.compute if turn % 2 else compilation.compute
                    assert right(await compute({"x": X + turn}), X + turn)

                for turn in range(30):
                    tasks.start_soon(call, turn)
            assert compilation.device == f"{cpu.name}+{muls.name}"


async def test_a_device_that_has_taken_over_does_not_fall_back_to_a_third_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(WholeEngine, CpuWholeEngine, CpuMulEngine) as (first, cpu, third):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [first.name, cpu.name, third.name]))
        first.fail("broken", "run")
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model(("Mul", "Mul", "Mul"))))
            assert (await compilation.compute({"x": X})).device == cpu.name
            cpu.fail("broken, too", "run")
            with pytest.raises(ExecutionError, match="broken, too"):
                await compilation.compute({"x": X})
            assert compilation.device == cpu.name
            assert not await runs(third, runtime)


async def test_a_compilation_that_is_swapped_to_a_new_model_may_fall_back_again(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        assert right(await compilation.compute({"x": X}))
        await runtime.swap(compilation, aionn.Model.from_onnx(three_step_model(("Sub", "Mul", "Add"))))
        first.fail("broken", "run")
        outputs = await compilation.compute({"x": X})
        np.testing.assert_allclose(outputs["y"], other(X), rtol=1e-6)
        assert outputs.device == cpu.name


async def test_a_swap_during_the_preparation_of_a_fallback_leaves_no_fallback_of_the_model_before(pair: list[FakeDevice]) -> None:
    first, cpu = pair
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        assert right(await compilation.compute({"x": X}))
        first.fail("broken", "run")
        cpu.hang("compile")
        async with anyio.create_task_group() as tasks:

            async def before() -> None:
                with pytest.raises(ExecutionError, match="broken"):
                    await compilation.compute({"x": X})

            async def after() -> None:
                outputs = await compilation.compute({"x": X})
                np.testing.assert_allclose(outputs["y"], other(X), rtol=1e-6)
                assert outputs.device == cpu.name

            tasks.start_soon(before)
            await cpu.heard("compile")
            first.behave()
            await runtime.swap(compilation, aionn.Model.from_onnx(three_step_model(("Sub", "Mul", "Add"))))
            first.fail("broken", "run")
            tasks.start_soon(after)
            await first.heard("run")
            cpu.behave()
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], other(X), rtol=1e-6)


async def test_a_fallback_that_would_take_over_during_a_swap_leaves_the_new_model(pair: list[FakeDevice]) -> None:
    first, _ = pair
    first.fail("broken", "run")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        compiled = compilation._parts.compiled
        swap, begun = compiled.swap, anyio.Event()

        async def late_swap(better: Serving, **options: Any) -> int:
            begun.set()
            await swapped.wait()
            return await swap(better, **options)

        swapped = anyio.Event()
        compiled.swap = late_swap  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                assert right(await compilation.compute({"x": X}))

            tasks.start_soon(call)
            await begun.wait()
            del compiled.swap
            first.behave()
            await runtime.swap(compilation, aionn.Model.from_onnx(three_step_model(("Sub", "Mul", "Add"))))
            swapped.set()
        assert compilation.device == first.name
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], other(X), rtol=1e-6)
