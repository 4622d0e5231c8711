"""A better stage asks a compile backend first. Whatever that does, the stream goes on, and the local worker compiles what is missing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import aionn
from aionn import fleet
from aionn.caching.outcomes import Refusal
from aionn.caching.store import Publisher
from aionn.events import CacheRefused, CompileStep
from aionn.fleet import ArtifactRequest, BuilderKey, Offered
from aionn.runtime.preparing import adopting, background
from aionn.runtime.processes.devices import Devices
from aionn.testing import FakeDevice, identity_model
from tests.fleet.builders import Backend, Pushed, build, offering, trust
from tests.leaks import leak_check
from tests.real_models import some_input
from tests.runtime.staged_streams import SHAPE, staged, streaming

pytestmark = pytest.mark.anyio
ALWAYS = aionn.StagePolicy(executions=0, min_gain=None)
Answering = Callable[[ArtifactRequest], Awaitable[Any]]


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices for which a worker process was started."""
    started: list[str] = []
    original = Devices.start_worker

    def start_worker(devices: Devices, name: str, threads: int) -> Any:
        started.append(name)
        return original(devices, name, threads)

    monkeypatch.setattr(Devices, "start_worker", start_worker)
    return started


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


def named(name: str) -> aionn.Model:
    """A model with that name and the operands of the others."""
    proto = onnx.load_from_string(identity_model({"x": SHAPE}, outputs=["y"]))
    proto.graph.name = name
    return aionn.Model.from_onnx(proto.SerializeToString())


@pytest.fixture
def key(folder: Path) -> BuilderKey:
    """A builder whom this user trusts."""
    key = BuilderKey.generate("farm")
    trust(folder, key)
    return key


@pytest.fixture
async def pushed(tmp_path: Path, model: aionn.Model, key: BuilderKey, best: FakeDevice) -> Pushed:
    (tmp_path / "builder").mkdir()
    return await build(tmp_path / "builder", model, key, best.name)


def asking(backend: Backend, **policy: Any) -> aionn.StagePolicy:
    return dataclasses.replace(ALWAYS, backend=backend, **policy)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- what the backend has ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("whose", ["the policy's", "the runtime's"])
async def test_a_stage_takes_what_the_backend_offers_and_no_worker_is_started(
    tmp_path: Path,
    model: aionn.Model,
    quick: FakeDevice,
    best: FakeDevice,
    pushed: Pushed,
    workers: list[str],
    caplog: pytest.LogCaptureFixture,
    cached: bool,
    whose: str,
) -> None:
    backend, ours = offering(pushed), whose == "the policy's"
    cache = tmp_path / "cache" if cached else None
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(
            runtime, model, quick, best, cache, stage_policy=dataclasses.replace(asking(backend), backend=backend if ours else None)
        )
        best.fail("this machine must not compile", "compile")
        if not ours:
            fleet.use_backend(runtime, backend)
        async with streaming(compilation) as stream:
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        stage = compilation.stages[1]
        assert (stage.state, stage.made_by, stage.local_reason, stage.step) == ("serving", "backend", "", "")
        assert stage.comparison is not None
    assert workers == []
    assert len(backend.requests) == len(backend.offered) == 1
    assert (backend.requests[0].key, backend.requests[0].device) == (pushed.manifest.key, best.name)
    assert pushed.held() == []
    assert warnings(caplog) == []
    if cache is not None:  # published: the next start has it, and asks no backend
        async with aionn.Runtime() as runtime:
            compilation = await staged(runtime, model, quick, best, cache, stage_policy=ALWAYS)
            assert [stage.state for stage in compilation.stages] == ["skipped", "serving"]


