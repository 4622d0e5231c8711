"""`compute_stream`: a model on each frame of a stream, over a burst of the stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from typing import Any

import aionn
from aionn.runtime.executing.retrying import Retries
from aionn.runtime.streaming.stream import each

Inputs = Mapping[str, Any]


async def compute_stream(
    compilation: aionn.Compilation,
    frames: Iterable[Inputs] | AsyncIterable[Inputs],
    states: Mapping[str, str] | None,
    *,
    retries: Retries,
) -> AsyncGenerator[dict[str, Any], None]:
    """Run a model on each frame, in order.

    Args:
        states: as for `aionn.Compilation.recurrent`. None: each frame is a call without state.
        retries: for calls without state.

    Yields:
        One array per output, by name.

    Raises:
        AionnError: as `aionn.Burst.compute`. The stream is over then.
    """
    if states is not None:
        async with compilation.recurrent(states, name=compilation.name) as kept:
            async for frame in each(frames):
                yield dict(await kept.compute(frame))
        return
    async with compilation.burst(name=compilation.name) as burst:
        async for frame in each(frames):
            yield dict(await burst.compute(frame, retry=retries))
