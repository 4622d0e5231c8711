"""A fresh process of `tests.bench.service`: an app that streams frames, or that floods a driver, until its parent writes a line.

It prints one line when it is ready, waits for a line, works, and prints what it found. It imports what its kind needs and nothing else, so
that its memory is that of an app.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.bench.starts_worker import Given, arrays, tell

PICTURE_SHAPE = (720, 1280, 3)
WARM = 5
PATIENCE_S = 10.0
"""Of one call. A call that takes longer is an error."""

Call = Callable[[dict[str, Any]], Any]


def letterboxed(picture: Any, room: Any) -> None:
    """Write a picture into the input of a detector: every n-th pixel, with a bar above and one below."""
    _, _, height, width = room.shape
    step = max(-(-picture.shape[0] // height), -(-picture.shape[1] // width))
    small = picture[::step, ::step]
    above, left = (height - small.shape[0]) // 2, (width - small.shape[1]) // 2
    inside = room[0, :, above : above + small.shape[0], left : left + small.shape[1]]
    np.multiply(small.transpose(2, 0, 1), np.float32(1 / 255), out=inside)


def camera(given: Given) -> Callable[[], dict[str, Any]]:
    """Return what makes the next inputs: from a picture of 720 lines, or those that every process has."""
    if not given["camera"]:
        made = arrays(given)
        return lambda: made
    picture = np.resize(np.arange(251, dtype=np.uint8), PICTURE_SHAPE)
    ((name, (dtype, shape)),) = given["inputs"].items()
    room = np.zeros(shape, dtype)

    def inputs() -> dict[str, Any]:
        letterboxed(picture, room)
        return {name: room}

    return inputs


@contextmanager
def blocking_call(given: Given) -> Iterator[Call]:
    """Open what a synchronous app calls: a burst that a service has given, or one of its own runtime in a thread."""
    if given["service"] != "off":
        import aionn.blocking

        with aionn.blocking.attach(given["model"], devices=(given["device"],), service=given["service"]) as burst:
            yield lambda inputs: burst.compute(inputs, timeout_s=PATIENCE_S)
        return
    from anyio.from_thread import start_blocking_portal

    import aionn

    with start_blocking_portal("asyncio", {"use_uvloop": True}) as portal:
        runtime = aionn.Runtime(service="off", start=(given["device"],), state_dir=given["state_dir"])
        with portal.wrap_async_context_manager(runtime):

            async def compiled() -> aionn.Compilation:
                model = await runtime.load(given["model"])
                return await runtime.compile(model, devices=(given["device"],), cache_dir=given["cache_dir"])

            with portal.call(compiled).blocking() as burst:
                yield lambda inputs: burst.compute(inputs, timeout_s=PATIENCE_S)


def parent_wrote() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def stream(given: Given) -> None:
    """Call at a rate, and print for each frame how many microseconds after its time the answer came, and how long the call took."""
    inputs = camera(given)
    period_ns = int(1e9 / given["rate"])
    with blocking_call(given) as call:
        for _ in range(WARM):
            call(inputs())
        tell(ready=True)
        sys.stdin.readline()
        late_us: list[float] = []
        taken_us: list[float] = []
        errors: list[str] = []
        due_ns = time.monotonic_ns() + int(period_ns * (1 + given["offset"]))
        while len(late_us) < given["count"] and not parent_wrote():
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            began_ns = time.monotonic_ns()
            try:
                call(inputs())
            except Exception as error:  # the parent judges what an app sees
                errors.append(f"{type(error).__name__}: {error}")
            ended_ns = time.monotonic_ns()
            late_us.append((ended_ns - due_ns) / 1e3)
            taken_us.append((ended_ns - began_ns) / 1e3)
            due_ns += period_ns
        tell(late_us=late_us, taken_us=taken_us, errors=errors)
        sys.stdin.readline()


async def flood(given: Given) -> None:
    """Keep one call in flight in each of many bursts, until the parent writes a line."""
    import asyncio
    from contextlib import AsyncExitStack

    import aionn

    ended, calls, errors = False, 0, []
    inputs = arrays(given)

    async def flat_out(burst: aionn.Burst) -> None:
        nonlocal calls
        while not ended:
            try:
                await burst.compute(inputs)
                calls += 1
            except aionn.AionnError as error:
                errors.append(f"{type(error).__name__}: {error}")
                return

    async with aionn.Runtime(service=given["service"], start=(), state_dir=given["state_dir"]) as runtime, AsyncExitStack() as stack:
        model = await runtime.load(given["model"])
        compilation = await runtime.compile(model, devices=(given["device"],), cache_dir=given["cache_dir"])
        bursts = [await stack.enter_async_context(compilation.burst()) for _ in range(given["bursts"])]
        await bursts[0].compute(inputs)
        tell(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        working = [asyncio.ensure_future(flat_out(burst)) for burst in bursts]
        await asyncio.to_thread(sys.stdin.readline)
        ended = True
        await asyncio.gather(*working)
        tell(calls=calls, errors=errors)
        await asyncio.to_thread(sys.stdin.readline)


def work(given: Given) -> None:
    if given["kind"] == "stream":
        stream(given)
        return
    import aionn

    aionn.run(flood, given)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
