"""`retried`: a call that is made again after its driver's death.

`retried` makes a call without state again after its driver has died, so that the caller meets latency and not an error. A request that
kills every driver must end, so a call is made again a limited number of times. A call with device memory is refused, because the second
call would not find the state. A call that failed for another reason than the driver's death is not made again. A hung driver is such a
reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from aionn.errors import CallerError, DeadlineError, DeviceMemoryLostError, DriverDiedError
from aionn.loopless import checked_count, deadline_of, seconds_until
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.executing.placement import TensorInDriver


class Retries(msgspec.Struct, frozen=True):
    """How often a call is made again at most, if it has no device memory. `on_retry` is called before each further call, to count it."""

    most: int
    on_retry: Callable[[], object] | None = None


async def retried(
    call: Callable[..., Awaitable[Outputs]],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None,
    measure_timing: bool,
    timeout_s: float | None,
    retry: int | Retries,
    placed: Mapping[str, Any] | None = None,
) -> Outputs:
    """Run a model once, and again after a driver's death. Other errors are those of `call`.

    Args:
        call: `Burst.compute` or `Compilation.compute`. The other arguments are its.
        timeout_s: seconds for all calls together.
        placed: what stands for inputs of a frame instead, by name. None where `inputs` holds plain arguments.

    Raises:
        CallerError: `retry` is not a whole number, or an argument is device memory.
        DeadlineError: the time is over.
        DriverDiedError: the driver has died, and the call was made again as often as `retry` says.
    """
    if isinstance(retry, Retries):
        retries = retry
    else:
        retries = Retries(checked_count("compute: retry", retry, 0))
        _refuse_device_memory(inputs if placed is None else placed, outputs)
    deadline_ns = deadline_of(timeout_s)
    left = retries.most
    while True:
        left_s = seconds_until(deadline_ns)
        if left_s == 0.0:
            raise DeadlineError("the call was not made again after its driver had died, because its deadline has come")
        try:
            return await call(inputs, outputs=outputs, measure_timing=measure_timing, timeout_s=left_s)
        except DeviceMemoryLostError:
            raise
        except DriverDiedError:
            if not left:
                raise
            left -= 1
            if retries.on_retry is not None:
                retries.on_retry()


def _refuse_device_memory(*arguments: Any) -> None:
    for values in arguments:
        if isinstance(values, Mapping) and any(isinstance(value, TensorInDriver) for value in values.values()):
            raise CallerError("compute: retry with device memory; its contents end with the driver, so leave retry out")
