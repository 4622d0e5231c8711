"""What a call of the public face runs through in the app: calls, files, calls of C and bytecodes of aionn's own code.

    python -m tests.bench walk [--json] [--show STEP]

Each step runs seven times with a warm driver: once to warm up, three times under a profile hook (calls, files, calls of C), and three
times under a trace hook (bytecodes). The least of three counts, because tasks run beside a step by chance. The heartbeat of the runtime
is put off, for the same reason. Calls and bytecodes are those of the loop's thread, files those of all threads. A coroutine that goes on
after an await counts as a call again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import anyio
import numpy as np

import aionn
from aionn.runtime import record
from aionn.testing import identity_model

HOUSE = f"{Path(aionn.__file__).parent}/"
DEVICE = ("onnxruntime",)
SETTLE_S = 0.2
"""Between two turns, so that drivers answer what the turn before has released, and no step counts that."""

TURNS = ("", "profile", "profile", "profile", "trace", "trace", "trace")


class Walk:
    """Counts what steps run through.

    Attributes:
        found: by step, the least counts so far.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._loop = threading.get_ident()
        self._hook = ""
        self._turn = 0
        self._counts: dict[str, int] = {}
        self._files: set[str] = set()

    def next_turn(self, turn: int) -> None:
        self._turn = turn

    def step(self, name: str) -> _Step:
        """Count what the body runs through."""
        return _Step(self, name)

    def begin(self) -> None:
        self._counts = {"calls": 0, "C calls": 0, "bytecodes": 0}
        self._files = set()
        self._hook = TURNS[self._turn]
        if self._hook == "profile":
            sys.setprofile(self._profile)
        elif self._hook == "trace":
            sys.settrace(self._trace)

    def end(self, name: str) -> None:
        hook, self._hook = self._hook, ""
        sys.setprofile(None)
        sys.settrace(None)
        if not hook:
            return
        counted = dict(self._counts)
        if hook == "profile":
            del counted["bytecodes"]
            counted["files"] = len(self._files)
        else:
            counted = {"bytecodes": counted["bytecodes"]}
        entry = self.found.setdefault(name, {})
        if hook == "profile" and len(self._files) <= entry.get("files", len(self._files)):
            entry["walk"] = sorted(self._files)
        for what, count in counted.items():
            entry[what] = min(count, entry.get(what, count))

    def watch_threads(self) -> None:
        """Count in threads that start from now on, too."""
        threading.setprofile(self._profile)
        threading.settrace(self._trace)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self._hook != "profile" or not _is_ours(frame):
            return
        in_loop = threading.get_ident() == self._loop
        if event == "call":
            self._counts["calls"] += in_loop
            self._files.add(frame.f_code.co_filename.removeprefix(HOUSE))
        elif event == "c_call":
            self._counts["C calls"] += in_loop

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._hook != "trace" or not _is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        self._counts["bytecodes"] += event == "opcode" and threading.get_ident() == self._loop
        return self._opcode


class _Step:
    def __init__(self, walk: Walk, name: str) -> None:
        self._walk = walk
        self._name = name

    def __enter__(self) -> None:
        self._walk.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._walk.end(self._name)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(HOUSE) and frame.f_code.co_name != "<module>"


async def walked(walk: Walk) -> None:
    """Take every step seven times, on ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "identity.onnx")
        await anyio.Path(path).write_bytes(identity_model())
        async with aionn.Runtime(state_dir=Path(folder, "state"), start=DEVICE) as runtime:
            model = await runtime.load(path)
            name, operand = next(iter(model.inputs.items()))
            inputs = {name: np.ones([size or 4 for size in operand.dimensions or ()], operand.type.dtype)}
            await (await runtime.compile(model, devices=DEVICE)).compute(inputs)
            for turn in range(len(TURNS)):
                walk.next_turn(turn)
                await _turn(walk, runtime, model, path, Path(folder, f"cache{turn}"), inputs)
                await anyio.sleep(SETTLE_S)


async def _turn(walk: Walk, runtime: aionn.Runtime, model: aionn.Model, path: Path, cache: Path, inputs: dict[str, Any]) -> None:
    """Take every step once. What the steps have made is dropped at the end, outside of all steps."""
    with walk.step("compile without cache"):
        plain = await runtime.compile(model, devices=DEVICE)
    with walk.step("MISS"):
        missed = await runtime.compile(await runtime.load(path), devices=DEVICE, cache_dir=cache)
    with walk.step("HIT"):
        hit = await runtime.compile(await runtime.load(path), devices=DEVICE, cache_dir=cache)
    kinds = [outcome.kind.name for made in (plain, missed, hit) for outcome in made.outcomes]
    assert kinds == ["NO_CACHE", "MISS", "HIT"], kinds
    with walk.step("compute, first of a compilation"):
        await hit.compute(inputs)
    for _ in range(5):
        await plain.compute(inputs)
    with walk.step("compute, hot"):
        await plain.compute(inputs)
    with walk.step("burst, open"):
        burst = plain.burst()
        await burst.__aenter__()
    for _ in range(6):
        await burst.compute(inputs)
    with walk.step("burst.compute, usual"):
        await burst.compute(inputs)
    with walk.step("swap"):
        await runtime.swap(plain, await runtime.load(path))
    await burst.aclose()


def main(argv: Sequence[str]) -> None:
    """Print what each step runs through. `--show STEP` lists its files, too."""
    walk = Walk()
    vars(record)["BEAT_S"] = 3600.0
    walk.watch_threads()  # before aionn starts its threads
    asyncio.run(walked(walk))
    if "--json" in argv:
        print(json.dumps(walk.found))
        return
    print(f"{'':34}{'calls':>7}{'files':>7}{'C calls':>9}{'bytecodes':>11}")
    for name, entry in walk.found.items():
        print(f"{name:34}{entry['calls']:7}{entry['files']:7}{entry['C calls']:9}{entry['bytecodes']:11}")
        if "--show" in argv and argv[-1] == name:
            print("    " + "\n    ".join(entry["walk"]))
