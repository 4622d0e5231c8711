"""An app's own new model version takes over a compilation: the same way as a better stage, but without comparing outputs.

What it must have in common with the model before is its border: the same inputs and outputs by name, order, element type and
dimensions, for frames are laid out and arguments checked by them. Symbols of open dimensions may have other names, as long as
equal ones are equal in the same places.

The new model is tried before anything depends on it, on inputs that the app has sent: those that come while it is compiled, else those
of the last execution, which still stand in its frame. Only a compilation that has executed nothing gives made-up ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError
from aionn.hal.model import Model
from aionn.runtime.preparing import background
from aionn.runtime.preparing.cached import CacheChoice
from aionn.runtime.preparing.renewal import Renewal
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.members import NotNowError
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging.measuring import Inputs, Run
from aionn.runtime.staging.samples import Samples, made_up_inputs, samples_of
from aionn.runtime.staging.stage import Stage, StagePolicy
from aionn.runtime.staging.stages import Staging, stages_after

_TRIES = 5
_FOREVER_S = 10 * 365 * 86400.0


@dataclass(frozen=True)
class NewModel:
    """What an app's new version of a compilation's model needs to take over.

    Attributes:
        renewal: what keeps the model before prepared.
        staging, begin_stages: what makes better stages, if anything does; and starts that anew.
        run: runs inputs on one prepared model.
        last_inputs: of the last execution on each burst, and without one.
        static: whether the model's shapes are all known.
    """

    renewal: Renewal
    staging: Staging | None
    begin_stages: Callable[[Sequence[Stage], StagePolicy], None]
    run: Run
    last_inputs: Callable[[], list[Inputs]]
    static: bool


async def swap_model(target: NewModel, model: Model, timeout_s: float | None) -> None:
    """See `Runtime.swap`."""
    renewal, staging, compiled = target.renewal, target.staging, target.renewal.compiled
    if not isinstance(model, Model):
        raise CallerError(f"swap takes an aionn.Model, not {type(model).__name__}; read one with aionn.Model.from_onnx(path)")
    if timeout_s is not None and timeout_s <= 0:
        raise CallerError(f"timeout_s={timeout_s}: a timeout is more than 0 seconds, or None for none")
    _check_border(renewal.model, model)
    serving = await renewal.live()
    policy = StagePolicy() if staging is None else staging.policy
    cache = renewal.cache
    if cache is not None:
        cache = CacheChoice(cache.store, model.token)
    last = target.last_inputs()  # before the compile: then bursts take the long way, and others may use the frames
    with _sampled(compiled, renewal.model) as samples:
        made = await background.make(
            renewal.session.devices,
            serving.device,
            model,
            dataclasses.replace(renewal.options, deadline_ns=None),
            cache,
            threads=policy.threads,
            timeout_s=_FOREVER_S if timeout_s is None else timeout_s,
            phase=lambda _: None,
        )
        made.prepared.remember(model)
    better = Serving(made.prepared, model, compiled.use)
    try:
        await _try(target, better, list(samples.kept) or last, policy)
        if staging is not None:
            await staging.stop("another model was swapped in")
        for attempt in range(_TRIES):
            try:
                await compiled.swap(better)
                break
            except NotNowError:
                if attempt == _TRIES - 1:
                    raise
        renewal.model, renewal.cache = model, cache
    except BaseException:
        if compiled.serving is not better:
            made.prepared.release()
        raise
    finally:
        if staging is not None and staging.over:
            target.begin_stages(stages_after(staging, compiled.serving), policy)


@contextmanager
def _sampled(compiled: CompiledModel, model: Model) -> Iterator[Samples]:
    """Keep inputs of executions for the body; those that stages keep, if they do."""
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


async def _try(target: NewModel, better: Serving, recent: Sequence[Inputs], policy: StagePolicy) -> None:
    """Run it on inputs of the app's, before anything depends on it. What the model before cannot run either decides nothing."""
    tried = False
    for inputs in recent:
        failed = await _failure(target.run, better, inputs, policy)
        if failed is None:
            tried = True
            continue
        before = target.renewal.compiled.serving
        if before is None or not before.alive or await _failure(target.run, before, inputs, policy) is None:
            raise CompilationError(f"the new model cannot run: {failed}", reason=str(failed)) from failed
    if tried:
        return
    failed = None
    for inputs in made_up_inputs(target.renewal.model):
        failed = await _failure(target.run, better, inputs, policy)
        if failed is None:
            return
    if failed is not None and target.static:
        raise CompilationError(f"the new model cannot run: {failed}", reason=str(failed)) from failed


async def _failure(run: Run, serving: Serving, inputs: Inputs, policy: StagePolicy) -> AionnError | None:
    deadline_ns = time.monotonic_ns() + int(policy.run_timeout_s * 1e9)
    try:
        await run(serving, inputs, deadline_ns)
    except DeadlineError:
        raise
    except AionnError as error:
        serving.check_alive()
        return error
    return None


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
