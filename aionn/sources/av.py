"""Pictures and sound by PyAV: files, cameras, microphones and URLs, as sources of `Burst.map` and `RecurrentStream.map`.

    pixels = Pixels(size=(224, 224))
    async for result in burst.map(video("/dev/video0", burst, input="x", pixels=pixels), policy="latest"):
        print(result.tag.time_s, result.outputs)

`video` and `audio` return a generator that blocks. `map` iterates it in a thread, which decodes while the driver computes. With a burst,
pictures are written into leased frames, so no array is made for them. Nothing is opened before the first item is asked for.

A stream that is closed while its source blocks ends all the same. The thread ends when the read returns: at the next picture of a
camera, or after `timeout_s` for a URL.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.loopless import checked_count, checked_seconds
from aionn.runtime.streaming.burst import Burst
from aionn.runtime.streaming.item import Item
from aionn.sources import SourceError

try:
    import av
    from av.video.reformatter import VideoReformatter
except ImportError as missing:
    raise ImportError(f"aionn.sources.av needs the package av ({missing}); run pip install 'aionn[av]'") from missing

if TYPE_CHECKING:
    from av.container import InputContainer

__all__ = ["Camera", "Picture", "Pixels", "Sound", "audio", "video"]

logger = logging.getLogger("aionn.sources")

T = TypeVar("T")

FORMATS = ("rgb24", "bgr24", "gray")
LAYOUTS = ("NCHW", "NHWC", "CHW", "HWC")

MOST_PACKETS = 256
"""Of so many packets the times are kept until their pictures come."""

MOST_BAD_PACKETS = 300
"""A source that gives so many packets in a row which cannot be decoded has failed. Lost data spoils a stream until its next key frame."""

RECENT_NS = 10_000_000_000
"""A picture that is older when it comes was stamped by another clock."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """How a picture becomes a tensor.

    Attributes:
        size: width and height that each picture is scaled to. None: its own.
        format: "rgb24", "bgr24" or "gray".
        layout: "NCHW", "NHWC", "CHW" or "HWC"; N is 1.
        mean, deviation: for a tensor of a float type, each value is (pixel / 255 - mean) / deviation. One number, or one per channel.
            A tensor of uint8 holds the pixels.
    """

    size: tuple[int, int] | None = None
    format: str = "rgb24"
    layout: str = "NCHW"
    mean: float | Sequence[float] = 0.0
    deviation: float | Sequence[float] = 1.0
    _factor: NDArray[np.float32] = field(init=False, repr=False, compare=False)
    _offset: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CallerError(f"pixels: format={self.format!r}; give one of {', '.join(FORMATS)}")
        if self.layout not in LAYOUTS:
            raise CallerError(f"pixels: layout={self.layout!r}; give one of {', '.join(LAYOUTS)}")
        if self.size is not None:
            if not isinstance(self.size, tuple) or len(self.size) != 2:
                raise CallerError(f"pixels: size={self.size!r}; give width and height, as in size=(640, 480)")
            for extent in self.size:
                checked_count("pixels: size", extent, 1)
        mean, deviation = self._per_channel("mean", self.mean), self._per_channel("deviation", self.deviation)
        if not deviation.all():
            raise CallerError(f"pixels: deviation={self.deviation!r}; give numbers other than 0")
        object.__setattr__(self, "_factor", (1 / (255 * deviation)).astype(np.float32))
        object.__setattr__(self, "_offset", (-mean / deviation).astype(np.float32))

    def _per_channel(self, name: str, given: float | Sequence[float]) -> NDArray[np.float64]:
        channels = 1 if self.format == "gray" else 3
        try:
            numbers = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            numbers = np.full((), np.nan)
        if numbers.shape not in ((), (1,), (channels,)) or not np.isfinite(numbers).all():
            raise CallerError(f"pixels: {name}={given!r}; give one number, or {channels}: one for each channel of {self.format}")
        return numbers

    def of(self, frame: av.VideoFrame, reformatter: VideoReformatter | None = None) -> NDArray[np.uint8]:
        """Return a decoded picture as uint8 of shape (height, width, channels), scaled to `size`.

        A reformatter keeps tables from one picture to the next. One thread at a time may use it.
        """
        width, height = self.size or (frame.width, frame.height)
        found: Any = (reformatter or VideoReformatter()).reformat(frame, width, height, self.format).to_ndarray()
        array: NDArray[np.uint8] = found.reshape(height, width, -1)
        return array

    def tensor(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the tensor of a part of a picture, such as what a detector has found: scaled, in the layout, as float32.

        Args:
            picture: uint8 of shape (height, width, channels) in this format, such as `tag.pixels[top:bottom, left:right]`.

        Raises:
            CallerError: the picture has another shape or type, or is empty.
        """
        channels = 1 if self.format == "gray" else 3
        found = np.asarray(picture)
        if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != channels or 0 in found.shape:
            wanted = f"shape (height, width, {channels})"
            raise CallerError(f"pixels: a picture of {found.dtype} and shape {found.shape}; give one of uint8 and {wanted}, not empty")
        if self.size is not None:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(found[..., 0] if channels == 1 else found), format=self.format)
            found = self.of(frame)
        tensor = np.empty(self.shape(found), np.float32)
        self.write(found, tensor)
        return tensor

    def shape(self, picture: NDArray[np.uint8]) -> tuple[int, ...]:
        """Return the shape of the tensor for a picture."""
        extents = dict(zip("HWC", picture.shape, strict=True), N=1)
        return tuple(extents[axis] for axis in self.layout)

    def write(self, picture: NDArray[np.uint8], tensor: NDArray[Any]) -> None:
        """Write a picture into a tensor of its `shape`."""
        place = tensor[0] if self.layout.startswith("N") else tensor
        if self.layout.endswith("CHW"):
            place = place.transpose(1, 2, 0)
        if place.dtype == np.uint8:
            np.copyto(place, picture)
            return
        np.multiply(picture, self._factor, out=place, casting="unsafe")
        if self._offset.any():
            np.add(place, self._offset, out=place, casting="unsafe")


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The tag of a picture's item.

    Attributes:
        index: the picture's number in its source, from 0.
        pts: its presentation time in units of the source, or None.
        time_s: the same in seconds, or None.
        captured_ns: when it was captured (CLOCK_MONOTONIC): as a V4L2 camera says, else when it came from the source, not yet decoded.
        decoded_ns: when it had been decoded (CLOCK_MONOTONIC).
        pixels: the decoded picture in its own size, as uint8 of shape (height, width, channels), or None without `keep`. Streams that share
            a `Camera` get the same array.
    """

    index: int
    pts: int | None
    time_s: float | None
    captured_ns: int
    decoded_ns: int
    pixels: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Sound:
    """The tag of a block of samples.

    Attributes:
        index: the block's number in its source, from 0.
        time_s: seconds of sound before the block.
        decoded_ns: when it had been decoded (CLOCK_MONOTONIC).
    """

    index: int
    time_s: float
    decoded_ns: int


class Camera:
    """One source of pictures for several streams: each picture is decoded once.

        with Camera("/dev/video0") as camera:
            found = detector.map(video(camera, detector, input="images"), policy="latest")
            named = classifier.map(video(camera, classifier, input="x", pixels=Pixels(size=(224, 224))), policy="latest")

    A stream gets the newest picture that it has not had. What came meanwhile is missed, as with a camera. So a file that is not `paced` is
    best read by one stream. Nothing is opened before the first picture is asked for.

    Args:
        source: a file, a URL or a device, as for `video`.
        paced: give pictures of a file at the times at which they are to be shown.
        options: for FFmpeg.
        timeout_s: how long opening, and each read of a URL, may take.

    Raises:
        CallerError: an argument is wrong.
    """

    def __init__(
        self, source: str | Path, *, paced: bool = False, options: Mapping[str, str] | None = None, timeout_s: float | None = 10.0
    ) -> None:
        self._place = _Place.of(source, options, timeout_s)
        self._pace = _Pace(paced)
        self._lock = threading.Lock()
        self._reading: Generator[_Decoded, None, None] | None = None
        self._newest: _Decoded | None = None
        self._error: Exception | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The source's name."""
        return self._place.name

    def __enter__(self) -> Camera:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the source. Its streams end. It does not block: where a thread waits for a picture, the source is closed after that."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _after(self, seen: int) -> _Decoded | None:
        """Return the newest picture, or wait for the next one if `seen` is its number. None: the source has ended. It blocks."""
        with self._lock:
            if self._error is not None:
                raise SourceError(str(self._error), source=self.name) from self._error
            if not self._closed and (self._newest is None or self._newest.index <= seen):
                if self._reading is None:
                    self._reading = self._read()
                try:
                    self._newest = next(self._reading, self._newest)  # at the end the last one stays, for streams that are late
                except Exception as error:
                    self._error = error
                    raise
            if self._closed:
                self._end()
            newest = self._newest
            return None if newest is None or newest.index <= seen else newest

    def _end(self) -> None:
        self._newest = None
        if self._reading is not None:
            self._reading.close()

    def _read(self) -> Generator[_Decoded, None, None]:
        came: dict[int | None, int] = {}  # by presentation time, for a decoder gives pictures later than it takes their packets

        with self._place.open("video") as container:

            def packets() -> Iterator[av.Packet[av.VideoStream]]:
                for packet in container.demux(video=0):
                    came[packet.pts] = time.monotonic_ns()
                    yield packet

            for index, frame in enumerate(self._place.read(self._place.decoded(packets()))):
                decoded_ns = time.monotonic_ns()
                time_s = None if frame.time is None else float(frame.time)
                if self._pace.wait(time_s):
                    captured_ns = decoded_ns = time.monotonic_ns()
                else:
                    captured_ns = self._place.captured_ns(time_s, came.pop(frame.pts, decoded_ns))
                if len(came) > MOST_PACKETS:
                    came.clear()  # of pictures that the decoder has dropped
                found = _Decoded(frame, Picture(index, frame.pts, time_s, captured_ns, decoded_ns))
                del frame
                yield found
                del found


