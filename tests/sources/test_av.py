"""Pictures and sound by PyAV: what comes out of files that the tests have made, and how sources end."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import av
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.errors import CallerError
from aionn.sources import SourceError
from aionn.sources.av import Camera, Picture, Pixels, Sound, audio, video
from aionn.testing import FakeDevice, identity_model
from tests.journeys.silero import Directly, still
from tests.leaks import leaves_nothing

pytestmark = pytest.mark.anyio

WIDTH, HEIGHT = 32, 16


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def pictures(count: int) -> list[NDArray[np.uint8]]:
    """Pictures that differ in each pixel and channel."""
    random = np.random.default_rng(3)
    return [random.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8) for _ in range(count)]


def write_video(path: Path, shown: list[NDArray[np.uint8]], rate: int = 25) -> Path:
    """Write pictures without loss."""
    with av.open(path, "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for picture in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def write_sound(path: Path, samples: NDArray[np.int16], rate: int) -> Path:
    """Write sound; `samples`: shape (channels, samples)."""
    with av.open(path, "w") as container:
        layout = "stereo" if len(samples) == 2 else "mono"
        stream = container.add_stream("pcm_s16le", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T.reshape(1, -1)), format="s16", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_video(tmp_path / "clip.mkv", pictures(6))


# --- pictures ------------------------------------------------------------------------------------------------------------


def test_pictures_come_in_order_with_their_times(clip: Path) -> None:
    items = list(video(clip, keep=True))
    assert len(items) == 6
    for number, (item, expected) in enumerate(zip(items, pictures(6), strict=True)):
        tag = item.tag
        assert isinstance(tag, Picture)
        assert tag.index == number
        assert tag.time_s == pytest.approx(number / 25)
        assert tag.pixels is not None
        np.testing.assert_array_equal(tag.pixels, expected)
        array = item.inputs["input"]
        assert (array.shape, array.dtype) == ((1, 3, HEIGHT, WIDTH), np.float32)
        np.testing.assert_allclose(array[0].transpose(1, 2, 0), expected / 255, atol=1e-6)
    assert all(items[0].tag.pts is not None and item.tag.decoded_ns > 0 for item in items)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHW", "HWC"])
@pytest.mark.parametrize("pixels", ["rgb24", "bgr24", "gray"])
def test_layouts_and_formats(clip: Path, layout: str, pixels: str) -> None:
    form = Pixels(size=(8, 4), format=pixels, layout=layout, mean=0.5, deviation=0.25)
    item = next(iter(video(clip, pixels=form, input="x", keep=True)))
    channels = 1 if pixels == "gray" else 3
    assert item.tag.pixels.shape == (HEIGHT, WIDTH, channels), "the decoded picture, not the scaled one"
    extents = {"N": 1, "C": channels, "H": 4, "W": 8}
    assert item.inputs["x"].shape == tuple(extents[axis] for axis in layout)
    scaled = next(video(clip, pixels=Pixels(size=(8, 4), format=pixels, layout="HWC"))).inputs["input"]
    expected = (scaled - 0.5) / 0.25
    found = item.inputs["x"].reshape(item.inputs["x"].shape[-3:])
    np.testing.assert_allclose(found if layout.endswith("HWC") else found.transpose(1, 2, 0), expected, atol=1e-5)


def test_each_channel_may_have_its_mean(clip: Path) -> None:
    item = next(iter(video(clip, pixels=Pixels(mean=(0.1, 0.2, 0.3), deviation=(1, 2, 4), layout="HWC"))))
    np.testing.assert_allclose(item.inputs["input"], (pictures(1)[0] / 255 - [0.1, 0.2, 0.3]) / [1, 2, 4], atol=1e-6)


@leaves_nothing
async def test_pictures_are_written_into_frames_of_the_burst(fake: FakeDevice, clip: Path) -> None:
    shape = ("N", 3, "H", "W")
    model = aionn.Model.from_onnx(identity_model({"x": shape}, np.uint8))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        async with compilation.burst() as burst:
            seen = []
            async with aclosing(burst.map(video(clip, burst, input="x"))) as results:
                async for result in results:
                    np.testing.assert_array_equal(result.outputs["x_out"][0].transpose(1, 2, 0), pictures(6)[result.tag.index])
                    seen.append(result.tag.index)
                    del result
            assert seen == list(range(6))
            assert burst.statistics()["copied_bytes"] == 0


@leaves_nothing
async def test_a_paced_file_is_a_camera_whose_latest_picture_wins(fake: FakeDevice, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "clip.mkv", pictures(10), rate=100)
    fake.delay(0.05)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 3, HEIGHT, WIDTH)})), devices=(fake.name,))
        async with compilation.burst() as burst:
            seen = [result.tag.index async for result in burst.map(video(clip, burst, input="x", paced=True), policy="latest")]
            assert seen == sorted(seen)
            assert seen[-1] == 9, "the last one is answered"
            assert len(seen) + burst.statistics()["dropped"] == 10
            assert burst.statistics()["dropped"] > 0


@leaves_nothing
async def test_a_source_that_blocks_does_not_keep_its_stream_from_closing(
    fake: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "camera"
    os.mkfifo(pipe)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 3, HEIGHT, WIDTH)})), devices=(fake.name,))
        async with compilation.burst() as burst:
            with caplog.at_level(logging.WARNING, "aionn.runtime"), anyio.move_on_after(0.2) as waited:
                async for _ in burst.map(video(pipe, burst, input="x")):
                    pytest.fail("nothing was written into the pipe")
            assert waited.cancelled_caught
            assert f"the source 'video {pipe}' still blocks after its stream was closed" in caplog.text
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # the end of the file ends the thread


# --- one camera, several streams -----------------------------------------------------------------------------------------


@leaves_nothing
async def test_two_streams_share_each_decoded_picture(fake: FakeDevice, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "clip.mkv", pictures(20), rate=50)
    shape = ("N", 3, "H", "W")
    seen: dict[str, dict[int, Any]] = {"whole": {}, "small": {}}
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": shape}, np.uint8)), devices=(fake.name,))

        async def watch(name: str, pixels: Pixels, camera: Camera) -> None:
            async with (
                compilation.burst() as burst,
                aclosing(burst.map(video(camera, burst, input="x", pixels=pixels, keep=True), policy="latest")) as results,
            ):
                async for result in results:
                    assert result.outputs["x_out"].shape[2:] == ((HEIGHT, WIDTH) if pixels.size is None else (4, 8))
                    assert time.monotonic_ns() - result.tag.captured_ns >= result.age_s * 1e9 > 0
                    if pixels.size is None:
                        np.testing.assert_array_equal(result.outputs["x_out"][0].transpose(1, 2, 0), result.tag.pixels)
                    seen[name][result.tag.index] = result.tag
                    del result

        with anyio.fail_after(60), Camera(clip, paced=True) as camera:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, "whole", Pixels(), camera)
                tasks.start_soon(watch, "small", Pixels(size=(8, 4)), camera)
    both = seen["whole"].keys() & seen["small"].keys()
    assert both
    assert all(seen["whole"][index] is seen["small"][index] for index in both), "one tag, so one decode"
    for tags in seen.values():
        for index, tag in tags.items():
            np.testing.assert_array_equal(tag.pixels, pictures(20)[index])


def test_a_shared_camera_gives_each_stream_the_newest_picture_that_it_has_not_had(clip: Path) -> None:
    with Camera(clip) as camera:
        first, second = video(camera), video(camera)
        assert [next(first).tag.index for _ in range(3)] == [0, 1, 2]
        assert [next(second).tag.index for _ in range(2)] == [2, 3]
        assert [item.tag.index for item in first] == [3, 4, 5]
        assert [item.tag.index for item in second] == [5], "the last one comes to a stream that is late, too"


def test_what_ends_a_shared_camera_ends_each_of_its_streams(clip: Path, tmp_path: Path) -> None:
    with Camera(clip) as camera:
        first, second = video(camera), video(camera)
        next(first)
    assert (list(first), list(second), list(video(camera))) == ([], [], [])
    nowhere = Camera(tmp_path / "none.mkv")
    for _ in range(2):
        with pytest.raises(SourceError, match="cannot be opened: No such file"):
            next(video(nowhere))


def test_a_camera_that_is_closed_while_a_thread_waits_for_a_picture_ends_after_it(tmp_path: Path) -> None:
    pipe = tmp_path / "camera"
    os.mkfifo(pipe)
    camera = Camera(pipe)
    ended: list[object] = []

    def watch() -> None:
        try:
            ended.extend(video(camera))
        except SourceError as error:
            ended.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    with open(pipe, "wb"):  # the thread has begun to open it
        camera.close()
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()
    assert len(ended) < 2
    held = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    assert str(pipe) not in held


def test_a_part_of_a_picture_becomes_a_tensor(clip: Path) -> None:
    tag = next(video(clip, pixels=Pixels(size=(8, 8)), keep=True)).tag
    part = tag.pixels[2:12, 3:19]
    whole = Pixels(mean=0.5, layout="HWC").tensor(part)
    np.testing.assert_allclose(whole, part / 255 - 0.5, atol=1e-6)
    for form, channels in (("rgb24", 3), ("gray", 1)):
        tensor = Pixels(size=(6, 4), format=form).tensor(np.full((10, 16, channels), 51, np.uint8))
        assert tensor.shape == (1, channels, 4, 6)
        np.testing.assert_allclose(tensor, 0.2, atol=1e-6)


@pytest.mark.parametrize(("name", "time_s", "expected_ns"), [
    ("/dev/video0", 99.5, 99_500_000_000),  # the kernel's stamp
    ("/dev/video0", 1.7e9, 100_000_000_000),  # of the wall clock
    ("/dev/video0", 1.0, 100_000_000_000),  # of no clock of today
    ("/dev/video0", None, 100_000_000_000),
    ("clip.mkv", 99.5, 100_000_000_000),
])  # fmt: skip
def test_the_age_of_a_picture_counts_from_the_stamp_of_a_v4l2_camera(name: str, time_s: float | None, expected_ns: int) -> None:
    assert Camera(name)._place.captured_ns(time_s, 100_000_000_000) == expected_ns


# --- sound ---------------------------------------------------------------------------------------------------------------


def test_sound_comes_in_blocks_with_what_was_before(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).integers(-30_000, 30_000, 1300).astype(np.int16)
    items = list(audio(write_sound(tmp_path / "a.wav", samples[np.newaxis], 16_000), context=64))
    assert [item.tag for item in items] == [Sound(n, n * 0.032, item.tag.decoded_ns) for n, item in enumerate(items)]
    padded = np.zeros(64 + 3 * 512, np.float32)
    padded[64 : 64 + 1300] = samples / 32768
    assert len(items) == 3
    for number, item in enumerate(items):
        block = item.inputs["input"]
        assert (block.shape, block.dtype) == ((1, 576), np.float32)
        np.testing.assert_allclose(block[0], padded[number * 512 : number * 512 + 576], atol=1e-6)


def test_sound_of_another_rate_and_two_channels_is_resampled(tmp_path: Path) -> None:
    seconds = np.arange(48_000) / 48_000
    tone = (10_000 * np.sin(2 * np.pi * 440 * seconds)).astype(np.int16)
    items = list(audio(write_sound(tmp_path / "a.wav", np.stack([tone, tone]), 48_000), input="sound", samples=160))
    sound = np.concatenate([item.inputs["sound"][0] for item in items])
    assert 16_000 <= len(sound) <= 16_160
    spectrum = np.abs(np.fft.rfft(sound[:16_000]))
    assert int(spectrum.argmax()) == 440
    assert float(np.abs(sound[1000:15_000]).max()) == pytest.approx(10_000 / 32768, rel=0.02)


@leaves_nothing
async def test_a_voice_stream_hears_a_file(silero_path: Path, tmp_path: Path) -> None:
    samples = np.random.default_rng(2).integers(-9_000, 9_000, 512 * 8).astype(np.int16)
    path = write_sound(tmp_path / "a.wav", samples[np.newaxis], 16_000)
    directly, state, expected = Directly(silero_path), still(), []
    for item in audio(path, context=64):
        answer = directly.run({"input": item.inputs["input"], "state": state})
        state = answer["stateN"]
        expected.append(float(answer["output"][0, 0]))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        async with compilation.recurrent({"state": "stateN"}) as voice:
            found = [float(result.outputs["output"][0, 0]) async for result in voice.map(audio(path, context=64))]
    np.testing.assert_allclose(found, expected, atol=1e-6)


# --- errors --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_said_in_one_sentence(tmp_path: Path, clip: Path) -> None:
    sound = write_sound(tmp_path / "a.wav", np.zeros((1, 100), np.int16), 16_000)
    (tmp_path / "text.mp4").write_text("no video at all", encoding="utf-8")
    way_out = "; give a file, camera, microphone or URL that FFmpeg reads"
    for source, sentence in (
        (video(tmp_path / "none.mp4"), f"'{tmp_path}/none.mp4' cannot be opened: No such file or directory{way_out}"),
        (video(tmp_path), f"'{tmp_path}' cannot be opened: Is a directory{way_out}"),
        (video(tmp_path / "text.mp4"), f"'{tmp_path}/text.mp4' cannot be opened: Invalid data found when processing input{way_out}"),
        (video(sound), f"'{sound}' has no video stream, but audio{way_out}"),
        (audio(clip), f"'{clip}' has no audio stream, but video{way_out}"),
        (video("/dev/video987"), f"'/dev/video987' cannot be opened: No such file or directory{way_out}"),
        (video("v4l2:/dev/video987"), f"'/dev/video987' cannot be opened: No such file or directory{way_out}"),
    ):
        with pytest.raises(SourceError) as told:
            next(source)
        assert str(told.value) == sentence
        assert isinstance(told.value, aionn.AionnError)
        assert told.value.source in sentence


def test_a_file_that_was_cut_off_gives_what_is_there(tmp_path: Path, clip: Path) -> None:
    content = clip.read_bytes()
    (tmp_path / "cut.mkv").write_bytes(content[: len(content) * 2 // 3])
    assert 0 < len(list(video(tmp_path / "cut.mkv"))) < 6


def instead(packet: Any, content: bytes) -> Any:
    """Another packet in the place of one."""
    made = av.Packet(content)
    made.pts, made.dts, made.time_base, made.stream = packet.pts, packet.dts, packet.time_base, packet.stream
    return made


def spoiled(path: Path, bad: range) -> Path:
    """A file of 40 pictures, each a packet of its own. The packets with these numbers hold zeros."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number in range(40):
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), number, np.uint8), format="rgb24")):
                container.mux(instead(packet, bytes(packet.size)) if number in bad else packet)
    return path


