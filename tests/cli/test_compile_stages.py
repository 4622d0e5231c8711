"""`aionn compile --stages`: every stage stored and compared, with progress; an app compares them anew, and compiles none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.testing import FakeDevice, identity_model
from tests.apps import run_app
from tests.real_models import carried


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "250")


def aionn_compile(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = run_app([sys.executable, "-m", "aionn", "compile", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def aionn_cache(*arguments: str) -> str:
    done = run_app([sys.executable, "-m", "aionn", "cache", *arguments], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    printed: str = done.stdout
    return printed


def test_real_engines_are_stored_and_compared(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    out, err = aionn_compile(str(carried("orientation")), "--cache-dir", cache, "--stages", "onnxruntime,openvino", "--json")
    quick, best = json.loads(out)["compilations"]
    assert [(one["device"], one["outcome"], one["stored"]) for one in (quick, best)] == [
        ("onnxruntime", "miss", True),
        ("openvino", "miss", True),
    ]
    steps = [line.partition(": ")[2] for line in err.splitlines()]
    assert any(step.startswith("compiled in ") for step in steps), err
    for step in ("compiling", "loading from the cache", "stage 'openvino' is loading", "stage 'openvino' is comparing"):
        assert step in steps, err
    # Which one is faster is the machine's to say; that their outputs agree is not.
    assert best["stage"]["state"] in ("serving", "rejected")
    assert best["stage"]["state"] == "serving" or best["stage"]["reason"].startswith("it is not faster by 10%")
    assert quick["stage"]["state"] == ("replaced" if best["stage"]["state"] == "serving" else "serving")
    assert best["stage"]["comparison"]["before_s"] > 0


def test_a_later_app_compiles_no_stage_and_compares_them_on_its_own_inputs(tmp_path: Path, quick: FakeDevice, best: FakeDevice) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}, outputs=["y"]))
    path, cache, stages = str(tmp_path / "model.onnx"), str(tmp_path / "cache"), f"{quick.name},{best.name}"

    async def begins_with() -> tuple[str, str, str]:
        model = aionn.Model.from_onnx(path)
        async with aionn.Runtime() as runtime:
            names = (quick.name, best.name)
            compilation = await runtime.compile(model, mode="staged", stages=names, cache_dir=cache, token=model.token)
            first = compilation.device
            await compilation.compute({"x": np.zeros((1, 16), np.float32)})
            await compilation.wait_for_stage(best.name, timeout_s=60)
            return first, compilation.outcomes[0].kind.value, compilation.stages[1].made_by

    best.tell(outputs_offset=0.5)
    out, _ = aionn_compile(path, "--cache-dir", cache, "--stages", stages)
    assert "rejected: output 'y': 16 of 16 elements are off" in out
    best.behave()
    out, err = aionn_compile(path, "--cache-dir", cache, "--stages", stages)
    header, first, second = (line.split() for line in out.splitlines())
    assert header[-1] == "stage"
    assert (first[0], first[1], first[-1]) == (quick.name, "hit", "replaced")
    assert (second[0], second[1], second[-1]) == (best.name, "hit", "serving")
    assert f"stage '{best.name}' is comparing" in err
    assert aionn.run(begins_with) == (quick.name, "hit", "cache")
    assert aionn.run(begins_with) == (best.name, "hit", "cache")


def test_measurements_are_listed_as_such_and_removed_where_asked(tmp_path: Path, quick: FakeDevice, best: FakeDevice) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}, outputs=["y"]))
    cache = str(tmp_path / "cache")
    best.tell(outputs_offset=0.5)
    aionn_compile(str(tmp_path / "model.onnx"), "--cache-dir", cache, "--stages", f"{quick.name},{best.name}")
    entries, measurements = aionn_cache("ls", cache).split("\n\n")
    assert entries.startswith("2 entries")
    assert "declined" not in entries
    title, header, line = measurements.splitlines()
    assert title == "1 stage measurement"
    cells = [cell.strip() for cell in re.split(r"\s{2,}", line)]
    assert cells[1:5] == [best.name, "1", quick.name, "1"]
    assert cells[6:9] == ["made up", "?", "0.5"]
    assert "output 'y': 16 of 16 elements are off by up to 0.5" in line
    assert header.split()[0] == "model"
    told = json.loads(aionn_cache("ls", cache, "--json"))
    assert [one["kind"] for one in told] == ["entry", "entry", "stage measurement"]
    assert all(one["size_bytes"] > 0 and not one["declined"] for one in told[:2])
    measured = told[2]
    assert (measured["stage"], measured["base"], measured["made_up"], measured["gain"]) == (best.name, quick.name, True, None)
    assert measured["model_digest"] == told[0]["model_digest"]
    assert measured["outputs"]["y"].pop("largest") == pytest.approx(0.5)
    assert measured["outputs"]["y"] == {"type": "float32", "absolute": 1e-3, "relative": 1e-3, "within": False}
    assert aionn_cache("prune", cache).startswith("0 entries removed")
    assert json.loads(aionn_cache("ls", cache, "--json"))[2]["measured_s"] == measured["measured_s"]
    assert aionn_cache("prune", cache, "--stage-measurements").rstrip().endswith("; stage measurements removed: 1")
    assert [one["kind"] for one in json.loads(aionn_cache("ls", cache, "--json"))] == ["entry", "entry"]
    assert json.loads(aionn_cache("prune", cache, "--stage-measurements", "--json"))["measurements"] == 0


@pytest.mark.parametrize("stages", ["onnxruntime,", "onnxruntime,onnxruntime"])
def test_stages_that_are_none_are_wrong_usage(tmp_path: Path, stages: str) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}, outputs=["y"]))
    _, err = aionn_compile(str(tmp_path / "model.onnx"), "--cache-dir", "cache", "--stages", stages, code=2)
    told: Any = err.splitlines()[-1]
    assert told.startswith(f"aionn: --stages {stages!r}: give names of devices")
