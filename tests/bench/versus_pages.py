"""Writes the figures of `tests.bench.versus` into pages of docs/, and draws their pictures.

A page keeps its prose. What stands between `<!-- measured: NAME -->` and `<!-- end of NAME -->` is written here: the machine, a table and a
picture for each row, the rows that aionn loses, the table of all ways, and the code of each way as it stands in the bench.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from aionn.cli.bench import machine_line

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / "explanation" / name for name in ("benchmarks.md", "compared-with.md"))
FIGURES = ROOT / "docs" / "explanation" / "benchmarks.json"
PICTURES = ROOT / "docs" / "pictures"
CODE = "tests/bench/versus_contenders.py"
SERVER = "tests/bench/versus_litserve.py"
OTHER_SIDES = {"shared memory": "tests/bench/real_worker.py", "LitServe": SERVER}
"""Files that hold the other process of a way."""

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A figure that a page shows. Less is better in each."""

    name: str
    title: str
    condition: str
    unit: str

    @property
    def picture(self) -> str:
        return "versus-" + re.sub(r"\W+", "-", self.name) + ".svg"


ROWS = (
    Row("one, p50", "A frame of Silero VAD, one stream", "31 frames a second, 3.3 kB in, 1 kB out; median from call to answer", "us"),
    Row("sixteen, p50", "16 streams", "Silero VAD, each stream 31 times a second; median from the time when a frame is due", "us"),
    Row("sixty-four, p99", "64 streams", "1,984 frames a second; 99 % of them from the time when a frame is due", "us"),
    Row("detector, p50", "A picture of a text detector", "10 a second, 2.9 MB in, 1 MB out, two threads; median of the call", "us"),
    Row("one, cpu", "CPU time of a frame of Silero VAD", "one stream; app and all its processes, divided by the frames", "us"),
    Row("sixty-four, cpu", "CPU time of a frame, 64 streams", "the same with 64 streams", "us"),
    Row("memory", "Memory of an app with one model", "app and all its processes after the first result; shared pages divided (PSS)", "MB"),
    Row("start", "From nothing to the first result", "a fresh process and Silero VAD, 1.2 MB; aionn has it in its cache", "ms"),
    Row("large start", "The same with a model of 134 MB", "a fresh process, to the first result", "ms"),
    Row("four apps", "Four apps with a model of 134 MB", "all apps, their drivers and the service; shared pages divided (PSS)", "MB"),
    Row(
        "death",
        "From SIGKILL to the next right answer",
        "one stream; the process with the model is killed, failed calls are made again",
        "ms",
    ),
)


# ---- figures -----------------------------------------------------------------------------------------------------------------


def ours(row: Row) -> str:
    """Return the lane of a row with which all others are compared."""
    return {"large start": "aionn, hit", "four apps": "aionn, one service"}.get(row.name, "aionn")


def known(figures: list[float | None]) -> list[float]:
    return [figure for figure in figures if figure is not None]


def ratios(lanes: Mapping[str, list[float | None]], of: str, by: str) -> list[float]:
    """Return one way's figure divided by the other's, for each round that has both."""
    pairs = zip(lanes.get(of, ()), lanes.get(by, ()), strict=False)  # a run may lack a way
    return [a / b for a, b in pairs if a is not None and b is not None]


def size(figure: float, unit: str) -> str:
    """Return a figure with two or three digits, in the unit that fits."""
    if unit == "MB":
        return f"{figure:.0f} MB"
    figure_us = figure * 1e3 if unit == "ms" else figure
    for limit, by, name in ((1e3, 1, "us"), (1e6, 1e3, "ms")):
        if figure_us < limit:
            return f"{digits(figure_us / by)} {name}"
    return f"{digits(figure_us / 1e6)} s"


def digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


MOST_RUNS = 4
"""So many runs are kept, with the new one."""

LEAST_SPREAD = 1.05
"""An interval reaches at least by this factor to both sides: a machine is never the same again."""


def interval(found: list[float]) -> tuple[float, float]:
    """Return where the median ratio of another run is expected.

    It reaches from the least to the greatest of the rounds, and half as far again to both sides. With five rounds and normal logarithms,
    99 of 100 medians of the same machine lie in it.
    """
    low, middle, high = min(found), statistics.median(found), max(found)
    beyond = math.sqrt(high / low)
    return min(low / beyond, middle / LEAST_SPREAD), max(high * beyond, middle * LEAST_SPREAD)


def runs(found: Found) -> list[Found]:
    """Return a run and those before it, which are kept with it. They may be of other machines, whose ratios differ."""
    return [found, *found.get("before", ())]


def following(found: dict[str, Any], kept: Found) -> dict[str, Any]:
    """Return a run with the ones that are kept as those before it."""
    return {**found, "before": [{name: run[name] for name in run if name != "before"} for run in runs(kept)][: MOST_RUNS - 1]}


