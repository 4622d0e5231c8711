"""openWakeWord: three models that make a score for each wake word of 80 ms of sound.

    1,760 samples  --melspectrogram-->  8 rows of 32 bands      then 1,280 samples on
    76 rows        --embedding_model-->  96 numbers             then 8 rows on
    16 embeddings  --a wake word-->      its score              (or as many as the word's model takes)

A stream begins as if 8 s of silence had been heard, so that it may answer from the first second. The silence is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.adapters.wyoming.models import SharedBurst, SoundModel
from aionn.errors import CallerError

STEP_SAMPLES = 1280
WINDOW_SAMPLES = 1760
"""The spectrogram of a window has its last rows from samples that the next window has as well."""

BANDS, NUMBERS = 32, 96
WINDOW_ROWS, STEP_ROWS = 76, 8
FEATURES = {"melspectrogram": (1, WINDOW_SAMPLES), "embedding_model": (1, WINDOW_ROWS, BANDS, 1)}
"""Names of the models that all words share, without the file's ending, and the shape that each takes."""

Rows = NDArray[np.float32]


class WakeWord(msgspec.Struct, frozen=True):
    """The model of one wake word, and how many embeddings it takes."""

    name: str
    served: SharedBurst
    embeddings: int


def embeddings_of(file: SoundModel) -> int:
    """Return how many embeddings a model takes as a wake word does, or 0 if it is not one."""
    shapes = [operand.dimensions for operand in file.model.inputs.values()]
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) != 3 or shapes[0][2] != NUMBERS:
        return 0
    return shapes[0][1]


class Features:
    """The two models that all words share. `await learn_silence()` before the first stream."""

    def __init__(self, spectrogram: SharedBurst, embedding: SharedBurst) -> None:
        self._spectrogram, self._embedding = spectrogram, embedding
        self.silent_rows = np.zeros((0, BANDS), np.float32)
        self.silent_embedding = np.zeros(NUMBERS, np.float32)

    async def learn_silence(self) -> None:
        """Compute what a stream begins with.

        Raises:
            CallerError: the models are not those of openWakeWord.
        """
        rows = await self.rows(np.zeros(WINDOW_SAMPLES, np.float32))
        if rows.shape != (STEP_ROWS, BANDS):
            found = f"the melspectrogram of {WINDOW_SAMPLES} samples has {rows.size} numbers"
            raise CallerError(f"{found}; give the models of openWakeWord, whose spectrogram has {STEP_ROWS} rows of {BANDS}")
        self.silent_rows = np.resize(rows, (WINDOW_ROWS - WINDOW_ROWS % STEP_ROWS, BANDS))
        self.silent_embedding = await self.embedding(np.resize(rows, (WINDOW_ROWS, BANDS)))

    async def rows(self, samples: Rows) -> Rows:
        """Return the spectrogram of a window, scaled as the next model takes it."""
        (rows,) = await self._spectrogram.compute(samples[np.newaxis])
        rows = np.asarray(rows / 10 + 2, np.float32)
        return rows if rows.size % BANDS else rows.reshape(-1, BANDS)

    async def embedding(self, rows: Rows) -> Rows:
        """Return the embedding of a window of rows."""
        (embedding,) = await self._embedding.compute(rows[np.newaxis, :, :, np.newaxis])
        return embedding.reshape(-1).copy()


class WakeStream:
    """The sound of one satellite. One task uses it."""

    def __init__(self, features: Features, words: Sequence[WakeWord]) -> None:
        self._features, self._words = features, words
        self._heard = -STEP_SAMPLES  # of the silence, this much is not computed yet
        self._samples = np.zeros(STEP_SAMPLES, np.float32)
        self._rows = features.silent_rows
        most = max(word.embeddings for word in words)
        self._embeddings = np.repeat(features.silent_embedding[np.newaxis], most, axis=0)

    async def scores(self, samples: Rows) -> list[tuple[int, Mapping[str, float]]]:
        """Hear more samples at 16 kHz. Returns the score of each word by its name for each window that they complete.

        Before the scores stands the number of samples that the stream had heard where the window ends.
        """
        self._samples = np.concatenate((self._samples, samples))
        found: list[tuple[int, Mapping[str, float]]] = []
        while len(self._samples) >= WINDOW_SAMPLES:
            rows = await self._features.rows(self._samples[:WINDOW_SAMPLES])
            rows = np.concatenate((self._rows, rows))
            embedding = await self._features.embedding(rows[:WINDOW_ROWS])
            embeddings = np.concatenate((self._embeddings[1:], embedding[np.newaxis]))
            scores = {}
            for word in self._words:
                (score,) = await word.served.compute(embeddings[np.newaxis, -word.embeddings :])
                scores[word.name] = float(score.reshape(-1)[0])
            self._samples = self._samples[STEP_SAMPLES:]
            self._rows, self._embeddings = rows[STEP_ROWS:], embeddings
            self._heard += STEP_SAMPLES
            found.append((self._heard + WINDOW_SAMPLES - STEP_SAMPLES, scores))
        return found
