"""`aionn.adapters.livekit`: calls of a job end when the process behind them dies, and jobs share models through a service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.adapters.livekit import AionnInferenceExecutor, OnnxMethod
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.docs.pages import programs
from tests.docs.worlds import fill
from tests.leaks import leak_check
from tests.service.served import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

MODEL = aionn.Model.from_onnx(identity_model({"x": (1, 4)}))
DATA = np.arange(4, dtype=np.float32).tobytes()


def decode(data: bytes) -> dict[str, Any]:
    return {"x": np.frombuffer(data, np.float32).reshape(1, 4)}


def encode(outputs: aionn.Outputs) -> bytes:
    return bytes(outputs["x_out"].tobytes())


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as folder:
        service = Served(folder)
        try:
            yield service
        finally:
            service.end()


async def compiled(runtime: aionn.Runtime, fake: FakeDevice) -> aionn.Compilation:
    return await runtime.compile(MODEL, devices=(fake.name,), instances=4)


async def calling(executor: AionnInferenceExecutor, fake: FakeDevice, calls: int) -> list[asyncio.Task[bytes | None]]:
    """Start calls that wait in a driver which hangs. Return when the first one is in its engine."""
    fake.hang()
    waiting = [asyncio.create_task(executor.do_inference("same", DATA)) for _ in range(calls)]
    await fake.heard("run")
    return waiting


async def test_calls_that_wait_end_when_the_process_dies_and_the_next_one_is_answered(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        executor = AionnInferenceExecutor({"same": OnnxMethod(await compiled(runtime, fake), decode, encode)})
        assert await executor.do_inference("same", DATA) == DATA
        waiting = await calling(executor, fake, 4)
        (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(60):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [aionn.DriverDiedError] * 4
        fake.behave()
        assert await executor.do_inference("same", DATA) == DATA


async def test_with_a_retry_the_calls_get_their_answers_from_the_next_process(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        executor = AionnInferenceExecutor({"same": OnnxMethod(await compiled(runtime, fake), decode, encode)}, retry=1)
        await executor.do_inference("same", DATA)
        waiting = await calling(executor, fake, 4)
        (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
        os.kill(pid, signal.SIGSTOP)  # so that only the next driver hears that it may run
        fake.behave()
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(60):
            assert await asyncio.gather(*waiting) == [DATA] * 4


@pytest.mark.own_process("livekit")
async def test_the_vad_of_the_page_has_the_events_of_silero_though_its_driver_is_killed(tmp_path: Path) -> None:
    """The program of docs/how-to/livekit.md, beside `silero.VAD.load()`, over the whole recording."""
    (page,) = (block for block in programs() if block.section == "Voice activity")
    world: dict[str, Any] = {"__name__": "page"}
    exec(compile(page.text.replace("aionn.run(main)", ""), str(page.page), "exec"), world)
    fill(tmp_path)
    windows = 0

    async def events(vad: Any, kill: Callable[[], None]) -> list[tuple[str, float]]:
        nonlocal windows
        stream, found = vad.stream(), []
        with wave.open(str(tmp_path / "speech.wav")) as sound:
            while data := sound.readframes(160):
                stream.push_frame(world["rtc"].AudioFrame(data, 16000, 1, len(data) // 2))
        stream.end_input()
        async for event in stream:
            windows += event.type == world["VADEventType"].INFERENCE_DONE
            if event.type != world["VADEventType"].INFERENCE_DONE:
                found.append((event.type.name, event.timestamp))
            elif windows == 400:
                kill()
        await stream.aclose()
        return found

    expected = await events(world["silero"].VAD.load(), lambda: None)
    assert (windows, len(expected)) == (883, 27)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(await runtime.load(world["MODEL"]), threads=1)
        session, windows = world["Session"](compilation.blocking), 0
        (first,) = (device.pid for device in runtime.devices if device.pid is not None)
        vad = world["silero"].VAD(session=session, opts=world["OPTIONS"])
        assert await events(vad, lambda: os.kill(first, signal.SIGKILL)) == expected
        assert windows == 883
        assert first not in [device.pid for device in runtime.devices]


async def test_a_call_that_is_cancelled_leaves_the_others(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        executor = AionnInferenceExecutor({"same": OnnxMethod(await compiled(runtime, fake), decode, encode)})
        first, *others = await calling(executor, fake, 3)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        fake.behave()
        assert await asyncio.gather(*others) == [DATA] * 2


async def test_a_runtime_that_closes_ends_calls_that_wait(fake: FakeDevice) -> None:
    async with leak_check():
        async with aionn.Runtime() as runtime:
            executor = AionnInferenceExecutor({"same": OnnxMethod(await compiled(runtime, fake), decode, encode)})
            (waiting,) = await calling(executor, fake, 1)
        with pytest.raises(aionn.CallerError, match="closed"):
            await waiting
        del waiting, executor


async def test_nonsense_reaches_its_caller_only(fake: FakeDevice) -> None:
    def refuse(outputs: aionn.Outputs) -> bytes:
        raise KeyError("no such output")

    async with aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        methods = {
            "same": OnnxMethod(compilation, decode, encode),
            "list": OnnxMethod(compilation, json.loads, encode),
            "text": OnnxMethod(compilation, decode, lambda outputs: "text"),  # type: ignore[arg-type, return-value]
            "none": OnnxMethod(compilation, decode, lambda outputs: None),
            "refuse": OnnxMethod(compilation, decode, refuse),
        }
        executor = AionnInferenceExecutor(methods)
        for method, data, error, sentence in (
            ("same", b"", ValueError, "reshape"),
            ("list", b"{", json.JSONDecodeError, "property name"),
            ("list", b"[1, 2]", aionn.CallerError, "inputs"),
            ("list", b'{"x": [[1, 2, 3]]}', aionn.CallerError, "x"),
            ("text", DATA, aionn.CallerError, "encode of the method 'text' returned a str; return bytes or None"),
            ("refuse", DATA, KeyError, "no such output"),
            ("other", DATA, aionn.CallerError, "no model has the method 'other'; the methods are 'same', 'list'"),
        ):
            with pytest.raises(error, match=sentence):
                await executor.do_inference(method, data)
            assert await executor.do_inference("same", DATA) == DATA
        assert await executor.do_inference("none", DATA) is None


async def test_an_executor_that_is_installed_again_behind_another_stays_there(fake: FakeDevice) -> None:
    """Where it came to the front, each of the two would have asked the other one, without an end."""
    async with aionn.Runtime() as runtime:
        method = OnnxMethod(await compiled(runtime, fake), decode, encode)
        one, two = AionnInferenceExecutor({"one": method}), AionnInferenceExecutor({"two": method})
        job: Any = SimpleNamespace(_inf_executor=None)
        for executor in (one, two, one, two, one):
            executor.install(job)
        assert job._inf_executor is two
        assert await job._inf_executor.do_inference("one", DATA) == DATA
        with pytest.raises(aionn.CallerError, match="no model has the method 'three'; the methods are 'one'"):
            await job._inf_executor.do_inference("three", DATA)


async def test_mistakes_get_a_sentence(fake: FakeDevice) -> None:
    async def late(data: bytes) -> dict[str, Any]:
        return decode(data)

    async with aionn.Runtime() as runtime:
        nothing: Any = object()
        compilation = await compiled(runtime, fake)
        method = OnnxMethod(compilation, decode, encode)
        wrong: list[tuple[Any, str]] = [
            (lambda: OnnxMethod("model.onnx", decode, encode), "compilation is a str; give what `await runtime.compile"),  # type: ignore[arg-type]
            (lambda: OnnxMethod(compilation, late, encode), "decode=.*late.*give a function that is not async"),  # type: ignore[arg-type]
            (lambda: OnnxMethod(compilation, decode, None), "encode=None"),  # type: ignore[arg-type]
            (lambda: AionnInferenceExecutor({}), "methods={}; give at least one OnnxMethod by its name"),
            (lambda: AionnInferenceExecutor({"same": compilation}), "methods has 'same': Compilation; give an OnnxMethod"),  # type: ignore[dict-item]
            (lambda: AionnInferenceExecutor({"same": method}, retry=2), "retry=2; give a whole number, from 0 to 1"),
            (lambda: AionnInferenceExecutor({"same": method}).install(nothing), "object has no executor to replace"),
        ]
        for make, sentence in wrong:
            with pytest.raises(aionn.CallerError, match=sentence):
                make()


def test_jobs_that_livekit_forks_share_one_driver_and_go_on_after_its_death(served: Served) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.livekit_app", served.path]
    drivers = []
    with App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdin is not None
        assert app.stdout is not None
        try:
            for _ in range(2):
                app.stdin.write("ask\n")
                app.stdin.flush()
                first, second = json.loads(app.stdout.readline())
                assert first.pop("pid") != second.pop("pid")
                assert first == second
                assert first["doubled"] == [0, 2, 4, 6]
                assert first["reversed"] == "cba"
                drivers.append(first["driver"])
                os.kill(drivers[-1], signal.SIGKILL)
            app.stdin.close()
            assert app.wait() == 0
        finally:
            app.kill()
    assert len(set(drivers)) == 2
