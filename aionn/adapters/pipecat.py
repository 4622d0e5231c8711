"""`AionnVADAnalyzer`: voice activity for Pipecat by Silero VAD in a driver process, in place of Pipecat's `SileroVADAnalyzer`.

Pipecat asks an analyzer for the confidence of each window, in a thread of the analyzer. Here that thread has a blocking burst, which it
shares with no other. The recurrent state goes with each call. So the app has it when a driver dies, and the analyzers of many callers may
share runs (`aionn.Batching`).

The context and the resets are those of Pipecat 1.14. Each window is preceded by the last samples of the one before. State and context begin
anew after two seconds of windows, as soon as the windows are quiet. So music and noise do not hide the speech after them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from aionn.errors import AionnError, CallerError
from aionn.loopless import checked_seconds
from aionn.runtime.streaming.blocking import BlockingBurst

try:
    from loguru import logger  # it comes with Pipecat, and is where people look for what an analyzer says
    from pipecat.audio.vad.vad_analyzer import VADAnalyzer, VADParams, VADState
except ImportError as error:
    raise ImportError("aionn.adapters.pipecat needs Pipecat, which is not installed; run pip install 'aionn[pipecat]'") from error

__all__ = ["AionnVADAnalyzer", "model_path"]

_WINDOW = {8000: 256, 16000: 512}
"""Samples that the model takes at once, by sample rate."""

_CONTEXT = {8000: 32, 16000: 64}
"""Samples of the window before, by sample rate."""

_RESET_S = 2.0
_QUIET_CONFIDENCE = 0.1
_QUIET_WINDOWS = 5
"""State and context begin anew after `_RESET_S`, once so many windows in a row were below `_QUIET_CONFIDENCE` and the voice is quiet."""

_NAMES = {"input", "state", "sr", "output", "stateN"}
"""Of the model's inputs and outputs."""


def model_path() -> Path:
    """Return the path of the Silero VAD model in the package `pipecat-ai`. It takes 8,000 and 16,000 Hz, and any number of rows."""
    return Path(str(files("pipecat.audio.vad.data") / "silero_vad.onnx"))


