"""An engine that prints, floods, crashes or shows its environment, as the first number of its input says. Its driver is confined."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray

from aionn.hal import CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable, weights_of

NAME = "tests.runtime.printing_engine:PrintingEngine"

BYTES = bytes(range(256)) * 2 + b"\xff\x00\r\n"
FLOOD_BYTES = 3 << 20
LAST_WORDS = "the last words"


class Act(IntEnum):
    """What a run does before its answer."""

    NOTHING = 0
    PRINT = 1
    FLOOD = 2
    TERMINATE = 3
    CRASH = 4
    KILL = 5
    DESCRIPTORS = 6
    ENVIRONMENT = 7
    EXIT = 8
    FLOOD_AND_EXIT = 9
    BLOCK = 10


def flood() -> Iterator[bytes]:
    for number in range(FLOOD_BYTES >> 10):
        yield b"the line %14d %s\n" % (number, b"." * 999)


class PrintingEngine(FakeEngine):
    name = "printing"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return PrintingExecutable(self, model.outputs, weights_of(model))


class SilentEngine(FakeEngine):
    """Says in `runs_on` what it finds in TMPDIR. It states no needs."""

    name = "silent"

    def __init__(self) -> None:
        super().__init__()
        self.runs_on = os.environ.get("TMPDIR", "none")


class PrintingExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        act(Act(int(inputs["input"].ravel()[0])))
        return super().run(inputs, outputs, timing)


def act(wanted: Act) -> None:
    match wanted:
        case Act.PRINT:
            os.write(1, BYTES)
            print("to stdout")
            print("to stderr", file=sys.stderr)
        case Act.FLOOD:
            # By the C library, with Python's lock held, as an extension module prints.
            put = ctypes.PyDLL(None).write
            for line in flood():
                assert put(2, line, len(line)) == len(line)
        case Act.FLOOD_AND_EXIT:
            act(Act.FLOOD)
            act(Act.EXIT)
        case Act.TERMINATE:
            ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
        case Act.CRASH:
            ctypes.string_at(8)
        case Act.KILL:
            print(f"{LAST_WORDS} \x1b[31m\x07", file=sys.stderr)
            os.kill(os.getpid(), 9)
        case Act.EXIT:
            print(LAST_WORDS, file=sys.stderr)
            os._exit(3)
        case Act.DESCRIPTORS:
            print(json.dumps({fd: [os.readlink(f"/proc/self/fd/{fd}"), os.stat(fd).st_ino] for fd in (0, 1, 2)}))
        case Act.BLOCK:
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # the descriptor of the listing itself
                    if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventfd]":
                        os.set_blocking(int(name), True)
            print("blocking")
        case Act.ENVIRONMENT:
            print(json.dumps(dict(os.environ)))
        case _:
            return
