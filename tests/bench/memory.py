"""Frames into a vision model and states out of the way: `python -m tests.bench memory [--frames N] [--steps N]`.

Frames: 1920 x 1080, RGB (6.2 MB) and NV12 (3.1 MB), into a model that casts and averages the whole frame, over a burst:
    by array        a NumPy array of the app's, copied once into the burst's frame
    by memory       `HardwareBuffer.allocate`: the app's image lies in shared memory, used in place
    by descriptor   `HardwareBuffer.from_fd` over a memfd that another process made, used in place
States: Silero VAD and an LSTM of 4 layers x 1024, batch 1, over a burst:
    in the driver   `DeviceMemory`; nothing of it crosses
    over the queue  the app feeds the output back as the next input
Each lane takes turns with its rivals within a round. Unit: microseconds per call, median over rounds of p50 and p99; copied
bytes per call as the burst counts them.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import aionn
from tests.real_models import carried

WIDTH, HEIGHT, ROUNDS, LAYERS, UNITS = 1920, 1080, 5, 4, 1024
Call = Callable[[], Awaitable[None]]


def vision(shape: tuple[int, ...]) -> bytes:
    """y = the mean of the whole uint8 frame."""
    nodes = [helper.make_node("Cast", ["frame"], ["f"], to=TensorProto.FLOAT), helper.make_node("ReduceMean", ["f"], ["y"], keepdims=0)]
    frame = helper.make_tensor_value_info("frame", TensorProto.UINT8, list(shape))
    return _serialized(nodes, [frame], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])], [])


def stacked_lstm() -> bytes:
    """One step of LAYERS LSTMs; state: (2 * LAYERS, 1, UNITS), h and c of each layer."""
    random = np.random.default_rng(0)
    nodes = [helper.make_node("Split", ["state"], [f"s{i}" for i in range(2 * LAYERS)], axis=0)]
    constants: list[Any] = []
    states: list[str] = []
    value = "x"
    for layer in range(LAYERS):
        for kind in "wr":
            weights = (random.standard_normal((1, 4 * UNITS, UNITS)) * 0.02).astype(np.float32)
            constants.append(numpy_helper.from_array(weights, f"{kind}{layer}"))
        made = [f"y{layer}", f"h{layer}", f"c{layer}"]
        reads = [value, f"w{layer}", f"r{layer}", "", "", f"s{2 * layer}", f"s{2 * layer + 1}"]
        nodes.append(helper.make_node("LSTM", reads, made, hidden_size=UNITS))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "axis"], [f"z{layer}"]))
        value, states = f"z{layer}", [*states, *made[1:]]
    constants.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    nodes += [helper.make_node("Concat", states, ["stateN"], axis=0), helper.make_node("Identity", [value], ["y"])]
    shapes = {"x": [1, 1, UNITS], "state": [2 * LAYERS, 1, UNITS], "y": [1, 1, UNITS], "stateN": [2 * LAYERS, 1, UNITS]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    return _serialized(nodes, [values["x"], values["state"]], [values["y"], values["stateN"]], constants)


def _serialized(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "bench", inputs, outputs, constants)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


async def compared(title: str, lanes: dict[str, tuple[aionn.Burst, Call]], count: int) -> None:
    print(title)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in lanes}
    copied = {}
    for _, call in lanes.values():
        for _ in range(10):
            await call()
    for _ in range(ROUNDS):
        for name, (burst, call) in lanes.items():
            before, taken = burst.statistics()["copied_bytes"], []
            for _ in range(count):
                began = time.perf_counter_ns()
                await call()
                taken.append((time.perf_counter_ns() - began) / 1e3)
            copied[name] = (burst.statistics()["copied_bytes"] - before) // count
            p50, p99 = np.percentile(taken, [50, 99])
            times[name].append((float(p50), float(p99)))
    for name, found in times.items():
        p50, p99 = (statistics.median(pair[i] for pair in found) for i in (0, 1))
        print(f"  {name:<16} p50 {p50:9.1f} us   p99 {p99:9.1f} us   {copied[name]:>8} bytes copied per call")


async def frames(runtime: aionn.Runtime, kind: Any, shape: tuple[int, ...], count: int) -> None:
    model = aionn.Model.from_onnx(vision(shape))
    content = np.random.default_rng(1).integers(0, 255, shape, np.uint8)
    mine = aionn.HardwareBuffer.allocate(WIDTH, HEIGHT, kind)
    foreign = os.memfd_create("camera", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.posix_fallocate(foreign, 0, content.nbytes)
    fcntl.fcntl(foreign, 1033, 2 | 4)  # F_ADD_SEALS: its size stays
    theirs = aionn.HardwareBuffer.from_fd(foreign, WIDTH, HEIGHT, kind)
    os.close(foreign)
    for buffer in (mine, theirs):
        np.frombuffer(buffer.view(), np.uint8)[: content.nbytes] = content.reshape(-1)
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation, compilation.burst() as burst:
        expected = float(content.mean())

        def lane(value: object) -> tuple[aionn.Burst, Call]:
            async def call() -> None:
                found = float((await burst.compute({"frame": value}))["y"])
                if abs(found - expected) > 0.1:
                    raise AssertionError(f"{found} instead of {expected}")

            return burst, call

        lanes = {"by array": lane(content), "by memory": lane(mine), "by descriptor": lane(theirs)}
        await compared(f"{kind} {WIDTH} x {HEIGHT}, {content.nbytes} bytes", lanes, count)
    mine.close()
    theirs.close()


async def states(runtime: aionn.Runtime, title: str, model: aionn.Model, x: str, count: int) -> None:
    async with await runtime.compile(model, devices=("onnxruntime",)) as compilation:
        shape = model.inputs["state"].dimensions or ()
        given = np.random.default_rng(2).standard_normal(model.inputs[x].dimensions or ()).astype(np.float32) * np.float32(0.1)
        async with compilation.burst() as one, compilation.burst() as other:
            state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
            await state.reset()
            fed: dict[str, NDArray[Any]] = {"state": np.zeros(shape, np.float32)}

            async def inside() -> None:
                await one.compute({x: given, "state": state}, outputs={"stateN": state})

            async def across() -> None:
                fed["state"] = (await other.compute({x: given, "state": fed["state"]}))["stateN"].copy()

            lanes: dict[str, tuple[aionn.Burst, Call]] = {"in the driver": (one, inside), "over the queue": (other, across)}
            await compared(f"{title}, state of {fed['state'].nbytes} bytes", lanes, count)
            if not np.allclose(await state.snapshot(), fed["state"], rtol=1e-5, atol=1e-6):
                raise AssertionError("the two states differ")


async def run(frame_count: int, steps: int) -> None:
    async with aionn.Runtime() as runtime:
        await frames(runtime, "rgb_888", (1, HEIGHT, WIDTH, 3), frame_count)
        await frames(runtime, "nv12", (HEIGHT * 3 // 2, WIDTH), frame_count)
        await states(runtime, "Silero VAD", aionn.Model.from_onnx(carried("silero")), "input", steps)
        await states(runtime, f"LSTM {LAYERS} x {UNITS}", aionn.Model.from_onnx(stacked_lstm()), "x", max(10, steps // 10))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=50, help="frames per lane and round")
    parser.add_argument("--steps", type=int, default=300, help="steps of Silero per lane and round; the LSTM takes a tenth")
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    aionn.run(run, options.frames, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
