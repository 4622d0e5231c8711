"""Cut a model over several devices, and prepare each step as any model is prepared.

A step has its own cache entry, whose key has its operations, and its own outcome. Steps of different devices are prepared side by side.
If one fails, those that are prepared are released. The plan itself is kept with the cache (`KeptPlan`), so that a hit needs no graph.

A `KeptPlan` says how a model was cut, beside the cache entries of the steps. With it a second start needs no graph: the steps name their
cache entries, and the operands of the whole model stand beside them.

A plan that a cache gives is checked before it is used (`decoded`). It begins with a digest of its scope and its text, so a damaged plan,
and one that stands under another scope, is ignored. A process that may write the directory may also write a plan. Such a plan leads to
no wrong result. The names of tensors are unique in a model, so all steps that fit together compute the same. And each driver takes an
entry only if it has stored these bytes for these operations of this model.

A `StepModel` is one step of a plan as a model. Its graph is made when it is first needed. A step that comes from a cache needs no graph.
Its token is made of the whole model's and of the step, and its operands come from the cache entry. A step that is compiled has the whole
model read, and its part cut out.

A plan that comes from a cache names the model that was cut. A step of it is never cut out of another model: its graph is made after the
whole model was digested and compared.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
import msgspec
from blake3 import blake3

from aionn import trace
from aionn.caching import CacheOutcome
from aionn.engines.processor import run_threads
from aionn.errors import AionnError, CallerError, CompilationError, DeviceUnavailableError
from aionn.graph.digest import NOTHING, Place
from aionn.graph.files import OpenFile
from aionn.graph.steps import Step, check_steps, step_token
from aionn.hal import model as hal_model
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import PooledModel, known_contents, known_token
from aionn.hal.types import CACHE_TOKEN_BYTES, Operand
from aionn.hal.values import outside_frames
from aionn.remote.device import RemotePreparedModel
from aionn.runtime import model as models
from aionn.runtime.model import adopt
from aionn.runtime.preparing.compile_acts import CompileRequest, UnsupportedOperationError, digested, read, supported_by
from aionn.runtime.preparing.preparation import Found, prepare
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
        # Steps join no requests, because what lies between them is in one frame with the arguments.
        self._options = msgspec.structs.replace(request.options, batching=None)
        self._request = msgspec.structs.replace(request, options=self._options)
        self._model, self._cache = request.model, request.cache
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


def plan_of(prepared: Prepared, model: PooledModel) -> tuple[Step, ...]:
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


_DIGEST_BYTES = 32
_FORMAT = 1
_Operands = tuple[tuple[str, Operand], ...]


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of one model.

    Attributes:
        model_digest: token of the model that was cut.
        inputs, outputs: operands of the whole model, in its order.
        operations: how many operations the model has. Some, such as nodes that only hold a constant, may be in no step.
        steps: in the order in which they run.
    """

    format: int = _FORMAT
    model_digest: Annotated[bytes, msgspec.Meta(min_length=CACHE_TOKEN_BYTES, max_length=CACHE_TOKEN_BYTES)]
    inputs: _Operands
    outputs: _Operands
    operations: int
    steps: tuple[Step, ...]


def scope_of(token: bytes, versions: Mapping[str, str], options: PrepareOptions) -> bytes:
    """Return the name under which a cache keeps a plan.

    Args:
        token: the app's token.
        versions: of the devices that the model may be cut over, by name, best first.
        options: the preference, the threads and the options of devices shape a plan.
    """
    parts = (token, tuple(versions.items()), options.preference.name, run_threads(options), options.instances, options.encoded)
    return blake3(msgspec.msgpack.encode(parts), derive_key_context="aionn 1 plan of a model").digest()


def encoded(plan: KeptPlan, scope: bytes) -> bytes:
    """Return a plan as a cache keeps it under that scope."""
    text = msgspec.msgpack.encode(plan)
    return blake3(scope + text).digest() + text


def decoded(body: bytes, scope: bytes, devices: Sequence[str], model_digest: bytes) -> KeptPlan | None:
    """Return a plan that a cache has kept, or None if it is damaged or does not fit together. The trace counts the reason.

    Args:
        devices: names of the devices that the model may be cut over.
        model_digest: token of the model, or empty if it is not known.
    """
    plan, wrong = None, "it does not match the digest that it begins with"
    if hmac.compare_digest(body[:_DIGEST_BYTES], blake3(scope + body[_DIGEST_BYTES:]).digest()):
        try:
            plan = msgspec.msgpack.decode(body[_DIGEST_BYTES:], type=KeptPlan)
            wrong = _wrong(plan, devices, model_digest)
        except (msgspec.MsgspecError, ValueError) as error:
            wrong = str(error)
    if wrong:
        trace.count("plan.refused", reason=wrong)
        return None
    return plan


def _wrong(plan: KeptPlan, devices: Sequence[str], model_digest: bytes) -> str:
    """Return why a plan cannot be used, or nothing."""
    if plan.format != _FORMAT:
        return f"it has format {plan.format}, and this release reads {_FORMAT}"
    if model_digest and not hmac.compare_digest(plan.model_digest, model_digest):
        return "it is the plan of another model"
    for step in plan.steps:
        if step.device not in devices:
            return f"it has a step on device {step.device!r}"
        if not step.operations or not step.outputs or len(step.nodes) != len(step.operations):
            return "it has a step without operations, outputs or names of nodes"
        if list(step.operations) != sorted(step.operations) or not 0 <= step.operations[0] <= step.operations[-1] < plan.operations:
            return "the operations of a step are not in order, or not operations of the model"
        if len(set(step.inputs)) < len(step.inputs) or len(set(step.outputs)) < len(step.outputs):
            return "a step names a tensor twice"
    inputs, outputs = dict(plan.inputs), dict(plan.outputs)
    if len(inputs) < len(plan.inputs) or len(outputs) < len(plan.outputs) or not outputs:
        return "it names an input or output twice, or no output"
    if any(name in inputs and name not in outputs for step in plan.steps for name in step.outputs):
        return "a step makes an input of the model"
    return check_steps(plan.steps, inputs, outputs) or ""


