"""An engine that attacks its machine from inside a real driver, and answers a frame of questions with what became of each.

The first class states no needs. The app gives the second one those of OpenVINO (`tests.sandbox.asking.NEEDS`).
A question is JSON in a tensor of bytes, and so is the answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable
from tests.sandbox import evil_files, evil_kernel, evil_network, evil_processes
from tests.sandbox.evil_calls import GIVEN, Target, outcome

__all__ = ["BYTES", "EVIL", "EVIL_COMPILER", "HALTING", "Answer", "Question", "packed", "unpacked"]

EVIL = "tests.sandbox.evil_engine:EvilEngine"
EVIL_COMPILER = "tests.sandbox.evil_engine:EvilCompiler"
HALTING = "tests.sandbox.evil_engine:HaltingEngine"
BYTES = 1 << 16
"""Length of a question and of an answer, with zeros at the end."""

_ = (evil_files, evil_kernel, evil_network, evil_processes)  # they register attacks


class Question(msgspec.Struct, frozen=True):
    """What an app asks.

    Attributes:
        attacks: names of attacks to carry out.
        target: what they aim at.
        paths: files to open for reading.
    """

    attacks: tuple[str, ...] = ()
    target: Target | None = None
    paths: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """What a driver found.

    Attributes:
        pid: of the driver.
        outcomes: by attack.
        while_compiling: what an attempt to read a file of the system gave before and in `compile`.
        environment: of the driver.
        descriptors: what each points at.
        readable: of the question's paths, with the first bytes of each.
    """

    pid: int
    outcomes: dict[str, str]
    while_compiling: tuple[str, ...]
    environment: dict[str, str]
    descriptors: dict[str, str]
    readable: dict[str, str]


def packed(message: Question | Answer) -> NDArray[np.uint8]:
    """Return a message as a tensor."""
    content = msgspec.json.encode(message)
    frame = np.zeros(BYTES, np.uint8)
    frame[: len(content)] = np.frombuffer(content, np.uint8)
    return frame


def unpacked(frame: NDArray[Any]) -> bytes:
    """Return the JSON in a tensor."""
    return frame.tobytes().rstrip(b"\0")


def _try_to_read(path: str) -> str:
    try:
        return Path(path).read_bytes()[:64].decode(errors="replace") or "empty"
    except OSError as error:
        return f"denied {error.strerror}"


def _descriptors() -> dict[str, str]:
    """Return what each open descriptor points at."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of the listing
    return found


class EvilExecutable(FakeExecutable):
    """Answers questions."""

    def __init__(self, engine: FakeEngine, made: FakeExecutable, while_compiling: tuple[str, ...]) -> None:
        super().__init__(engine, made.operands, made.weights)
        self._while_compiling = while_compiling

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        question = msgspec.json.decode(unpacked(inputs["question"]), type=Question)
        outcomes = {name: outcome(name, question.target) for name in question.attacks if question.target is not None}
        read = {path: _try_to_read(path) for path in question.paths}
        readable = {path: content for path, content in read.items() if not content.startswith("denied")}
        np.copyto(
            outputs["answer"], packed(Answer(os.getpid(), outcomes, self._while_compiling, dict(os.environ), _descriptors(), readable))
        )
        return ExecutionReport({}, None)


_EARLY = _try_to_read("/etc/passwd")


class EvilEngine(FakeEngine):
    """States no needs, as an engine of a stranger."""

    name = "evil"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        GIVEN.extend(os.dup(int(fd)) for fd, points_at in _descriptors().items() if points_at.endswith("/weights.bin"))
        return EvilExecutable(self, super().compile(model, options), (_EARLY, _try_to_read("/etc/passwd")))

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return EvilExecutable(self, super().load(artifact, options), (_EARLY, _try_to_read("/etc/passwd")))


class EvilCompiler(EvilEngine):
    """An app gives it the needs of OpenVINO: it makes code."""

    name = "evil2"


class HaltingEngine(EvilEngine):
    """It stops its process while it compiles, so that a test can look at it. Outputs repeat inputs."""

    name = "halting"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        os.kill(os.getpid(), signal.SIGSTOP)
        return FakeEngine.compile(self, model, options)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return FakeEngine.load(self, artifact, options)
