"""`Fallback`: an execution that failed, once more on another device.

An execution that a driver answered with an error is run once more on a CPU device, if the app named no devices.

    whole model     prepared on the next CPU device that can run it
    step of a plan  the same plan, with the failing step on the next CPU device that can run it, and later with each other one that fails

The fallback is first tried on the inputs that failed. If it computes them, it takes over the compilation by a swap, so later executions
go there at once. The log warns, the trace counts "execution.fell_back", the page counts `fell_back`, and `Outputs.device` names the device.
If it fails, too, the inputs are at fault. The caller gets the first error, with a note, and the device before goes on serving.

Nothing falls back after a driver's death, a hang, a deadline or a wrong call, because these are not the answer of an engine. What uses
device memory does not fall back either, because its contents lie in the driver that failed.

Invariants
    A device that has taken over has no fallback again, so nothing goes round in a circle.
    A fallback computes the model that the app has swapped in last, or nothing.
    A fallback that did not help is kept, and one that cannot be prepared is remembered. So inputs that always fail prepare nothing again.
"""

from __future__ import annotations

import logging
import weakref

import anyio
import msgspec

from aionn import trace
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError
from aionn.hal.model import PooledModel
from aionn.hal.types import DeviceType, Result
from aionn.loopless import seconds_until
from aionn.remote.device import RemoteBuffer
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.executing.control import execution_of, fixed_route
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.executing.execution import Call, Executor
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.preparing.preparation import Found, prepare
from aionn.runtime.record import Progress, about
from aionn.runtime.serving.serving import CompiledModel, NotNowError, Serving

logger = logging.getLogger("aionn.runtime")

_TRIES = 5
"""How often a swap is tried that comes at a wrong moment."""


class Fallback:
    """The fallback of one compilation. It knows the `KeptModel` weakly, so a compilation that the app no longer holds is collected.

    `_hopeless` has the devices, and steps, for which no fallback can be prepared, and `_taken_over` the devices of fallbacks that serve or
    have served. `_steps` are those of the plan that have failed. All are of `_model`.
    """

    def __init__(self, kept_model: KeptModel, trials: Executor) -> None:
        """`trials`: runs what the fallback is tried on."""
        self._kept_model = weakref.ref(kept_model)
        self._tasks = kept_model.session.tasks
        self._trials = trials
        self._base: Serving | None = None
        self._outcomes: tuple[CacheOutcome, ...] = ()
        self._key: object = None
        self._model: PooledModel | None = None
        self._hopeless: set[object] = set()
        self._taken_over: set[str] = set()
        self._steps: frozenset[int] = frozenset()
        self._busy: anyio.Event | None = None
        kept_model.compiled.abandoned = self.close

    def close(self) -> None:
        """Free a fallback that does not serve, without waiting."""
        base, self._base = self._base, None
        if base is not None:
            base.release()

    async def __call__(self, serving: Serving, error: ExecutionError, result: Result, call: Call) -> Outputs | None:
        """Run a call that failed on `serving` with `error` once more. `result` is the answer.

        Returns:
            None if there is no fallback, or if the fallback fails. Its failure is a note of `error`.

        Raises:
            DeadlineError: the call's deadline has come.
        """
        kept_model = self._kept_model()
        if kept_model is None or serving.model is not kept_model.model or _in_driver(call):
            return None
        if serving.model is not self._model:  # the app has swapped it in
            self.close()
            self._model = serving.model
            self._hopeless.clear()
            self._taken_over.clear()
            self._steps = frozenset()
        if serving.device in self._taken_over:
            return None
        again = call.with_arguments(dict(call.inputs), call.outputs, dict(call.placed))
        failed: Result | None = result
        while True:
            step = _step_of(failed)
            if step is not None:
                self._steps |= {step}
            steps = self._steps
            base = await self._fallback_of(kept_model, serving, steps)
            if base is None:
                return None
            trial = execution_of(self._trials, fixed_route(base), again)
            try:
                outputs = await trial.run()
                break
            except DeadlineError:
                raise
            except AionnError as second:
                failed = trial.failed
                if _step_of(failed) not in (None, *steps) or steps != self._steps:
                    continue  # another step has failed, in this call or in one beside it, which took the fallback's place
                error.add_note(f"device {base.device!r} was tried, too, and failed: {second}")
                return None
        trace.count("execution.fell_back", device=serving.device, to=base.device, reason=str(error))
        words, name = "device %r failed to run model %r, and device %r computed in its place: %s", kept_model.record.name
        logger.warning(words, serving.device, name, base.device, str(error), extra=about(device=serving.device, model=name))
        if kept_model.compiled.serving is serving:
            await self._wait_for(kept_model, base, call.options.deadline_ns)
        return outputs

    async def _fallback_of(self, kept_model: KeptModel, serving: Serving, steps: frozenset[int]) -> Serving | None:
        """Return what is prepared to take the place of `serving`. Returns None if no device can. One preparation runs at a time."""
        compiled = kept_model.compiled
        key = serving.device, steps
        while True:
            now = compiled.serving
            if now is not None and now is not serving and now.alive and now.model is serving.model and now.device in self._taken_over:
                return now  # another call has fallen back meanwhile
            if serving.model is not kept_model.model:
                return None
            if self._busy is not None:
                await self._busy.wait()
            elif self._key == key and self._base is not None and self._base.alive:
                return self._base
            elif key in self._hopeless or compiled.closed:
                return None
            else:
                self.close()
                self._busy = anyio.Event()
                self._tasks.start_soon(self._prepare, kept_model, serving, steps, self._busy, name="fallback")

    async def _prepare(self, kept_model: KeptModel, serving: Serving, steps: frozenset[int], over: anyio.Event) -> None:
        key = serving.device, steps
        try:
            found = await _prepared(kept_model, serving, steps)
            if serving.model is not kept_model.model:  # the app has swapped in another one meanwhile
                if found is not None:
                    found[0].release()
                return
            if found is None:
                self._hopeless.add(key)
                return
            found[0].remember(serving.model)
            self._base, self._outcomes, self._key = Serving(found[0], serving.model, kept_model.compiled.use), found[1], key
            if kept_model.compiled.closed:
                self.close()
        except Exception:  # a defect here must not end the app's runtime
            self._hopeless.add(key)
            extra = about(device=serving.device, model=kept_model.record.name)
            logger.exception(
                "the fallback of device %r for model %r cannot be prepared", serving.device, kept_model.record.name, extra=extra
            )
        finally:
            self._busy = None
            over.set()

    async def _wait_for(self, kept_model: KeptModel, base: Serving, deadline_ns: int | None) -> None:
        """Let the fallback take over. The outputs are there, so the call does not wait beyond its deadline."""
        if self._busy is None and self._base is base:
            self._busy = anyio.Event()
            self._tasks.start_soon(self._take_over, kept_model, base, self._busy, name="fallback takes over")
        if self._busy is not None:
            with anyio.move_on_after(seconds_until(deadline_ns)):
                await self._busy.wait()

    async def _take_over(self, kept_model: KeptModel, base: Serving, over: anyio.Event) -> None:
        name = kept_model.record.name
        try:
            with kept_model.compiled.use.hold():
                await _swap(kept_model.compiled, base)
            self._taken_over.add(base.device)
            self._base, kept_model.outcomes = None, self._outcomes
        except AionnError as error:
            words = "device %r cannot take over model %r, and is tried again at the next failure: %s"
            logger.warning(words, base.device, name, error, extra=about(device=base.device, model=name))
        except Exception:  # a defect here must not end the app's runtime
            logger.exception("device %r cannot take over model %r", base.device, name, extra=about(device=base.device, model=name))
        finally:
            self._busy = None
            over.set()


