"""A better stage is made although processes die or stop meanwhile: who waits for it gets an answer, without an execution of the app's.

The fake devices give the exact moments. The last test has ONNX Runtime and the reference beside it, and random moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.runtime.staging import stages
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.operator_engines import MulEngine, WholeEngine, drivers, expected, three_step_model
from tests.runtime.staged_streams import SHAPE, frame, rejected, staged
from tests.scaled_model import scaled_model
from tests.stopping import stop

pytestmark = pytest.mark.anyio

WITHIN_S = 60.0
"""A wait that is longer never ends. On a machine with a free CPU none takes 20 s; a worker under SCHED_IDLE waits for a busy one."""


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


def device(runtime: aionn.Runtime, name: str) -> Any:
    return next(device for device in runtime.devices if device.name == name)


async def kill(runtime: aionn.Runtime, name: str) -> None:
    """Kill the driver of a device, and return when the runtime has seen its end."""
    process = device(runtime, name)._process
    os.kill(process.pid, signal.SIGKILL)
    await process.wait_ended()


# --- the driver of the first stage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before anyone waits", "while the worker compiles", "while the better stage is loaded"])
async def test_a_better_stage_comes_although_the_first_ones_driver_has_died(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, moment: str
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=aionn.StagePolicy(min_gain=None))
        act = {"while the worker compiles": "compile", "while the better stage is loaded": "load"}.get(moment, "")
        if act:
            best.hang(act)
        else:
            await kill(runtime, quick.name)
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(compilation.wait_for_stage, best.name)
                if act:
                    await best.heard(act)
                    await kill(runtime, quick.name)
                    best.behave()
        assert device(runtime, quick.name).statistics()["starts"] == 2
        assert compilation.stages[1].comparison is not None, "the two were compared all the same"
        outputs = await compilation.compute(frame(3))
        assert (outputs.stage, outputs["y"][0, 0]) == (best.name, 3)


async def test_a_better_stage_comes_although_the_first_ones_driver_dies_under_the_comparison(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=aionn.StagePolicy(min_gain=None))
        quick.crash("run")
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(compilation.wait_for_stage, best.name)
                await quick.heard("run")
                quick.behave()
        assert device(runtime, quick.name).statistics()["starts"] >= 2
        assert compilation.stages[1].state == "serving"


@pytest.mark.parametrize("made_up", [True, False])
async def test_a_first_stage_that_dies_under_each_comparison_ends_the_wait_with_the_reason(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, monkeypatch: pytest.MonkeyPatch, made_up: bool
) -> None:
    monkeypatch.setattr(stages, "COMPARISONS", 3)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best)
        if not made_up:
            await compilation.compute(frame(1))
        quick.crash("run")
        with anyio.fail_after(WITHIN_S):
            reason = await rejected(compilation, best)
        assert reason.startswith("while comparing: ")
        assert f"driver process of device {quick.name!r} ended by signal 9" in reason
        assert device(runtime, quick.name).statistics()["starts"] == 3


async def test_a_first_stage_that_cannot_be_prepared_again_ends_the_wait_with_the_reason(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best)
        quick.fail("no luck today", "compile")
        await kill(runtime, quick.name)
        with anyio.fail_after(WITHIN_S):
            assert "while comparing: " in (reason := await rejected(compilation, best))
        assert "no luck today" in reason


async def test_an_app_that_has_used_device_memory_alone_need_not_send_inputs_for_the_comparison(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=aionn.StagePolicy(min_gain=None))
        async with await compilation.allocate(inputs=("x",)) as memory:
            await memory.copy_from(frame(5)["x"])
            assert (await compilation.start({"x": memory}))["y"][0, 0] == 5
            assert not compilation._parts.staging._samples.kept  # type: ignore[union-attr]
            with anyio.fail_after(WITHIN_S):
                await compilation.wait_for_stage(best.name)
            assert compilation.stages[1].comparison.made_up  # type: ignore[union-attr]


@pytest.fixture
def two() -> Iterator[list[FakeDevice]]:
    with drivers(WholeEngine, MulEngine) as found:
        yield found


async def test_a_better_stage_of_several_devices_comes_although_the_first_ones_driver_has_died(two: list[FakeDevice]) -> None:
    whole, muls = two
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()),
            mode="staged",
            stages=(whole.name, muls.name),
            stage_policy=aionn.StagePolicy(executions=0, min_gain=None),
        )
        await kill(runtime, whole.name)
        with anyio.fail_after(WITHIN_S):
            await compilation.wait_for_stage(muls.name)
        outputs = await compilation.compute({"x": x})
        assert outputs.stage == muls.name
        np.testing.assert_allclose(outputs["y"], expected(x), rtol=1e-6)


async def test_a_first_stage_of_several_devices_comes_back_for_the_comparison(two: list[FakeDevice]) -> None:
    whole, muls = two
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(three_step_model()),
            mode="staged",
            stages=(muls.name, whole.name),
            stage_policy=aionn.StagePolicy(executions=0, min_gain=None),
        )
        assert {step.device for step in compilation.plan} == {whole.name, muls.name}
        await kill(runtime, muls.name)
        with anyio.fail_after(WITHIN_S):
            await compilation.wait_for_stage(whole.name)
        assert device(runtime, muls.name).statistics()["starts"] >= 2


# --- the worker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["start", "compile"])
async def test_a_worker_that_is_stopped_ends_the_wait_with_the_reason(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, act: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with leak_check(), aionn.Runtime(hang_s=1.0) as runtime:
        compilation = await staged(runtime, model, quick, best)
        best.hang(act)
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_in, best, act)
                reason = await rejected(compilation, best)
        assert reason.startswith("while compiling: ")
        assert "made no progress" in reason
        assert "was stopped by a signal" in caplog.text
        best.behave()


async def _stop_in(best: FakeDevice, act: str) -> None:
    stop(await best.heard(act))


# --- random moments ------------------------------------------------------------------------------------------------------

STAGES = ("reference", "onnxruntime")
OUTPUTS_DECIDE = aionn.StagePolicy(min_gain=None)
X = np.ones((1, 8), np.float32)


class Rounds:
    """Rounds of a staged compilation in one runtime, each with one fault at a random moment."""

    def __init__(self, runtime: aionn.Runtime, cache: Path, moments: random.Random) -> None:
        self._runtime = runtime
        self._cache = cache
        self._random = moments
        self.happened: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.longest_s = 0.0
        self._usual_s = 0.0
        """How long an undisturbed wait takes here. No moment is drawn later: the wait would be over."""

    async def round(self, number: int, fault: str | None) -> None:
        """Wait for the better stage while the fault happens. The wait ends in time, and the model's answers are right."""
        model = aionn.Model.from_onnx(scaled_model(X * (number + 1)))
        cache = self._cache / str(number) if self._random.random() < 0.7 or fault == "a cache file is cut" else None
        async with await self._runtime.compile(
            model, mode="staged", stages=STAGES, cache_dir=cache, stage_policy=OUTPUTS_DECIDE
        ) as compilation:
            began_s = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                if fault is not None:
                    tasks.start_soon(self._strike, fault, self._random.uniform(0.0, self._usual_s), cache)
                try:
                    await compilation.wait_for_stage(STAGES[1], timeout_s=WITHIN_S)
                    self.ends["swapped"] += 1
                except aionn.StageRejected as rejected:
                    assert rejected.reason
                    self.ends["rejected"] += 1
                except aionn.DeadlineError as late:
                    raise AssertionError(f"round {number}, {fault}: {compilation.stages}, {self._runtime.health()}") from late
                tasks.cancel_scope.cancel()
            took_s = anyio.current_time() - began_s
            self.longest_s = max(self.longest_s, took_s)
            if fault is None:
                self._usual_s = took_s
            try:
                outputs = await compilation.compute({"x": X})
            except aionn.DriverDiedError:  # by a kill just before the end of the wait
                assert str(fault).endswith("is killed"), fault
                outputs = await compilation.compute({"x": X})
            np.testing.assert_allclose(outputs["y"], X * (number + 1.0))

    async def _strike(self, fault: str, after_s: float, cache: Path | None) -> None:
        await anyio.sleep(after_s)  # the moment itself, and no wait for anything
        if fault == "a cache file is cut":
            assert cache is not None
            self.happened[fault] += cut_a_file(cache, self._random)
            return
        who, _, what = fault.partition(" is ")
        signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
        if who == "the worker":
            pids = self._runtime._opened.devices.worker_pids
        else:
            pids = [pid for pid in (device(self._runtime, who).pid,) if pid is not None]
        for pid in pids:
            os.kill(pid, signals[what])
            self.happened[fault] += 1


