"""Pipecat's analyzer and the one of aionn over the same speech. Importing this imports Pipecat, which changes `asyncio.wait_for`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import soundfile
import soxr
from loguru import logger
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.audio.vad.vad_analyzer import VADAnalyzer, VADState

import aionn
from aionn.adapters.pipecat import AionnVADAnalyzer, model_path
from tests.real_models import carried

__all__ = ["CHUNK_S", "MODEL", "AionnVADAnalyzer", "VADState", "chunks", "model_path", "said", "speech", "states", "theirs", "warnings"]

MODEL = aionn.Model.from_onnx(model_path())

CHUNK_S = 0.02
"""As Pipecat's transports send."""


def speech(rate: int, begin_s: float = 0.0, end_s: float | None = None) -> bytes:
    """Return a part of the recording as 16-bit samples of one channel."""
    samples, recorded = soundfile.read(carried("speech"), dtype="float32")
    samples = samples[int(begin_s * recorded) : None if end_s is None else int(end_s * recorded)]
    resampled = np.clip(soxr.resample(samples, recorded, rate), -1, 1) * 32767
    return bytes(resampled.astype(np.int16).tobytes())


def said(rate: int) -> bytes:
    """Return speech, a pause that is long enough for a reset, and other speech."""
    return speech(rate, 0, 12) + bytes(2 * 4 * rate) + speech(rate, 20, 26)


def chunks(sound: bytes, rate: int) -> Iterator[bytes]:
    size = 2 * int(rate * CHUNK_S)
    for begin in range(0, len(sound) - size + 1, size):
        yield sound[begin : begin + size]


def theirs(rate: int) -> SileroVADAnalyzer:
    analyzer = SileroVADAnalyzer()
    analyzer.set_sample_rate(rate)
    return analyzer


async def states(analyzer: VADAnalyzer, sound: bytes) -> list[VADState]:
    """Return the state after each chunk of the sound."""
    return [await analyzer.analyze_audio(chunk) for chunk in chunks(sound, analyzer.sample_rate)]


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect what is logged in the block, as people who use Pipecat see it."""
    found: list[str] = []
    sink = logger.add(lambda message: found.append(message.record["message"]), level="WARNING")
    try:
        yield found
    finally:
        logger.remove(sink)
