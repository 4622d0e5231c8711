"""`aionn.ray.MultiplexedHolder` without Serve: many models in few places, with real drivers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
import aionn.ray
from aionn.ray import multiplexed as multiplexed_module
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids, ended, leaves_nothing
from tests.ray.multiplexing import CompilationWatch, factor_of, written_models

pytestmark = pytest.mark.anyio

X = {"x": np.ones((1, 16), np.float32)}
CALLED: ContextVar[str] = ContextVar("CALLED", default="")


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def _calls_name_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve keeps the model's id in the context of a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns
        from ray import serve

    monkeypatch.setattr(serve, "get_multiplexed_model_id", CALLED.get)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> CompilationWatch:
    return CompilationWatch().install(monkeypatch.setattr)


@asynccontextmanager
async def held(tmp_path: Path, multiplexed: Any, **arguments: Any) -> AsyncIterator[Any]:
    """Do as Serve does: make the object, await its constructor, and its destructor at the end."""
    made: Any = aionn.ray.MultiplexedHolder.__new__(aionn.ray.MultiplexedHolder)
    runtime = {"threads": 1, "state_dir": tmp_path / "state"}
    try:
        await made.__init__(multiplexed, runtime=runtime, **arguments)
        yield made
    finally:
        await made.__del__()
        assert driver_pids() == []


def calls(holder: Any, model_id: str, number: float = 1.0, **arguments: Any) -> asyncio.Task[Any]:
    """Call the replica as Serve does: in a task whose context names the model."""

    async def infer() -> Any:
        CALLED.set(model_id)
        return await holder.infer({"x": np.full((1, 16), number, np.float32)}, **arguments)

    return asyncio.create_task(infer())


def fake_models(fake: FakeDevice, *names: str) -> dict[str, aionn.ray.ModelSpec]:
    """Models whose output is called like the model, so that the answer of a wrong model is seen."""
    return {name: aionn.ray.ModelSpec(identity_model({"x": (1, 16)}, outputs=[name]), devices=(fake.name,), warm_up=0) for name in names}


async def kill_drivers() -> None:
    for pid in driver_pids():
        os.kill(pid, signal.SIGKILL)
        assert await ended(pid, 10)


@leaves_nothing
async def test_each_call_gets_its_model_and_two_are_compiled_at_most(tmp_path: Path, watch: CompilationWatch) -> None:
    chance = random.Random(0)
    async with held(tmp_path, written_models(tmp_path, 6, "reference"), max_models=2) as holder:

        async def caller() -> None:
            for number in range(15):
                model_id = f"m{chance.randrange(6)}"
                answer = (await calls(holder, model_id, number))["y"]
                assert answer.tolist() == [[number * factor_of(model_id)] * 16]

        async with anyio.create_task_group() as callers:
            for _ in range(4):
                callers.start_soon(caller)
        assert (watch.most, watch.wrong) == (2, 0)
        assert len(await holder.open_models()) <= 2
        await holder.check_health()
        assert holder.runtime.health().ready
    assert watch.live == 0


async def test_calls_that_miss_at_once_compile_the_model_once(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de")) as holder:
            await calls(holder, "de")
            fake.hang("compile")
            tasks = [calls(holder, "fr", number) for number in range(5)]
            await fake.heard("compile")
            assert holder.runtime.health().ready, "the other models answer meanwhile"
            fake.behave()
            assert [(await task)["fr"][0, 0] for task in tasks] == list(range(5))
            assert watch.compiles == 2


async def test_a_model_in_use_is_closed_after_its_call(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=1) as holder:
            fake.hang()
            running = calls(holder, "fr", 3)
            await fake.heard("run")
            other = calls(holder, "de", 4)
            with pytest.raises(aionn.DeadlineError, match="model 'fr' was not compiled"):
                await calls(holder, "fr", timeout_s=0.05)
            assert list(await holder.open_models()) == ["fr"]
            fake.behave()
            assert (await running)["fr"][0, 0] == 3
            assert (await other)["de"][0, 0] == 4
            assert (watch.most, watch.wrong, watch.compiles) == (1, 0, 2)


async def test_a_compile_that_fails_is_an_error_of_its_calls_and_is_not_kept(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=2) as holder:
            await calls(holder, "de")
            fake.fail("no beans", "compile")
            tasks = [calls(holder, "fr") for _ in range(2)]
            for task in tasks:
                with pytest.raises(aionn.CompilationError, match="no beans"):
                    await task
            assert (watch.compiles, watch.live, list(await holder.open_models())) == (2, 1, ["de"])
            await holder.check_health()
            assert holder.runtime.health().ready
            fake.behave()
            assert (await calls(holder, "fr", 3))["fr"][0, 0] == 3


async def test_an_unknown_model_is_refused_and_costs_no_other_one_its_place(tmp_path: Path, watch: CompilationWatch) -> None:
    models = written_models(tmp_path, 2, "reference")

    def spec_of(model_id: str) -> aionn.ray.ModelSpec:
        if model_id not in models:
            raise aionn.CallerError(f"{model_id} is not for sale")
        return models[model_id]

    for given, said in ((models, "has no model 'm7' among its 2"), (spec_of, "m7 is not for sale")):
        async with held(tmp_path, given, max_models=1) as holder:
            await calls(holder, "m1")
            before = watch.compiles
            with pytest.raises(aionn.CallerError, match=said):
                await calls(holder, "m7")
            assert (await calls(holder, "m1"))["y"][0, 0] == 2.0
            assert watch.compiles == before
            with pytest.raises(aionn.CallerError, match="the call names no model"):
                await holder.infer(X)
            with pytest.raises(aionn.CallerError, match="no model 'm0' that is called by name; call handle"):
                await holder.infer(X, "m0")


async def test_a_function_must_return_a_specification(tmp_path: Path) -> None:
    async with held(tmp_path, lambda model_id: f"/models/{model_id}.onnx") as holder:
        with pytest.raises(aionn.CallerError, match="return an aionn"):
            await calls(holder, "fr")


async def test_calls_that_wait_shorter_than_the_compile_do_not_begin_it_again(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=1) as holder:
            fake.hang("compile")
            for _ in range(3):
                with pytest.raises(aionn.DeadlineError, match="model 'fr' was not compiled"):
                    await calls(holder, "fr", timeout_s=0.05)
            await fake.heard("compile")
            other = calls(holder, "de", 4)
            await anyio.wait_all_tasks_blocked()
            assert (watch.compiles, watch.live) == (1, 1), "one compile for all calls, which keeps its place"
            fake.behave()
            assert (await other)["de"][0, 0] == 4
            assert (await calls(holder, "fr", 3, timeout_s=60))["fr"][0, 0] == 3
            assert (watch.most, watch.wrong) == (1, 0)


async def test_a_compile_goes_on_after_the_deadline_of_its_call_and_serves_the_next_one(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr")) as holder:
            fake.hang("compile")
            with pytest.raises(aionn.DeadlineError):
                await calls(holder, "fr", timeout_s=0.05)
            fake.behave()
            assert (await calls(holder, "fr", 3))["fr"][0, 0] == 3
            assert (watch.compiles, watch.wrong) == (1, 0)


async def test_closing_ends_a_compile_whose_call_has_ended(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr")) as holder:
            fake.hang("compile")
            call = calls(holder, "fr", timeout_s=0.05)
            await fake.heard("compile")
            with pytest.raises(aionn.DeadlineError):
                await call
            assert watch.live == 1
            with anyio.fail_after(30):
                await holder.__del__()
            assert (watch.live, driver_pids()) == (0, [])


@pytest.mark.parametrize("act", ["compile", "run"])
async def test_a_call_that_is_cancelled_keeps_no_place(tmp_path: Path, watch: CompilationWatch, act: Any) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=1) as holder:
            await calls(holder, "de")
            fake.hang(act)
            task = calls(holder, "fr")
            await fake.heard(act)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fake.behave()
            assert (await calls(holder, "de", 3))["de"][0, 0] == 3
            assert (watch.most, watch.wrong) == (1, 0)
    assert watch.live == 0


async def test_the_death_of_a_driver_is_not_the_callers_concern(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=2) as holder:
            await calls(holder, "de")
            fake.crash(after=2)
            for number in range(6):
                assert (await calls(holder, "fr", number))["fr"][0, 0] == number
            assert (await holder.open_models())["fr"]["retried"] > 0
            fake.behave()
            await kill_drivers()
            answers = [calls(holder, name, 7) for name in ("fr", "de")]
            assert [(await answer)[name][0, 0] for answer, name in zip(answers, ("fr", "de"), strict=True)] == [7, 7]
            assert (watch.compiles, watch.wrong) == (2, 0), "a compilation outlives its driver"


async def test_a_compile_whose_driver_dies_is_made_again_once(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de")) as holder:
            fake.hang("compile")
            task = calls(holder, "fr", 3)
            os.kill(await fake.heard("compile"), signal.SIGKILL)
            fake.behave()
            assert (await task)["fr"][0, 0] == 3
            assert watch.compiles == 2
            fake.crash("compile")
            with pytest.raises(aionn.DriverDiedError):
                await calls(holder, "de")
            fake.behave()
            assert (await calls(holder, "de", 4))["de"][0, 0] == 4
            assert (watch.compiles, watch.live, watch.wrong) == (5, 2, 0)


async def test_an_idle_model_gives_its_memory_back_and_keeps_its_place(tmp_path: Path, watch: CompilationWatch) -> None:
    models = written_models(tmp_path, 2, "reference")
    async with held(tmp_path, models, idle_s=0.05) as holder:
        for _ in range(2):
            for model_id in models:
                assert (await calls(holder, model_id))["y"][0, 0] == factor_of(model_id)
            for pid in driver_pids():
                assert await ended(pid, 30), "a driver without a model ends"
        assert list(await holder.open_models()) == ["m0", "m1"]
        assert (watch.compiles, watch.live) == (2, 2)


@leaves_nothing
async def test_closing_lets_calls_end_and_refuses_those_that_wait(tmp_path: Path, watch: CompilationWatch) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr", "de"), max_models=1) as holder:
            fake.hang()
            running = calls(holder, "fr", 3)
            await fake.heard("run")
            waiting = calls(holder, "de")
            await anyio.lowlevel.checkpoint()
            closing = asyncio.create_task(holder.__del__())
            with pytest.raises(aionn.CallerError, match="the models are being closed"):
                await waiting
            assert not running.done()
            fake.behave()
            assert (await running)["fr"][0, 0] == 3
            await closing
            assert (watch.live, watch.wrong) == (0, 0)
            with pytest.raises(aionn.CallerError, match="the models are being closed"):
                await calls(holder, "de")
            with pytest.raises(RuntimeError, match="closed"):
                await holder.check_health()


async def test_closing_does_not_wait_for_a_call_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed_module, "_LEASES_END_S", 0.05)
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr")) as holder:
            fake.hang()
            running = calls(holder, "fr")
            await fake.heard("run")
            await holder.__del__()
            with pytest.raises(aionn.AionnError):
                await running


async def test_closing_does_not_wait_for_a_compile_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed_module, "_LEASES_END_S", 0.05)
    monkeypatch.setattr(multiplexed_module, "_MODELS_END_S", 0.1)
    begun, stop = asyncio.Event(), asyncio.Event()

    async def compile_without_end(*arguments: Any, **options: Any) -> Any:
        begun.set()
        while not stop.is_set():
            with suppress(asyncio.CancelledError):
                await stop.wait()
        raise aionn.CompilationError("it ended")

    monkeypatch.setattr(multiplexed_module, "compile_model", compile_without_end)
    async with held(tmp_path, written_models(tmp_path, 1, "reference")) as holder:
        call = calls(holder, "m0")
        await begun.wait()
        with anyio.fail_after(30):
            await holder.__del__()
        assert holder.closed
        with pytest.raises(aionn.CallerError, match="the models are being closed"):
            await call
        stop.set()


async def test_closing_ends_the_drivers_also_if_it_is_cancelled(tmp_path: Path) -> None:
    with FakeDevice() as fake:
        async with held(tmp_path, fake_models(fake, "fr")) as holder:
            fake.hang()
            running = calls(holder, "fr")
            await fake.heard("run")
            closing = asyncio.create_task(holder.__del__())
            await anyio.wait_all_tasks_blocked()
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert holder.closed
            assert driver_pids() == []
            with pytest.raises(aionn.AionnError):
                await running


async def test_a_stream_keeps_its_model(tmp_path: Path, watch: CompilationWatch) -> None:
    async with held(tmp_path, written_models(tmp_path, 2, "reference"), max_models=1) as holder:

        async def stream() -> list[float]:
            CALLED.set("m1")
            return [float(outputs["y"][0, 0]) async for outputs in holder.stream(frames())]

        other: list[asyncio.Task[Any]] = []

        async def frames() -> AsyncIterator[dict[str, Any]]:
            for number in range(5):
                yield {"x": np.full((1, 16), number, np.float32)}
                if number == 2:
                    other.append(calls(holder, "m0", 7))
                if number == 4:
                    assert list(await holder.open_models()) == ["m1"]

        assert await asyncio.create_task(stream()) == [0, 2, 4, 6, 8]
        assert (await other[0])["y"][0, 0] == 7
        assert watch.most == 1


async def test_models_that_each_replica_serves_are_called_by_name(tmp_path: Path, watch: CompilationWatch) -> None:
    fixed = written_models(tmp_path, 3, "reference").pop("m2")
    async with held(tmp_path, written_models(tmp_path, 2, "reference"), max_models=1, models={"vad": fixed}) as holder:
        for model_id in ("m0", "m1"):
            assert (await calls(holder, model_id, 2))["y"][0, 0] == 2 * factor_of(model_id)
            assert (await calls(holder, model_id, 2, model="vad"))["y"][0, 0] == 6
        assert (await holder.infer(X))["y"][0, 0] == 3, "a call that names no model gets the one that is always there"
        assert [outputs["y"][0, 0] async for outputs in holder.stream([X], "vad")] == [3]
        assert (list(await holder.describe()), list(await holder.open_models())) == (["vad"], ["m1"])
        assert watch.most == 2
        with pytest.raises(aionn.CallerError, match="the call names no model"):
            async with holder.leased():
                pass


async def test_a_method_of_a_subclass_leases_the_model_of_its_call(tmp_path: Path) -> None:
    models = written_models(tmp_path, 2, "reference")

    class Shop(aionn.ray.MultiplexedHolder):
        multiplexed = models

        async def price(self, model_id: str | None = None) -> float:
            async with self.leased(model_id) as compilation:
                return float((await compilation.compute(X))["y"][0, 0])

    made: Any = Shop.__new__(Shop)
    await made.__init__(runtime={"threads": 1, "state_dir": tmp_path / "state"})
    CALLED.set("m1")
    assert (await made.price(), await made.price("m0")) == (2.0, 1.0)
    await made.__del__()


@pytest.mark.parametrize(
    "arguments", [{"multiplexed": {}}, {"multiplexed": {"m": 3}}, {"max_models": 0}, {"idle_s": 0}, {"models": {"m": 3}}]
)
async def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(aionn.CallerError):
        async with held(tmp_path, **{"multiplexed": {"m": "m.onnx"}, **arguments}):
            pass
