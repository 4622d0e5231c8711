"""Makes the moving picture of the live page: a browser shows the page, and what it showed becomes an animated SVG.

`docs/screenshots.py --only live` runs it. The camera sees parcels on a belt, and the microphone hears a recording. Everything else is
real: both models, the swap to the better stage, the death of the drivers, and each figure. The SVG has the colours of the page.
"""

from __future__ import annotations

import base64
import io
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import soundfile
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError
from playwright.sync_api import sync_playwright

LIVE = Path(__file__).parents[1] / "examples" / "live"

BEFORE_SWAP_S, BEFORE_DEATH_S, AFTER_DEATH_S = 3.5, 3.5, 4.5
SWAP_WITHIN_S = 60
STEP_S = 0.3  # between two pictures of the camera, and two figures

WIDTH, HEIGHT = 900, 384
PICTURE = (320, 256)  # the camera's
RIGHT, PANEL = 412, 476  # where the right half begins, and how wide it is
PAST_S = 8.0  # sound and latencies that can be seen at once
LATENCIES_MS = (1, 10, 100, 1000, 10_000)
HEADS = ["Frames/s", "Age ms", "Drops", "Stage", "Recovered"]
CELLS = ("fps", "age", "drops", "stage", "recovered")


@dataclass
class Step:
    """What the page showed at one moment: `at` in ms of its clock, the camera's picture with its boxes, its words and the two rows."""

    at: float
    picture: str
    status: str
    mark: str
    rows: list[list[str]]
    events: list[list[str]]


@dataclass
class Recording:
    """What the page showed: `steps`, and `data` as `live()` of the page returns it at the end. `colours`: its style sheet."""

    steps: list[Step]
    data: dict[str, Any]
    colours: str


def parcels(path: Path) -> None:
    """Write a film (MJPEG) of a belt with labelled parcels, which can be repeated without a jump."""
    labels = ("GATE 7", "FRAGILE", "BERLIN", "THIS SIDE UP", "PARCEL 0417", "EXIT 12 A")
    font, number = ImageFont.load_default(34), 300
    length = 320 * len(labels)
    with path.open("wb") as film:
        for frame in range(number):
            image = Image.new("RGB", (640, 512), "#8d99a6")
            pen = ImageDraw.Draw(image)
            pen.rectangle((0, 330, 640, 512), "#33383e")
            moved = frame * length / number
            for tick in range(-1, 16):
                left = tick * 48 - moved % 48
                pen.line((left, 330, left - 40, 512), "#464c54", 4)
            for index, label in enumerate(labels):
                left = (index * 320 - moved) % length - 320
                top = 150 if index % 2 else 190
                pen.rectangle((left, top, left + 280, 420), "#b98b5a" if index % 3 else "#c99f6b")
                pen.rectangle((left, top, left + 280, top + 18), "#a3784b")
                pen.rectangle((left + 10, top + 70, left + 270, top + 140), "#f7f5ef")
                pen.text((left + 140, top + 105), label, "#1b1b1b", font, anchor="mm")
            image.save(film, "JPEG", quality=90)