async def _swap(compiled: CompiledModel, base: Serving) -> None:
    def is_of_the_same_model() -> bool:
        return compiled.serving is not None and compiled.serving.model is base.model

    for attempt in range(_TRIES):
        if not is_of_the_same_model():
            raise CallerError("the app has swapped in another model")
        try:
            await compiled.swap(base, may_swap=is_of_the_same_model)
            return
        except NotNowError:
            if attempt == _TRIES - 1:
                raise


async def _prepared(kept_model: KeptModel, serving: Serving, failing: frozenset[int]) -> Found | None:
    """Prepare the model on the next CPU device, or a plan with the failing steps there. Returns None if no device can do so."""
    from aionn.runtime.preparing.partition import Partition  # few executions fail
    from aionn.runtime.serving.planned_model import PlannedModel

    devices, request = kept_model.session.devices, kept_model.request.without_deadline(kept_model.disproved())
    steps = [one.step for one in serving.prepared.steps] if isinstance(serving.prepared, PlannedModel) and failing else []
    failed = {steps[number].device for number in failing} if steps else {serving.device}
    for name in devices.installed:
        if name in failed:
            continue
        try:
            if (await devices.get(name, request.options.priority)).type is not DeviceType.CPU:
                continue
            with Progress(kept_model.record, name) as progress:
                if steps:
                    moved = [msgspec.structs.replace(one, device=name) if number in failing else one for number, one in enumerate(steps)]
                    found = await Partition(devices, request).prepare(moved)
                else:
                    prepared, outcome = await prepare(devices, name, request)
                    found = prepared, (outcome,)
                progress.outcomes = found[1]
                return found
        except AionnError as error:
            logger.info("device %r cannot take the place of %s: %s", name, " and ".join(map(repr, failed)), error)
    trace.count("execution.no_fallback", device="+".join(sorted(failed)))
    return None


def _step_of(result: Result | None) -> int | None:
    """Return the number of the step of a plan that has failed, or None."""
    from aionn.runtime.serving.planned_execution import StepFailure

    return result.step if isinstance(result, StepFailure) else None


def _in_driver(call: Call) -> bool:
    """Return whether some argument lies in a driver."""
    return any(isinstance(value, DeviceMemory | RemoteBuffer) for value in (*call.placed.values(), *call.outputs.values()))
