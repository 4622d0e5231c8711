"""What a comparison measured is kept, and the present policy is applied to it when it is read."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import time
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import numpy as np
import pytest

import aionn
from aionn.caching import OutputDifference, StageMeasurement
from aionn.caching.store import CacheStore
from aionn.hal import ExecutionPreference, PrepareOptions, Priority
from aionn.runtime.preparing.compile_acts import CacheChoice, CompileRequest
from aionn.runtime.staging import measuring, stages, verdicts
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame, rejected, staged, streaming

pytestmark = pytest.mark.anyio

MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(measuring, "SAMPLES", 1)
    monkeypatch.setattr(stages, "RUNS", 1)


# --- the verdict on one measurement -------------------------------------------------------------------------------------------


def measured(gain: float | None = 0.3, *, largest: float | None = 1e-4, within: bool = True, **changes: Any) -> StageMeasurement:
    found = StageMeasurement(
        model_digest=MODEL.token,
        stage="best",
        version="1",
        base="quick",
        base_version="1",
        threads=2,
        outputs={"y": OutputDifference("float32", 1e-3, 1e-3, largest, within)},
        gain=gain,
        before_s=0.010,
        after_s=0.007,
        measured_s=time.time(),
    )
    return msgspec.structs.replace(found, **changes)


def verdict(found: StageMeasurement, **policy: Any) -> str | None:
    return verdicts.verdict(found, MODEL, dataclasses.replace(aionn.StagePolicy(), **policy))


def test_the_gain_that_the_present_policy_wants_decides() -> None:
    assert verdict(measured(0.3)) == verdicts.APPROVED
    assert verdict(measured(0.3), min_gain=0.3) == verdicts.APPROVED
    assert verdict(measured(0.3), min_gain=0.31) == "it is not faster by 31%: a run takes 7.000 ms instead of 10.000 ms"
    assert "it is not faster by 10%" in str(verdict(measured(-0.2)))
    assert verdict(measured(-0.2), min_gain=None) == verdicts.APPROVED
    assert verdict(measured(None)) is None
    assert verdict(measured(None), min_gain=None) == verdicts.APPROVED


def test_the_tolerance_that_the_present_policy_allows_decides_where_the_measurement_answers_that() -> None:
    def of(absolute: float, relative: float) -> dict[str, Any]:
        return {"tolerances": {"float32": aionn.Tolerance(absolute, relative)}}

    assert verdict(measured(), **of(1e-2, 1e-2)) == verdicts.APPROVED
    assert verdict(measured(), **of(1e-4, 0)) == verdicts.APPROVED
    assert verdict(measured(), **of(1e-5, 0)) == "output 'y': elements are off by up to 0.0001, allowed are 1e-05"
    assert verdict(measured(), **of(1e-5, 1e-3)) is None  # by how much of each element they are off is not known
    bad = measured(largest=0.5, within=False, detail="output 'y': off by 0.5")
    assert verdict(bad) == verdict(bad, **of(1e-4, 0)) == "output 'y': off by 0.5"
    assert verdict(bad, **of(0.6, 0)) is None  # it differed on the first input, and the others were not looked at
    assert verdict(measured(outputs={})) is None


def test_made_up_inputs_decide_nothing_and_a_failure_is_one_under_any_policy() -> None:
    assert verdict(measured(made_up=True)) is None
    assert verdict(measured(made_up=True, within=False, detail="off")) is None
    assert verdict(measured(failed=True, detail="it failed 3 times"), min_gain=None) == "it failed 3 times"


def test_a_refusal_outweighs_an_approval() -> None:
    policy = aionn.StagePolicy()
    assert verdicts.judged([], MODEL, policy) is None
    assert verdicts.judged([measured(None), measured(0.3)], MODEL, policy) == verdicts.APPROVED
    assert "not faster" in str(verdicts.judged([measured(0.3), measured(0.0, base="other")], MODEL, policy))


def asked(cache: CacheChoice, model: aionn.Model | None = None, options: PrepareOptions | None = None) -> CompileRequest:
    """What an app asks for. Nothing shows it."""
    return CompileRequest(model or MODEL, options or PrepareOptions(), cast(Any, None), cache=cache)


@pytest.mark.parametrize("change", [{"version": "2"}, {"base_version": "2"}, {"threads": 3}])
def test_a_measurement_holds_for_the_versions_and_threads_that_it_was_made_with(change: dict[str, Any]) -> None:
    assert verdicts.holds(measured(), "1", "1", 2)
    assert not verdicts.holds(measured(**change), "1", "1", 2)


def test_the_scope_of_a_measurement_is_the_model_the_token_the_options_and_the_stage() -> None:
    store = CacheStore("nowhere")
    other = aionn.Model.from_onnx(identity_model({"x": (1, 17)}, outputs=["y"]))
    scopes = {
        verdicts.scope(asked(CacheChoice(store, token), model, options), stage)
        for token in (bytes(32), bytes(31) + b"1")
        for model in (MODEL, other)
        for options in (PrepareOptions(), PrepareOptions(ExecutionPreference.LOW_POWER), PrepareOptions(priority=Priority.HIGH))
        for stage in ("a", "b")
    }
    assert len(scopes) == 2 * 2 * 3 * 2


# --- at a start ----------------------------------------------------------------------------------------------------------------


async def measure(quick: FakeDevice, best: FakeDevice, cache: Path, min_gain: float | None = None) -> str:
    """Start an app that streams until the better stage has been decided on; why it was rejected, or empty. Outputs alone decide here."""
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, cache, stage_policy=aionn.StagePolicy(min_gain=min_gain))
        async with streaming(compilation):
            try:
                await compilation.wait_for_stage(best.name, timeout_s=60)
            except aionn.StageRejected as refused:
                return refused.reason
        return ""


async def begins_with(quick: FakeDevice, best: FakeDevice, cache: Path, min_gain: float | None = None) -> str:
    async with leak_check(), aionn.Runtime() as runtime:
        return (await staged(runtime, MODEL, quick, best, cache, stage_policy=aionn.StagePolicy(min_gain=min_gain))).device


async def remembered(cache: Path) -> StageMeasurement:
    async with CacheStore(cache) as store:
        (found,) = await store.remembered.measurements()
        return found


async def test_a_comparison_is_remembered_as_it_was_measured(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache", stage_policy=aionn.StagePolicy(min_gain=0.5))
        await compilation.compute(frame(1))  # and nothing more: each run is timed alone, whichever stage is the faster one
        try:
            await compilation.wait_for_stage(best.name, timeout_s=60)
        except aionn.StageRejected as refused:
            assert refused.reason.startswith("it is not faster by 50%")
        comparison = compilation.stages[1].comparison
    found = await remembered(tmp_path / "cache")
    assert comparison is not None
    assert found.gain is not None
    assert found.gain == comparison.gain
    assert (comparison.refused == found.detail == "") == (found.gain >= 0.5)
    assert (found.before_s, found.after_s) == (comparison.before_s, comparison.after_s)
    assert (found.stage, found.version, found.base, found.base_version) == (best.name, "1", quick.name, "1")
    assert (found.made_up, found.failed, found.outputs["y"].largest) == (False, False, 0.0)
    assert abs(found.measured_s - time.time()) < 60


async def test_a_later_start_applies_its_own_policy_to_what_was_measured(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert await measure(quick, best, cache) == ""
    found = await remembered(cache)
    async with CacheStore(cache) as store:
        scope = verdicts.scope(asked(CacheChoice(store, MODEL.token)), best.name)
        await store.remembered.remember(scope, msgspec.structs.replace(found, gain=0.3, before_s=0.010, after_s=0.007))
    for min_gain, first in ((None, best.name), (0.0, best.name), (0.3, best.name), (0.31, quick.name), (0.99, quick.name)):
        assert await begins_with(quick, best, cache, min_gain) == first
    reason = await measure(quick, best, cache, 0.31)
    assert reason == "as an earlier comparison found: it is not faster by 31%: a run takes 7.000 ms instead of 10.000 ms"


@pytest.mark.parametrize("changed", ["better stage", "stage before", "threads"])
async def test_a_change_of_what_a_measurement_depends_on_ends_it(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await measure(quick, best, tmp_path / "cache") == ""
    assert await begins_with(quick, best, tmp_path / "cache") == best.name
    if changed == "better stage":
        best.tell(version="2")
    elif changed == "stage before":
        quick.tell(version="2")
    else:
        monkeypatch.setattr("aionn.engines.processor.usable_cpus", lambda: 1000)
    assert await begins_with(quick, best, tmp_path / "cache") == quick.name


async def test_a_refusal_ends_with_a_new_version_of_the_better_stage(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    best.tell(outputs_offset=0.5)
    assert "off by up to 0.5" in await measure(quick, best, tmp_path / "cache")
    best.behave()
    assert "as an earlier comparison found" in await measure(quick, best, tmp_path / "cache")
    best.tell(version="2")
    assert await measure(quick, best, tmp_path / "cache") == ""


async def test_a_measurement_is_forgotten_after_a_week(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    assert await measure(quick, best, tmp_path / "cache") == ""
    for age_s, first in ((7 * 86400 - 3600, best.name), (7 * 86400 + 1, quick.name), (-7 * 86400 - 60, quick.name)):
        _make_older(tmp_path / "cache", age_s)
        assert await begins_with(quick, best, tmp_path / "cache") == first, age_s


def _make_older(cache: Path, age_s: float) -> None:
    with sqlite3.connect(cache / "index.sqlite") as database:
        assert database.execute("UPDATE measurements SET measured_s = ?", (time.time() - age_s,)).rowcount == 1
    database.close()


async def test_what_was_measured_on_made_up_inputs_never_lets_a_stage_serve(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache", stage_policy=aionn.StagePolicy(min_gain=None))
        await compilation.wait_for_stage(best.name, timeout_s=60)
        assert compilation.stages[1].comparison is not None
        assert compilation.stages[1].comparison.made_up
    assert (await remembered(tmp_path / "cache")).made_up
    assert await begins_with(quick, best, tmp_path / "cache") == quick.name
    assert await measure(quick, best, tmp_path / "cache") == ""
    assert not (await remembered(tmp_path / "cache")).made_up
    assert await begins_with(quick, best, tmp_path / "cache") == best.name
    async with CacheStore(tmp_path / "cache") as store:  # a measurement on made-up inputs takes no other's place
        (found,) = await store.remembered.measurements()
        scope = verdicts.scope(asked(CacheChoice(store, MODEL.token)), best.name)
        await store.remembered.remember(scope, msgspec.structs.replace(found, made_up=True))
        assert await store.remembered.measurements(scope) == [found]


async def test_the_version_of_the_stage_before_is_asked_by_a_driver_that_ends_again(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path
) -> None:
    assert await measure(quick, best, tmp_path / "cache") == ""
    async with leak_check(), aionn.Runtime() as runtime:
        quick.tell()
        compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache", stage_policy=aionn.StagePolicy(min_gain=None))
        pid = await quick.heard("start")
        assert compilation.device == best.name
        assert runtime._opened.devices.worker_pids == []
        assert [device.pid for device in runtime.devices if device.name == quick.name] == [None]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_the_better_stage_serves_where_the_driver_of_the_stage_before_does_not_start(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path
) -> None:
    assert await measure(quick, best, tmp_path / "cache") == ""
    quick.crash("start")
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache", stage_policy=aionn.StagePolicy(min_gain=None))
        assert [stage.state for stage in compilation.stages] == ["rejected", "serving"]
        assert compilation.outcomes[0].kind.name == "HIT"
        np.testing.assert_array_equal((await compilation.compute(frame(5)))["y"], frame(5)["x"])


async def test_outputs_that_differ_after_the_first_runs_are_noticed(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    # The fake counts the runs of one driver process: here its first run warms up, the second is beside the stream, the third is timed.
    best.tell(outputs_offset=0.5, after={"run": 2})
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache")
        async with streaming(compilation):
            assert (await rejected(compilation, best)).startswith("output 'y': 16 of 16 elements are off by up to 0.5")
        assert compilation.stages[1].comparison is not None
        assert compilation.stages[1].comparison.differs == "y"


async def test_one_execution_before_the_stages_have_begun_is_an_input_to_compare_with(quick: FakeDevice, best: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, stage_policy=aionn.StagePolicy(min_gain=None))
        await compilation.compute(frame(3))
        with anyio.fail_after(60):
            await compilation.wait_for_stage(best.name)
        assert compilation.stages[1].comparison is not None
        assert not compilation.stages[1].comparison.made_up
        np.testing.assert_array_equal((await compilation.compute(frame(5)))["y"], frame(5)["x"])
