"""Find the speech in a recording: a real model, in its own driver process, fed frame by frame over a burst.

    python examples/voice_activity.py [WAV] [--json]

The model is Silero VAD at 16 kHz. It listens to 32 ms at a time (512 new samples after the last 64 of what came before),
answers how likely it is that somebody speaks, and hands back a state that goes in again with the next frame. The state stays
in the driver: per frame 2304 bytes of sound go in, 4 bytes of answer come out, and `state_bytes` is 0.
`speech_probabilities` is what aionn is about; the rest is sound in and text out.

Exit codes: 0 fine, 1 the runtime failed or nobody takes the answer, 2 wrong usage (a missing or unreadable file, a package
that is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import aionn
from answers import print_answer
from carriers import UsageError, packaged, required

with required("voice_activity.py"):
    import soundfile
    import soxr

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 512  # 32 ms
CONTEXT_SAMPLES = 64  # of the frame before

# How probabilities become segments, with the values that Silero recommends.
SPEECH_BEGINS_AT = 0.5
SPEECH_ENDS_BELOW = 0.35  # lower than where it begins, or a voice that wavers would be cut to pieces
MIN_SPEECH_SAMPLES = SAMPLE_RATE * 250 // 1000
MIN_SILENCE_SAMPLES = SAMPLE_RATE * 100 // 1000
PADDING_SAMPLES = SAMPLE_RATE * 30 // 1000


@dataclass(frozen=True)
class Listening:
    """What came of one recording.

    Attributes:
        probabilities: of speech, one per frame.
        frame_ns: from a frame's samples to its answer, one per frame.
        state_bytes: of all bytes that were copied into memory shared with the driver, or shown back from it, those that
            are neither sound nor answer; counted by the burst.
    """

    probabilities: list[float]
    frame_ns: list[int]
    state_bytes: int = 0


async def speech_probabilities(model_path: Path, samples: NDArray[np.float32], show_progress: bool) -> Listening:
    """Stream a recording through the model.

    Args:
        samples: mono, 16 kHz, in [-1, 1]; the last frame is filled up with silence.
    """
    probabilities: list[float] = []
    frame_ns: list[int] = []
    shown_bytes = 0
    async with aionn.Runtime() as runtime:
        model = await runtime.load(model_path)
        compilation = await runtime.compile(model, devices=("onnxruntime",), preference="sustained_speed")
        async with compilation.burst() as burst, await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
            await state.reset()  # silence before the first frame
            with progress(windows(samples), frame_count(samples), show_progress) as frames:
                for window in frames:
                    started_ns = time.perf_counter_ns()
                    outputs = await burst.compute({"input": window[np.newaxis], "state": state}, outputs={"stateN": state})
                    probabilities.append(float(outputs["output"][0, 0]))
                    frame_ns.append(time.perf_counter_ns() - started_ns)
                    shown_bytes += sum(array.nbytes for array in outputs.values())
            crossed_bytes = burst.statistics()["copied_bytes"] + shown_bytes
    sound_and_answers = len(probabilities) * 4 * (CONTEXT_SAMPLES + FRAME_SAMPLES + 1)
    return Listening(probabilities, frame_ns, crossed_bytes - sound_and_answers)


def frame_count(samples: NDArray[np.float32]) -> int:
    return -(-len(samples) // FRAME_SAMPLES)


def windows(samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Per frame its 512 samples with the 64 before them; silence before the first and after the last."""
    missing = frame_count(samples) * FRAME_SAMPLES - len(samples)
    padded = np.pad(samples, (CONTEXT_SAMPLES, missing))
    for start in range(0, len(samples), FRAME_SAMPLES):
        yield padded[start : start + CONTEXT_SAMPLES + FRAME_SAMPLES]


@contextmanager
def progress(frames: Iterable[NDArray[np.float32]], total: int, shown: bool) -> Iterator[Iterable[NDArray[np.float32]]]:
    """A bar on stderr while the frames go by, or nothing at all."""
    if not shown:
        yield frames
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar.track(frames, total, description="listening")


