"""The directory in which the programs of the pages run: the files that a reader has, by the names that the pages use."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
import soundfile
import soxr

from tests.real_models import carried
from tests.scaled_model import scaled_model

SAMPLE_RATE = 16_000


def fill(folder: Path) -> None:
    """Put the files into the folder: models, and a recording of two speakers (16 kHz, mono, 28 s)."""
    (folder / "model.onnx").write_bytes(scaled_model(np.full((1, 16), 2, np.float32)))
    (folder / "silero_vad.onnx").symlink_to(carried("silero"))
    for name in ("detector", "upside_down"):
        (folder / f"{name}.onnx").symlink_to(carried(name))
    samples, rate = soundfile.read(carried("speakers"), dtype="float32")
    soundfile.write(folder / "speech.wav", soxr.resample(samples, rate, SAMPLE_RATE), SAMPLE_RATE, subtype="PCM_16")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a program: drivers keep records in the folder, and `aionn` is on the path.

    A pytest has the plugins that a page needs. With all that are installed here, its start takes twice as long.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "anyio.pytest_plugin,aionn.testing.plugin"}
    return {**inherited, **plugins, "PATH": path, "XDG_STATE_HOME": str(folder / "state"), "PYTHONWARNINGS": "default", "COLUMNS": "120"}
