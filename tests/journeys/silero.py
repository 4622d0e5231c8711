"""What the journeys send and what they compare with: Silero VAD, fed from a seed, and ONNX Runtime called directly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

EXACT = 1e-6  # the same engine on the same machine; what is left is the order of sums between threads
WINDOW_SHAPE = (1, 576)
STATE_SHAPE = (2, 1, 128)

Arrays = dict[str, NDArray[Any]]


def windows(count: int, seed: int = 0) -> Iterator[NDArray[np.float32]]:
    """Noise that swells and fades: the model's answers go up and down with it."""
    random = np.random.default_rng(seed)
    for index in range(count):
        loudness = 0.3 * (1 + np.sin(index / 5))
        yield (loudness * random.standard_normal(WINDOW_SHAPE)).clip(-1, 1).astype(np.float32)


def still() -> NDArray[np.float32]:
    """The state before the first frame."""
    return np.zeros(STATE_SHAPE, np.float32)


class Directly:
    """ONNX Runtime in this process, without aionn."""

    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Arrays) -> Arrays:
        return dict(zip(self._outputs, self._session.run(None, inputs), strict=True))

    def stream(self, count: int, seed: int = 0) -> list[Arrays]:
        """The answers to a whole stream, the state fed back."""
        state, answers = still(), []
        for window in windows(count, seed):
            answers.append(self.run({"input": window, "state": state}))
            state = answers[-1]["stateN"]
        return answers


def assert_same(found: Any, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=EXACT)
