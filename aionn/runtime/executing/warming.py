"""`warm_up`: runs of a model that prepare the engine for the app's first execution, and that nothing counts.

They go over the control socket, with frames that are freed afterwards. So no burst's statistics, no slot of the app's page, no estimate
of a stream's rhythm, no sample and no policy of stages sees them. Swaps wait for them as for any execution.

Inputs that are made up are random numbers, always the same, with 1 for open dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.model import PooledModel
from aionn.hal.options import CallOptions
from aionn.hal.types import MAX_INSTANCES, Operand
from aionn.loopless import checked_count
from aionn.runtime.executing.arguments import Arguments, check_mapping
from aionn.runtime.executing.control import control_route, execution_of
from aionn.runtime.executing.execution import Call, Executor
from aionn.runtime.executing.frames import Frames
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.tasks import each

_WAY_OUT = "give inputs that the model takes with compilation.warm_up(inputs=...)"


async def warm_up(kept_model: KeptModel, arguments: Arguments, runs: int, inputs: Mapping[str, Any] | None = None) -> None:
    """Run the model `runs` times on each instance. See `Compilation.warm_up`."""
    runs = checked_count("warm_up: runs", runs, 1)
    kept_model.check_usable()
    if inputs is not None:
        check_mapping(inputs)
    # The shapes of a model with mode "jit", and the engine's own number of instances, may be known from then on only.
    instances = min((await kept_model.live()).prepared.instances, MAX_INSTANCES)  # a driver may send any number
    executor = Executor(arguments, Frames(instances), None)
    try:
        given = made_up_inputs(kept_model.model, _WAY_OUT) if inputs is None else inputs
        for _ in range(runs):
            await each([partial(_run, kept_model, executor, given)] * instances, instances)
    except ExecutionError as error:
        if inputs is not None:
            raise
        raise CallerError(f"the model does not run on made-up inputs ({error}); {_WAY_OUT}") from error
    finally:
        executor.frames.close()


async def _run(kept_model: KeptModel, executor: Executor, given: Mapping[str, Any]) -> None:
    inputs = dict(given)
    call = Call(inputs, {}, CallOptions(), inputs)
    await execution_of(executor, control_route(kept_model, counted=False), call).run()


def made_up_array(operand: Operand, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """Return numbers for an input: from 0 to below 1, or 0 and 1 for an input that takes no fractions."""
    dtype = operand.type.dtype
    return random.random(shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 2, shape).astype(dtype)


def made_up_inputs(model: PooledModel, way_out: str) -> Mapping[str, NDArray[Any]]:
    """Return an array for each input that has no default.

    Args:
        way_out: what to do about an input that cannot be made up, as the end of the error's sentence.

    Raises:
        CallerError: an input has no shape in the model, or takes texts, sequences, maps or optionals.
    """
    random = np.random.default_rng(0)
    inputs = {}
    for name, operand in model.inputs.items():
        if operand.default is not None:
            continue
        if not operand.in_frames:
            raise CallerError(f"input {name!r} is of type {operand.word}, and only numbers are made up; {way_out}")
        if operand.dimensions is None:
            raise CallerError(f"input {name!r} has no shape in the model, so none can be made up; {way_out}")
        inputs[name] = made_up_array(operand, tuple(extent or 1 for extent in operand.dimensions), random)
    return inputs
