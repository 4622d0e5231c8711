"""Executions of models with strings, sequences, maps or optionals. Each runs on a lane, like every other execution."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aionn.burst.executors import result_of
from aionn.driver.execution import failed_run
from aionn.driver.lanes import Lane, Lanes
from aionn.errors import AionnError, CallerError
from aionn.hal.interfaces import IPreparedModel
from aionn.hal.types import ErrorStatus, Result, Timing
from aionn.hal.values import ValuesResult
from aionn.memory.region import Region
from aionn.remote.calls import ExecutedValues, ExecuteValues
from aionn.remote.connection import Descriptors
from aionn.remote.values import IN_LOOP_BYTES, aside, decoded, encoded_values, laid_out, received_data


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


async def serve_values(prepared: IPreparedModel, call: ExecuteValues, descriptors: Descriptors) -> tuple[ExecutedValues, Region | None]:
    """Execute what a client asked for. Returns the answer, and the memory that travels beside it, which the caller closes."""
    execute = getattr(prepared, "execute_values", None)
    try:
        if execute is None:
            raise CallerError("the device of this model executes tensors of numbers only; use another device")
        with received_data(call.inputs, descriptors) as data:
            tree = call.inputs.tree
            large = len(tree) + len(data) > IN_LOOP_BYTES
            inputs = await aside(large, lambda: decoded(prepared.inputs, tree, data, "input", owned=False))
            result, outputs, _ = await execute(inputs, call.measure_timing, call.deadline_ns)
            if result.status is not ErrorStatus.NONE:
                return ExecutedValues(result), None
            try:
                encoded = await encoded_values(prepared.outputs, outputs, "output")
            except CallerError as error:
                fault = f"{error}; the fault lies in the engine"
                return ExecutedValues(Result(ErrorStatus.GENERAL_FAILURE, message=fault)), None
            outputs, region = await laid_out(encoded)  # while the inputs are mapped, because an output may be one of them
            return ExecutedValues(result, outputs), region
    except AionnError as error:
        return ExecutedValues(result_of(error)), None