class _Decoded:
    """One decoded picture, for any number of streams and their threads."""

    def __init__(self, frame: av.VideoFrame, tag: Picture) -> None:
        self.frame = frame
        self.tag = tag
        self._kept: dict[str, Picture] = {}
        self._lock = threading.Lock()

    @property
    def index(self) -> int:
        return self.tag.index

    def kept(self, format: str) -> Picture:  # noqa: A002  (the word that FFmpeg uses)
        """Return the tag with the picture in its own size."""
        with self._lock:
            if format not in self._kept:
                self._kept[format] = replace(self.tag, pixels=Pixels(format=format).of(self.frame))
            return self._kept[format]


def video(
    source: str | Path | Camera,
    burst: Burst | None = None,
    *,
    input: str = "input",  # noqa: A002  (the word that models use)
    pixels: Pixels | None = None,
    keep: bool = False,
    paced: bool = False,
    options: Mapping[str, str] | None = None,
    timeout_s: float | None = 10.0,
) -> Generator[Item, None, None]:
    """Return the pictures of a source, each an `aionn.Item` with a `Picture` as its tag. Iterate it in `burst.map`.

    Args:
        source: a file, a URL, or a device: "/dev/video0", or "FORMAT:NAME" for any input format of FFmpeg, as in "v4l2:/dev/video2". A
            `Camera` is shared with other streams. It has its own `paced`, `options` and `timeout_s`.
        burst: the burst whose `map` iterates the source. Pictures are written into its frames. None: each item holds a new array, of
            float32.
        input: the model's input.
        pixels: how a picture becomes a tensor. None: `Pixels()`.
        keep: let the tag hold the decoded picture too, in its own size, to be drawn on or to be cut.
        paced: give pictures of a file at the times at which they are to be shown, as a camera does.
        options: for FFmpeg, as in {"video_size": "640x480", "framerate": "30"}.
        timeout_s: how long opening, and each read of a URL, may take.

    Raises:
        CallerError: an argument is wrong.
        SourceError: while iterating: the source cannot be opened or read, or has no video stream.
    """
    shared = isinstance(source, Camera)
    if shared and (paced or options is not None):
        raise CallerError("a shared camera has its own paced and options; give them to Camera(...) and not to video(...)")
    camera = source if isinstance(source, Camera) else Camera(source, paced=paced, options=options, timeout_s=timeout_s)
    found: Any = _pictures(camera, shared, burst, input, pixels or Pixels(), keep)
    found.__qualname__ = f"video {camera.name}"  # what a warning about a source that blocks calls it
    return found  # type: ignore[no-any-return]