@contextmanager
def served() -> Iterator[str]:
    """Run the server of the live page during the body. Returns its address."""
    process = subprocess.Popen(
        [sys.executable, str(LIVE / "server.py"), "--listen", "127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise LookupError("the server of the live page ended early; its messages are above")
        yield url
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


SHOWN = """() => ({
    at: performance.now(),
    picture: document.getElementById("picture").toDataURL("image/png").split(",")[1],
    status: document.getElementById("status").textContent,
    mark: document.getElementById("mark").textContent,
    rows: ["voice", "camera"].map((name) => CELLS.map((cell) => document.querySelector(`#${name}-row .${cell}`).textContent)),
    events: [...document.querySelectorAll("#events li")].slice(-3).map((line) => [line.className, line.textContent.slice(9)]),
})""".replace("CELLS", str(list(CELLS)))


def record() -> Recording:
    """Show the live page in chromium until a better stage has taken over, and some seconds after the drivers were killed.

    Raises:
        LookupError: there is no chromium, the server ended early, or the better stage did not take over. The sentence says which.
    """
    sys.path.insert(0, str(LIVE.parent))
    from carriers import packaged

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise LookupError("chromium is not installed; run apt-get install chromium")
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder, served() as url, sync_playwright() as playwright:
        film, speech = Path(folder, "belt.mjpeg"), Path(folder, "speech.wav")
        parcels(film)
        samples, rate = soundfile.read(packaged("moonshine_voice", "assets/two_cities.wav"))
        soundfile.write(speech, samples, rate, subtype="PCM_16")
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--use-fake-ui-for-media-stream",
            "--use-fake-device-for-media-stream",
            f"--use-file-for-fake-video-capture={film}",
            f"--use-file-for-fake-audio-capture={speech}",
            "--autoplay-policy=no-user-gesture-required",
        )
        browser = playwright.chromium.launch(executable_path=chromium, headless=False, args=list(flags))
        page = browser.new_context(viewport={"width": 1000, "height": 700}, permissions=["microphone", "camera"]).new_page()
        page.goto(url)

        def watch(seconds: float) -> Iterator[Step]:
            until_ms = page.evaluate("performance.now()") + seconds * 1e3
            while page.evaluate("performance.now()") < until_ms:
                steps.append(Step(**page.evaluate(SHOWN)))
                yield steps[-1]
                page.wait_for_timeout(max(0.0, STEP_S * 1e3 - (page.evaluate("performance.now()") - steps[-1].at)))

        try:
            page.locator("#camera-row .stage").filter(has_text="onnxruntime").wait_for(timeout=SWAP_WITHIN_S * 1e3)
        except PlaywrightTimeoutError:
            raise LookupError(f"the live page had no answer within {SWAP_WITHIN_S} s; close other programs") from None
        if not any(step.rows[1][CELLS.index("stage")] == "openvino" for step in watch(SWAP_WITHIN_S)):
            raise LookupError(f"OpenVINO did not serve within {SWAP_WITHIN_S} s; install aionn[openvino], or close other programs")
        list(watch(BEFORE_DEATH_S))
        page.click("#kill")
        list(watch(AFTER_DEATH_S))
        data = page.evaluate("live()")
        browser.close()
    style = (LIVE / "page" / "style.css").read_text(encoding="utf-8")
    return Recording(steps, data, style[: style.index("* {")].replace("color-scheme: light dark;", ""))


def sound(recording: Recording, began: float, width: float, height: float) -> str:
    """Return the sound as paths, with bands behind speech."""
    bars: dict[str, list[str]] = {"band": [], "voice": [], "faint": []}
    blocks = recording.data["blocks"]
    per_ms = width / PAST_S / 1e3
    for index, block in enumerate(blocks):
        left = width + (recording.data["now"] - 32 * (len(blocks) - index) - began) * per_ms
        if left < 0:
            continue
        speaks = (block.get("speech") or 0) >= 0.5
        if speaks:
            bars["band"].append(f"M{left:.1f} 0h{32 * per_ms:.2f}")
        part = 32 / len(block["peaks"]) * per_ms
        for number, peak in enumerate(block["peaks"]):
            tall = max(1.0, min(1.0, 3 * peak) * height)
            bars["voice" if speaks else "faint"].append(f"M{left + (number + 0.5) * part:.1f} {(height - tall) / 2:.0f}v{tall:.0f}")
    found = f'<path class="band" d="{"".join(bars["band"])}" stroke-width="{2 * height}"/>'
    for name in ("voice", "faint"):
        found += f'<path class="{name}" d="{"".join(bars[name])}" stroke-width="{16 * per_ms:.2f}"/>'
    return found


def plot(recording: Recording, began: float, width: float, height: float) -> str:
    """Return the latencies as points, with lines for deaths and swaps."""

    def x(at: float) -> float:
        return width + (at - began) * width / PAST_S / 1e3

    points: dict[str, list[str]] = {}
    for name in ("voice", "camera"):
        for answer in recording.data[name]:
            if x(answer["at"]) > 0:
                of = "voice" if name == "voice" else answer["stage"]
                points.setdefault(of, []).append(f"M{x(answer['at']):.1f} {latency_at(answer['age'], height):.0f}h0")
    found = "".join(
        f'<path class="{name}" d="{"".join(all_)}" stroke-width="{2.5 if name == "voice" else 4}"/>' for name, all_ in points.items()
    )
    for mark in recording.data["marks"]:
        at = x(mark["at"])
        if at > 0:
            found += f'<path class="{mark["kind"]}" d="M{at:.1f} 0v{height}" stroke-width="1.5"/>'
            row, label = 12 + mark["row"] * 13, escape(mark["label"])
            found += f'<text class="{mark["kind"]}" x="{at - 4:.1f}" y="{row}" text-anchor="end">{label}</text>'
    return found


def latency_at(ms: float, height: float) -> float:
    """Return the row of a latency in the plot."""
    least, most = math.log(LATENCIES_MS[0]), math.log(LATENCIES_MS[-1])
    share = (math.log(min(max(ms, LATENCIES_MS[0]), LATENCIES_MS[-1])) - least) / (most - least)
    return height - 6 - share * (height - 12)


def cells(name: str, row: list[str], y: int) -> str:
    """Return one row of the table."""
    stage = {"Stream": "faint", "Microphone": "voice"}.get(name, row[CELLS.index("stage")])
    words = (name, *row)
    texts = (f'<tspan x="{x}">{escape(word)}</tspan>' for x, word in zip((12, 96, 156, 212, 254, 336), words, strict=True))
    return f'<text y="{y}" class="{stage}">{"".join(texts)}</text>'


def small(picture: str) -> str:
    """Return the camera's part of a canvas (PNG) as a small WebP, both in base64."""
    found = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        scale = min(image.width / PICTURE[0], image.height / PICTURE[1])
        left, top = (image.width - PICTURE[0] * scale) / 2, (image.height - PICTURE[1] * scale) / 2
        cut = image.convert("RGB").crop((math.ceil(left), math.ceil(top), int(image.width - left), int(image.height - top)))
        cut.resize((320, 256), Image.Resampling.LANCZOS).save(found, "WEBP", quality=40, method=6)
    return base64.b64encode(found.getvalue()).decode()


STYLE = """
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
path { fill: none; stroke-linecap: butt; }
#plot path { stroke-linecap: square; }
#plot text { font-size: 10.5px; paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
.paper { fill: var(--paper); } .panel { fill: var(--panel); } text.faint { fill: var(--faint); } path.line { stroke: var(--line); }
path.band { stroke: var(--band); } path.faint { stroke: var(--faint); }
@media (prefers-reduced-motion: reduce) { * { animation-play-state: paused !important; } }
"""
COLOURED = ("voice", "onnxruntime", "openvino", "death", "start", "swap")


TITLE = (
    "The live page: boxes around text in a video, speech in a sound, and the latency of each frame. "
    "OpenVINO takes over, then the drivers are killed, and new drivers go on."
)


def shown(step: Step, name: str, begins: float, over: float, seconds: float) -> str:
    """Return what the page showed at a step, which is seen from `begins` to `over`, both in per cent of the whole."""
    first = "visible" if begins == 0 else "hidden"
    keyframes = f"0%{{visibility:{first}}}{begins:.2f}%{{visibility:visible}}{over:.2f}%,100%{{visibility:hidden}}"
    lines = (
        f'<text x="{RIGHT}" y="{336 + 17 * index}" class="{kind}">{escape(text)}</text>' for index, (kind, text) in enumerate(step.events)
    )
    return (
        f"<style>@keyframes {name}{{{keyframes}}}#{name}{{animation:{name} {seconds:.2f}s step-end infinite}}</style>"
        f'<g id="{name}"><image x="12" y="34" width="388" height="288" preserveAspectRatio="xMidYMid slice"'
        f' href="data:image/webp;base64,{small(step.picture)}"/>'
        f'<text x="130" y="22" class="faint">{escape(step.status)}</text><text x="{RIGHT}" y="22">Microphone: {escape(step.mark)}</text>'
        f"{cells('Microphone', step.rows[0], 353)}{cells('Camera', step.rows[1], 370)}{''.join(lines)}</g>"
    )


def panel(y: int, height: int, still: str, moving: str, over: str = "") -> str:
    """Return a panel of the right half: what stands still, what moves to the left, and what stands still above it."""
    place = f'x="{RIGHT}" y="{y}" width="{PANEL}" height="{height}"'
    return f'<rect class="panel" {place} rx="4"/><svg {place}>{still}<g class="moves">{moving}</g>{over}</svg>'


def draw(recording: Recording) -> str:
    """Return the recording as an SVG that repeats itself, from some seconds before the swap on."""
    swapped = next(step.at for step in recording.steps if step.rows[1][CELLS.index("stage")] == "openvino")
    steps = [step for step in recording.steps if step.at >= swapped - BEFORE_SWAP_S * 1e3]
    began = steps[0].at
    turns = [*(step.at for step in steps), recording.data["now"]]  # a step may have come late on a busy machine
    seconds = (turns[-1] - began) / 1e3
    percents = [(turn - began) / seconds / 10 for turn in turns]
    drawn = (shown(step, f"s{index}", *percents[index : index + 2], seconds) for index, step in enumerate(steps))
    grid = "".join(f'<path class="line" d="M0 {latency_at(ms, 164):.0f}h{PANEL}"/>' for ms in LATENCIES_MS)
    words = "".join(f'<text class="faint" x="2" y="{latency_at(ms, 164) - 3:.0f}">{ms} ms</text>' for ms in LATENCIES_MS[:-1])
    colours = "".join(f"text.{name}{{fill:var(--{name})}}path.{name}{{stroke:var(--{name})}}" for name in COLOURED)
    moves = f"@keyframes moves{{to{{transform:translateX(-{PANEL / PAST_S * seconds:.1f}px)}}}}"
    moves += f".moves{{animation:moves {seconds:.2f}s linear infinite}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"<title>{TITLE}</title><style>{recording.colours}{STYLE}{colours}{moves}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/><text x="12" y="22" font-weight="700">aionn: live page</text>'
        f"{panel(34, 90, '', sound(recording, began, PANEL, 90))}"
        f'<text x="{RIGHT}" y="142">Latency of each frame</text>'
        f'<g id="plot">{panel(150, 164, grid, plot(recording, began, PANEL, 164), words)}</g>'
        f"{cells('Stream', HEADS, 336)}{''.join(drawn)}</svg>\n"
    )