def expected(found: Found, row: Row, way: str) -> tuple[float, float]:
    """Return the interval that holds those of all runs that are kept."""
    pairs = [pairs for run in runs(found) if (pairs := ratios(run["rows"].get(row.name, {}), ours(row), way))]
    lows, highs = zip(*map(interval, pairs), strict=True)
    return min(lows), max(highs)


def ratio_text(found: Found, row: Row, way: str) -> str:
    """Return the median ratio of a run, with the interval in which that of another run is expected."""
    low, high = expected(found, row, way)
    return f"{digits(statistics.median(ratios(found['rows'][row.name], ours(row), way)))} ({digits(low)} to {digits(high)})"


def outside(kept: Found, again: Found) -> list[str]:
    """Return a line for each ratio of another run that lies outside of its interval."""
    lines, count = [], 0
    for row in ROWS:
        for way in kept["rows"][row.name]:
            pairs, others = (ratios(found["rows"].get(row.name, {}), ours(row), way) for found in (kept, again))
            if way == ours(row) or not pairs or not others:
                continue
            count += 1
            (low, high), ratio = expected(kept, row, way), statistics.median(others)
            if not low <= ratio <= high:
                lines.append(f"{row.title}: aionn / {way} is {digits(ratio)}, and was {ratio_text(kept, row, way)}")
    return [*lines, f"{count - len(lines)} of {count} ratios lie within the interval that the page states"]


def sorted_lanes(lanes: Mapping[str, list[float | None]]) -> list[tuple[str, list[float]]]:
    return sorted(((way, known(figures)) for way, figures in lanes.items() if known(figures)), key=lambda lane: statistics.median(lane[1]))


def table(found: Found) -> str:
    """Return all figures as a table for a terminal."""
    lines = []
    for row in ROWS:
        lanes = found["rows"].get(row.name, {})
        lines.append(f"\n{row.title}: {row.condition}")
        for way, figures in sorted_lanes(lanes):
            pairs = ratios(lanes, ours(row), way) if ours(row) in lanes and way != ours(row) else []
            ratio = f"aionn / it {ratio_text(found, row, way)}" if pairs else ""
            lines.append(f"  {way:28} {size(statistics.median(figures), row.unit):>9}   {ratio}")
    return "\n".join(lines)


# ---- parts of pages ----------------------------------------------------------------------------------------------------------


MOST_BUSY = 0.2
"""The share of the CPUs that other programs may use. `aionn bench` warns from the same share on."""


def machine_part(found: Found) -> str:
    machine, versions = machine_line(found["machine"]).splitlines()
    others = f"Other programs used {found['others']:.0%} of the CPUs meanwhile, daemons of Ray among them."
    if found["others"] > MOST_BUSY:
        others += f" **No figure can be trusted where that is more than {MOST_BUSY:.0%}: repeat it on a quiet machine.**"
    took = f"Measured on {found['date']} in {found['seconds'] / 60:.0f} minutes and {found['rounds']} rounds."
    text = f"{took} {others}\n\n```text\n{machine}\n{versions}\n```"
    earlier = [f"{run['date']}  {machine_line(run['machine']).splitlines()[0]}" for run in runs(found)[1:]]
    return "\n".join([text, "\nThe intervals of the ratios count earlier runs, too:\n", "```text", *earlier, "```"]) if earlier else text


def row_part(row: Row, found: Found) -> str:
    lanes = found["rows"][row.name]
    mine = ours(row)
    lines = [
        f"![{row.title}: {row.condition}](../pictures/{row.picture})",
        "",
        "| way | median | least and most of the rounds | aionn divided by it |",
        "|---|--:|--:|--:|",
    ]
    for way, figures in sorted_lanes(lanes):
        spread = f"{size(min(figures), row.unit)} to {size(max(figures), row.unit)}"
        name = f"**{way}**" if way == mine else f"[{way}](#{anchor(way)})" if way in sections() else way
        ratio = "" if way == mine or not known(lanes[mine]) else ratio_text(found, row, way)
        lines.append(f"| {name} | {size(statistics.median(figures), row.unit)} | {spread} | {ratio} |")
    silent = [way for way, figures in lanes.items() if not known(figures)]
    if silent:
        lines += ["", f"No right answer came within 30 s from {' and '.join(silent)}."]
    return "\n".join(lines)


def lost_part(found: Found) -> str:
    """Return the rows in which another way was better in each round of a run that is kept."""
    lines = ["| row | better than aionn in each round: aionn divided by it |", "|---|---|"]
    for row in ROWS:
        better = []
        for way, _ in sorted_lanes(found["rows"][row.name]):
            of_runs = [ratios(run["rows"].get(row.name, {}), ours(row), way) for run in runs(found)]
            if way != ours(row) and any(pairs and min(pairs) > 1 for pairs in of_runs) and of_runs[0]:
                better.append(f"{way} {ratio_text(found, row, way)}")
        if better:
            lines.append(f"| {row.title} | {', '.join(better)} |")
    return "\n".join(lines)


