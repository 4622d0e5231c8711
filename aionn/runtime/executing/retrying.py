"""`compute_stateless`: make a call without state again after its driver has died, so that the caller meets latency and not an error.

A request that kills every driver must end, so a call is made again a limited number of times. A call whose device memory was lost is
never made again, because the second call would not find the state. A call that failed for another reason than the driver's death is not
made again either. A hung driver is such a reason (`DriverHungError`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aionn.errors import DeadlineError, DeviceMemoryLostError, DriverDiedError
from aionn.memory.pool import Frame
from aionn.runtime.executing.frame_layout import Outputs

__all__ = ["compute_stateless"]


async def compute_stateless(
    call: Callable[..., Awaitable[Outputs]],
    inputs: Mapping[str, Any] | Frame,
    *,
    retries: int,
    on_retry: Callable[[], object],
    measure_timing: bool = False,
    deadline_ns: int | None = None,
) -> Outputs:
    """Run a model once, and again after a driver's death. Other errors are those of `call`.

    Args:
        call: `Burst.compute` or `Compilation.compute`.
        retries: how often the call is made again at most.
        on_retry: is called before each further call, to count it.
        measure_timing: as for `Burst.compute`.
        deadline_ns: when the answer is of no use any more, in nanoseconds of CLOCK_MONOTONIC. It holds for all calls together.

    Raises:
        DeadlineError: the deadline has passed.
        DriverDiedError: the driver has died, and the call was made again `retries` times.
    """
    left = retries
    while True:
        timeout_s = None if deadline_ns is None else (deadline_ns - time.monotonic_ns()) / 1e9
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineError("the request took longer than its timeout allows")
        try:
            return await call(inputs, measure_timing=measure_timing, timeout_s=timeout_s)
        except DeviceMemoryLostError:
            raise
        except DriverDiedError:
            if not left:
                raise
            left -= 1
            on_retry()