def cut_a_file(folder: Path, choice: random.Random) -> bool:
    """Cut one of the files below a folder at a random length. Return whether there was one."""
    with contextlib.suppress(FileNotFoundError):  # it has got another name meanwhile
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        if files:
            path = choice.choice(files)
            os.truncate(path, choice.randrange(path.stat().st_size))
            return True
    return False


FAULTS = ("reference is killed", "the worker is killed", "the worker is stopped", "onnxruntime is killed", "a cache file is cut")


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_a_wait_for_a_stage_ends_whatever_dies_or_stops_at_a_random_moment(tmp_path: Path, rounds: int) -> None:
    seed = 26 if rounds == 12 else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with leak_check(grace_s=10.0), aionn.Runtime(hang_s=1.0) as runtime:
        here = Rounds(runtime, tmp_path, random.Random(seed))
        for number in range(2):  # the second one finds the engines' worker as the others will
            await here.round(number, None)
        for number in range(2, 2 + 3 * rounds):  # on a busy machine some moments come after the wait
            await here.round(number, FAULTS[number % len(FAULTS)])
            if number > rounds and here.happened.total() >= rounds // 3:
                break
    print(here.happened, here.ends, f"the longest wait took {here.longest_s:.1f} s")
    assert here.happened.total() >= rounds // 3, here.happened
    assert here.ends["swapped"], here.ends
