"""Executions of models with strings, sequences, maps or optionals. Each runs on a lane, like every other execution."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aionn.driver.execution import failed_run
from aionn.driver.lanes import Lane, Lanes
from aionn.hal.types import ErrorStatus, Result, Timing
from aionn.hal.values import ValuesResult


async def run_values(lanes: Lanes, device: str, inputs: Mapping[str, Any], measure_timing: bool, deadline_ns: int | None) -> ValuesResult:
    """Run once with values of the model's types. Returns the outputs as the engine gives them. `device`: its name, for the log."""

    def job(lane: Lane) -> ValuesResult:
        began_ns = time.monotonic_ns()
        if deadline_ns is not None and began_ns >= deadline_ns:
            late = "the deadline had passed before the device began the execution"
            return ValuesResult(Result(ErrorStatus.MISSED_DEADLINE_TRANSIENT, message=late), {})
        try:
            outputs = lane.executable.run_values(inputs)  # type: ignore[attr-defined]  # an optional method, see `Executable`
        except (Exception, SystemExit) as error:  # every error of an engine fails this execution and nothing else
            return ValuesResult(failed_run(error, device), {})
        if not measure_timing:
            return ValuesResult(Result(ErrorStatus.NONE), outputs)
        return ValuesResult(Result(ErrorStatus.NONE, timing=Timing(in_driver_us=(time.monotonic_ns() - began_ns) // 1000)), outputs)

    return await lanes.run(job)