class AionnVADAnalyzer(VADAnalyzer):
    """A `VADAnalyzer` of Pipecat whose model runs in a driver process. One for each voice.

    A driver that dies costs time only: the call runs again on a new driver, with the same state. If that fails too, or takes longer than
    `timeout_s`, the window has confidence 0 and the state begins anew. One WARNING says so, until a call succeeds again.

    Examples:
        >>> compilation = await runtime.compile(await runtime.load(model_path()))
        >>> analyzer = AionnVADAnalyzer(compilation.blocking)
    """

    def __init__(
        self,
        connect: Callable[[], BlockingBurst],
        *,
        sample_rate: int | None = None,
        params: VADParams | None = None,
        timeout_s: float | None = 2.0,
    ) -> None:
        """Connect to nothing yet: the first window does that, in the analyzer's thread.

        Args:
            connect: returns a blocking burst of the model at `model_path()`: `compilation.blocking`, or
                `functools.partial(aionn.blocking.attach, model_path())` for a service.
            sample_rate: 8000 or 16000. None is what the pipeline says.
            params: as for every analyzer of Pipecat.
            timeout_s: seconds for the confidence of one window, with the start of a new driver. None waits until the runtime finds a hang.

        Raises:
            CallerError: an argument is wrong.
        """
        given: Any = connect
        if not callable(given):
            found = type(given).__name__
            raise CallerError(
                f"AionnVADAnalyzer: connect is a {found}; give a function that returns a blocking burst: compilation.blocking"
            )
        if sample_rate is not None:
            _checked_rate(sample_rate)
        self._timeout_s = checked_seconds("AionnVADAnalyzer: timeout_s", timeout_s)
        self._connect = connect
        self._burst: BlockingBurst | None = None
        self._failing = False
        self._closed = threading.Event()
        super().__init__(sample_rate=sample_rate, params=params)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Set the sample rate of the pipeline, 8000 or 16000. A new rate begins anew. The rate given at construction goes before.

        Raises:
            CallerError: another rate.
        """
        rate = _checked_rate(self._init_sample_rate or sample_rate)
        if rate != self._sample_rate:
            self._input = np.zeros((1, _CONTEXT[rate] + _WINDOW[rate]), np.float32)
            self._state = np.zeros((2, 1, 128), np.float32)
            self._inputs = {"input": self._input, "state": self._state, "sr": np.array(rate, np.int64)}
            self._windows = self._quiet_windows = 0
        super().set_sample_rate(sample_rate)

    def num_frames_required(self) -> int:
        """Return the samples of one window: 256 at 8,000 Hz and 512 at 16,000 Hz. `set_sample_rate` comes before."""
        return _WINDOW[_checked_rate(self.sample_rate)]

    def voice_confidence(self, buffer: bytes) -> float:
        """Return how sure the model is that the window has speech, from 0.0 to 1.0. It waits in the calling thread.

        Args:
            buffer: one window of signed 16-bit samples of one channel.

        Raises:
            CallerError: the buffer is not one window, or `set_sample_rate` has not been called. Or `connect` gives another model, or its
                compilation or this analyzer is closed.
        """
        window = self.num_frames_required()
        if len(buffer) != 2 * window:
            raise CallerError(f"voice_confidence: {len(buffer)} bytes; give one window of {window} samples of 16 bits, {2 * window} bytes")
        np.divide(np.frombuffer(buffer, np.int16), 32768, out=self._input[0, -window:], dtype=np.float32)
        try:
            outputs = self._opened().compute(self._inputs, timeout_s=self._timeout_s, retry=1)
        except CallerError:
            raise
        except AionnError as error:
            if not self._failing:
                logger.warning(f"voice activity is not known, and its state begins anew with the next answer: {error}")
            self._failing = True
            self._begin_anew()
            return 0.0
        self._failing = False
        np.copyto(self._state, outputs["stateN"])
        context = _CONTEXT[self.sample_rate]
        self._input[0, :context] = self._input[0, -context:]
        confidence = float(outputs["output"][0, 0])
        self._begin_anew_if_quiet(confidence)
        return confidence

    async def cleanup(self) -> None:
        """Give back the burst and the thread. A call that waits ends with `CallerError`."""
        self._closed.set()
        if self._burst is not None:
            self._burst.close()
        await super().cleanup()  # type: ignore[no-untyped-call]

    def _opened(self) -> BlockingBurst:
        """Return the burst, which the first call opens."""
        if self._closed.is_set():
            raise CallerError("this analyzer is closed, because Pipecat has cleaned it up; make one for each voice")
        if self._burst is not None:
            return self._burst
        burst: Any = self._connect()
        if not isinstance(burst, BlockingBurst):
            raise CallerError(f"AionnVADAnalyzer: connect returned a {type(burst).__name__}; return a blocking burst that is not open")
        found = [*burst.inputs, *burst.outputs]
        if set(found) != _NAMES:
            burst.close()
            raise CallerError(f"AionnVADAnalyzer: the model has {', '.join(found)}; give Pipecat's Silero VAD, at model_path()")
        self._burst = burst  # from now on `cleanup` can end the opening
        try:
            if self._closed.is_set():
                burst.close()
            return burst.open()
        except BaseException:
            self._burst = None
            raise

    def _begin_anew(self) -> None:
        self._state[:] = 0
        self._input[:] = 0
        self._windows = 0

    def _begin_anew_if_quiet(self, confidence: float) -> None:
        """Begin anew if that is due. `_vad_state` is still the one of the window before."""
        self._windows += 1
        self._quiet_windows = self._quiet_windows + 1 if confidence < _QUIET_CONFIDENCE else 0
        due = self._windows >= math.ceil(_RESET_S * self.sample_rate / _WINDOW[self.sample_rate])
        if due and self._quiet_windows >= _QUIET_WINDOWS and self._vad_state == VADState.QUIET:
            self._begin_anew()


def _checked_rate(rate: int) -> int:
    if rate not in _WINDOW:
        raise CallerError(f"AionnVADAnalyzer: a sample rate of {rate!r}; Silero VAD takes 8000 or 16000 Hz")
    return rate
