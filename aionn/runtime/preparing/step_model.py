"""`StepModel`: one step of a plan as a model. Its graph is made when it is first needed.

A step that comes from a cache needs no graph. Its token is made of the whole model's and of the step, and its operands come from the
cache entry. A step that is compiled has the whole model read, and its part cut out.

A plan that comes from a cache names the model that was cut. A step of it is never cut out of another model: its graph is made after the
whole model was digested and compared.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aionn.errors import CallerError
from aionn.graph.steps import Step, step_token
from aionn.hal import model as hal_model
from aionn.hal.model import known_contents, known_token
from aionn.runtime import model as models

_FIELDS = frozenset({"graph", "inputs", "outputs", "operations", "constants", "pools", "token"})


class OtherModelError(CallerError):
    """The plan that a cache has kept is that of another model."""


class Parts:
    """The steps of a plan, and the source of their tokens and graphs (`Source`).

    The graphs of all steps are made together at the first use, because the whole graph is walked for them.
    """

    def __init__(self, whole: hal_model.Model, steps: Sequence[Step]) -> None:
        self.whole = whole
        self.steps = tuple(steps)
        self._made: tuple[hal_model.Model, ...] = ()
        self._lock = threading.Lock()

    def digest(self, model: StepModel) -> None:
        """Digest the whole model, and make the token of the step. See `Source.digest`.

        Raises:
            CallerError: the model cannot be digested.
            OtherModelError: the step is that of another model.
        """
        source = models.source_of(self.whole)
        if source is not None:
            source.digest(self.whole)
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
        from aionn.graph.step_models import step_models  # brings `onnx`, which a cache hit does without

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


class StepModel(hal_model.Model):
    """A step of a model. `inputs` and `outputs` are known once its graph has been made, or a cache entry was loaded.

    Attributes:
        whole: the model that was cut.
        step: which part of it this is. number: of the step in the plan.
        digest: token of the model that a plan from a cache names. Empty for a plan that was made of the model at hand.
    """

    whole: hal_model.Model
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