def speech_segments(probabilities: Sequence[float], sample_count: int) -> list[tuple[float, float]]:
    """Where somebody speaks, in seconds from the beginning, to the millisecond.

    Speech begins with the first frame at SPEECH_BEGINS_AT or above, and ends where a silence of MIN_SILENCE_SAMPLES began.
    Frames between the two thresholds belong to what was before. What is too short to be speech is dropped, and each
    segment gets PADDING_SAMPLES on both sides, as far as the recording goes.
    """
    spoken: list[tuple[int, int]] = []
    began: int | None = None
    quiet_since: int | None = None
    for index, probability in enumerate(probabilities):
        at = index * FRAME_SAMPLES
        if probability >= SPEECH_BEGINS_AT:
            quiet_since = None
            began = at if began is None else began
        elif began is not None and probability < SPEECH_ENDS_BELOW:
            quiet_since = at if quiet_since is None else quiet_since
            if at - quiet_since >= MIN_SILENCE_SAMPLES:
                spoken.append((began, quiet_since))
                began = quiet_since = None
    if began is not None:
        spoken.append((began, sample_count))
    # No two segments can meet: the silence between them is longer than both paddings.
    return [
        (round(max(0, begin - PADDING_SAMPLES) / SAMPLE_RATE, 3), round(min(sample_count, end + PADDING_SAMPLES) / SAMPLE_RATE, 3))
        for begin, end in spoken
        if end - begin > MIN_SPEECH_SAMPLES
    ]


def load_recording(path: Path) -> NDArray[np.float32]:
    """Samples of a sound file of any rate and channel count: mono, 16 kHz.

    Raises:
        UsageError: there is no such file, or it holds no sound.
    """
    try:
        found = path.is_file()
    except OSError as error:
        raise UsageError(f"{str(path)[:80]}: {error.strerror}; give the path of a sound file") from error
    if not found:
        raise UsageError(f"{path}: there is no such file; give the path of a sound file")
    try:
        channels, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise UsageError(f"{path} cannot be read as sound: {str(error).rstrip('.')}") from error
    mono = np.ascontiguousarray(channels.mean(axis=1, dtype=np.float32))
    samples: NDArray[np.float32] = mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE)
    if not len(samples):
        raise UsageError(f"{path} holds no samples; give a file with sound in it")
    if not np.isfinite(samples).all():
        raise UsageError(f"{path}: some samples are not numbers; give a file with sound in it")
    return samples


def report(heard: Listening, sample_count: int) -> dict[str, object]:
    """All that is printed; the keys of `--json`. `real_time_factor` is time spent per time of sound: below 1 keeps up."""
    frame_us = np.array(heard.frame_ns) / 1000
    return {
        "frames": len(heard.probabilities),
        "speech_frames": sum(probability >= SPEECH_BEGINS_AT for probability in heard.probabilities),
        "segments": speech_segments(heard.probabilities, sample_count),
        "probabilities": heard.probabilities,
        "p50_us": round(float(np.percentile(frame_us, 50)), 1),
        "p99_us": round(float(np.percentile(frame_us, 99)), 1),
        "state_bytes": heard.state_bytes,
        "real_time_factor": round(sum(heard.frame_ns) / 1e9 / (sample_count / SAMPLE_RATE), 6),
    }


def as_text(found: dict[str, object]) -> str:
    """The segments, one a line, then one line that sums up."""
    segments = found["segments"]
    assert isinstance(segments, list)
    lines = [f"{begin:8.2f} s to {end:8.2f} s" for begin, end in segments] or ["no speech"]
    summary = (
        f"{found['frames']} frames, {found['speech_frames']} of them speech; "
        f"p50 {found['p50_us']} us, p99 {found['p99_us']} us per frame; real-time factor {found['real_time_factor']}"
    )
    return "\n".join([*lines, summary])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="voice_activity.py", description="Find the speech in a recording.")
    parser.add_argument("wav", nargs="?", type=Path, metavar="WAV", help="a sound file (default: 44 s of a novel being read)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        recording = options.wav or packaged("moonshine_voice", "assets/two_cities.wav")
        model_path = packaged("silero_vad", "data/silero_vad_openvino_16k.onnx")
        samples = load_recording(recording)
    except UsageError as error:
        print(f"voice_activity.py: {error}", file=sys.stderr)
        return 2
    try:
        heard = aionn.run(speech_probabilities, model_path, samples, sys.stderr.isatty())
    except aionn.AionnError as error:
        print(f"voice_activity.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells count SIGINT; the driver has ended by now
    found = report(heard, len(samples))
    return print_answer("voice_activity.py", json.dumps(found) if options.json else as_text(found))


if __name__ == "__main__":
    sys.exit(main())
