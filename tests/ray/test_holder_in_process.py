"""`aionn.ray.Holder` without Serve: what a replica does at its start, at an upgrade and at its end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import onnx
import pytest

import aionn
import aionn.ray
from aionn.ray import held as held_module
from aionn.ray import holder as holder_module
from aionn.ray.models import compile_model, open_model
from aionn.runtime.processes import process
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import SecondFakeEngine
from tests.leaks import driver_pids, ended, leaves_nothing
from tests.ray.multiplexing import CompilationWatch
from tests.real_models import carried
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio

X = {"x": np.ones((1, 16), np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@asynccontextmanager
async def held(tmp_path: Path, models: dict[str, Any], runtime: dict[str, Any] | None = None, **arguments: Any) -> AsyncIterator[Any]:
    """Do as Serve does: make the object, await its constructor, and its destructor at the end."""
    made: Any = aionn.ray.Holder.__new__(aionn.ray.Holder)
    try:
        try:
            await made.__init__(models, runtime={"threads": 1, "state_dir": tmp_path / "state", **(runtime or {})}, **arguments)
        except BaseException:
            assert made.closed, "a constructor that fails leaves nothing open"
            raise
        yield made
    finally:
        await made.__del__()
        assert driver_pids() == []


def written(path: Path, factor: float, columns: int = 16) -> str:
    path.write_bytes(scaled_model(np.full((1, columns), factor, np.float32)))
    return str(path)


async def digest_of(path: str) -> str:
    return (await (await aionn.Model.load(path)).digest()).hex()


def spec(path: str, tmp_path: Path, device: str = "reference", **others: Any) -> aionn.ray.ModelSpec:
    return aionn.ray.ModelSpec(path, devices=(device,), cache_dir=tmp_path / "cache", **others)


# --- the start ---------------------------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_replica_answers_after_its_constructor(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", 2)
    async with held(tmp_path, {"m": spec(path, tmp_path, digest=await digest_of(path))}) as holder:
        await holder.check_health()
        assert (await holder.infer(X))["y"].tolist() == [[2.0] * 16]
        assert (await holder.infer(X, "m", timeout_s=30))["y"].tolist() == [[2.0] * 16]
        assert await holder.describe() == {"m": {"digest": await digest_of(path), "device": "reference", "retried": 0}}
        with pytest.raises(aionn.CallerError, match="has no model 'other'"):
            await holder.infer(X, "other")
    with pytest.raises(RuntimeError, match="closed"):
        await holder.check_health()


async def test_contents_of_a_model_may_travel_with_the_deployment(tmp_path: Path) -> None:
    content = scaled_model(np.full((1, 16), 2, np.float32))
    async with held(tmp_path, {"m": aionn.ray.ModelSpec(content, devices=("reference",))}) as holder:
        assert (await holder.infer(X))["y"].tolist() == [[2.0] * 16]


async def test_a_destructor_may_be_awaited_twice_and_a_subclass_may_have_one(tmp_path: Path) -> None:
    class Careful(aionn.ray.Holder):
        async def __del__(self) -> None:
            await super().__del__()  # type: ignore[misc]

    made = Careful.__new__(Careful)
    await made.__init__({"m": spec(written(tmp_path / "m.onnx", 2), tmp_path)}, runtime={"threads": 1, "state_dir": tmp_path / "state"})  # type: ignore[misc]
    assert inspect.iscoroutinefunction(aionn.ray.Holder.__del__), "`serve.ingress` awaits it then"  # type: ignore[attr-defined]
    await made.__del__()
    assert made.closed
    await made.__del__()
    del Careful.__del__  # Python calls the one of `Holder` when the object goes
    del made
    gc.collect()


async def test_a_file_with_another_digest_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", 2)
    digest = await digest_of(path)
    written(tmp_path / "m.onnx", 3)
    with pytest.raises(aionn.CallerError, match=f"asks for {digest}"):
        async with held(tmp_path, {"m": spec(path, tmp_path, digest=digest)}):
            pass
    assert driver_pids() == []


async def test_a_model_that_is_not_required_is_compiled_behind_the_start(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", 2)
    with FakeDevice() as fake:
        fake.hang("compile")
        models = {
            "quick": spec(path, tmp_path),
            "slow": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), required=False),
        }
        async with held(tmp_path, models) as holder:
            await holder.check_health()
            await fake.heard("compile")
            assert (await holder.infer(X, "quick"))["y"].tolist() == [[2.0] * 16]
            with pytest.raises(aionn.DeadlineError, match="model 'slow' was not compiled"):
                await holder.infer(X, "slow", timeout_s=0.01)
            with pytest.raises(aionn.CallerError, match="name one of its models"):
                await holder.infer(X)
            fake.behave()
            (answer,) = (await holder.infer(X, "slow")).values()
            assert answer.tolist() == X["x"].tolist()


async def test_a_background_compile_that_fails_is_tried_again_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    compiles = []
    compile_ = aionn.Runtime.compile

    async def counted(self: aionn.Runtime, *model: Any, **options: Any) -> aionn.Compilation:
        compiles.append(clock[0])
        return await compile_(self, *model, **options)

    monkeypatch.setattr(aionn.Runtime, "compile", counted)
    monkeypatch.setattr(held_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with FakeDevice() as fake:
        fake.fail("no room", "compile")
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), required=False)}
        async with held(tmp_path, models) as holder:
            raised = []
            for at in (100.0, 100.5, 101.0, 102.5, 103.0):
                clock[0] = at
                for _ in range(3):
                    with pytest.raises(aionn.CompilationError, match="no room") as failed:
                        await holder.infer(X)
                    raised.append(failed.value)
            assert compiles == [100.0, 101.0, 103.0]
            assert len(set(map(id, raised))) == 15, "each call has an error of its own"
            fake.behave()
            clock[0] = 107.0
            (answer,) = (await holder.infer(X)).values()
            assert answer.tolist() == X["x"].tolist()


@pytest.mark.parametrize("fault", ["the file is replaced during the warm-up", "the burst cannot be opened"])
async def test_an_attempt_that_fails_after_its_compile_leaves_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = written(tmp_path / "m.onnx", 2)
    watch = CompilationWatch().install(monkeypatch.setattr)
    warm_up, open_burst, faults = aionn.Compilation.warm_up, aionn.Burst.__aenter__, [fault]

    async def warm_up_slowly(self: aionn.Compilation, *arguments: Any) -> None:
        await warm_up(self, *arguments)
        if faults == ["the file is replaced during the warm-up"]:
            written(tmp_path / "m.onnx", 3)
            faults.clear()

    async def open_second(self: aionn.Burst) -> aionn.Burst:
        if faults:
            raise aionn.CallerError(faults.pop())
        return await open_burst(self)

    monkeypatch.setattr(aionn.Compilation, "warm_up", warm_up_slowly)
    monkeypatch.setattr(aionn.Burst, "__aenter__", open_second)
    async with aionn.Runtime(threads=1, state_dir=tmp_path / "state", start=()) as runtime:
        model = held_module.HeldModel("m", aionn.ray.ModelSpec(path, devices=("reference",)), runtime)
        with pytest.raises(aionn.CallerError, match="has changed" if "file" in fault else "burst"):
            await model.compile()
        assert (watch.compiles, watch.live) == (1, 0)
        await model.compile()
        assert (watch.compiles, watch.live) == (2, 1)
        model.close()


async def test_the_pause_before_a_further_compile_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(held_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    async with aionn.Runtime(start=()) as runtime:
        model = held_module.HeldModel("m", aionn.ray.ModelSpec(str(tmp_path / "none.onnx")), runtime)
        for _ in range(12):
            with pytest.raises(aionn.CallerError):
                await model.serving()
            clock[0] += 60.0
        scaled = written(tmp_path / "none.onnx", 2)
        model.spec = aionn.ray.ModelSpec(scaled, devices=("reference",))
        assert (await model.serving()).device == "reference"
        model.close()


async def test_a_replica_starts_the_drivers_that_its_models_need_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.processes.spawning.BY_DEFAULT", True)  # else the runtime starts none by itself
    read = []

    async def seen(name: str, spec: aionn.ray.ModelSpec) -> aionn.Model:
        with anyio.fail_after(60):
            while not driver_pids():  # noqa: ASYNC110 -- it is on its way, or never starts before the model is read
                await anyio.sleep(0.01)
        read.append(name)
        return await open_model(name, spec)

    monkeypatch.setattr(held_module, "open_model", seen)
    with FakeDevice() as fake:
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,))}
        async with held(tmp_path, models) as holder:
            assert read == ["m"]
            assert [device.name for device in holder.runtime.health().devices if device.pid is not None] == [fake.name]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{}], None),
        ([{"devices": ("reference", "onnxruntime")}, {"stages": ("onnxruntime", "openvino")}], ("reference", "onnxruntime")),
        ([{"devices": ("reference",)}, {"devices": ("reference",)}], ("reference",)),
        ([{"devices": ("reference",)}, {}], None),
        ([{"devices": ("reference",)}, {"required": False}, {"devices": ("openvino",), "required": False}], ("reference",)),
        ([{"devices": ("no-such-device",)}], ()),
        ([{"devices": ("reference",), "options": {"priority": "low"}}], ()),
    ],
)
def test_the_first_devices_of_required_models_start_early(given: list[dict[str, Any]], expected: tuple[str, ...] | None) -> None:
    assert held_module.first_devices([aionn.ray.ModelSpec("m.onnx", **arguments) for arguments in given]) == expected


@pytest.mark.parametrize("first", ["cannot be compiled", "is being compiled"])
async def test_a_model_that_does_not_serve_is_upgraded_all_the_same(tmp_path: Path, first: str) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    with FakeDevice() as fake:
        if first == "cannot be compiled":
            fake.fail("no room", "compile")
        else:
            fake.hang("compile")
        async with held(tmp_path, {"m": spec(one, tmp_path, fake.name, required=False)}) as holder, anyio.create_task_group() as tasks:
            await fake.heard("compile")
            if first == "cannot be compiled":
                with pytest.raises(aionn.CompilationError, match="no room"):
                    await holder.infer(X)
                fake.behave()
            else:
                tasks.start_soon(holder.infer, X)  # waits for the version before, and gets the one after
            with anyio.fail_after(60):
                await holder.reconfigure(config(m=(two, None)))
            fake.behave()
            await holder.infer(X)
            assert (await holder.describe())["m"]["digest"] == await digest_of(two)
            await holder.reconfigure({"models": {}})
            assert (await holder.describe())["m"]["digest"] == await digest_of(one)


@pytest.mark.parametrize("named", ["as before", "by its digest", "by another path", "not at all"])
async def test_a_compile_in_the_background_goes_on_if_its_model_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    same = written(tmp_path / "same.onnx", 2)
    configs: dict[str, dict[str, Any]] = {
        "as before": config(m=(one, None), b=(two, None)),
        "by its digest": config(m=(one, await digest_of(one)), b=(two, None)),
        "by another path": config(m=(same, None), b=(two, None)),
        "not at all": config(b=(two, None)),
    }
    watch = CompilationWatch().install(monkeypatch.setattr)
    with FakeDevice() as fake:
        fake.hang("compile")
        models = {"m": spec(one, tmp_path, fake.name, required=False), "b": spec(one, tmp_path)}
        async with held(tmp_path, models) as holder:
            await fake.heard("compile")
            before = watch.compiles
            await holder.reconfigure(configs[named])
            assert (await holder.infer(X, "b"))["y"][0, 0] == 3.0
            fake.behave()
            await holder.infer(X, "m")
            assert (watch.compiles, watch.live) == (before, before), "the compile was not made again"
            served = await holder.describe()
            assert [served[name]["digest"] for name in "mb"] == [await digest_of(one), await digest_of(two)]
            await holder.reconfigure({"models": {}})
            assert (await holder.infer(X, "b"))["y"][0, 0] == 2.0


async def test_a_compile_in_the_background_goes_on_if_an_upgrade_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, same = written(tmp_path / "1.onnx", 2), written(tmp_path / "same.onnx", 2)
    watch = CompilationWatch().install(monkeypatch.setattr)
    with FakeDevice() as fake:
        fake.hang("compile")
        models = {"a": spec(one, tmp_path, fake.name, required=False), "b": spec(one, tmp_path)}
        async with held(tmp_path, models) as holder:
            await fake.heard("compile")
            before = watch.compiles
            with pytest.raises(aionn.CallerError, match="asks for 000"):
                await holder.reconfigure(config(a=(same, None), b=(one, "0" * 64)))
            os.unlink(same)  # the next attempt must not need it
            assert holder._held["a"].spec == models["a"]
            fake.behave()
            await holder.infer(X, "a")
            assert holder._held["a"].spec == models["a"]
            assert watch.compiles == before


@pytest.mark.parametrize("how", ["written over", "replaced"])
async def test_a_compile_in_the_background_is_made_again_if_its_file_has_changed(tmp_path: Path, how: str) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    digest = await digest_of(two)
    with FakeDevice() as fake:
        fake.hang("compile")
        async with held(tmp_path, {"m": spec(one, tmp_path, fake.name, required=False)}) as holder:
            await fake.heard("compile")
            if how == "written over":
                written(tmp_path / "1.onnx", 3)
            else:
                os.replace(two, one)
            with anyio.fail_after(60):
                await holder.reconfigure(config(m=(one, None)))
            fake.behave()
            await holder.infer(X)
            assert (await holder.describe())["m"]["digest"] == digest


async def test_a_failed_upgrade_takes_back_a_model_that_does_not_serve(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    with FakeDevice() as fake:
        fake.hang("compile")
        models = {"a": spec(one, tmp_path, fake.name, required=False), "b": spec(one, tmp_path)}
        async with held(tmp_path, models) as holder:
            with pytest.raises(aionn.CallerError, match="asks for 000"):
                await holder.reconfigure(config(a=(two, None), b=(two, "0" * 64)))
            fake.behave()
            await holder.infer(X, "a")
            assert (await holder.describe())["a"]["digest"] == await digest_of(one)


async def test_a_failed_upgrade_takes_back_a_model_whose_version_before_is_missing(tmp_path: Path) -> None:
    one, two = str(tmp_path / "1.onnx"), written(tmp_path / "2.onnx", 3)
    with FakeDevice() as fake:
        models = {"a": spec(one, tmp_path, fake.name, required=False), "b": spec(two, tmp_path)}
        async with held(tmp_path, models) as holder:
            with pytest.raises(aionn.CallerError, match="no such file"):
                await holder.infer(X, "a")
            fake.hang("compile")
            with pytest.raises(aionn.CallerError, match="asks for 000"):
                await holder.reconfigure(config(a=(two, None), b=(two, "0" * 64)))
            fake.behave()
            with pytest.raises(aionn.CallerError, match="no such file"):
                await holder.infer(X, "a")
            assert (await holder.describe())["a"]["digest"] == ""


@dataclass
class CancelledUpgrade:
    """An upgrade that was cancelled while it cancelled the compile of version `one`, a file that scales by 2.

    Attributes:
        stop: lets that compile end, and later ones run. again: set when a second compile begins.
    """

    holder: aionn.ray.Holder
    one: str
    stop: anyio.Event
    again: anyio.Event


@asynccontextmanager
async def cancelled_upgrade(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CancelledUpgrade]:
    one, two = written(folder / "1.onnx", 2), written(folder / "2.onnx", 3)
    begun, cancelled, stop, again = (anyio.Event() for _ in range(4))

    async def compile_until(runtime: aionn.Runtime, name: str, asked: aionn.ray.ModelSpec, **options: Any) -> tuple[aionn.Compilation, str]:
        (again if begun.is_set() else begun).set()
        try:
            await stop.wait()
        except asyncio.CancelledError:
            cancelled.set()
            await stop.wait()  # as a driver that takes long to end a compile
            raise
        return await compile_model(runtime, name, asked, **options)

    monkeypatch.setattr(held_module, "compile_model", compile_until)
    async with held(folder, {"m": spec(one, folder, required=False)}) as holder:
        await begun.wait()
        upgrade = asyncio.create_task(holder.reconfigure(config(m=(two, None))))
        await cancelled.wait()
        upgrade.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upgrade
        yield CancelledUpgrade(holder, one, stop, again)


async def test_an_upgrade_that_is_cancelled_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cancelled_upgrade(tmp_path, monkeypatch) as upgrade:
        upgrade.stop.set()
        assert (await upgrade.holder.infer(X))["y"].tolist() == [[2.0] * 16]


async def test_an_upgrade_back_to_a_compile_that_is_being_cancelled_begins_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cancelled_upgrade(tmp_path, monkeypatch) as upgrade:
        assert not upgrade.again.is_set()
        back = asyncio.create_task(upgrade.holder.reconfigure(config(m=(upgrade.one, None))))
        await anyio.wait_all_tasks_blocked()
        upgrade.stop.set()
        with anyio.fail_after(30):
            await back
            await upgrade.again.wait()  # no call has asked for it
        assert (await upgrade.holder.infer(X, "m"))["y"][0, 0] == 2.0


async def test_a_long_start_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(holder_module, "_PROGRESS_S", 0.01)
    caplog.set_level(logging.INFO, "aionn.ray")

    async def released(fake: FakeDevice) -> None:
        while "'m' is in preparation on" not in caplog.text:
            await anyio.lowlevel.checkpoint()
        fake.behave()

    with FakeDevice() as fake:
        fake.hang("compile")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(released, fake)
            async with held(tmp_path, {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,))}) as holder:
                await holder.infer(X)
    assert "the replica has been starting for 0 s: the runtime is compiling" in caplog.text


async def test_a_staged_model_serves_from_its_first_stage(tmp_path: Path) -> None:
    with FakeDevice() as first, FakeDevice(SecondFakeEngine) as second:
        second.hang("compile")
        staged = aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), stages=(first.name, second.name), cache_dir=tmp_path / "cache")
        async with held(tmp_path, {"m": staged}) as holder:
            (answer,) = (await holder.infer(X)).values()
            assert answer.tolist() == X["x"].tolist()
            assert (await holder.describe())["m"]["device"] == first.name


async def test_a_model_without_made_up_inputs_starts_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "texts", text[:1], text[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    async with held(tmp_path, {"m": aionn.ray.ModelSpec(model.SerializeToString(), devices=("onnxruntime",))}) as holder:
        assert (await holder.infer({"x": np.array(["word"])}))["y"].tolist() == ["word"]
    assert "model 'm' is not warmed up, because inputs for it cannot be made up" in caplog.text


# --- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_call_without_state_is_made_again_after_a_death(tmp_path: Path, retries: int) -> None:
    with FakeDevice() as fake:
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), warm_up=0)}
        async with held(tmp_path, models, retry_stateless=retries) as holder:
            fake.crash(after=2)
            failures = 0
            for _ in range(6):
                try:
                    await holder.infer(X)
                except aionn.DriverDiedError:
                    failures += 1
            retried = (await holder.describe())["m"]["retried"]
            assert (failures, retried) == ((0, 2) if retries else (2, 0))


async def test_frames_of_a_stream_survive_a_death(tmp_path: Path) -> None:
    with FakeDevice() as fake:
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), warm_up=0)}
        async with held(tmp_path, models) as holder:
            fake.crash(after=2)
            frames = [{"x": np.full((1, 16), number, np.float32)} for number in range(7)]
            got = [next(iter(outputs.values()))[0, 0] async for outputs in holder.stream(frames)]
            assert got == list(range(7))


async def test_errors_of_the_caller_and_of_the_execution_are_not_retried(tmp_path: Path) -> None:
    with FakeDevice() as fake:
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), warm_up=0)}
        async with held(tmp_path, models) as holder:
            with pytest.raises(aionn.CallerError):
                await holder.infer({"y": X["x"]})
            fake.fail("out of beans")
            with pytest.raises(aionn.ExecutionError, match="out of beans"):
                await holder.infer(X)
            assert (await holder.describe())["m"]["retried"] == 0


async def test_lost_state_is_an_error_and_a_kept_state_is_not(tmp_path: Path) -> None:
    models = {"vad": aionn.ray.ModelSpec(carried("silero"), devices=("onnxruntime",), cache_dir=tmp_path / "cache")}
    random = np.random.default_rng(0)
    frames = [{"input": random.uniform(-0.1, 0.1, (1, 576)).astype(np.float32)} for _ in range(40)]
    async with held(tmp_path, models) as holder:
        states = {"state": "stateN"}
        expected = [float(outputs["output"][0, 0]) async for outputs in holder.stream(frames, states=states)]
        got = []
        async for outputs in holder.stream(frames, states=states):
            got.append(float(outputs["output"][0, 0]))
            if len(got) == 20:
                for pid in driver_pids():
                    os.kill(pid, signal.SIGKILL)
                    assert await ended(pid, 10)
        assert got == expected
        compilation = await holder.compilation()
        async with await compilation.allocate(inputs=("state",), outputs=("stateN",)) as memory:
            await memory.reset()
            for pid in driver_pids():
                os.kill(pid, signal.SIGKILL)
                assert await ended(pid, 10)
            with pytest.raises(aionn.DeviceMemoryLostError):
                await holder.infer({**frames[0], "state": memory})
            assert (await holder.describe())["vad"]["retried"] == 0


async def test_a_hung_driver_makes_the_replica_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DEFAULT_HANG_S", 0.3)
    with FakeDevice() as fake:
        models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), warm_up=0)}
        async with held(tmp_path, models, {"hang_s": None}) as holder, anyio.create_task_group() as tasks:
            fake.hang()
            tasks.start_soon(holder.infer, X)
            await fake.heard("run")
            with pytest.raises(RuntimeError, match=r"stalled: the driver .* is hung"):
                while True:
                    await holder.check_health()
                    await anyio.lowlevel.checkpoint()
            fake.behave()


# --- upgrades ----------------------------------------------------------------------------------------------------------


def config(**sources: tuple[str, str | None]) -> dict[str, Any]:
    return {
        "models": {name: {"source": path, **({} if digest is None else {"digest": digest})} for name, (path, digest) in sources.items()}
    }


async def test_a_new_version_takes_over(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    digests = {path: await digest_of(path) for path in (one, two)}
    async with held(tmp_path, {"m": spec(one, tmp_path, digest=digests[one])}) as holder:
        await holder.reconfigure(config(m=(two, None)))  # a new source without a digest: any contents
        assert (await holder.infer(X))["y"][0, 0] == 3.0
        for path, factor in ((two, 3.0), (two, 3.0), (one, 2.0)):
            await holder.reconfigure(config(m=(path, digests[path])))
            assert (await holder.infer(X))["y"][0, 0] == factor
            assert (await holder.describe())["m"]["digest"] == digests[path]


async def test_the_way_back_compiles_nothing(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    with FakeDevice() as fake:
        async with held(tmp_path, {"m": spec(one, tmp_path, fake.name)}) as holder:
            await holder.reconfigure(config(m=(two, None)))
            fake.fail("this is not a hit", "compile")
            await holder.reconfigure(config(m=(one, None)))
            assert (await holder.describe())["m"]["digest"] == await digest_of(one)


@pytest.mark.parametrize("fault", ["no model", "another digest", "another shape", "an unknown operator", "no file"])
async def test_a_broken_version_raises_and_the_one_before_serves(tmp_path: Path, fault: str) -> None:
    one = written(tmp_path / "1.onnx", 2)
    bad, digest = tmp_path / "bad.onnx", None
    kind: type[aionn.AionnError] = aionn.CallerError
    if fault == "no model":
        bad.write_bytes(b"not a model")
    elif fault == "another digest":
        written(bad, 3)
        digest = "0" * 64
    elif fault == "another shape":
        written(bad, 3, columns=8)
    elif fault == "an unknown operator":
        import onnx

        graph = onnx.load_from_string(scaled_model(np.full((1, 16), 3, np.float32)))
        graph.graph.node[0].op_type = "NoSuchOperator"
        bad.write_bytes(graph.SerializeToString())
        kind = aionn.CompilationError
    async with held(tmp_path, {"m": spec(one, tmp_path)}) as holder:
        with pytest.raises(kind):
            await holder.reconfigure(config(m=(str(bad), digest)))
        assert (await holder.infer(X))["y"][0, 0] == 2.0
        assert (await holder.describe())["m"]["digest"] == await digest_of(one)


async def test_several_models_change_together_or_not_at_all(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    async with held(tmp_path, {"a": spec(one, tmp_path), "b": spec(one, tmp_path)}) as holder:
        with pytest.raises(aionn.CallerError):
            await holder.reconfigure(config(a=(two, None), b=(two, "0" * 64)))
        assert [(await holder.infer(X, name))["y"][0, 0] for name in "ab"] == [2.0, 2.0]
        assert {one["digest"] for one in (await holder.describe()).values()} == {await digest_of(one)}
        await holder.reconfigure(config(a=(two, None), b=(two, None)))
        assert [(await holder.infer(X, name))["y"][0, 0] for name in "ab"] == [3.0, 3.0]


async def test_what_a_replica_serves_does_not_depend_on_earlier_configs(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    async with held(tmp_path, {"a": spec(one, tmp_path), "b": spec(one, tmp_path)}) as holder:
        served = []
        configs: list[dict[str, Any]] = [config(a=(two, None)), config(b=(two, None)), {"models": {}}]
        for named in configs:
            await holder.reconfigure(named)
            served.append([(await holder.infer(X, name))["y"][0, 0] for name in "ab"])
        assert served == [[3.0, 2.0], [2.0, 3.0], [2.0, 2.0]]


async def test_models_go_back_although_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = written(tmp_path / "1.onnx", 2), written(tmp_path / "2.onnx", 3)
    swap, swaps = aionn.Runtime.swap, list[str]()

    async def failing(self: aionn.Runtime, compilation: aionn.Compilation, model: aionn.Model) -> None:
        swaps.append(compilation.name)
        if swaps == ["a", "b", "b"]:
            raise aionn.CompilationError("no room")
        await swap(self, compilation, model)

    monkeypatch.setattr(aionn.Runtime, "swap", failing)
    async with held(tmp_path, {name: spec(one, tmp_path) for name in "abc"}) as holder:
        with pytest.raises(aionn.CallerError, match="asks for 000"):
            await holder.reconfigure(config(a=(two, None), b=(two, None), c=(two, "0" * 64)))
        assert [(await holder.infer(X, name))["y"][0, 0] for name in "abc"] == [2.0, 3.0, 2.0]
        assert [(await holder.describe())[name]["digest"] == await digest_of(one) for name in "abc"] == [True, False, True]
        assert "model 'b'" in caplog.text
        await holder.reconfigure({"models": {}})
        assert [(await holder.infer(X, name))["y"][0, 0] for name in "abc"] == [2.0] * 3


async def test_a_holder_outside_of_ray_starts_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    made: Any = aionn.ray.Holder.__new__(aionn.ray.Holder)
    await made.__init__({"m": spec(written(tmp_path / "m.onnx", 2), tmp_path)}, runtime={"state_dir": tmp_path / "state"})
    assert (await made.infer(X))["y"].tolist() == [[2.0] * 16]
    await made.__del__()


async def test_a_replica_that_keeps_its_models_logs_the_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = written(tmp_path / "1.onnx", 2)
    async with held(tmp_path, {"m": spec(one, tmp_path)}, failed_upgrade="keep") as holder:
        with pytest.raises(aionn.CallerError):  # it has just started, so it would serve something else than the deployment says
            await holder.reconfigure(config(m=(one, "0" * 64)))
        await holder.check_health()
        await holder.reconfigure(config(m=(one, "0" * 64)))
        assert "the replica keeps the models that it had, because an upgrade failed: CallerError" in caplog.text
        assert (await holder.infer(X))["y"][0, 0] == 2.0


@pytest.mark.parametrize(
    "user_config",
    [
        None,
        [],
        {"models": ["m"]},
        {"models": {"other": {"source": "m.onnx"}}},
        {"models": {"m": "m.onnx"}},
        {"models": {"m": {"devices": []}}},
    ],
)
async def test_a_config_of_another_form_is_refused(tmp_path: Path, user_config: Any) -> None:
    one = written(tmp_path / "1.onnx", 2)
    async with held(tmp_path, {"m": spec(one, tmp_path)}) as holder:
        with pytest.raises(aionn.CallerError, match="user_config"):
            await holder.reconfigure(user_config)


# --- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"source": ""},
        {"source": 3},
        {"source": "m.onnx", "digest": "abc"},
        {"source": "m.onnx", "warm_up": -1},
        {"source": "m.onnx", "options": {"device": "x"}},
        {"source": "m.onnx", "options": {"devices": ("x",)}},
        {"source": "m.onnx", "options": "x"},
    ],
)
def test_a_specification_that_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(aionn.CallerError, match="ModelSpec"):
        aionn.ray.ModelSpec(**arguments)


@pytest.mark.parametrize("arguments", [{"models": {}}, {"models": {"m": 3}}, {"retry_stateless": -1}, {"failed_upgrade": "ignore"}])
async def test_a_holder_with_wrong_arguments_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(aionn.CallerError):
        async with held(tmp_path, **{"models": {"m": "m.onnx"}, **arguments}):
            pass


def test_contents_of_a_model_are_not_in_an_error() -> None:
    from aionn.ray.models import checked_specs

    contents: Any = bytearray(b"contents" * 1000)
    for wrong in (lambda: checked_specs({"m": bytes(contents)}), lambda: checked_specs(contents), lambda: aionn.ray.ModelSpec(contents)):
        with pytest.raises(aionn.CallerError) as raised:
            wrong()
        assert "contentscontents" not in str(raised.value)


def test_the_options_of_serve_bound_queues_and_find_a_hang() -> None:
    assert aionn.ray.serve_options(max_ongoing_requests=10, num_replicas=2) == {
        "max_ongoing_requests": 10,
        "max_queued_requests": 40,
        "health_check_period_s": 0.5,
        "health_check_timeout_s": 5.0,
        "graceful_shutdown_timeout_s": 20.0,
        "num_replicas": 2,
    }
    scaling = aionn.ray.serve_options(max_ongoing_requests=10, autoscaling={"max_replicas": 4})["autoscaling_config"]
    assert scaling == {"target_ongoing_requests": 7.0, "max_replicas": 4}
    with pytest.raises(aionn.CallerError, match="never adds a replica"):
        aionn.ray.serve_options(max_ongoing_requests=10, autoscaling={"target_ongoing_requests": 10})


def test_the_names_need_no_ray_until_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('it is not here')\n", encoding="utf-8")
    program = (
        "import aionn.ray; aionn.ray.Holder; s = aionn.ray.ModelSpec('m.onnx'); aionn.ray.serve_options(); aionn.ray.deployment({'m': s})"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ran.stderr.splitlines()[-1] == "ImportError: aionn.ray needs Ray; install it with: pip install 'aionn[ray]'"
