"""`examples/serve_voice.py` as a person at a terminal meets it: on a Ray node of its own, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.leaks import leak_check, left_running
from tests.real_models import carried

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import voice_activity  # noqa: E402

SECONDS = 5


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for temporary files with a short path, because Ray makes sockets in it."""
    made = Path(tempfile.mkdtemp(prefix="sv-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end. No process that it started, or that one of those started, may be there afterwards."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "AIONN_TEST_MARK": mark, "TMPDIR": str(folder)}
    command = [sys.executable, str(EXAMPLES / "serve_voice.py"), *arguments]
    with leak_check():
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, env=environment)
    assert left_running("AIONN_TEST_MARK", mark) == []
    return ran


def directly(name: str) -> list[float]:
    session = onnxruntime.InferenceSession(carried("silero"), providers=["CPUExecutionProvider"])
    samples = voice_activity.load_recording(carried(name))[: SECONDS * voice_activity.SAMPLE_RATE]
    state, probabilities = np.zeros((2, 1, 128), np.float32), []
    for window in voice_activity.windows(samples):
        probability, state = session.run(["output", "stateN"], {"input": window[np.newaxis], "state": state})
        probabilities.append(float(probability[0, 0]))
    return probabilities


@pytest.mark.soak  # it starts a cluster
@pytest.mark.fleet
@pytest.mark.timeout(240)
def test_two_recordings_are_heard_by_replicas_and_nothing_is_left(folder: Path) -> None:
    ran = run(folder, "--json", "--seconds", str(SECONDS))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for name, file in {"a novel": "speech", "two speakers": "speakers"}.items():
        np.testing.assert_allclose(found[name]["probabilities"], directly(file), rtol=0, atol=1e-6)
        assert found[name]["replica"] > 0
    assert sum(one["speech_frames"] for one in found.values()) > 0
    assert list(folder.iterdir()) == []


def test_some_of_the_recordings_are_needed(folder: Path) -> None:
    ran = run(folder, "--seconds", "0")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.endswith("serve_voice.py: --seconds 0: give a positive number of seconds\n")