async def test_a_real_model_compiled_elsewhere_takes_over(tmp_path: Path, key: BuilderKey, silero_path: Path, workers: list[str]) -> None:
    (tmp_path / "builder").mkdir()
    model = aionn.Model.from_onnx(silero_path)
    pushed = await build(tmp_path / "builder", model, key, "openvino")
    async with leak_check(), aionn.Runtime() as runtime:
        stages = ("onnxruntime", "openvino")
        compilation = await runtime.compile(
            model, mode="staged", stages=stages, cache_dir=tmp_path / "cache", stage_policy=asking(offering(pushed))
        )
        inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
        assert (await compilation.compute(inputs)).stage == "onnxruntime"
        await compilation.wait_for_stage("openvino", timeout_s=100)
        assert (await compilation.compute(inputs)).stage == "openvino"
        assert compilation.stages[1].made_by == "backend"
    assert workers == []


async def test_a_swap_takes_what_the_backend_offers(tmp_path: Path, key: BuilderKey, best: FakeDevice, workers: list[str]) -> None:
    first, second = named("first"), named("second")
    (tmp_path / "builder").mkdir()
    pushed = await build(tmp_path / "builder", second, key, best.name)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(first, devices=(best.name,), cache_dir=tmp_path / "cache")
        best.fail("this machine must not compile", "compile")
        fleet.use_backend(runtime, offering(pushed))
        await runtime.swap(compilation, second)
        assert compilation.model is second
    assert workers == []


async def test_the_words_of_a_backend_are_the_step_of_its_stage(
    model: aionn.Model, quick: FakeDevice, best: FakeDevice, pushed: Pushed
) -> None:
    reported, release = asyncio.Event(), asyncio.Event()
    seen: list[Any] = []

    async def answer(request: ArtifactRequest) -> Offered:
        request.report("compiling\n (attempt 2)" + "!" * 500)
        reported.set()
        await release.wait()
        return pushed.offer()

    backend = Backend(answer)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(
            model, mode="staged", stages=(quick.name, best.name), on_event=seen.append, stage_policy=asking(backend)
        )
        await reported.wait()
        words = ("compiling (attempt 2)" + "!" * 500)[:200]
        assert (compilation.stages[1].state, compilation.stages[1].step) == ("compiling", words)
        steps = [event.step for event in seen if isinstance(event, CompileStep) and event.device == best.name]
        assert steps[-2:] == ["asking the compile backend", words]
        release.set()
        await compilation.compute({"x": some_input(model.inputs["x"])})
        await compilation.wait_for_stage(best.name, timeout_s=60)
        backend.requests[0].report("too late")
        assert compilation.stages[1].step == ""
    assert "too late" not in [event.step for event in seen if isinstance(event, CompileStep)]


# --- what the backend does not have ------------------------------------------------------------------------------------


async def _nothing(request: ArtifactRequest) -> None:
    return None


async def _raises(request: ArtifactRequest) -> None:
    raise ConnectionError("the farm was stopped")


async def _hangs(request: ArtifactRequest) -> None:
    await asyncio.Event().wait()


async def _answers_something(request: ArtifactRequest) -> str:
    return "an artifact"


async def _loses_its_work(request: ArtifactRequest) -> None:
    (work := asyncio.ensure_future(asyncio.Event().wait())).cancel()
    await work


NO_OFFER: dict[Answering, tuple[str, int]] = {
    _nothing: ("the compile backend has no such compilation", 0),
    _raises: ("the compile backend failed: the farm was stopped", 1),
    _hangs: ("the compile backend did not answer within 0.050 s", 1),
    _answers_something: ("the compile backend failed: it answered str, expected Offered or None", 1),
    _loses_its_work: ("the compile backend failed: its own work was cancelled", 1),
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("answer", NO_OFFER, ids=lambda answer: answer.__name__)
async def test_without_an_offer_the_worker_compiles_and_the_stream_does_not_notice(
    tmp_path: Path,
    model: aionn.Model,
    quick: FakeDevice,
    best: FakeDevice,
    key: BuilderKey,
    workers: list[str],
    caplog: pytest.LogCaptureFixture,
    answer: Answering,
    cached: bool,
) -> None:
    backend = Backend(answer)
    if answer is _hangs:
        backend.wait_s = 0.05
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache" if cached else None, stage_policy=asking(backend))
        async with streaming(compilation) as stream:
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        stage = compilation.stages[1]
        assert (stage.made_by, stage.local_reason) == ("worker", NO_OFFER[answer][0])
    assert workers == [best.name]
    assert len(backend.requests) == 1
    assert len(warnings(caplog)) == NO_OFFER[answer][1], warnings(caplog)


async def test_a_backend_that_is_stopped_in_the_middle_costs_the_stage_only_time(
    model: aionn.Model, quick: FakeDevice, best: FakeDevice, key: BuilderKey, workers: list[str]
) -> None:
    asked, stopped = asyncio.Event(), asyncio.Event()

    async def answer(request: ArtifactRequest) -> None:
        asked.set()
        await stopped.wait()
        raise ConnectionError("the farm was stopped")

    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=asking(Backend(answer)))
        async with streaming(compilation) as stream:
            await asked.wait()
            await stream.goes_on()
            assert workers == []
            stopped.set()
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        assert compilation.stages[1].made_by == "worker"


