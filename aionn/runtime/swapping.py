"""An app's own new model version takes over a compilation: the same way as a better stage, but without comparing outputs.

What it must have in common with the model before is its border: the same inputs and outputs by name, order, element type and
dimensions, for frames are laid out and arguments checked by them. Symbols of open dimensions may have other names, as long as
equal ones are equal in the same places.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError
from aionn.hal.model import Model
from aionn.runtime import background
from aionn.runtime.comparing import made_up_inputs
from aionn.runtime.compiled_model import Serving
from aionn.runtime.measuring import Inputs
from aionn.runtime.moving import NotNowError
from aionn.runtime.preparation import CacheChoice
from aionn.runtime.stages import Stage, StagePolicy

if TYPE_CHECKING:
    from aionn.runtime.compilation import Compilation

_TRIES = 5
_FOREVER_S = 10 * 365 * 86400.0


async def swap_model(compilation: Compilation, model: Model, timeout_s: float | None) -> None:
    """See `Runtime.swap`."""
    if not isinstance(model, Model):
        raise CallerError(f"swap takes an aionn.Model, not {type(model).__name__}; read one with aionn.Model.from_onnx(path)")
    if timeout_s is not None and timeout_s <= 0:
        raise CallerError(f"timeout_s={timeout_s}: a timeout is more than 0 seconds, or None for none")
    _check_border(compilation.model, model)
    serving = await compilation._live()
    staging, compiled = compilation._staging, compilation._compiled
    policy = StagePolicy() if staging is None else staging.policy
    cache = compilation._cache
    if cache is not None:
        cache = CacheChoice(cache.store, model.token)
    made = await background.make(
        compilation._runtime._devices,
        serving.device,
        model,
        dataclasses.replace(compilation._options, deadline_ns=None),
        cache,
        threads=policy.threads,
        timeout_s=_FOREVER_S if timeout_s is None else timeout_s,
        phase=lambda _: None,
    )
    made.prepared.remember(model)
    better = Serving(made.prepared, model, compiled.use)
    try:
        await _try(compilation, better, policy)
        if staging is not None:
            await staging.stop("another model was swapped in")
        for attempt in range(_TRIES):
            try:
                await compiled.swap(better)
                break
            except NotNowError:
                if attempt == _TRIES - 1:
                    raise
        compilation.model, compilation._cache = model, cache
    except BaseException:
        if compiled.serving is not better:
            made.prepared.release()
        raise
    finally:
        if staging is not None and staging.over:
            names = [stage.name for stage in staging.stages]
            now = compiled.serving.stage if compiled.serving is not None else names[-1]
            compilation._begin_stages([_stage(name, names, now) for name in names], policy)


def _stage(name: str, names: list[str], now: str) -> Stage:
    stage = Stage(name)
    if name == now:
        stage._enter("serving")
    elif names.index(name) < names.index(now):
        stage._enter("skipped", f"stage {now!r} serves")
    return stage


async def _try(compilation: Compilation, better: Serving, policy: StagePolicy) -> None:
    """Run it once, on the last input that is known, before anything depends on it."""
    sampling = compilation._compiled.sampling
    samples: list[Inputs] = list(sampling.kept) if sampling is not None else []
    failed: AionnError | None = None
    for inputs in samples[-1:] or made_up_inputs(compilation.model):
        deadline_ns = time.monotonic_ns() + int(policy.run_timeout_s * 1e9)
        try:
            await compilation._compute_on(better, compilation._arguments.shapes_of(inputs), inputs, deadline_ns=deadline_ns)
            return
        except DeadlineError:
            raise
        except AionnError as error:
            better.check_alive()
            failed = error
    if failed is not None and (samples or compilation._static):
        raise CompilationError(f"the new model cannot run: {failed}", reason=str(failed)) from failed


def _check_border(old: Model, new: Model) -> None:
    """Raise unless they fit the same frames."""
    for what, ours, theirs in (("inputs", old.inputs, new.inputs), ("outputs", old.outputs, new.outputs)):
        have = [(name, operand.type.value, operand.dimensions) for name, operand in ours.items()]
        got = [(name, operand.type.value, operand.dimensions) for name, operand in theirs.items()]
        if have != got:
            raise CallerError(f"the new model's {what} are {got}, this compilation's {have}; compile it on its own instead")
    if _symbols(old) != _symbols(new):
        raise CallerError("the new model ties its open dimensions together in another way; compile it on its own instead")


def _symbols(model: Model) -> list[list[int | None]]:
    """Open dimensions numbered by symbol, in the order in which symbols appear."""
    numbers: dict[Any, int] = {}
    return [
        [None if symbol is None else numbers.setdefault(symbol, len(numbers)) for symbol in operand.symbols]
        for operand in (*model.inputs.values(), *model.outputs.values())
    ]
