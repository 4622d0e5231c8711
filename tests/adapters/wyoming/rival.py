"""openWakeWord as the package `pyopen-wakeword` runs it, in a separate process.

    python -m tests.adapters.wyoming.rival SOUND.npy FOUND.npz

Its library and that of LiteRT have the same symbols, so no process of a test loads both.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1024
SILENT_WINDOWS = 75
"""Windows of the silence with which the package fills a new stream, whose scores come before the first real one."""


class Stream:
    """One satellite's sound. `hear` returns the score of each word by name, for each window that the samples complete."""

    def __init__(self, words: tuple[str, ...]) -> None:
        from pyopen_wakeword import Model, OpenWakeWord, OpenWakeWordFeatures

        self.features: Any = OpenWakeWordFeatures.from_builtin()
        self.words: dict[str, Any] = {word: OpenWakeWord.from_builtin(Model(word)) for word in words}
        self.embeddings: list[NDArray[np.float32]] = []

    def hear(self, samples: NDArray[np.int16]) -> list[dict[str, float]]:
        found = []
        for embedding in self.features.process_streaming(samples.tobytes()):
            self.embeddings.append(embedding.reshape(-1).copy())
            scores = {name: list(word.process_streaming(embedding)) for name, word in self.words.items()}
            if all(scores.values()):
                found.append({name: float(one) for name, (one,) in scores.items()})
        return found


def main(sound: str, found: str) -> None:
    samples = np.load(sound)
    stream = Stream(("alexa", "hey_jarvis", "hey_mycroft", "hey_rhasspy", "okay_nabu"))
    scores = [score for start in range(0, len(samples), CHUNK) for score in stream.hear(samples[start : start + CHUNK])]
    by_word = {word: np.array([score[word] for score in scores[SILENT_WINDOWS:]]) for word in stream.words}
    arrays: dict[str, Any] = {"embeddings": np.array(stream.embeddings), **by_word}
    np.savez(found, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
