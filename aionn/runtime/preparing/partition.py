"""Cut a model over several devices, and prepare each step as any model is prepared.

A step has its own cache entry, whose key has its operations, and its own outcome. Steps of different devices are prepared side by side.
If one fails, those that are prepared are released. The plan itself is kept with the cache (`kept_plan`), so that a hit needs no graph.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from aionn import trace
from aionn.caching import CacheOutcome
from aionn.errors import AionnError, CompilationError, DeviceUnavailableError
from aionn.graph.steps import Step
from aionn.hal.model import Model, known_token
from aionn.hal.types import Operand
from aionn.hal.values import outside_frames
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.model import adopt
from aionn.runtime.preparing.compile_acts import CompileRequest, UnsupportedOperationError, digested, read, supported_by
from aionn.runtime.preparing.kept_plan import KeptPlan, decoded, encoded, scope_of
from aionn.runtime.preparing.preparation import Found, prepare
from aionn.runtime.preparing.step_model import OtherModelError, Parts, StepModel
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import about, current
from aionn.runtime.serving.planned_model import PlannedModel, PlannedStep, Prepared
from aionn.tasks import in_time, ungrouped

logger = logging.getLogger("aionn.runtime")

T = TypeVar("T")
PrepareStep = Callable[[str, CompileRequest], Awaitable[tuple[RemotePreparedModel, CacheOutcome]]]
"""Prepares a model on the device of that name."""

_PLAN_SHARE = 0.25
"""The share of the time that is left which reading or keeping a plan may take."""


class Partition:
    """Cuts one model over several devices.

    Attributes:
        capable: by device, for each operation whether the device may run it.
        step_failed: name of the device that could not prepare its step at the last attempt, or None.
    """

    def __init__(self, devices: Devices, request: CompileRequest, prepare_step: PrepareStep | None = None) -> None:
        """`prepare_step`: how each step is prepared, by default as any model is."""
        self._devices = devices
        self._request = request
        self._model, self._options, self._cache = request.model, request.options, request.cache
        self._prepare_step = prepare_step or partial(prepare, devices)
        self.capable: dict[str, Sequence[bool]] = {}
        self.step_failed: str | None = None

    async def kept(self, versions: Mapping[str, str]) -> Found | None:
        """Prepare the plan that the cache keeps for these devices. Returns None if the cache has no plan that can be used.

        Args:
            versions: of the devices by name, best first.

        Raises: as `prepare`.
        """
        cache = self._cache
        if cache is None:
            return None
        scope = scope_of(cache.token, versions, self._options)
        body = await self._in_time(lambda: cache.store.remembered.plan(scope))
        plan = None if body is None else decoded(body, scope, list(versions), known_token(self._model))
        trace.count("plan.kept", found=plan is not None)
        if plan is None:
            return None
        try:
            return await self.prepare(plan.steps, plan)
        except (OtherModelError, CompilationError) as error:  # of the plan's fault, or the same comes of the plan that is made now
            words = "the plan that the cache keeps for model %r is not used, and the model is cut again: %s"
            logger.warning(words, current.get().name, str(error), extra=about(model=current.get().name))
            trace.count("plan.refused", reason=str(error))
            return None

    async def ask(self, name: str, error: UnsupportedOperationError | None = None) -> Sequence[bool]:
        """Return for each operation whether the device of that name can run it. `error`: what a device has said already, if so."""
        if error is not None and error.device == name and error.supported is not None:
            return error.supported
        remote = await self._devices.get(name, self._options.priority)
        await read(self._devices, self._model, name)
        return await supported_by(remote, self._model, self._options)

    async def cut(self, versions: Mapping[str, str]) -> Found:
        """Cut the model over the devices of `capable`, prepare its steps, and keep the plan.

        Args:
            versions: of all devices that were asked for, by name, best first.

        Raises: as `prepare`, and
            CompilationError: no device can run a node, which is `.node`; or the model cannot be cut.
        """
        from aionn.graph.cutting import cut  # brings `onnx`, which a cache hit does without

        model, options = self._model, self._options
        if outside_frames(model):
            reason = "a model with strings, sequences, maps or optionals at its border is not cut over several devices"
            raise CompilationError(f"no device can run the whole model, and {reason}; give a device that can run all of it", reason=reason)
        remotes = [await self._devices.get(name, options.priority) for name in self.capable]
        performance = {remote.name: remote.performance for remote in remotes}
        with trace.span("plan.cut", devices="+".join(self.capable)):
            steps = await anyio.to_thread.run_sync(
                lambda: cut(model, self.capable, performance, options.preference), abandon_on_cancel=True
            )
        names = "+".join(dict.fromkeys(step.device for step in steps))
        words = "model %r is cut into %d steps over the devices %s"
        logger.info(words, current.get().name, len(steps), names, extra=about(model=current.get().name))
        trace.count("plan.cut", steps=len(steps), devices="+".join(self.capable))
        found = await self.prepare(steps)
        try:
            await self._keep(steps, versions)
        except BaseException:
            found[0].release()  # the caller gets no model
            raise
        return found

    async def _keep(self, steps: Sequence[Step], versions: Mapping[str, str]) -> None:
        cache, model = self._cache, self._model
        if cache is None:
            return
        digest = await digested(self._devices, model)
        scope = scope_of(cache.token, versions, self._options)
        plan = KeptPlan(
            model_digest=digest,
            inputs=tuple(model.inputs.items()),
            outputs=tuple(model.outputs.items()),
            operations=len(model.operations),
            steps=tuple(steps),
        )

        async def keep() -> bool:
            with cache.store.in_use():
                await cache.store.remembered.keep_plan(scope, encoded(plan, scope))
            return True

        await self._in_time(keep)

    async def prepare(self, steps: Sequence[Step], kept: KeptPlan | None = None) -> Found:
        """Prepare each step on its device.

        Args:
            kept: the plan from a cache that the steps belong to. None for a plan that was made of the model at hand.

        Raises:
            OtherModelError: the steps are those of another model.
            CompilationError, DeadlineError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError: a step cannot
                be prepared. Nothing is left of the others.
        """
        made: dict[int, tuple[RemotePreparedModel, CacheOutcome]] = {}
        self.step_failed = None
        model, digest = self._model, b"" if kept is None else kept.model_digest
        parts = Parts(model, steps)

        async def on_device(name: str) -> None:
            for number, step in enumerate(steps):
                if step.device == name:
                    made[number] = await self._one(StepModel(parts, number, digest))

        try:
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    for name in dict.fromkeys(step.device for step in steps):
                        tasks.start_soon(on_device, name)
            planned = tuple(PlannedStep(step, made[number][0]) for number, step in enumerate(steps))
            inputs, outputs = (model.inputs, model.outputs) if kept is None else (dict(kept.inputs), dict(kept.outputs))
            _check_borders(inputs, outputs, planned)
            if not adopt(model, inputs, outputs):
                raise OtherModelError("the plan that the cache keeps under this token has other inputs or outputs than the model")
            return PlannedModel(model, planned), tuple(made[number][1] for number in range(len(steps)))
        except BaseException as error:
            for prepared, _ in made.values():
                prepared.release()
            if isinstance(error, BaseExceptionGroup):
                raise _first_of(error) from None
            raise

    async def _one(self, model: StepModel) -> tuple[RemotePreparedModel, CacheOutcome]:
        step = model.step
        cache = None if self._cache is None else msgspec.structs.replace(self._cache, operations=step.operations)
        open_outputs = tuple(name for name in self._options.open_outputs if name in step.outputs)
        try:
            return await self._prepare_step(step.device, self._request.of(model, cache, open_outputs))
        except AionnError:
            self.step_failed = self.step_failed or step.device
            raise

    async def _in_time(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Wait for the disk for a part of the time that is left."""
        return await in_time(self._devices.tasks, work, self._request.left_s(_PLAN_SHARE), None)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one error for those of several devices. The others are its notes."""
    first, *others = (error for error in group.exceptions if isinstance(error, AionnError))
    for other in others:
        first.add_note(str(other))
    return first


def _check_borders(inputs: Mapping[str, Operand], outputs: Mapping[str, Operand], steps: Sequence[PlannedStep]) -> None:
    """Compare the operands of each step with those of the steps before, and of the model, as it is known or as a plan says.

    Raises:
        OtherModelError: they do not fit together.
    """
    known = dict(inputs)
    for planned in steps:
        step, prepared = planned.step, planned.prepared
        if tuple(prepared.inputs) != step.inputs or tuple(prepared.outputs) != step.outputs:
            raise OtherModelError(f"the step on device {step.device!r} has other inputs or outputs than the plan")
        for name, operand in prepared.inputs.items():
            if name not in known or known[name].type is not operand.type:
                raise OtherModelError(f"the step on device {step.device!r} reads {name!r} as {operand.type.value}, and no step makes that")
        for name, operand in prepared.outputs.items():
            if name in outputs and outputs[name].type is not operand.type:
                raise OtherModelError(f"the step on device {step.device!r} makes the output {name!r} as {operand.type.value}")
            known[name] = operand


async def prepare_again(devices: Devices, before: Prepared, request: CompileRequest) -> Found:
    """Prepare a model on the devices that it was prepared on before: whole, or in the same steps.

    Raises: as `prepare`.
    """
    if isinstance(before, PlannedModel):
        return await Partition(devices, request).prepare([planned.step for planned in before.steps])
    prepared, outcome = await prepare(devices, before.device.name, request)
    return prepared, (outcome,)


def device_names(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the devices that run a prepared model, each once."""
    steps = [planned.prepared for planned in prepared.steps] if isinstance(prepared, PlannedModel) else [prepared]
    return tuple(dict.fromkeys(step.device.name for step in steps))


