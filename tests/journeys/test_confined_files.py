"""Which files a confined driver opens while it compiles, stores, runs and loads: strace says it. None is the user's."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import aionn
from aionn.caching.outcomes import CacheOutcomeKind
from tests.real_models import some_input
from tests.sandbox.asking import ask, attacked, targets
from tests.sandbox.evil_engine import EVIL, Question

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

OPENED = re.compile(
    r'\b(?:open|openat|openat2|creat|truncate|rename\w*|unlink\w*|mkdir\w*)\((?:\S+?, )?"((?:[^"\\]|\\.)*)"(?:.*= \d+<(.*)>)?'
)
"""A call with a path, and the real path of the descriptor that it gave."""


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start drivers under strace. Return the folder with what it writes.

    The traced process is the one that the app starts (-D): its parent is the app, and it has one thread when it is confined.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; `apt-get install strace` lets this test see which files a driver opens")
    folder = tmp_path / "traces"
    folder.mkdir()
    starter = tmp_path / "python"
    calls = "open,openat,openat2,creat,truncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,landlock_restrict_self"
    starter.write_text(f'#!/bin/sh\nexec {strace} -D -f -y -qq -s 4096 -o {folder}/$$ -e trace={calls} {sys.executable} "$@"\n')
    starter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(starter))
    return folder


def with_weights_apart(source: Path, folder: Path) -> Path:
    """Save a model with all of its weights in a file beside it."""
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save_model(onnx.load(source), path, save_as_external_data=True, location="weights.bin", size_threshold=64, convert_attribute=True)
    assert (folder / "weights.bin").stat().st_size > 10_000
    return path


def paths_in(traces: Path) -> tuple[set[str], int]:
    """Return all paths that traced drivers named or opened, and how many drivers were confined by Landlock."""
    found: set[str] = set()
    confined = 0
    for trace in traces.iterdir():
        text = trace.read_text(errors="replace")
        confined += "landlock_restrict_self" in text
        for named, real in OPENED.findall(text):
            found |= {named, real}
    return found, confined


def is_the_users(folder: Path) -> Callable[[str], bool]:
    """Return what says whether a path is in the test's folder or in the home folder. A driver may open its own records, and Python."""
    users = (str(folder), os.path.expanduser("~"), os.path.expanduser("~/"))
    allowed = (str(folder / "state"), sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
    return lambda path: (path.startswith(users) and not path.startswith(allowed)) or path.endswith((".onnx", "weights.bin"))


async def test_the_trace_shows_what_a_hostile_engine_opens(traced: Path, tmp_path: Path) -> None:
    """The trace would show it, so the test below proves something."""
    with targets(tmp_path) as target:
        async with attacked(EVIL, "auto", target) as (_, compilation, aim):
            tried = ("open the secret", "open from another working directory", "reopen the weights for writing")
            answer = await ask(compilation, Question(tried, aim))
    assert set(answer.outcomes.values()) == {"denied EACCES"}
    named, _ = paths_in(traced)
    assert target.secret in set(filter(is_the_users(tmp_path), named))
    assert "secret" in named


@pytest.mark.parametrize("device", ["onnxruntime", "openvino"])
async def test_a_driver_opens_no_file_of_the_user(device: str, traced: Path, tmp_path: Path, silero_path: Path) -> None:
    model = aionn.Model.from_onnx(with_weights_apart(silero_path, tmp_path / "models"))
    cache = tmp_path / "cache"
    frame = {name: some_input(operand) for name, operand in model.inputs.items()}
    answers = []
    for kind in (CacheOutcomeKind.MISS, CacheOutcomeKind.HIT):
        async with aionn.Runtime(sandbox="auto") as runtime:
            compilation = await runtime.compile(model, devices=(device,), cache_dir=cache, token=model.token)
            (outcome,) = compilation.outcomes
            assert (outcome.kind, outcome.save_failure) == (kind, None)
            answers.append(await compilation.compute(frame))
            async with compilation.burst() as burst:
                answers.append(await burst.compute(frame))
    for answer in answers[1:]:
        for name, array in answer.items():
            np.testing.assert_allclose(array, answers[0][name], atol=1e-5)
    named, confined = paths_in(traced)
    assert any(path.endswith(".so") for path in named)  # the trace has seen the engine
    assert sorted(filter(is_the_users(tmp_path), named)) == []
    if not confined:
        pytest.skip("this kernel has no Landlock; the driver opened no file of the user all the same")
