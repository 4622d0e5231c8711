"""What stages give: time to the first result, steady time of each stage, time to the swap, and what the background compile costs.

    python -m tests.bench stages [--seconds 12] [--models detector,orientation,...]

Per model, in one run and beside each other: ONNX Runtime alone, OpenVINO alone, and both as stages. Each stream sends frame after frame
at 20 fps through a burst. Times are milliseconds. A stage that is refused is told with its reason: where the gain is small, that
is the right answer. Caches are off, so every compile is a real one.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import aionn
from tests.real_models import carried, some_input

FPS = 20
Frame = dict[str, np.ndarray[Any, Any]]
# Open extents, in the order in which the inputs have them.
MODELS: dict[str, tuple[int, ...]] = {
    "silero": (),
    "magika": (1,),
    "orientation": (1,),
    "detector": (1, 160, 160),
    "detector 320": (1, 320, 320),
    "recognizer": (1, 320),
}


def model_path(name: str) -> Path:
    if name == "recognizer":
        return next(carried("detector").parent.glob("*_rec_*.onnx"))
    return carried(name.split()[0])


def frame_of(model: aionn.Model, extents: tuple[int, ...]) -> Frame:
    return {name: some_input(operand, *extents) for name, operand in model.inputs.items()}


async def stream(compilation: aionn.Compilation, frame: Frame, seconds: float) -> list[tuple[float, str, float]]:
    """(second, stage, milliseconds) of each frame."""
    found = []
    began = time.perf_counter()
    async with compilation.burst() as burst:
        for number in range(int(seconds * FPS)):
            sent = time.perf_counter()
            outputs = await burst.compute(frame)
            found.append((sent - began, outputs.stage, (time.perf_counter() - sent) * 1e3))
            await anyio.sleep(max(0.0, began + (number + 1) / FPS - time.perf_counter()))
    return found


async def alone(model: aionn.Model, frame: Frame, device: str, seconds: float) -> tuple[float, float, float]:
    """Milliseconds to the first result in a process that is up; steady p50 and p99."""
    async with aionn.Runtime() as runtime:
        await runtime._opened.devices.get(device)
        began = time.perf_counter()
        compilation = await runtime.compile(model, devices=(device,))
        await compilation.compute(frame)
        first_ms = (time.perf_counter() - began) * 1e3
        times = [ms for at, _, ms in await stream(compilation, frame, seconds) if at > 0.5]
    return first_ms, *np.percentile(times, [50, 99])


async def staged(model: aionn.Model, frame: Frame, seconds: float) -> str:
    async with aionn.Runtime() as runtime:
        await runtime._opened.devices.get("onnxruntime")
        began = time.perf_counter()
        compilation = await runtime.compile(model, mode="staged", stages=("onnxruntime", "openvino"))
        await compilation.compute(frame)
        first_ms = (time.perf_counter() - began) * 1e3
        times = await stream(compilation, frame, seconds)
        stage = compilation.stages[1]
    compile_from_s = stage.times_s.get("waiting", 0.0)
    compile_to_s = compile_from_s + stage.times_s.get("compiling", 0.0)
    during = [ms for at, _, ms in times if compile_from_s <= at <= compile_to_s]
    quiet = [ms for at, name, ms in times if name == "onnxruntime" and 0.3 < at < compile_from_s]
    cost = f"{np.percentile(during, 99):.2f} / {np.percentile(quiet, 99):.2f}" if during and quiet else "-"
    before = [ms for at, name, ms in times if name == "onnxruntime" and at > 0.5]
    line = (
        f"first {first_ms:8.1f}   p50 {np.percentile(before, 50):7.2f}   p99 during the compile / quiet {cost}"
        f"   worker {stage.times_s.get('compiling', 0.0):.2f} s"
    )
    if (found := stage.comparison) is not None:
        line += f"   compared {found.before_s * 1e3:.2f} with {found.after_s * 1e3:.2f} in {found.pairs} pairs and {found.holds} holds"
    swapped = [(at, ms) for at, name, ms in times if name == "openvino"]
    if swapped:
        after = [ms for at, ms in swapped if at > swapped[0][0] + 0.3]
        steady = f"p50 {np.percentile(after, 50):.2f} p99 {np.percentile(after, 99):.2f}" if after else "too late for a steady time"
        return f"{line}   swap after {swapped[0][0]:.2f} s, then {steady}"
    return f"{line}   {stage.state}: {stage.reason or 'not done in this time'}"


async def bench(names: list[str], seconds: float) -> None:
    print(f"{platform.machine()}, {platform.python_version()}; {FPS} fps for {seconds} s per stream; milliseconds")
    for name in names:
        model = aionn.Model.from_onnx(model_path(name))
        frame = frame_of(model, MODELS[name])
        print(f"\n{name}", flush=True)
        for device in ("onnxruntime", "openvino"):
            first_ms, p50, p99 = await alone(model, frame, device, seconds / 2)
            print(f"  {device + ' alone':<20} first {first_ms:8.1f}   p50 {p50:7.2f}   p99 {p99:7.2f}", flush=True)
        print(f"  {'stages':<20} {await staged(model, frame, seconds)}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench stages", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args(arguments)
    aionn.run(bench, options.models.split(","), options.seconds)


if __name__ == "__main__":
    main()
