"""Silero VAD: the probability of speech in each 32 ms of sound, and where speech begins and ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aionn.adapters.wyoming.models import Array, SharedBurst, SoundModel

STEP_SAMPLES, CONTEXT_SAMPLES = 512, 64
RATE = 16_000
BEGINS_AT, GOES_ON_AT = 0.5, 0.35
"""Probabilities. Speech goes on at less than it begins at, so that it does not flicker."""

PAUSE_STEPS = 16
"""Speech has ended after half a second below `GOES_ON_AT`."""


def is_voice(file: SoundModel) -> bool:
    """Return whether a model takes what Silero VAD takes: sound, a state, and perhaps the sample rate."""
    return list(file.model.inputs)[:2] == ["input", "state"]


class VoiceStream:
    """The sound of one satellite. One task uses it."""

    def __init__(self, served: SharedBurst) -> None:
        self._served = served
        self._samples = np.zeros(CONTEXT_SAMPLES, np.float32)
        self._state = np.zeros((2, 1, 128), np.float32)
        self._heard = 0
        self._rate: list[Array] = [np.array(RATE, np.int64)] if "sr" in served.inputs else []
        self._pause = 0
        self.speaking = False

    async def changes(self, samples: NDArray[np.float32]) -> list[tuple[int, bool]]:
        """Hear more samples at 16 kHz. Returns where speech begins (True) and ends (False), in samples that the stream has heard."""
        self._samples = np.concatenate((self._samples, samples / 32768))
        found = []
        while len(self._samples) >= CONTEXT_SAMPLES + STEP_SAMPLES:
            window = self._samples[: CONTEXT_SAMPLES + STEP_SAMPLES]
            probability, state = await self._served.compute(window[np.newaxis], self._state, *self._rate)
            self._state = state.copy()
            self._samples = self._samples[STEP_SAMPLES:]
            self._heard += STEP_SAMPLES
            if self._is_change(float(probability.reshape(-1)[0])):
                found.append((self._heard, self.speaking))
        return found

    def _is_change(self, probability: float) -> bool:
        self._pause = 0 if probability >= GOES_ON_AT else self._pause + 1
        changes = self._pause >= PAUSE_STEPS if self.speaking else probability >= BEGINS_AT
        self.speaking ^= changes
        return changes