async def test_a_backend_may_take_half_of_the_time_of_a_stage(
    model: aionn.Model, quick: FakeDevice, best: FakeDevice, key: BuilderKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that never answers gets a part of the time only. The local worker has the rest."""
    most: list[float] = []
    original = adopting.offered_instead

    async def offered_instead(missed: Any, backend: Any, most_s: float) -> Any:
        most.append(most_s)
        return await original(missed, backend, 0.05)

    monkeypatch.setattr(background, "offered_instead", offered_instead)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=asking(Backend(_hangs), timeout_s=100.0))
        async with streaming(compilation):
            await compilation.wait_for_stage(best.name, timeout_s=60)
        assert compilation.stages[1].made_by == "worker"
    assert 0 < most[0] <= 50.0


# --- what the driver refuses -------------------------------------------------------------------------------------------


def _unsigned(offered: Offered) -> None:
    offered.signed = None


def _flipped(offered: Offered) -> None:
    assert offered.signed is not None
    offered.signed = offered.signed[:-1] + bytes((offered.signed[-1] ^ 1,))


def _as_it_is(offered: Offered) -> None:
    pass


FAULTS: dict[str, tuple[Callable[[Offered], None], str]] = {
    "unsigned": (_unsigned, "no_integrity_record"),
    "signature": (_flipped, "bad_signature"),
    "file": (_as_it_is, "wrong_bytes"),
    "length": (_as_it_is, "wrong_length"),
    "model": (_as_it_is, "other_model"),
    "stranger": (_as_it_is, "untrusted_builder"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_refused_offer_is_compiled_by_the_worker(
    tmp_path: Path,
    model: aionn.Model,
    quick: FakeDevice,
    best: FakeDevice,
    key: BuilderKey,
    pushed: Pushed,
    workers: list[str],
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    harm, reason = FAULTS[fault]
    if fault in ("model", "stranger"):
        (tmp_path / "other").mkdir()
        wrong = (model, BuilderKey.generate("stranger")) if fault == "stranger" else (named("another"), key)
        pushed = await build(tmp_path / "other", *wrong, best.name)
    elif fault in ("file", "length"):
        path = pushed.folder / "model0"
        path.write_bytes(bytes(path.stat().st_size - (fault == "length")))
    offered: list[Offered] = []

    async def answer(request: ArtifactRequest) -> Offered:
        offered.append(pushed.offer())
        harm(offered[0])
        return offered[0]

    seen: list[Any] = []
    async with leak_check(), aionn.Runtime() as runtime:
        stages = (quick.name, best.name)
        compilation = await runtime.compile(
            model, mode="staged", stages=stages, cache_dir=tmp_path / "cache", on_event=seen.append, stage_policy=asking(Backend(answer))
        )
        async with streaming(compilation) as stream:
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        stage = compilation.stages[1]
        assert stage.made_by == "worker"
        assert stage.local_reason.startswith(f"the offered compilation was refused: {reason}")
    assert workers == [best.name]
    assert len(offered) == 1
    assert pushed.held() == []
    assert [event.reason for event in seen if isinstance(event, CacheRefused)] == [reason]
    assert len(warnings(caplog)) == 1, warnings(caplog)


async def test_without_a_trusted_builder_no_backend_is_asked(
    folder: Path, model: aionn.Model, quick: FakeDevice, best: FakeDevice, workers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    backend = Backend(_nothing)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, stage_policy=asking(backend))
        async with streaming(compilation):
            await compilation.wait_for_stage(best.name, timeout_s=60)
        assert compilation.stages[1].local_reason.startswith("untrusted_builder")
    assert (backend.requests, workers) == ([], [best.name])
    assert len(warnings(caplog)) == 1


async def test_a_driver_that_dies_over_an_offer_is_replaced_and_the_worker_compiles(
    tmp_path: Path, model: aionn.Model, quick: FakeDevice, best: FakeDevice, pushed: Pushed, workers: list[str]
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache", stage_policy=asking(offering(pushed)))
        best.crash("load")
        async with streaming(compilation) as stream:
            await best.heard("load")
            best.behave()
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        stage = compilation.stages[1]
        assert stage.made_by == "worker"
        assert "the driver ended over it" in stage.local_reason
    assert workers == [best.name]


# --- ends in the middle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["the compilation is closed", "the runtime is closed"])
async def test_an_end_while_the_backend_is_asked_cancels_it_and_closes_what_it_offers(
    model: aionn.Model, quick: FakeDevice, best: FakeDevice, pushed: Pushed, workers: list[str], end: str
) -> None:
    asked, late = asyncio.Event(), pushed.offer()

    async def stubborn(request: ArtifactRequest) -> Offered:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return late
        raise AssertionError

    async with leak_check():
        async with aionn.Runtime() as runtime:
            compilation = await staged(runtime, model, quick, best, stage_policy=asking(Backend(stubborn)))
            await compilation.compute({"x": some_input(model.inputs["x"])})
            await asked.wait()
            if end == "the compilation is closed":
                await compilation.aclose()
                assert compilation.stages[1].state == "rejected"
        assert pushed.held() == []
    assert workers == []


async def test_an_end_while_the_worker_compiles_kills_it(model: aionn.Model, quick: FakeDevice, best: FakeDevice, key: BuilderKey) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        best.hang("compile")
        compilation = await staged(runtime, model, quick, best, stage_policy=asking(Backend(_nothing)))
        worker = await best.heard("compile")
        assert runtime._opened.devices.worker_pids == [worker]
        assert compilation.stages[1].local_reason
        await compilation.aclose()
        assert runtime._opened.devices.worker_pids == []
    best.behave()


# --- the local worker as a backend -------------------------------------------------------------------------------------


async def test_the_workers_files_are_published_without_a_copy(
    tmp_path: Path, model: aionn.Model, quick: FakeDevice, best: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_into(*arguments: Any) -> None:
        raise AssertionError("a second copy of the artifact")

    monkeypatch.setattr(adopting, "copy_into", copy_into)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache", stage_policy=ALWAYS)
        await compilation.compute({"x": some_input(model.inputs["x"])})
        await compilation.wait_for_stage(best.name, timeout_s=60)
        assert (compilation.stages[1].made_by, compilation.stages[1].local_reason) == ("worker", "")
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache", stage_policy=ALWAYS)
        assert compilation.stages[1].made_by == "cache"


async def test_an_artifact_that_cannot_be_published_is_compiled_once_and_serves(
    tmp_path: Path, model: aionn.Model, quick: FakeDevice, best: FakeDevice, workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish(publisher: Publisher, *, compile_ns: int | None = None) -> Any:
        await publisher.aclose()
        return Refusal(aionn.MissReason.NO_SPACE, "the disk is full")

    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache", stage_policy=ALWAYS)
        monkeypatch.setattr(Publisher, "publish", publish)
        await compilation.compute({"x": some_input(model.inputs["x"])})
        await compilation.wait_for_stage(best.name, timeout_s=60)
        assert compilation.stages[1].made_by == "worker"
    assert workers == [best.name]