def audio(
    source: str | Path,
    *,
    input: str = "input",  # noqa: A002  (the word that models use)
    samples: int = 512,
    rate: int = 16_000,
    context: int = 0,
    paced: bool = False,
    options: Mapping[str, str] | None = None,
    timeout_s: float | None = 10.0,
) -> Generator[Item, None, None]:
    """Return the sound of a source in blocks, each an `aionn.Item` with a `Sound` as its tag. The last block ends in silence.

    Each item holds a float32 array of shape (1, context + samples), mono, from -1 to 1.

    Args:
        source: a file, a URL, or a microphone: "alsa:default", or "pulse:default" where PyAV was built with it.
        input: the model's input.
        samples: of each block. rate: samples per second; other rates are resampled.
        context: so many samples of the block before stand in front of each block. They are silence before the first block.
        paced: give blocks of a file at the pace at which they are to be heard, as a microphone does.
        options: for FFmpeg.
        timeout_s: how long opening, and each read of a URL, may take.

    Raises:
        CallerError: an argument is wrong.
        SourceError: while iterating: the source cannot be opened or read, or has no audio stream.
    """
    place = _Place.of(source, options, timeout_s)
    samples, rate = checked_count("samples", samples, 1), checked_count("rate", rate, 1)
    context = checked_count("context", context, 0, samples)
    found: Any = _sounds(place, input, samples, rate, context, paced)
    found.__qualname__ = f"audio {place.name}"
    return found  # type: ignore[no-any-return]


