"""`aionn compile --stages`: every stage stored and compared, with progress; the next app begins with the best one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.testing import FakeDevice, identity_model
from tests.real_models import carried


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "250")


def aionn_compile(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-m", "aionn", "compile", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_real_engines_are_stored_and_compared(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    out, err = aionn_compile(str(carried("orientation")), "--cache-dir", cache, "--stages", "onnxruntime,openvino", "--json")
    quick, best = json.loads(out)["compilations"]
    assert [(one["device"], one["outcome"], one["stored"]) for one in (quick, best)] == [
        ("onnxruntime", "miss", True),
        ("openvino", "miss", True),
    ]
    steps = [line.partition(": ")[2] for line in err.splitlines()]
    for step in ("compiling", "compiled", "loading from the cache", "stage 'openvino' is loading", "stage 'openvino' is comparing"):
        assert step in steps, err
    # Which one is faster is the machine's to say; that their outputs agree is not.
    assert best["stage"]["state"] in ("serving", "rejected")
    assert best["stage"]["state"] == "serving" or best["stage"]["reason"].startswith("it is not faster by 10%")
    assert quick["stage"]["state"] == ("replaced" if best["stage"]["state"] == "serving" else "serving")
    assert best["stage"]["comparison"]["before_s"] > 0


def test_a_later_app_begins_with_the_best_stage_that_was_found_good(tmp_path: Path, quick: FakeDevice, best: FakeDevice) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}, outputs=["y"]))
    path, cache, stages = str(tmp_path / "model.onnx"), str(tmp_path / "cache"), f"{quick.name},{best.name}"

    async def begins_with() -> tuple[str, str]:
        model = aionn.Model.from_onnx(path)
        async with aionn.Runtime() as runtime:
            names = (quick.name, best.name)
            compilation = await runtime.compile(model, mode="staged", stages=names, cache_dir=cache, token=model.token)
            return compilation.device, compilation.outcomes[0].kind.value

    best.tell(outputs_offset=0.5)
    out, _ = aionn_compile(path, "--cache-dir", cache, "--stages", stages)
    assert "rejected: output 'y': 16 of 16 elements are off" in out
    assert aionn.run(begins_with) == (quick.name, "hit")
    best.behave()
    out, err = aionn_compile(path, "--cache-dir", cache, "--stages", stages)
    header, first, second = (line.split() for line in out.splitlines())
    assert header[-1] == "stage"
    assert (first[0], first[1], first[-1]) == (quick.name, "hit", "replaced")
    assert (second[0], second[1], second[-1]) == (best.name, "hit", "serving")
    assert f"stage '{best.name}' is comparing" in err
    assert aionn.run(begins_with) == (best.name, "hit")


@pytest.mark.parametrize("stages", ["onnxruntime,", "onnxruntime,onnxruntime"])
def test_stages_that_are_none_are_wrong_usage(tmp_path: Path, stages: str) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}, outputs=["y"]))
    _, err = aionn_compile(str(tmp_path / "model.onnx"), "--cache-dir", "cache", "--stages", stages, code=2)
    told: Any = err.splitlines()[-1]
    assert told.startswith(f"aionn: --stages {stages!r}: give names of devices")