def plan_of(prepared: Prepared, model: Model) -> tuple[Step, ...]:
    """Return the steps of what was prepared. A model that one device runs whole is one step, for which its graph is read if it was not."""
    if isinstance(prepared, PlannedModel):
        return tuple(planned.step for planned in prepared.steps)
    nodes = tuple(operation.name for operation in model.operations)
    return (Step(prepared.device.name, tuple(range(len(nodes))), nodes, tuple(model.inputs), tuple(model.outputs)),)


async def prepare_on(devices: Devices, names: Sequence[str], request: CompileRequest, prepare_step: PrepareStep | None = None) -> Found:
    """Prepare a model on the first of these devices. If that cannot run every node, it runs what it can, and the others run the rest.

    Args:
        prepare_step: how a model, or a step, is prepared. By default as `preparation.prepare` does.

    Raises: as `prepare`, and
        CompilationError: no device can run a node.
    """
    prepare_step = prepare_step or partial(prepare, devices)
    try:
        prepared, outcome = await prepare_step(names[0], request)
        return prepared, (outcome,)
    except UnsupportedOperationError as error:
        if len(names) < 2 or request.model.format != "onnx":  # no other format can be cut
            raise
        own = error.supported  # not the error, whose traceback refers to this call
    partition = Partition(devices, request, prepare_step)
    # The order is part of the plan's scope. The version says that the plan is one of a stage.
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = (await devices.get(name, request.options.priority)).version
        except DeviceUnavailableError as error:
            extra = about(device=name, model=current.get().name)
            logger.warning("device %r is passed over for model %r: %s", name, current.get().name, error, extra=extra)
    versions[names[0]] += "; first"
    found = await partition.kept(versions)
    if found is None:
        own = own or await partition.ask(names[0])
        flags = {name: await partition.ask(name) for name in versions if name != names[0]}
        if any(map(all, flags.values())):  # or the plan would be that device alone
            flags = {name: [able and not taken for able, taken in zip(can, own, strict=True)] for name, can in flags.items()}
        partition.capable = {names[0]: own, **flags}
        found = await partition.cut(versions)
    return found
