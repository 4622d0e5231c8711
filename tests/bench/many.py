"""Many callers at real rates, beside what a good engineer would write: `python -m tests.bench many [--row N1,N4] [--rounds 5]`.

Rows, one ratio or more each, with the bound that aionn means to reach. Ratios are computed within a round; their median is judged.
    N1        64 paced streams of Silero beside `to_thread` over one session
    N2        64 paced streams of Silero that share runs, staggered and in step, beside the same
    N3        16 streams of Silero in a closed loop that share runs, beside one lane without that
    N4        16 paced streams of Silero beside the same
    N5        one paced stream beside 60 lines of shared memory, and beside `to_thread`
    N6        a model that does nothing, 1,000 times a second, beside shared memory
    N7        detector, Silero and low-priority work at once: each beside itself alone
    N8        a chain of two tiny models, in one driver and in two, beside two `compute`
    N9        a chain of preprocessing and detector, with an idle and with a busy loop, beside two `compute`
    N10       the blocking face beside the awaited call, hot and at 31 calls a second
    N11       opening the 64th burst, and the memory that it adds
    N12       one active burst among 64 idle ones; 64 and 200 outputs held
    N13       joining where nothing is joined: a lone caller, a driver that waits, a model that gains nothing; and instances
    N14       64 streams through deaths, swaps and scrapes: two minutes a round, and only if it is named
Contenders measure short segments in turn, unpinned. Times are microseconds from the moment when a frame is due. CPU is seconds per 10,000
frames, of the app and of the other process. N6 and N12 need `--rounds 10`.
"""

from __future__ import annotations

import argparse

import uvloop

from tests.bench import many_blocking, many_chains, many_frames, many_joined, many_joining, many_soak, many_streams
from tests.bench.real_report import Groups, Options, Report, measure, print_measured, rows_among

GROUPS: Groups = (
    (("N1",), many_streams.sixty_four),
    (("N2",), many_joined.joined),
    (("N3",), many_joined.closed),
    (("N4",), many_streams.sixteen),
    (("N5",), many_streams.one),
    (("N6",), many_streams.identity),
    (("N7",), many_streams.mixed),
    (("N8",), many_chains.tiny),
    (("N9",), many_chains.detection),
    (("N10",), many_blocking.blocking),
    (("N11",), many_frames.opening),
    (("N12",), many_frames.idle_and_held),
    (("N13",), many_joining.little),
    (("N14",), many_soak.soak),
)
ROWS = tuple(row for rows, _ in GROUPS for row in rows)


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench many", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", "--rows", type=rows_among(ROWS), default=frozenset(ROWS) - {"N14"}, help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=190, help="frames per stream and round; more at high rates")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    report = Report(options.row, quiet=options.json)
    where = f"not pinned; {options.rounds} rounds of {options.frames} frames a stream"
    how = Options(options.rounds, options.frames, None)
    print_measured(report, where, options.json, lambda: uvloop.run(measure(GROUPS, report, how)))
