"""`KeptPlan`: how a model was cut over several devices, as a cache keeps it beside the entries of the steps.

With it a second start needs no graph: the steps name their cache entries, and the operands of the whole model stand beside them.

A plan that a cache gives is checked before it is used (`decoded`). It begins with a digest of its scope and its text, so a damaged plan,
and one that stands under another scope, is ignored. A process that may write the directory may also write a plan. Such a plan leads to
no wrong result. The names of tensors are unique in a model, so all steps that fit together compute the same. And each driver takes an
entry only if it has stored these bytes for these operations of this model.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from aionn import trace
from aionn.engines.processor import run_threads
from aionn.graph.steps import Step, check_steps
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import CACHE_TOKEN_BYTES, Operand

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
