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

import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
except ImportError as missing:
    raise ImportError(f"aionn.sources.av needs the package av ({missing}); run pip install 'aionn[av]'") from missing

if TYPE_CHECKING:
    from av.container import InputContainer

__all__ = ["Picture", "Pixels", "Sound", "audio", "video"]

T = TypeVar("T")

FORMATS = ("rgb24", "bgr24", "gray")
LAYOUTS = ("NCHW", "NHWC", "CHW", "HWC")


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

    def of(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """Return a decoded picture as uint8 of shape (height, width, channels)."""
        width, height = self.size or (frame.width, frame.height)
        found: Any = frame.reformat(width=width, height=height, format=self.format).to_ndarray()
        array: NDArray[np.uint8] = found.reshape(height, width, -1)
        return array

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
        decoded_ns: when it had been decoded (CLOCK_MONOTONIC).
        pixels: the picture as uint8 of shape (height, width, channels), or None without `keep`.
    """

    index: int
    pts: int | None
    time_s: float | None
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


def video(
    source: str | Path,
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
        source: a file, a URL, or a device: "/dev/video0", or "FORMAT:NAME" for any input format of FFmpeg, as in "v4l2:/dev/video2".
        burst: the burst whose `map` iterates the source. Pictures are written into its frames. None: each item holds a new array, of
            float32.
        input: the model's input.
        pixels: how a picture becomes a tensor. None: `Pixels()`.
        keep: let the tag hold the picture too, to be drawn on.
        paced: give pictures of a file at the times at which they are to be shown, as a camera does.
        options: for FFmpeg, as in {"video_size": "640x480", "framerate": "30"}.
        timeout_s: how long opening, and each read of a URL, may take.

    Raises:
        CallerError: an argument is wrong.
        SourceError: while iterating: the source cannot be opened or read, or has no video stream.
    """
    place = _Place.of(source, options, timeout_s)
    found: Any = _pictures(place, burst, input, pixels or Pixels(), keep, paced)
    found.__qualname__ = f"video {place.name}"  # what a warning about a source that blocks calls it
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

    def wait(self, time_s: float | None) -> None:
        """Return when it is time for what is `time_s` seconds into the source."""
        if self._wanted and time_s is not None:
            now_s = time.monotonic()
            if self._began_s is None:
                self._began_s = now_s - time_s
            time.sleep(max(0.0, self._began_s + time_s - now_s))


def _pictures(place: _Place, burst: Burst | None, name: str, pixels: Pixels, keep: bool, paced: bool) -> Generator[Item, None, None]:
    pace = _Pace(paced)
    with place.open("video") as container:
        for index, frame in enumerate(place.read(container.decode(video=0))):
            time_s = None if frame.time is None else float(frame.time)
            pace.wait(time_s)
            picture = pixels.of(frame)
            tag = Picture(index, frame.pts, time_s, time.monotonic_ns(), picture if keep else None)
            shape = pixels.shape(picture)
            if burst is None:
                array = np.empty(shape, np.float32)
                pixels.write(picture, array)
                yield Item({name: array}, tag)
                continue
            leased = burst.lease({name: shape})
            pixels.write(picture, leased[name])
            item = Item(leased, tag)
            del leased
            yield item
            del item  # a source that blocks holds no frame


def _sounds(place: _Place, name: str, samples: int, rate: int, context: int, paced: bool) -> Generator[Item, None, None]:
    pace, before = _Pace(paced), np.zeros(context, np.float32)
    with place.open("audio") as container:
        resampler = av.AudioResampler(format="fltp", rate=rate, frame_size=samples)

        def resampled() -> Iterator[av.AudioFrame]:
            for frame in container.decode(audio=0):
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
