"""What the statistics page costs a frame (row O1): `python -m tests.bench page [--rounds N] [--trips N] [--counted]`.

The same app runs with the build as it is, and with one that is compiled with AIONN_COUNTS_NOTHING. Both run in turns, in fresh processes.

    hot          64 B by `burst.compute`, p50 of a process in microseconds, and the median over the rounds
    8 in flight  requests per second
    --counted    instructions of what the page does for one frame (valgrind), and system calls of app and driver per frame (strace).
                 For these the preference is "low_power", because a spin makes no fixed number of system calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from aionn.cli.bench import machine, machine_line

ROOT = Path(__file__).parent.parent.parent
WORKER = """
import asyncio, json, sys, time
import numpy as np
import aionn
from aionn.testing.models import identity_model

ENGINE, FRAME = "tests.bench.empty_engine:EmptyEngine", {"input": np.zeros((1, 16), np.float32)}
trips, preference = int(sys.argv[1]), sys.argv[2]

async def main():
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(ENGINE,), preference=preference)
        async with compilation.burst() as burst:
            async def run(count):
                taken = []
                for _ in range(count):
                    began = time.perf_counter_ns()
                    await burst.compute(FRAME)
                    taken.append(time.perf_counter_ns() - began)
                return taken
            await run(min(trips, 100))
            taken = await run(trips)
            began = time.perf_counter()
            await asyncio.gather(*(run(trips // 8) for _ in range(8)))
            print(json.dumps([float(np.median(taken)) / 1e3, trips // 8 * 8 / (time.perf_counter() - began)]))

aionn.run(main)
"""


def built(folder: Path, *, counts: bool) -> Path:
    """Build a copy of aionn. Returns the folder to import from."""
    where = folder / ("with" if counts else "without")
    shutil.copytree(ROOT / "aionn", where / "aionn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, where / name)
    (where / "tests").symlink_to(ROOT / "tests")
    (where / "setup.py").write_text("from setuptools import setup\nsetup()\n")
    flags = {} if counts else {"CFLAGS": f"{os.environ.get('CFLAGS', '')} -DAIONN_COUNTS_NOTHING"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=where, env={**os.environ, **flags}, check=True, capture_output=True)
    return where


def run(where: Path, trips: int, preference: str, *before: str) -> str:
    """Run the app, perhaps under a tool. Returns what it prints."""
    command = [*before, sys.executable, "-c", WORKER, str(trips), preference]
    # With a path of its own, so that the copy is imported and not what is installed.
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=where, env=environment, check=True, capture_output=True, text=True).stdout


FRAME = """
#include "aionn/hal/burst_slot.h"
#include "aionn/hal/model_slot.h"
#include <stdlib.h>
int main(int count, char **arguments)
{
    static page_word words[SLOT_WORDS];
    struct page_slot slot = {.magic = PAGE_SLOT_MAGIC, .words = words};
    for (long frame = count > 1 ? atol(arguments[1]) : 0; frame > 0; frame--) {
        slot_sent(&slot);
        slot_answered(&slot, 5000 + frame, 1000 + frame);
        slot_add(&slot, SLOT_COMPUTED, 1);
        slot_add(&slot, SLOT_COPIED_BYTES, 64);
        model_slot_begin(&slot, frame);
        model_slot_end(&slot, frame, frame + 1000);
        __asm__ volatile("" ::: "memory");
    }
    return 0;
}
"""
"""What the page adds to a frame, in app and driver: the calls of the native frame path, without Python around them."""


def instructions(where: Path, trips: int) -> float:
    """Return the instructions of what the page does for one frame. Python under valgrind would miss the system calls of aionn."""
    source, program = where / "frame.c", where / "frame"
    source.write_text(FRAME)
    flags = [] if where.name == "with" else ["-DAIONN_COUNTS_NOTHING"]
    subprocess.run(["cc", "-std=c11", "-O2", *flags, f"-I{where}", "-o", str(program), str(source)], check=True)
    found = []
    for count in (trips, 3 * trips):
        out = where / "callgrind"
        subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", str(program), str(count)], check=True, capture_output=True
        )
        totals = re.search(r"^(?:summary|totals): (\d+)", out.read_text(errors="replace"), re.MULTILINE)
        assert totals is not None
        found.append(int(totals[1]))
    return (found[1] - found[0]) / (2 * trips)


def system_calls(where: Path, trips: int) -> float:
    """Return the system calls of app and driver for one frame."""
    found = []
    for count in (trips, 3 * trips):
        with tempfile.NamedTemporaryFile() as out:
            run(where, count, "low_power", "strace", "-f", "-c", "-o", out.name)
            total = re.search(r"^100\.00\s+\S+\s+\S*\s*(\d+)", Path(out.name).read_text(), re.MULTILINE)
        assert total is not None
        found.append(int(total[1]))
    return (found[1] - found[0]) / (4 * trips)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="tests.bench page")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=20_000)
    parser.add_argument("--counted", action="store_true")
    options = parser.parse_args(argv)
    print(machine_line(machine()))
    with tempfile.TemporaryDirectory() as folder:
        builds = {"with": built(Path(folder), counts=True), "without": built(Path(folder), counts=False)}
        taken: dict[str, list[list[float]]] = {"with": [], "without": []}
        for round_number in range(options.rounds):
            for name in ("with", "without") if round_number % 2 else ("without", "with"):
                taken[name].append(json.loads(run(builds[name], options.trips, "fast_single_answer")))
        for row, unit in ((0, "us, hot p50"), (1, "per s, 8 in flight")):
            with_page, without = (statistics.median(one[row] for one in taken[name]) for name in ("with", "without"))
            pairs = [one[row] / other[row] for one, other in zip(taken["with"], taken["without"], strict=True)]
            print(f"{unit:26} with {with_page:9.2f}   without {without:9.2f}   ratio {statistics.median(pairs):.3f}")
        if options.counted:
            for unit, count in (("instructions of the page", instructions), ("system calls", system_calls)):
                with_page, without = (count(builds[name], 500) for name in ("with", "without"))
                print(f"{unit:26} with {with_page:9.1f}   without {without:9.1f}   difference {with_page - without:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
