"""How aionn does at what users meet, beside what they have already: `python -m tests.bench real [--row P1,P2] [--pinned]`.

Rows, one ratio or more each, with the bound that aionn means to reach. Ratios are computed within a round; their median is judged.
    P1, P5    Silero at 31 frames a second, beside the call in the app's own loop, shared memory with eventfds, and a thread
    P2        a model that does nothing, at 30, 100 and 1,000 frames a second
    P3        calls without a pause, where the scheduler puts the two ends and pinned
    P4        a stream beside a run of seconds in the same driver
    P6        outputs that the app keeps, and requests in flight
    P7        Silero with its state in the driver, by 1 to 64 bursts
    P8        descriptors, memory and opening of a burst
    P9, P10   `compute()` beside a burst and a process pool, and a thousand calls at once
    P11-P15   start-up, cache hits and large models in fresh processes; `tests.bench.starts` says more (P15 only with --large)
    P16, P17  threads and instances: two streams, a batch of pictures beside the best pool of sessions
    P18       a stream with priority high beside a model with priority low that is flat out
    P19, P20  a bound for threads, and anticipation
Times are microseconds, CPU is seconds per 10,000 calls of the app and of the other process.
"""

from __future__ import annotations

import argparse
import os

import uvloop

from tests.bench import real_hot, real_lanes, real_many, real_paced, real_urgent, starts
from tests.bench.real_report import Groups, Options, Report, measure, print_measured, rows_among

GROUPS: Groups = (
    (("P1", "P5"), real_paced.silero),
    (("P2",), real_paced.identity),
    (("P3",), real_hot.placement),
    (("P4",), real_paced.beside_a_long_run),
    (("P6",), real_hot.holding),
    (("P7",), real_many.many_streams),
    (("P8",), real_many.holdings),
    (("P9",), real_hot.one_call),
    (("P10",), real_hot.at_once),
    (("P16",), real_lanes.instances),
    (("P17",), real_lanes.batch),
    (("P18",), real_urgent.priorities),
    (("P19",), real_urgent.bounded_threads),
    (("P20",), real_urgent.anticipation),
)
ROWS = sorted((*starts.ROWS, *(row for rows, _ in GROUPS for row in rows)), key=lambda row: int(row[1:]))


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", "--rows", type=rows_among(ROWS), default=frozenset(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=150, help="frames per lane and round; more at high rates")
    parser.add_argument(
        "--pinned", action="store_true", help="the app on the first CPU, all others on the last; not for P4, P8, P11 to P19"
    )
    parser.add_argument("--large", action="store_true", help="P15, too: a model of 2.4 GB")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))
    cpus = (usable[0], usable[-1]) if options.pinned else None
    where = f"app on CPU {usable[0]}, others on CPU {usable[-1]}" if options.pinned else "not pinned"
    report = Report(options.row, quiet=options.json)

    def act() -> None:
        uvloop.run(measure(GROUPS, report, Options(options.rounds, options.frames, cpus)))
        if report.wanted & set(starts.ROWS):
            starts.measure(report, starts.Options(options.rounds, large=options.large))

    print_measured(report, f"{where}; {options.rounds} rounds of {options.frames} frames", options.json, act)