def test_packets_that_cannot_be_decoded_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a camera's data was lost on its way. Streams of a shared camera go on, too."""
    assert [item.tag.pts for item in video(spoiled(tmp_path / "some.avi", range(10, 13)))] == [*range(10), *range(13, 40)]
    assert [record.message for record in caplog.records] == [
        f"source '{tmp_path}/some.avi': packets that cannot be decoded are left out (Invalid data found when processing input)"
    ]


def test_packets_of_sound_that_cannot_be_decoded_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sound.mka"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        for number in range(40):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16_000, 1024 * number
            for packet in stream.encode(frame):
                container.mux(instead(packet, b"\xff" * packet.size) if number == 20 else packet)
    assert len(list(audio(path, samples=1024))) >= 30  # 20 before it, and most of those after it


def test_a_source_that_cannot_be_decoded_any_more_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.sources.av.MOST_BAD_PACKETS", 6)
    assert len(list(video(spoiled(tmp_path / "five.avi", range(10, 15))))) == 35
    pictures = video(spoiled(tmp_path / "six.avi", range(10, 16)))
    assert len([next(pictures) for _ in range(10)]) == 10
    with pytest.raises(SourceError, match="cannot be read any further: Invalid data found"):
        next(pictures)
    monkeypatch.setattr("aionn.sources.av.MOST_BAD_PACKETS", 1000)
    with pytest.raises(SourceError, match="cannot be read any further: Invalid data found"):
        next(video(spoiled(tmp_path / "all.avi", range(40))))


