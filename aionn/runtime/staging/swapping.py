"""An app's new version of a model takes over a compilation, in the same way as a better stage but without comparing outputs.

The new model must have the same inputs and outputs as the model before, by name, order, element type and dimensions. Frames are laid out
by them, and arguments are checked by them. Defaults of inputs must be equal, too, because frames hold those of the model before. Symbols
of open dimensions may have other names, as long as equal symbols stand in the same places.

The new model is tried before anything depends on it, on inputs that the app has sent. These are the inputs that come while the new
model is compiled. If none come, they are the inputs of the last execution, which are still in its frame. Made-up inputs are used only
for a compilation that has executed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError
from aionn.hal.model import PooledModel
from aionn.loopless import deadline_of
from aionn.runtime.preparing import background
from aionn.runtime.preparing.compile_acts import CacheChoice, digested, read
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.record import Progress
from aionn.runtime.serving.serving import CompiledModel, NotNowError, Serving
from aionn.runtime.staging.measuring import RUN_TIMEOUT_S, Inputs, Run, Samples, guessed_inputs, samples_of
from aionn.runtime.staging.stage import Stage, StagePolicy
from aionn.runtime.staging.stages import Staging, stages_after

_TRIES = 5
"""How often a swap is tried that comes at a wrong moment."""


@dataclass(frozen=True)
class NewModel:
    """What an app's new version of a compilation's model needs to take over.

    Attributes:
        kept_model: keeps the model before prepared.
        staging: makes better stages, or None.
        begin_stages: starts a new staging.
        run: runs inputs on one prepared model.
        last_inputs: returns the inputs of the last execution on each burst, and of the last one without a burst.
        static: whether all shapes of the model are known.
    """

    kept_model: KeptModel
    staging: Staging | None
    begin_stages: Callable[[Sequence[Stage], StagePolicy], None]
    run: Run
    last_inputs: Callable[[], list[Inputs]]
    static: bool


async def swap_model(target: NewModel, model: PooledModel, timeout_s: float | None) -> None:
    """See `Runtime.swap`."""
    kept_model, staging, compiled = target.kept_model, target.staging, target.kept_model.compiled
    if not isinstance(model, PooledModel):
        raise CallerError(f"swap takes an aionn.Model, not {type(model).__name__}; open one with await aionn.Model.load(path)")
    cache = kept_model.request.cache
    if cache is not None:
        await digested(kept_model.session.devices, model)
    await read(kept_model.session.devices, model)
    _check_border(kept_model.model, model)
    serving = await kept_model.live()
    policy = StagePolicy() if staging is None else staging.policy
    request = kept_model.request.of(model, None if cache is None else CacheChoice(cache.store, model.token)).without_deadline()
    last = target.last_inputs()  # before the compile, during which later executions may use the frames
    with _sampled(compiled, kept_model.model) as samples, Progress(kept_model.record, serving.device):
        effort = background.Effort(policy.threads, math.inf if timeout_s is None else timeout_s, policy.backend)
        made = await background.make(kept_model.session.devices, kept_model.devices_of(serving), request, effort)
        made.prepared.remember(model)
    better = Serving(made.prepared, model, compiled.use)
    try:
        await _try(target, better, list(samples.kept) or last)
        if staging is not None:
            await staging.aclose("another model was swapped in")
        for attempt in range(_TRIES):
            try:
                await compiled.swap(better)
                break
            except NotNowError:
                if attempt == _TRIES - 1:
                    raise
        kept_model.request, kept_model.joined_deaths = request, 0
    except BaseException:
        if compiled.serving is not better:
            made.prepared.release()
        raise
    finally:
        if staging is not None and staging.ended:
            target.begin_stages(stages_after(staging, compiled.serving, kept_model.record), policy)


@contextmanager
def _sampled(compiled: CompiledModel, model: PooledModel) -> Iterator[Samples]:
    """Keep inputs of executions for the body. If stages keep inputs already, these are used."""
    samples = compiled.sampling
    if isinstance(samples, Samples):
        yield samples
        return
    samples = compiled.sampling = samples_of(model)
    try:
        with compiled.watching():
            yield samples
    finally:
        if compiled.sampling is samples:
            compiled.sampling = None


async def _try(target: NewModel, better: Serving, recent: Sequence[Inputs]) -> None:
    """Run the new model on inputs of the app, before anything depends on it.

    Inputs that the model before cannot run either decide nothing.

    Raises:
        CompilationError: the new model cannot run.
    """
    tried = False
    for inputs in recent:
        failed = await _failure(target, better, inputs)
        if failed is None:
            tried = True
            continue
        before = target.kept_model.compiled.serving
        if before is None or not before.alive or await _failure(target, before, inputs) is None:
            raise CompilationError(f"the new model cannot run: {failed}", reason=str(failed)) from failed
    if tried:
        return
    failed = None
    for inputs in guessed_inputs(target.kept_model.model):
        failed = await _failure(target, better, inputs)
        if failed is None:
            return
    if failed is not None and target.static:
        raise CompilationError(f"the new model cannot run: {failed}", reason=str(failed)) from failed


async def _failure(target: NewModel, serving: Serving, inputs: Inputs) -> AionnError | None:
    """Run inputs on a prepared model. Returns the error of a run that failed, or None.

    Raises:
        CallerError: the compilation was closed meanwhile, which says nothing about the model.
    """
    try:
        await target.run(serving, inputs, deadline_of(RUN_TIMEOUT_S))
    except DeadlineError:
        raise
    except AionnError as error:
        target.kept_model.check_not_closed()
        serving.check_alive()
        return error
    return None


def _check_border(old: PooledModel, new: PooledModel) -> None:
    """Raise a `CallerError` unless both models fit the same frames."""
    for what, ours, theirs in (("inputs", old.inputs, new.inputs), ("outputs", old.outputs, new.outputs)):
        have = [(name, operand.word, operand.dimensions) for name, operand in ours.items()]
        got = [(name, operand.word, operand.dimensions) for name, operand in theirs.items()]
        if have != got:
            raise CallerError(f"the new model's {what} are {got}, but this compilation's are {have}; compile the new model by itself")
    for name, operand in old.inputs.items():
        if operand.default != new.inputs[name].default:
            raise CallerError(
                f"input {name!r} of the new model has another default than this compilation's; compile the new model by itself"
            )
    if _symbols(old) != _symbols(new):
        raise CallerError("the new model's open dimensions are equal in other places than this compilation's; compile it by itself")


def _symbols(model: PooledModel) -> list[list[int | None]]:
    """Return the open dimensions, numbered by symbol in the order in which the symbols appear."""
    numbers: dict[Any, int] = {}
    return [
        [None if symbol is None else numbers.setdefault(symbol, len(numbers)) for symbol in operand.symbols]
        for operand in (*model.inputs.values(), *model.outputs.values())
    ]
