"""Plans over several devices: `python -m tests.bench plan [--rounds N] [--trips N]`.

All lanes run one after the other within each round, so that drift of the machine hits all alike. Unit: microseconds per execution. Shown
is the median over the rounds of each round's p50 and p99, and the median of the rounds' ratios to the lane it is compared with.

    boundary     a chain of four nodes of 64 B over engines that compute nothing: as one step, and as two and four steps over two drivers.
                 What one more step costs is the difference to one step, by the number of boundaries
    partitioned  PP-OCR's detector and magika, whole on ONNX Runtime, and cut in the middle of their nodes over two ONNX Runtimes

Each over a burst, and over control calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from onnx import TensorProto, helper

import aionn
from aionn.hal.options import CallOptions
from aionn.runtime.compilation import parts_of
from aionn.runtime.executing.control import control_route
from aionn.runtime.executing.execution import Call, Execution
from tests.bench.burst import EMPTY
from tests.bench.machine import machine_lines
from tests.bench.partial_engines import BACK
from tests.real_models import carried

EVEN, ODD, FRONT, BACK_DEVICE = (f"tests.bench.partial_engines:{name}" for name in ("Even", "Odd", "Front", "Back"))
ROOT = Path(__file__).parents[2]

Trip = Callable[[], Awaitable[object]]


def chain(homes: str) -> bytes:
    """Return identity nodes of 64 B, one per letter: "e" is run by Even, "o" by Odd."""
    names = ["input", *(f"t{number}" for number in range(1, len(homes))), "output"]
    words = {"e": "even", "o": "odd"}
    graph = helper.make_graph(
        [
            helper.make_node("Identity", [names[number]], [names[number + 1]], name=f"{words[home]}_{number}")
            for number, home in enumerate(homes)
        ],
        "chain",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, (1, 16))],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, (1, 16))],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


async def lanes_of(
    stack: AsyncExitStack, name: str, compilation: aionn.Compilation, inputs: Mapping[str, Any]
) -> dict[str, tuple[Trip, int]]:
    """Return a lane over a burst and one over control calls, and the number of steps in their names."""
    burst = await stack.enter_async_context(compilation.burst())
    parts = parts_of(compilation)
    executor = parts.bursts.executor(4)
    steps = len(compilation.plan)

    async def call() -> None:
        await Execution(executor, control_route(parts.kept_model), Call(inputs, {}, CallOptions(), inputs)).run()

    return {f"{name} ({steps}), burst": (lambda: burst.compute(inputs), steps), f"{name} ({steps}), control": (call, steps)}


async def one_round(trip: Trip, count: int) -> tuple[float, float]:
    """Return p50 and p99 in microseconds."""
    for _ in range(max(5, count // 10)):
        await trip()
    taken = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await trip()
        taken.append(time.perf_counter_ns() - began)
    cuts = statistics.quantiles(taken, n=100)
    return cuts[49] / 1e3, cuts[98] / 1e3


async def measure(lanes: Mapping[str, tuple[Trip, int]], rounds: int, trips: int) -> dict[str, list[tuple[float, float]]]:
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in lanes}
    for _ in range(rounds):
        for name, (trip, _) in lanes.items():
            measured[name].append(await one_round(trip, trips))
    return measured


def show(title: str, measured: Mapping[str, list[tuple[float, float]]], lanes: Mapping[str, tuple[Trip, int]], boundary: bool) -> None:
    print(f"\n{title:44} {'p50':>10} {'p99':>10} {'to whole':>9}" + (f" {'a boundary':>11}" if boundary else ""))
    whole = {name.rpartition(", ")[2]: name for name in reversed(list(measured)) if lanes[name][1] == 1}
    for name, found in measured.items():
        base = measured[whole[name.rpartition(", ")[2]]]
        ratio = statistics.median(own[0] / other[0] for own, other in zip(found, base, strict=True))
        p50, p99 = (statistics.median(values) for values in zip(*found, strict=True))
        line = f"{name:44} {p50:10.1f} {p99:10.1f} {ratio:8.2f}x"
        if boundary and (steps := lanes[name][1]) > 1:
            line += f" {statistics.median((own[0] - other[0]) / (steps - 1) for own, other in zip(found, base, strict=True)):11.1f}"
        print(line)


async def boundaries(runtime: aionn.Runtime, rounds: int, trips: int) -> None:
    inputs = {"input": np.zeros((1, 16), np.float32)}
    async with AsyncExitStack() as stack:
        lanes: dict[str, tuple[Trip, int]] = {}
        for name, homes, devices in (("whole", "eeee", (EMPTY,)), ("even-odd", "eeoo", (EVEN, ODD)), ("alternating", "eoeo", (EVEN, ODD))):
            compilation = await runtime.compile(aionn.Model.from_onnx(chain(homes)), devices=devices)
            lanes |= await lanes_of(stack, name, compilation, inputs)
        show("boundary, us (steps)", await measure(lanes, rounds, trips), lanes, boundary=True)


@contextmanager
def later_half(model: aionn.Model) -> Iterator[None]:
    """Give the later half of the nodes to Back, in drivers that start in the body."""
    operations = model.operations
    os.environ[BACK] = json.dumps([operation.name for operation in operations[len(operations) // 2 :]])
    yield


async def partitioned(runtime: aionn.Runtime, name: str, inputs: Mapping[str, Any], rounds: int, trips: int) -> None:
    model = aionn.Model.from_onnx(carried(name))
    with later_half(model):
        async with AsyncExitStack() as stack:
            lanes: dict[str, tuple[Trip, int]] = {}
            for title, devices in (("whole", ("onnxruntime",)), ("cut", (FRONT, BACK_DEVICE))):
                compilation = await runtime.compile(model, devices=devices, threads=1)
                lanes |= await lanes_of(stack, title, compilation, inputs)
            show(f"{name}, us (steps)", await measure(lanes, rounds, trips), lanes, boundary=False)


async def run(rounds: int, trips: int) -> None:
    print(machine_lines("onnxruntime", "uvloop"))
    async with aionn.Runtime() as runtime:
        await boundaries(runtime, rounds, trips)
    for name, inputs in (
        ("magika", {"bytes": np.zeros((1, 2048), np.int32)}),
        ("detector", {"x": np.random.default_rng(0).random((1, 3, 384, 640), np.float32)}),
    ):
        async with aionn.Runtime() as runtime:  # its drivers know this model's nodes
            await partitioned(runtime, name, inputs, rounds, max(10, trips // (200 if name == "detector" else 10)))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trips", type=int, default=2000)
    asked = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    uvloop.run(run(asked.rounds, asked.trips))
