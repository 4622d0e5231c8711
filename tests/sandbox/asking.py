"""What tests with the evil engine share: things to attack, a model that carries questions, and drivers to ask."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from onnx import TensorProto, helper

import aionn.hal
from aionn.runtime.processes.template import why_none
from tests.engines.onnx_graphs import model_of, value
from tests.leaks import leak_check
from tests.sandbox.evil_calls import Target
from tests.sandbox.evil_engine import BYTES, EVIL, EVIL_COMPILER, Answer, Question, packed, unpacked

__all__ = ["NEEDS", "WORD", "ask", "attacked", "evil_model", "targets"]

WORD = "a secret of the app"

NEEDS = {EVIL_COMPILER: aionn.hal.Needs(makes_code=True)}


def evil_model(folder: Path) -> aionn.Model:
    """Write a model of bytes with weights beside it into a folder, and return it."""
    weights = TensorProto(name="weights", data_type=TensorProto.UINT8, dims=[BYTES], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="weights.bin")
    shape = [BYTES]
    model = model_of(
        [helper.make_node("Add", ["question", "weights"], ["answer"])],
        [value("question", shape, TensorProto.UINT8)],
        [value("answer", shape, TensorProto.UINT8)],
    )
    model.graph.initializer.append(weights)
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(bytes(BYTES))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return aionn.Model.from_onnx(folder / "model.onnx")


async def ask(compilation: aionn.Compilation, question: Question) -> Answer:
    """Ask a driver of the evil engine."""
    answered = await compilation.compute({"question": packed(question)})
    return msgspec.json.decode(unpacked(answered["answer"]), type=Answer)


def _listening(stack: ExitStack, family: int, kind: int, address: Any) -> socket.socket:
    sock = stack.enter_context(socket.socket(family, kind))
    sock.bind(address)
    if kind == socket.SOCK_STREAM:
        sock.listen()
    return sock


def _files(folder: Path) -> Path:
    """Make what attacks on files change. Return the secret file."""
    secret = folder / "home" / "secret"
    secret.parent.mkdir()
    secret.write_text(WORD)
    secret.chmod(0o600)
    (folder / "work" / "empty").mkdir(parents=True)
    for name in ("file", "removed", "renamed"):
        (folder / "work" / name).write_text("content")
    for name in ("user.secret", "user.removed"):
        os.setxattr(folder / "work" / "file", name, WORD.encode())
    return secret


@contextmanager
def targets(folder: Path) -> Iterator[Target]:
    """Make everything that attacks aim at. The victim must be alive at the end."""
    secret = _files(folder)
    word = ctypes.create_string_buffer(WORD.encode())
    abstract = f"aionn-evil-{os.getpid()}"
    with ExitStack() as stack:
        tcp = _listening(stack, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        udp = _listening(stack, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        _listening(stack, socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "stream"))
        _listening(stack, socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "datagram"))
        _listening(stack, socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))
        stack.callback(victim.kill)
        file = stack.enter_context(secret.open("rb"))
        yield Target(
            secret=str(secret),
            word=WORD,
            folder=str(folder / "work"),
            tcp=tcp.getsockname()[1],
            udp=udp.getsockname()[1],
            stream=str(folder / "stream"),
            datagram=str(folder / "datagram"),
            abstract=abstract,
            app=os.getpid(),
            sibling=0,
            victim=victim.pid,
            address=ctypes.addressof(word),
            fd=file.fileno(),
        )
        assert victim.poll() is None


@asynccontextmanager
async def attacked(
    device: str, sandbox: str, target: Target, environment: Mapping[str, str] | None = None, template: bool = True
) -> AsyncIterator[tuple[aionn.Runtime, aionn.Compilation, Target]]:
    """Start a driver of one evil engine to ask, and another of the other, its sibling. The first is a copy of the template, if asked."""
    other = EVIL_COMPILER if device == EVIL else EVIL
    model = evil_model(Path(target.folder).parent / "model")
    options: dict[str, Any] = {"sandbox": sandbox, "driver_env": environment, "engine_needs": NEEDS, "hang_s": 60}
    async with leak_check(), aionn.Runtime(**options, template=template) as runtime:
        sibling = await ask(await runtime.compile(model, devices=(other,)), Question())
        assert bool(why_none()) is not template
        compilation = await runtime.compile(model, devices=(device,))
        yield runtime, compilation, msgspec.structs.replace(target, sibling=sibling.pid)