def test_a_read_that_fails_is_said_in_one_sentence(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = av.open

    class Failing:
        """A container whose device is pulled out after the first picture."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._container = opened(*arguments, **named)
            self.streams = self._container.streams

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *_: object) -> None:
            self._container.close()

        def demux(self, **named: Any) -> Any:
            yield next(self._container.demux(**named))
            raise av.error.OSError(5, "Input/output error", str(clip))

    monkeypatch.setattr(av, "open", Failing)
    pictures = video(clip)
    next(pictures)
    with pytest.raises(SourceError, match="cannot be read any further: Input/output error; give a file"):
        next(pictures)


@leaves_nothing
async def test_an_error_of_the_source_ends_its_stream(fake: FakeDevice, tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 3, HEIGHT, WIDTH)})), devices=(fake.name,))
        async with compilation.burst() as burst:
            with pytest.raises(SourceError, match="No such file"):
                _ = [result async for result in burst.map(video(tmp_path / "none.mp4", burst, input="x"))]
            with pytest.raises(CallerError, match="'x'"):
                clip = write_video(tmp_path / "clip.mkv", pictures(1))
                _ = [result async for result in burst.map(video(clip, burst, input="x", pixels=Pixels(size=(5, 5))))]


def test_a_url_that_gives_nothing_is_told_with_its_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/clip.mkv"
        with pytest.raises(SourceError, match=r"cannot be opened: it gave nothing within 0\.2 s; give a file, camera"):
            next(video(url, timeout_s=0.2))


def test_wrong_arguments_are_refused_at_once() -> None:
    for wrong, sentence in (
        (lambda: video(""), "source=''; give a path, a device such as '/dev/video0', or a URL"),
        (lambda: video(b"x"), "source=b'x'"),  # type: ignore[arg-type]
        (lambda: video("x", timeout_s=-1), "timeout_s is -1; give a number of seconds above 0"),
        (lambda: Pixels(format="yuv420p"), "format='yuv420p'; give one of rgb24, bgr24, gray"),
        (lambda: Pixels(layout="NCWH"), "layout='NCWH'; give one of NCHW, NHWC, CHW, HWC"),
        (lambda: Pixels(size=(0, 5)), "pixels: size=0; give a whole number, at least 1"),
        (lambda: Pixels(size=5), "size=5; give width and height"),  # type: ignore[arg-type]
        (lambda: Pixels(mean=(1, 2)), r"mean=\(1, 2\); give one number, or 3"),
        (lambda: Pixels(mean="light"), "mean='light'; give one number, or 3"),  # type: ignore[arg-type]
        (lambda: video(Camera("x"), paced=True), "a shared camera has its own paced and options"),
        (lambda: Pixels().tensor(np.zeros((4, 4), np.uint8)), r"a picture of uint8 and shape \(4, 4\); give one of uint8 and shape \(h"),
        (lambda: Pixels().tensor(np.zeros((0, 4, 3), np.uint8)), r"not empty"),
        (lambda: video("x", options={"framerate": 30}), "'framerate': 30}; give a dict of texts"),  # type: ignore[dict-item]
        (lambda: audio("x", options=[5]), r"options=\[5\]; give a dict of texts"),  # type: ignore[arg-type]
        (lambda: Pixels(deviation=0), "deviation=0; give numbers other than 0"),
        (lambda: audio("x", samples=0), "samples=0; give a whole number, at least 1"),
        (lambda: audio("x", context=600), "context=600; give a whole number, from 0 to 512"),
    ):
        with pytest.raises(CallerError, match=sentence):
            wrong()


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['av'] = None; import aionn.sources.av"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "ImportError: aionn.sources.av needs the package av" in ran.stderr
    assert "run pip install 'aionn[av]'" in ran.stderr
