"""The house counts what there is to carry, and what a call runs through. The bounds may only fall.

`python -m tests.bench walk` and `python -m tests.bench size` print the counts. A bound is the count that was measured when it was
set. Tasks of the runtime run beside a step by chance, so the bounds of calls and bytecodes leave some per cent for them: nine of ten
walks keep a bound.
"""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import size

pytestmark = pytest.mark.no_cover  # it reads code, or runs it in another process

# step: calls, files, bytecodes (of Python 3.11)
MOST: dict[str, tuple[int, int, int]] = {
    "compile without cache": (225, 36, 5_580),  # 5,460 to 5,570 in different runs of the same code
    "MISS": (350, 51, 8_360),  # 8,199 to 8,353 in different runs of the same code
    "HIT": (216, 44, 5_900),  # 43 or 44 files in different runs of the same code, 5,761 to 5,893 bytecodes
    "compute, first of a compilation": (337, 41, 9_800),  # with the opening, which takes the memory of the first frame
    "compute, hot": (12, 5, 395),  # 375 to 395 in different runs of the same code
    "burst, open": (208, 30, 6_110),  # with the memory of the first frame, which the first call had to make
    "burst.compute, usual": (6, 3, 254),  # 253 or 254 in different runs of the same code
    "swap": (1_390, 75, 35_700),  # quiet: 1,166, 70, 28,884; under load the loop turns more often
}
# 370 of them are the template of drivers, 767 bursts for threads without a loop and further clients, 1,150 the joining of requests,
# 165 (and 192 of C) the chains that wait in a driver,
# 15 the frames of a blocking burst, 18 of C the coroutine of a blocking call, 12 that a step of a thread and a swap see each other,
# 34 of C how many bursts take turns,
# 59 of C what the handlers of signals raise, 50 the claim of a request that its caller may leave, 15 that its place is free then,
# 1,110 the service of all apps (it may have 2,500)
# 24 the extra `cli`, completion, names of models in `cache ls`,
# 116 the camera that streams share, and tensors of what is cut from pictures,
# 124 the engine for .tflite files, 8 what anyio needs in a callback where sniffio is installed
# 348 the quotas, idle executables, quarantine and sealed memory in a driver that apps share
# 21 the memory beside a page of a driver, which others may write to,
# 94 the bounds of one process in a shared driver, and descriptors of the files beside a model for a service that opens no path
# 567 the server for the detectors of Frigate, 500 the server for satellites of Home Assistant
# 175 the executor for LiveKit and the analyzer for Pipecat
# 26 the end of what a client of a service leaves under way, and of drivers of a service that was replaced
# 13 the cache files that a driver has verified, and does not read again while they stay the same
# 25 a service that starts without the libraries of the command line
# 14 what compiles and computes, imported when an open runtime needs it
# 17 the look for engines without `importlib.metadata`, where no other package has some
# 35 the memory of a burst's first frame, which goes to the driver with the opening
# 249 a service that gives its rights away, and the process that starts its drivers
# 26 threads of a model that start when all of them work
# 18 a template that imports the library of a further device
# 21 sentences with a way out, and the log of a damaged entry, where a hostile user found none
# 60 digests that a service makes once for all apps (row V2); 8 went with the bound of what a driver gives back after a compile
# 33 what one hostile app of a service could do to the others, and drivers that do not end when they are killed
# 73 bounds of what one app of a service holds (threads, descriptors, variables, buffers that grow, small memories, calls that wait, models
#    without a file), files that changed just now, and a service that imports no NumPy (rows V1 and V3)
# 55 adapters: packets that cannot be decoded, a model whose first run never ends, sockets that are removed, and smaller mends
# 4 the end of a runtime that a thread meets as a queue of its driver
MOST_CODE_LINES = 45_511
MOST_FILES = 328
MOST_LINES_OF_C = 5_880
MOST_NAMES_DEFINED_TWICE = 0
MOST_VERBS_FOR_AN_END = 6


def test_a_call_runs_through_no_more_code_than_before() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "tests.bench", "walk", "--json"]
    kinds = 3 if sys.version_info[:2] == (3, 11) else 2  # other versions of Python have other bytecodes
    least: dict[str, tuple[int, ...]] = {}
    for _ in range(8):  # what arrives at once, or one turn of the loop later, differs
        found = json.loads(subprocess.run(command, cwd=root, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout)
        for step, entry in found.items():
            counts = tuple(entry[what] for what in ("calls", "files", "bytecodes")[:kinds])
            least[step] = tuple(map(min, counts, least.get(step, counts)))
        more = {step: (counts, MOST[step]) for step, counts in least.items() if any(map(operator.gt, counts, MOST[step]))}
        if not more:
            break
    assert least.keys() == MOST.keys()
    assert more == {}


def test_there_is_no_more_code_than_before() -> None:
    found = size.measured()
    assert found["code lines"] <= MOST_CODE_LINES
    assert found["files"] <= MOST_FILES
    assert found["lines of C"] <= MOST_LINES_OF_C
    assert len(found["class names defined twice"]) <= MOST_NAMES_DEFINED_TWICE
    assert len(found["verbs for an end"]) <= MOST_VERBS_FOR_AN_END


def test_a_code_line_is_no_comment_and_no_docstring() -> None:
    heading = '"""A module."""\n\n# a comment\nx = [\n    1,\n]  # code\n'
    text = heading + 'def f() -> str:\n    """Return a text.\n\n    Lines."""\n    return """a\n\n# b"""\n'
    assert size.code_lines(text) == 7
