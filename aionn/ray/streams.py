"""`compute_stream`: a model on each frame of a stream, over a burst of the stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from typing import Any

import aionn
from aionn.runtime.executing.retrying import compute_stateless
from aionn.runtime.streaming.stream import each

__all__ = ["Inputs", "compute_stream"]

Inputs = Mapping[str, Any]


async def compute_stream(
    compilation: aionn.Compilation,
    frames: Iterable[Inputs] | AsyncIterable[Inputs],
    states: Mapping[str, str] | None,
    *,
    retries: int,
    on_retry: Callable[[], object],
) -> AsyncGenerator[dict[str, Any], None]:
    """Run a model on each frame, in order.

    Args:
        states: as for `aionn.Compilation.recurrent`. None: each frame is a call without state.
        retries, on_retry: for calls without state, as for `compute_stateless`.

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
            yield dict(await compute_stateless(burst.compute, frame, retries=retries, on_retry=on_retry))