_FIELDS = frozenset({"graph", "inputs", "outputs", "operations", "constants", "pools", "token"})


class OtherModelError(CallerError):
    """The plan that a cache has kept is that of another model."""


class Parts:
    """The steps of a plan, and the source of their tokens and graphs (`Source`).

    The graphs of all steps are made together at the first use, because the whole graph is walked for them.
    """

    def __init__(self, whole: hal_model.PooledModel, steps: Sequence[Step]) -> None:
        self.whole = whole
        self.steps = tuple(steps)
        self._made: tuple[hal_model.PooledModel, ...] = ()
        self._lock = threading.Lock()

    def to_read(self) -> Mapping[str, OpenFile]:
        """See `Source.to_read`."""
        source = models.source_of(self.whole)
        return {} if source is None else source.to_read()

    def digest(self, model: StepModel, known: Mapping[Place, bytes] = NOTHING) -> None:
        """Digest the whole model, and make the token of the step. See `Source.digest`.

        Raises:
            CallerError: the model cannot be digested.
            OtherModelError: the step is that of another model.
        """
        source = models.source_of(self.whole)
        if source is not None:
            source.digest(self.whole, known)
        token = self.whole.token
        if model.digest not in (b"", token):
            raise OtherModelError("the plan that the cache keeps under this token is that of another model; a token is unique to one model")
        _set(model, token=step_token(token, model.step))

    def read(self, model: StepModel) -> None:
        """Read the whole model, and make the step's graph. See `Source.read`.

        Raises:
            CallerError, CompilationError: the model cannot be read.
            OtherModelError: the step is that of another model.
        """
        if models.is_read(model):
            return
        if model.digest:
            self.digest(model)
        source = models.source_of(self.whole)
        if source is not None:
            source.read(self.whole)
        self.cut(model)

    def cut(self, model: StepModel) -> None:
        """Give a step its graph. The whole model has been read. Blocks.

        Raises:
            OtherModelError: the model has no such step.
        """
        from aionn.graph.cutting import step_models  # brings `onnx`, which a cache hit does without

        if model.digest:
            self._check_kept(model.step)
        with self._lock:
            if not self._made:
                self._made = step_models(self.whole, self.steps, models.digests_of(self.whole) or {})
        part = self._made[model.number]
        if not models.adopt(model, part.inputs, part.outputs):
            raise OtherModelError("the cache entry of a step has other inputs or outputs than the step")
        contents = known_contents(part)
        _set(model, _contents=contents, operations=part.operations, constants=part.constants, pools=part.pools, graph=part.graph)

    def _check_kept(self, step: Step) -> None:
        """Compare a step of a plan from a cache with the graph."""
        from aionn.graph.flow import Flow

        operations = self.whole.operations
        if step.operations[-1] >= len(operations) or any(operations[i].name != n for i, n in zip(step.operations, step.nodes, strict=True)):
            raise OtherModelError("the plan that the cache keeps names operations that the model does not have")
        flow = Flow(self.whole)
        there = {*step.inputs, *flow.constants, *(name for index in step.operations for name in flow.makes[index])}
        if not there.issuperset(name for index in step.operations for name in flow.reads[index]) or not there.issuperset(step.outputs):
            raise OtherModelError("a step of the plan that the cache keeps has other inputs or outputs than its operations")

    def compiled(self, model: StepModel, contents: bytes) -> None:
        """See `Source.compiled`."""
        known: dict[tuple[int, ...], bytes] = self.whole.__dict__.setdefault("_compiled_steps", {})
        before = known_contents(model) or known.setdefault(model.step.operations, contents)
        if contents != before:
            raise CallerError(
                "the weights of the model have changed since it was read; load the model again, and replace files by renaming"
            )


class StepModel(hal_model.PooledModel):
    """A step of a model. `inputs` and `outputs` are known once its graph has been made, or a cache entry was loaded.

    Attributes:
        whole: the model that was cut.
        step: which part of it this is. number: of the step in the plan.
        digest: token of the model that a plan from a cache names. Empty for a plan that was made of the model at hand.
    """

    whole: hal_model.PooledModel
    step: Step
    name = ""
    number: int
    digest: bytes
    _source: Parts

    def __init__(self, parts: Parts, number: int, digest: bytes) -> None:
        whole, step = parts.whole, parts.steps[number]
        _set(self, whole=whole, step=step, name=getattr(whole, "name", ""), number=number, digest=digest, _source=parts)
        if known := digest or known_token(whole):
            _set(self, token=step_token(known, step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # A field is missing until it is needed, so Python calls this.
            if name not in _FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if name == "token":
                raise CallerError("the model has not been digested, so the token of its step is not known")
            self._source.cut(self)
            return self.__dict__[name]

    def __repr__(self) -> str:
        return f"<StepModel of {self.whole!r}: {len(self.step.operations)} operations on {self.step.device!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _set(model: StepModel, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(model, name, value)  # the dataclass is frozen for its users
