"""The examples in docstrings of the public face run, and print what they show. A world gives the names that an example does not make."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.testing.models import identity_model
from tests.docs.worlds import fill

World = dict[str, Any]


@asynccontextmanager
async def small() -> AsyncIterator[World]:
    """A runtime with the small model, and a burst."""
    async with aionn.Runtime(start=()) as runtime:
        model = await runtime.load("model.onnx")
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            yield {"runtime": runtime, "model": model, "compilation": compilation, "burst": burst, "x": np.ones((1, 16), np.float32)}


@asynccontextmanager
async def recurrent() -> AsyncIterator[World]:
    """A runtime with Silero VAD, a burst, and one more device memory."""
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(await runtime.load("silero_vad.onnx"), devices=("onnxruntime",))
        other = await compilation.allocate(inputs=("state",), outputs=("stateN",))
        async with compilation.burst() as burst:
            x = np.zeros((1, 576), np.float32)
            yield {"runtime": runtime, "compilation": compilation, "burst": burst, "x": x, "other": other, "cache_dir": "cache"}


@asynccontextmanager
async def pair() -> AsyncIterator[World]:
    """Two compilations of which one makes what the other takes."""
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack():
        world: World = {"runtime": runtime, "text": np.arange(4, dtype=np.float32)}
        for name, source, target in (("encoder", "text", "hidden"), ("decoder", "hidden", "words")):
            model = aionn.Model.from_onnx(identity_model({source: (4,)}, outputs=(target,)))
            world[name] = await runtime.compile(model, devices=("onnxruntime",))
        yield world


@asynccontextmanager
async def ending() -> AsyncIterator[World]:
    """A runtime whose driver dies while the example runs, and which is closed then."""
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(await runtime.load("model.onnx"), devices=("onnxruntime",))

        async def end() -> None:
            events = runtime.events()
            (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
            os.kill(pid, signal.SIGKILL)
            async for event in events:
                if isinstance(event, aionn.events.DriverEnded):
                    break
            await runtime.aclose()

        task = asyncio.create_task(end())
        yield {"runtime": runtime}
        await task


@asynccontextmanager
async def empty() -> AsyncIterator[World]:
    yield {"x": np.ones((1, 16), np.float32)}


WORLDS: dict[str, Callable[[], Any]] = {
    "Batching": small,
    "BlockingBurst": small,
    "Burst": small,
    "Compilation": small,
    "DeviceMemory": recurrent,
    "Event": small,
    "HardwareBuffer": empty,
    "Health": small,
    "HealthPolicy": empty,
    "Item": small,
    "Memory": small,
    "Model": recurrent,
    "RecurrentStream": recurrent,
    "Runtime": empty,
    "Runtime.allocate": pair,
    "Runtime.events": ending,
    "Runtime.health": small,
    "StagePolicy": small,
}
"""By the name of each object with an example."""


def thing(name: str) -> Any:
    found: Any = aionn
    for part in name.split("."):
        found = getattr(found, part)
    return found


def examples_of(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(thing(name)) or "", name)


@pytest.fixture
def anyio_backend() -> Any:
    """One loop is enough here; the journeys have both."""
    return ("asyncio", {"use_uvloop": True})


@pytest.mark.anyio
@pytest.mark.parametrize("name", sorted(WORLDS))
async def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fill(tmp_path)
    assert examples_of(name)
    async with WORLDS[name]() as world:
        names = {"aionn": aionn, "np": np, **world}
        for example in examples_of(name):
            printed = await run(example, names)
            same = doctest.OutputChecker().check_output(example.want, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert same or not example.want, f"{name}: {example.source}shows {example.want}and prints {printed}"


async def run(example: doctest.Example, names: World) -> str:
    """Run one example as the prompt of `python -m asyncio` would, and return what it prints."""
    printed = io.StringIO()
    code = compile(example.source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(printed):
        running = eval(code, names)
        if inspect.iscoroutine(running):
            await running
    names.pop("_", None)
    return printed.getvalue()


def test_every_example_of_the_public_face_runs_here() -> None:
    named = set()
    for name in aionn.__all__:
        if examples_of(name):
            named.add(name)
        if inspect.isclass(thing(name)):
            parts = [part for part, value in vars(thing(name)).items() if not part.startswith("_") and inspect.isroutine(value)]
            named |= {f"{name}.{part}" for part in parts if examples_of(f"{name}.{part}")}
    assert named == set(WORLDS)


def test_the_main_classes_have_examples() -> None:
    main = {"Runtime", "Compilation", "Burst", "Model", "Memory", "HardwareBuffer", "DeviceMemory", "Event", "Item", "StagePolicy"}
    assert [name for name in sorted(main) if not re.search(r"^Examples:$", inspect.getdoc(thing(name)) or "", re.MULTILINE)] == []
