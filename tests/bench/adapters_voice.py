"""What jobs of LiveKit and voices of Pipecat get from aionn, for `tests.bench.adapters`. Importing this imports Pipecat."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import aionn
from aionn.adapters.livekit import AionnInferenceExecutor, OnnxMethod
from tests.adapters.voices import CHUNK_S, MODEL, AionnVADAnalyzer, chunks, speech, states, theirs
from tests.bench.machine import process_cpu_ns
from tests.bench.real_hot import driver_pid
from tests.bench.real_report import Options, Report
from tests.bench.service import served
from tests.real_models import carried

DEVICE = "onnxruntime"
WAITING = 4
LARGE, SMALL = (1, 3, 736, 736), (1, 3, 32, 32)
"""Pictures for the text detector. A call with a large one still runs when its process is killed. The next call has a small one."""

IN_RUN_S = 0.05
RATE = 16000
VOICES, MINUTES, PAUSE_S = 16, 10, 5.0
BATCH = aionn.Batching(max_rows=16, max_wait_us=8000)


def _pictures(data: bytes) -> dict[str, Any]:
    return {"x": np.zeros(LARGE if data == b"large" else SMALL, np.float32)}


@asynccontextmanager
async def _executor(service: str, cache: str) -> AsyncIterator[tuple[AionnInferenceExecutor, aionn.Runtime]]:
    async with aionn.Runtime(service=service) as runtime:
        model = await runtime.load(carried("detector"))
        compilation = await runtime.compile(model, devices=(DEVICE,), threads=1, instances=2, cache_dir=cache)
        encode = OnnxMethod(compilation, _pictures, lambda outputs: next(iter(outputs.values())).tobytes())
        executor = AionnInferenceExecutor({"detect": encode})
        await executor.do_inference("detect", b"small")
        yield executor, runtime


async def deaths(report: Report, options: Options) -> None:
    """D4: calls that wait in a process that is killed, with the job's driver and with one of a service."""
    for how in ("own driver", "service"):
        ended: list[float] = []
        answered: list[float] = []
        wrong = 0
        for _ in range(options.rounds):  # a driver that dies again and again is started again after a pause
            with TemporaryDirectory() as cache, served() as service:
                async with _executor("off" if how == "own driver" else service.path, cache) as (executor, runtime):
                    calls = [asyncio.create_task(_timed(executor, b"large")) for _ in range(WAITING)]
                    await asyncio.sleep(IN_RUN_S)
                    wrong += sum(call.done() for call in calls)
                    began_ns = time.monotonic_ns()
                    os.kill(driver_pid(runtime), signal.SIGKILL)
                    found = await asyncio.gather(*calls)
                    wrong += sum(not isinstance(error, aionn.DriverDiedError) for error, _ in found)
                    ended.append((max(at_ns for _, at_ns in found) - began_ns) / 1e6)
                    began_ns = time.monotonic_ns()
                    error, at_ns = await _timed(executor, b"small")
                    wrong += error is not None
                    answered.append((at_ns - began_ns) / 1e6)
        report.check("D4", f"{how}: calls that ended otherwise than with DriverDiedError", [wrong], 0)
        report.check("D4", f"{how}: ms from the kill until all of {WAITING} calls have ended", ended, 100)
        report.check("D4", f"{how}: ms of the next call", answered, 200)


async def _timed(executor: AionnInferenceExecutor, data: bytes) -> tuple[Exception | None, int]:
    """Return the error of a call, if it raised one, and when it ended."""
    try:
        await executor.do_inference("detect", data)
    except Exception as error:
        return error, time.monotonic_ns()
    return None, time.monotonic_ns()


async def voices(report: Report, options: Options) -> None:
    """D5: states of ten minutes of speech with pauses, and the CPU time of sixteen voices in real time."""
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(DEVICE,), threads=1, batch=BATCH)
        once = speech(RATE) + bytes(int(2 * RATE * PAUSE_S))
        sound = (once * (MINUTES * 60 * RATE * 2 // len(once) + 1))[: MINUTES * 60 * RATE * 2]
        ours, other = _ours(compilation), _theirs()
        found, expected = await states(ours, sound), await states(other, sound)
        report.check("D5", f"chunks of {MINUTES} minutes whose state differs", [sum(map(_differ, found, expected))], 0)
        await ours.cleanup()
        await other.cleanup()

        ratios, differing = [], 0
        figures: dict[str, list[float]] = {"Pipecat's own": [], "aionn: app": [], "aionn: driver": []}
        for number in range(options.rounds):
            async with AsyncExitStack() as stack:
                crowds = {"aionn": [_ours(compilation) for _ in range(VOICES)], "own": [_theirs() for _ in range(VOICES)]}
                learning = [_ours(compilation) for _ in range(VOICES)]
                for one in (*crowds["aionn"], *crowds["own"], *learning):
                    stack.push_async_callback(one.cleanup)
                parts = [sound[number * RATE * 2 :][index * RATE :] for index in range(VOICES)]
                await _heard(learning, parts, options.frames, 0.0)  # until sizes of runs are known
                spent: dict[str, tuple[float, float]] = {}
                said: dict[str, Any] = {}
                for name in ("aionn", "own") if number % 2 else ("own", "aionn"):
                    before = (time.process_time_ns(), process_cpu_ns(driver_pid(runtime)))
                    said[name] = await _heard(crowds[name], parts, options.frames, CHUNK_S)
                    after = (time.process_time_ns(), process_cpu_ns(driver_pid(runtime)))
                    spent[name] = tuple((late - early) / 1e3 / VOICES / options.frames for early, late in zip(before, after, strict=True))  # type: ignore[assignment]
            differing += sum(map(_differ, said["aionn"], said["own"]))
            ratios.append(sum(spent["aionn"]) / spent["own"][0])
            figures["Pipecat's own"].append(spent["own"][0])
            figures["aionn: app"].append(spent["aionn"][0])
            figures["aionn: driver"].append(spent["aionn"][1])
        report.note(f"CPU time of {VOICES} voices, for each chunk of 20 ms", figures, "us")
        report.check("D5", f"chunks of {VOICES} voices whose state differs", [differing], 0)
        report.check("D5", f"{VOICES} voices, CPU: aionn / Pipecat's own", ratios, 0.9)


def _differ(found: Any, expected: Any) -> bool:
    return bool(found != expected)


def _ours(compilation: aionn.Compilation) -> Any:
    made = AionnVADAnalyzer(compilation.blocking)
    made.set_sample_rate(RATE)
    return made


def _theirs() -> Any:
    return theirs(RATE)


async def _heard(crowd: Sequence[Any], sounds: Sequence[bytes], count: int, period_s: float) -> list[Any]:
    """Let each voice hear so many chunks, and return all states. The voices are staggered over a window."""
    loop = asyncio.get_running_loop()
    begin = loop.time() + 0.1

    async def hear(index: int) -> list[Any]:
        found = []
        for number, chunk in zip(range(count), chunks(sounds[index], RATE), strict=False):
            if period_s:
                await asyncio.sleep(begin + period_s * (number + index / len(crowd)) - loop.time())
            found.append(await crowd[index].analyze_audio(chunk))
        return found

    return [state for one in await asyncio.gather(*map(hear, range(len(crowd)))) for state in one]
