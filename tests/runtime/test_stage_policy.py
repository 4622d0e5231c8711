"""Each field of `StagePolicy` has its effect. Others have theirs shown elsewhere: `executions` in `test_stage_use`, `timeout_s` in
`test_stage_failures`, and `min_gain` in `test_stage_measurements`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.runtime.staging import measuring, stages
from aionn.runtime.staging.measuring import Samples
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame, rejected, staged

MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_policy_has_these_fields_and_no_more() -> None:
    assert [field.name for field in dataclasses.fields(aionn.StagePolicy)] == [
        "executions",
        "threads",
        "timeout_s",
        "min_gain",
        "tolerances",
        "backend",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("executions", -1),
        ("executions", "x"),
        ("executions", 1.5),
        ("executions", True),
        ("threads", 1.5),
        ("threads", None),
        ("timeout_s", None),
        ("timeout_s", True),
        ("timeout_s", 10**400),
        ("min_gain", "x"),
        ("tolerances", None),
        ("tolerances", {"float32": 0.1}),
        ("timeout_s", float("nan")),
        ("threads", 0),
        ("timeout_s", 0.0),
        ("min_gain", -0.1),
        ("min_gain", 1.0),
        ("timeout_s", -1.0),
        ("backend", "s3://bucket"),
        ("backend", type("NoWait", (), {"compile": print})()),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(aionn.CallerError, match=f"StagePolicy: .*{field}"):
        aionn.StagePolicy(**{field: value})


@pytest.mark.anyio
async def test_compile_refuses_a_policy_that_is_of_no_use() -> None:
    async with aionn.Runtime(start=()) as runtime:
        for mode in ("eager", "jit"):
            with pytest.raises(aionn.CallerError, match=f"stage_policy with mode='{mode}': .*leave stage_policy out"):
                await runtime.compile(MODEL, mode=mode, stage_policy=aionn.StagePolicy())
        for policy in ({"executions": 3}, False):
            with pytest.raises(aionn.CallerError, match=f"stage_policy of type {type(policy).__name__}: give an aionn.StagePolicy"):
                await runtime.compile(MODEL, mode="staged", stages=("reference",), stage_policy=policy)  # type: ignore[arg-type]
        assert [device.pid for device in runtime.devices if device.pid] == [], "no driver was started for it"


@pytest.mark.anyio
@pytest.mark.timeout(400)  # its worker starts with the highest niceness
@pytest.mark.usefixtures("workers_in_the_background")
@pytest.mark.parametrize("threads", [1, 2])
async def test_the_worker_may_use_as_many_cpus_as_the_policy_says(quick: FakeDevice, best: FakeDevice, threads: int) -> None:
    if len(os.sched_getaffinity(0)) < threads:
        pytest.skip("this machine has one CPU")
    async with leak_check(), aionn.Runtime() as runtime:
        best.hang("compile")
        compilation = await staged(runtime, MODEL, quick, best, stage_policy=aionn.StagePolicy(threads=threads, executions=1))
        await compilation.compute(frame(1))
        pid = await best.heard("compile")
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # those that libraries made when they were imported, too
            assert len(os.sched_getaffinity(thread)) == threads
            assert (os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) == (os.SCHED_BATCH, 19)
        best.behave()


@pytest.mark.anyio
async def test_tolerances_say_how_far_outputs_may_differ(quick: FakeDevice, best: FakeDevice) -> None:
    for offset, tolerances, serves in (
        (0.01, {}, False),
        (0.01, {"float32": aionn.Tolerance(0.1)}, True),
        (0.01, {"float64": aionn.Tolerance(0.1)}, False),
        (0.0005, {}, True),
        (0.0005, {"float32": aionn.Tolerance()}, False),
    ):
        async with leak_check(), aionn.Runtime() as runtime:
            best.tell(outputs_offset=offset)
            compilation = await staged(runtime, MODEL, quick, best, stage_policy=aionn.StagePolicy(min_gain=None, tolerances=tolerances))
            await compilation.compute(frame(1))
            if serves:
                await compilation.wait_for_stage(best.name, timeout_s=60)
            else:
                assert (await rejected(compilation, best)).startswith("output 'y': 16 of 16 elements are")


@pytest.mark.anyio
async def test_a_run_that_takes_too_long_is_not_timed_but_given_up(
    quick: FakeDevice, best: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "RUNS", 1)
    best.delay(0.8)  # slow, and well under the second after which a driver that misses its deadline counts as hung
    for run_timeout_s, reason in ((0.2, "did not come by the deadline"), (20.0, "it is not faster by 10%")):
        async with leak_check(), aionn.Runtime() as runtime:
            monkeypatch.setattr(measuring, "RUN_TIMEOUT_S", run_timeout_s)
            compilation = await staged(runtime, MODEL, quick, best)
            await compilation.compute(frame(1))
            assert reason in await rejected(compilation, best)


def test_samples_stay_within_their_number_and_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SAMPLE_EVERY_S", 0.0)

    def kept(most: int, most_bytes: int) -> list[float]:
        samples = Samples(MODEL, most, most_bytes)
        for number in range(5):
            samples.take({"x": np.full(SHAPE, number, np.float32)})
            assert samples.size_bytes == 64 * len(samples.kept)
        return [float(inputs["x"][0, 0]) for inputs in samples.kept]

    assert kept(3, 1 << 20) == [2, 3, 4]
    assert kept(3, 128) == kept(3, 191) == [3, 4]
    assert kept(3, 1) == [4]  # one, whatever its size


def test_neighbouring_frames_are_one_sample() -> None:
    samples = Samples(MODEL, 3, 1 << 20)
    for number in range(5):
        samples.take({"x": np.full(SHAPE, number, np.float32)})
    assert [float(inputs["x"][0, 0]) for inputs in samples.kept] == [0]


@pytest.mark.anyio
@pytest.mark.parametrize("timeout_s", ["x", float("nan"), 0])
async def test_a_wait_for_a_stage_checks_its_timeout(quick: FakeDevice, best: FakeDevice, timeout_s: Any) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best)
        with pytest.raises(aionn.CallerError, match="timeout_s is"):
            await compilation.wait_for_stage(best.name, timeout_s=timeout_s)