# --- opening and reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """What to open, and how. `format`: FFmpeg's input format, or None to find out."""

    name: str
    format: str | None
    options: dict[str, str]
    timeout_s: float | None

    @classmethod
    def of(cls, source: str | Path, options: Mapping[str, str] | None, timeout_s: float | None) -> _Place:
        if not isinstance(source, str | Path) or not str(source):
            raise CallerError(f"source={source!r}; give a path, a device such as '/dev/video0', or a URL")
        device = None if isinstance(source, Path) else re.fullmatch(r"([a-z]\w+):(?!//)(.+)", source)
        seconds, given = checked_seconds("timeout_s", timeout_s), options or {}
        if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in (*given, *given.values())):
            raise CallerError(f"options={options!r}; give a dict of texts, as in options={{'framerate': '30'}}")
        if device is not None and device[1] in ",".join(av.formats_available).split(","):
            return cls(device[2], device[1], dict(given), seconds)
        camera = "v4l2" if str(source).startswith("/dev/video") else None
        return cls(str(source), camera, dict(given), seconds)

    def open(self, kind: str) -> InputContainer:
        """Open the source, which must have a stream of that kind: "video" or "audio".

        Raises:
            SourceError: it cannot be opened, or has no such stream.
        """
        try:
            container = av.open(self.name, format=self.format, options=self.options, timeout=self.timeout_s)
        except (av.FFmpegError, OSError, ValueError) as error:
            raise self.error(f"cannot be opened: {self._reason(error)}") from error
        if not getattr(container.streams, kind):
            found = " and ".join(stream.type for stream in container.streams)
            container.close()
            raise self.error(f"has no {kind} stream" + (f", but {found}" if found else ""))
        return container

    def read(self, decoded: Iterable[T]) -> Iterator[T]:
        """Yield what a decoder yields.

        Raises:
            SourceError: the source cannot be read any further.
        """
        iterator = iter(decoded)
        while True:
            try:
                found = next(iterator)
            except (StopIteration, av.EOFError):
                return
            except (av.FFmpegError, OSError) as error:
                raise self.error(f"cannot be read any further: {self._reason(error)}") from error
            yield found
            del found  # a picture must not be held while the next one is decoded

    def decoded(self, packets: Iterable[av.Packet[Any]]) -> Iterator[Any]:
        """Yield what packets decode to. One that cannot be decoded is left out: a camera sends such where data is lost on its way.

        Raises:
            av.FFmpegError: no packet can be decoded, or not one of many in a row.
        """
        wrong: av.FFmpegError | None = None
        good, bad = False, 0  # whether something was decoded, and packets since then that were left out
        for packet in packets:
            try:
                frames = packet.decode()
            except av.EOFError:
                break
            except av.FFmpegError as error:  # mostly an InvalidDataError, but each decoder has its own
                if wrong is None:
                    logger.warning("source %r: packets that cannot be decoded are left out (%s)", self.name, self._reason(error))
                wrong, bad = error, bad + 1
                if bad == MOST_BAD_PACKETS:
                    raise
                continue
            if frames:
                good, bad = True, 0
            yield from frames
            del frames  # a picture must not be held while the next one is decoded
        if wrong is not None and not good:
            raise wrong

    def captured_ns(self, time_s: float | None, came_ns: int) -> int:
        """Return when a picture was captured. The kernel stamps those of V4L2 devices, by the monotonic clock with most drivers."""
        stamped_ns = int((time_s or 0.0) * 1e9)
        return stamped_ns if self.format == "v4l2" and 0 <= came_ns - stamped_ns < RECENT_NS else came_ns

    def error(self, what: str) -> SourceError:
        return SourceError(f"{self.name!r} {what}; give a file, camera, microphone or URL that FFmpeg reads", source=self.name)

    def _reason(self, error: Exception) -> str:
        """Return the reason without the number and the path that PyAV adds."""
        if isinstance(error, av.ExitError):
            return f"it gave nothing within {self.timeout_s:g} s"
        return (getattr(error, "strerror", None) or str(error)).rstrip(".")