WAYS_ROWS = ("one, p50", "detector, p50", "one, cpu", "memory", "start", "death")


def ways_part(found: Found) -> str:
    """Return the table of all ways: one column for each row."""
    rows = [row for row in ROWS if row.name in WAYS_ROWS]
    lines = ["| | " + " | ".join(row.title for row in rows) + " |", "|---|" + "--:|" * len(rows)]
    for way in sections():
        cells = []
        for row in rows:
            lane = found["rows"][row.name].get(way)
            figures = known(lane or [])
            cells.append(size(statistics.median(figures), row.unit) if figures else "-" if lane is None else "none in 30 s")
        lines.append(f"| {f'**{way}**' if way == 'aionn' else way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sections() -> dict[str, str]:
    """Return the code of each way, as it stands in the bench."""
    parts = re.split(r"^# ---- (.+?) -+\n", (ROOT / CODE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True) if name != "all of them"}


def anchor(way: str) -> str:
    return way.lower().replace(" ", "-")


def code_part(found: Found) -> str:
    parts = []
    for way, text in sections().items():
        parts.append(f"### {way}\n\n<!-- source: {CODE} -->\n```python\n{text}\n```")
        if other := OTHER_SIDES.get(way):
            whole = (ROOT / other).read_text(encoding="utf-8")
            kept = whole[re.search(r"^(?:PR_SET|import litserve)", whole, re.MULTILINE).start() :].strip()  # type: ignore[union-attr]
            parts.append(f"Its other process:\n\n<!-- source: {other} -->\n```python\n{kept}\n```")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[Found], str]] = {
    "machine": machine_part,
    "lost": lost_part,
    "ways": ways_part,
    "code": code_part,
    **{row.name: lambda found, row=row: row_part(row, found) for row in ROWS},  # type: ignore[misc]
}


def filled(text: str, found: Found) -> str:
    """Return a page with its measured parts written anew."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- measured: {name} -->\n\n{PARTS[name](found)}\n\n<!-- end of {name} -->"

    return re.sub(r"<!-- measured: (.+?) -->\n.*?<!-- end of \1 -->", part, text, flags=re.DOTALL)


def write() -> None:
    """Write the pages and the pictures from the figures that are there."""
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    for row in ROWS:
        (PICTURES / row.picture).write_text(picture(row, found), encoding="utf-8")


# ---- pictures ----------------------------------------------------------------------------------------------------------------

WIDTH, LABEL, VALUE, LINE, HEAD = 640, 176, 80, 28, 52
MOST = 4.0
"""A bar that is longer than so many times aionn's is cut. Otherwise the short bars would all look alike."""

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 12px; fill: #59636e }
.bar { fill: #b4bac2 } .ours { fill: #3f51b5 } .whisker { stroke: #1f2328; stroke-width: 1.5 } .cut { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ef } .small { fill: #a9b1bd } .bar { fill: #596273 } .ours { fill: #8c9eff }
.whisker { stroke: #e6e9ef } .cut { fill: #1e2129 }
}
"""


def picture(row: Row, found: Found) -> str:
    """Return a picture (SVG) with a bar for each way: its length is the median, and the line on it reaches from the least to the most."""
    lanes = found["rows"][row.name]
    mine, ordered = ours(row), sorted_lanes(lanes)
    medians = {way: statistics.median(figures) for way, figures in ordered}
    longest = min(max(medians.values()), MOST * medians[mine]) if mine in medians else max(medians.values())
    longest = max(longest, *(max(figures) for way, figures in ordered if medians[way] <= longest)) if ordered else longest
    room = WIDTH - LABEL - VALUE
    height = HEAD + LINE * len(ordered) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(row.title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(row.title)}</text><text class="small" x="0" y="38">{escape(row.condition)}</text>',
    ]
    for number, (way, figures) in enumerate(ordered):
        top, length = HEAD + LINE * number, min(medians[way], longest) / longest * room
        middle = top + 9
        parts.append(f'<text x="{LABEL - 8}" y="{top + 14}" text-anchor="end">{escape(way)}</text>')
        parts.append(f'<rect class="{"ours" if way == mine else "bar"}" x="{LABEL}" y="{top}" width="{length:.1f}" height="18" rx="2"/>')
        if medians[way] > longest:
            at = LABEL + length - 24
            parts.append(f'<path class="cut" d="M{at:.0f} {top - 1}l5 0l-5 20l-5 0zM{at + 9:.0f} {top - 1}l5 0l-5 20l-5 0z"/>')
        elif len(figures) > 1:
            low, high = (LABEL + figure / longest * room for figure in (min(figures), max(figures)))
            parts.append(
                f'<path class="whisker" fill="none" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"/>'
            )
            length = max(length, high - LABEL)
        parts.append(f'<text x="{LABEL + length + 8:.1f}" y="{top + 14}">{size(medians[way], row.unit)}</text>')
    return "\n".join([*parts, "</svg>\n"])
