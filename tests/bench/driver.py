"""What a driver process costs to start and to end: `python -m tests.bench driver [--repeat 10] [--engines NAME...]`.

A runtime is opened, compiles a model of one Identity node, computes once, and is closed; the app's side has done it before. Engines take
turns. Median and range of the repeats; milliseconds:
    greeted     from the start of the process until it said that it may be called
    answered    until the first execution was answered: greeting, compilation, execution
    ended       from the closing of the runtime until the process was gone
    CPU         user and system time of the process, all its threads, from its start to its end
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np

import aionn
from aionn import trace
from aionn.testing import identity_model

ENGINES = ("reference", "onnxruntime", "openvino", "aionn.testing.fake_engine:FakeEngine")


@dataclass
class Costs:
    """Milliseconds of each repeat."""

    greeted: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def once(engine: str, model: aionn.Model, costs: Costs) -> None:
    before_s = children_s()
    async with aionn.Runtime() as runtime:
        with trace.record() as recorded:
            began = time.perf_counter()
            compilation = await runtime.compile(model, devices=(engine,))
            await compilation.compute({"input": np.zeros((1, 16), np.float32)})
            costs.answered.append((time.perf_counter() - began) * 1e3)
        (start,) = [span for span in recorded.spans if span.name == "driver.start"]
        costs.greeted.append(start.duration_ns / 1e6)
        began = time.perf_counter()
    costs.ended.append((time.perf_counter() - began) * 1e3)
    costs.cpu.append((children_s() - before_s) * 1e3)


async def run(engines: list[str], repeat: int) -> None:
    model = aionn.Model.from_onnx(identity_model())
    all_costs = {engine: Costs() for engine in engines}
    for engine in engines:
        await once(engine, model, Costs())
    for _ in range(repeat):
        for engine, costs in all_costs.items():
            await once(engine, model, costs)
    for engine, costs in all_costs.items():
        print(engine)
        for what, found in vars(costs).items():
            print(f"  {what:<10}{statistics.median(found):8.1f} ms   ({min(found):.1f} to {max(found):.1f})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {options.repeat} repeats, Python {sys.version.split()[0]}")
    if sys.dont_write_bytecode:
        print("Python keeps no bytecode here (PYTHONDONTWRITEBYTECODE): each driver compiles its sources anew")
    aionn.run(run, options.engines, options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