class _Pace:
    """When to give what a file holds."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._began_s: float | None = None

    def wait(self, time_s: float | None) -> bool:
        """Wait until what is `time_s` seconds into the source is due. Returns whether the source is paced."""
        if not self._wanted or time_s is None:
            return False
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s - time_s
        time.sleep(max(0.0, self._began_s + time_s - now_s))
        return True


def _pictures(camera: Camera, shared: bool, burst: Burst | None, name: str, pixels: Pixels, keep: bool) -> Generator[Item, None, None]:
    reformatter, seen = VideoReformatter(), -1
    try:
        while (found := camera._after(seen)) is not None:
            seen = found.index
            picture = pixels.of(found.frame, reformatter)
            tag = found.kept(pixels.format) if keep else found.tag
            del found  # a source that blocks holds no picture
            shape = pixels.shape(picture)
            if burst is None:
                array = np.empty(shape, np.float32)
                pixels.write(picture, array)
                yield Item({name: array}, tag, tag.captured_ns)
                continue
            leased = burst.lease({name: shape})
            pixels.write(picture, leased[name])
            leased.captured_ns = tag.captured_ns
            item = Item(leased, tag)
            del leased, picture, tag
            yield item
            del item  # a source that blocks holds no frame
    finally:
        if not shared:
            camera.close()


def _sounds(place: _Place, name: str, samples: int, rate: int, context: int, paced: bool) -> Generator[Item, None, None]:
    pace, before = _Pace(paced), np.zeros(context, np.float32)
    with place.open("audio") as container:
        resampler = av.AudioResampler(format="fltp", rate=rate, frame_size=samples)

        def resampled() -> Iterator[av.AudioFrame]:
            for frame in place.decoded(container.demux(audio=0)):
                yield from resampler.resample(frame)
            yield from resampler.resample(None)

        for index, frame in enumerate(place.read(resampled())):
            block = np.zeros((1, context + samples), np.float32)
            sound = frame.to_ndarray().mean(axis=0, dtype=np.float32)  # FFmpeg's way to mono makes sound louder than its channels
            block[0, :context] = before
            block[0, context : context + len(sound)] = sound
            before = block[0, samples:].copy()
            pace.wait((index + 1) * samples / rate)
            yield Item({name: block}, Sound(index, index * samples / rate, time.monotonic_ns()))
