"""A fresh process of `tests.bench.versus`: an app that runs one job in one way, `python tests/bench/versus_worker.py JSON`.

It prints a line after its first result, waits until its parent has read its memory, runs paced streams, and prints what they took. Then
it may kill the process that runs the model, and print how long the next right answer took.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))  # the parent passes -P, so the folder of this script is not on the path

from tests.bench.starts_worker import checksum
from tests.bench.versus_contenders import OPEN, Arrays, Job, Opened

ANSWERS = os.dup(1)
"""For the parent. What libraries print goes to stderr."""

CALL_S, PATIENCE_S = 5.0, 30.0
"""After a death: for one call, before it is made again, and for the right answer."""

WARM = 5
PIECES = 64
"""Different inputs, which take turns."""


def tell(**values: Any) -> None:
    """Print one line for the parent."""
    os.write(ANSWERS, json.dumps(values).encode() + b"\n")


def pieces(job: Job) -> list[Arrays]:
    """Return inputs like a sound's or a picture's. The state of a recurrent model stays zero, so all ways compute the same."""
    import numpy as np

    random = np.random.default_rng(0)

    def array(name: str, dtype: str, shape: Sequence[int]) -> Any:
        return np.zeros(shape, dtype) if name == "state" else random.random(shape, np.float32)

    count = PIECES if sum(np.prod(shape) for _, shape in job.inputs.values()) < 10_000 else 2
    return [{name: array(name, *spec) for name, spec in job.inputs.items()} for _ in range(count)]


async def measure(given: dict[str, Any]) -> None:
    job = Job(**given["job"])
    async with OPEN[given["contender"]](job) as opened:
        inputs = pieces(job)
        outputs = await opened.calls[0](inputs[0])
        right = checksum(next(iter(outputs.values())))
        tell(checksum=right)
        await asyncio.to_thread(sys.stdin.readline)
        for number in range(WARM):
            await asyncio.gather(*(call(inputs[number % len(inputs)]) for call in opened.calls))
        tell(**await paced(opened, inputs, given["rate"], given["frames"]))
        if given["kill"]:
            tell(**await killed(opened, inputs[0], right))
    await asyncio.to_thread(sys.stdin.readline)


async def paced(opened: Opened, inputs: list[Arrays], rate: float, frames: int) -> dict[str, Any]:
    """Run all streams at a rate. Times count from the call of a single stream, and from the moment at which a frame of many is due."""
    from tests.bench.machine import process_cpu_ns
    from tests.bench.many_streams import Crowd
    from tests.bench.real_paced import LEAD, Stream, steady, ticking
    from tests.bench.real_subjects import Subject
    from tests.bench.starts_processes import descendants

    def spent_ns() -> int:
        return sum(process_cpu_ns(pid) for pid in (os.getpid(), *descendants(os.getpid())))

    async with ticking() as ticks:
        before_ns, began_ns = spent_ns(), time.monotonic_ns()
        if len(opened.calls) == 1:
            stream = Stream(ticks, opened.calls[0])
            await stream.segment(inputs, steady(rate), frames)
            times_ns = stream.taken_ns
        else:
            crowd = Crowd("", opened.calls)
            await crowd.segment(ticks, Subject("", Path(), inputs), rate, frames)
            times_ns = crowd.late_ns
        cpu_ns, passed_ns = spent_ns() - before_ns, time.monotonic_ns() - began_ns
    count = (frames + LEAD) * len(opened.calls)
    return {"times_ns": times_ns, "cpu_us": cpu_ns / count / 1e3, "per_s": count / (passed_ns / 1e9)}


async def killed(opened: Opened, inputs: Arrays, right: float) -> dict[str, Any]:
    """Kill the process that runs the model, and call until an answer is right. Each call that fails is made again."""
    assert opened.serving is not None
    victim, errors = await opened.serving(), 0
    began_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    while time.monotonic_ns() - began_ns < PATIENCE_S * 1e9:
        try:
            outputs = await asyncio.wait_for(opened.calls[0](inputs), CALL_S)
        except Exception:  # each way has errors of another kind
            errors += 1
            await asyncio.sleep(0.001)
        else:
            after_ms, found = (time.monotonic_ns() - began_ns) / 1e6, checksum(next(iter(outputs.values())))
            return {"after_ms": after_ms, "errors": errors, "right": abs(found - right) <= 0.01 * abs(right)}
    return {"after_ms": None, "errors": errors, "right": False}


if __name__ == "__main__":
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # of deaths, which are wanted
    uvloop.run(measure(json.loads(sys.argv[1])))
