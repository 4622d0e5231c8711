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
    """The models of all steps of a plan. They are made together at the first use, because the whole graph is walked for them."""

    def __init__(self, whole: hal_model.Model, steps: Sequence[Step]) -> None:
        self.whole = whole
        self.steps = tuple(steps)
        self._made: tuple[hal_model.Model, ...] = ()
        self._lock = threading.Lock()

    def part(self, number: int) -> hal_model.Model:
        """Return the model of a step. The whole model has been read. Blocks."""
        from aionn.graph.step_models import step_models  # brings `onnx`, which a cache hit does without

        with self._lock:
            if not self._made:
                self._made = step_models(self.whole, self.steps, models.digests_of(self.whole) or {})
        return self._made[number]


class StepModel(hal_model.Model):
    """A step of a model. `inputs` and `outputs` are known once its graph has been made, or a cache entry was loaded.

    Attributes:
        whole: the model that was cut.
        step: which part of it this is.
    """

    whole: hal_model.Model
    step: Step
    name = ""
    _parts: Parts
    _number = 0
    _digest = b""

    def __init__(self, parts: Parts, number: int, digest: bytes) -> None:
        """Make the model of a step.

        Args:
            parts: the plan. number: of the step in it.
            digest: token of the model that a plan from a cache names. Empty for a plan that was made of the model at hand.
        """
        whole, step = parts.whole, parts.steps[number]
        _set(self, whole=whole, step=step, name=getattr(whole, "name", ""), _parts=parts, _number=number, _digest=digest)
        if known := digest or known_token(whole):
            _set(self, token=step_token(known, step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # A field is missing until it is needed, so Python calls this.
            if name not in _FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if name == "token":
                raise CallerError("the model has not been digested, so the token of its step is not known")
            self._cut()
            return self.__dict__[name]

    def __repr__(self) -> str:
        return f"<StepModel of {self.whole!r}: {len(self.step.operations)} operations on {self.step.device!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def digest_here(self) -> None:
        """Digest the whole model in the calling thread, and make the token of the step. Blocking.

        Raises:
            CallerError: the model cannot be digested.
            OtherModelError: the step is that of another model.
        """
        if isinstance(self.whole, models.Model):
            models.digest_here(self.whole)
        whole = self.whole.token
        if self._digest not in (b"", whole):
            raise OtherModelError("the plan that the cache keeps under this token is that of another model; a token is unique to one model")
        _set(self, token=step_token(whole, self.step))

    def read_here(self) -> None:
        """Read the whole model in the calling thread, and make the step's graph. Blocking.

        Raises:
            CallerError, CompilationError: the model cannot be read.
            OtherModelError: the step is that of another model.
        """
        if models.is_read(self):
            return
        if self._digest:
            self.digest_here()
        if isinstance(self.whole, models.Model):
            models.read_here(self.whole)
        self._cut()

    def _cut(self) -> None:
        if self._digest:
            self._check_kept()
        part = self._parts.part(self._number)
        if not models.adopt(self, part.inputs, part.outputs):
            raise OtherModelError("the cache entry of a step has other inputs or outputs than the step")
        _set(self, _contents=known_contents(part), operations=part.operations, constants=part.constants, pools=part.pools, graph=part.graph)

    def _check_kept(self) -> None:
        """Compare a step of a plan from a cache with the graph.

        Raises:
            OtherModelError: the model has no such step.
        """
        from aionn.graph.flow import Flow

        step, operations = self.step, self.whole.operations
        if step.operations[-1] >= len(operations) or any(operations[i].name != n for i, n in zip(step.operations, step.nodes, strict=True)):
            raise OtherModelError("the plan that the cache keeps names operations that the model does not have")
        flow = Flow(self.whole)
        there = {*step.inputs, *flow.constants, *(name for index in step.operations for name in flow.makes[index])}
        if not there.issuperset(name for index in step.operations for name in flow.reads[index]) or not there.issuperset(step.outputs):
            raise OtherModelError("a step of the plan that the cache keeps has other inputs or outputs than its operations")

    def check_compiled(self, contents: bytes) -> None:
        """Check that a driver has compiled the weights that the model had before. The first compilation says what they are.

        Raises:
            CallerError: they are others.
        """
        known: dict[tuple[int, ...], bytes] = self.whole.__dict__.setdefault("_compiled_steps", {})
        before = self._contents or known.setdefault(self.step.operations, contents)
        if contents != before:
            raise CallerError(
                "the weights of the model have changed since it was read; load the model again, and replace files by renaming"
            )


def _set(model: StepModel, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(model, name, value)  # the dataclass is frozen for its users
