"""Adapters beside what they replace: `python -m tests.bench adapters [--row D1,D2] [--rounds 5] [--frames 150]`.

Rows, one figure or more each, with the bound that aionn means to reach. Ratios are computed within a round; their median is judged.
    D1    a detector of Frigate: answers that differ from plain ONNX Runtime with the table's decoding, the time that the way to the
          driver adds beside a session with default options and beside one with the driver's (a thread for each usable CPU, no spinning),
          and the time from the driver's SIGKILL to the next right answer
    D2    six cameras at 10 pictures a second: p99 and memory beside a detector process of ONNX Runtime, which is fed as Frigate feeds its
          own: pictures in shared memory, names through a queue
    D3    16 satellites of Home Assistant: scores and CPU of `aionn serve-wyoming` beside `pyopen-wakeword`, in process and behind the
          package `wyoming`
    D4    four calls of a LiveKit job that wait when the driver is killed: until all have ended, and the time of the next one
    D5    voices of Pipecat: states of ten minutes of speech, and the CPU time of sixteen voices, beside Pipecat's own analyzer
A detector process of Frigate has one session with default options. Here it imports NumPy and ONNX Runtime only, so it is leaner than
Frigate's. Memory is PSS: of that process, and of `aionn serve-frigate` with its driver and template.
"""

from __future__ import annotations

import argparse
import os

import uvloop

from tests.bench.adapters_frigate import cameras, detector
from tests.bench.adapters_wyoming import satellites
from tests.bench.real_report import Groups, Options, Report, measure, print_measured, rows_among


async def _deaths(report: Report, options: Options) -> None:
    from tests.bench.adapters_voice import deaths  # it needs what tests/adapters/voice.txt has

    await deaths(report, options)


async def _voices(report: Report, options: Options) -> None:
    from tests.bench.adapters_voice import voices

    await voices(report, options)


GROUPS: Groups = ((("D1",), detector), (("D2",), cameras), (("D3",), satellites), (("D4",), _deaths), (("D5",), _voices))
ROWS = tuple(row for rows, _ in GROUPS for row in rows)


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", "--rows", type=rows_among(ROWS), default=frozenset(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each row")
    parser.add_argument(
        "--frames", type=int, default=150, help="per round: pictures of a camera, steps of 80 ms, or chunks of 20 ms of sound"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    report = Report(options.row, quiet=options.json)
    where = f"not pinned; {options.rounds} rounds of {options.frames} pictures a camera; load {os.getloadavg()[0]:.1f}"
    how = Options(options.rounds, options.frames, None)
    print_measured(report, where, options.json, lambda: uvloop.run(measure(GROUPS, report, how)))
