"""`Step`: a part of a model that one device runs. A plan is a tuple of steps, in the order in which they run.

No `onnx` is needed here, so a plan that is read from a cache costs nothing of it.

    step_token     names the content of a step, from the token of the whole model
    check_steps    says whether steps fit together, as those of a plan that comes from a file must
    lifetimes      when each temporary is made, and when it is read last
    lay_out        gives temporaries their places in one region, which those of different times share
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from blake3 import blake3

TEMPORARY_ALIGNMENT_BYTES = 64
"""A cache line and AVX-512's width, so engines can read and write temporaries in place."""

_TOKEN_CONTEXT = "aionn 1 step of a model"
_LENGTH = struct.Struct("<Q")


class Step(msgspec.Struct, frozen=True):
    """A part of a model that one device runs.

    Attributes:
        device: name of the device.
        operations: their indices in `Model.operations`, rising.
        nodes: the names of these operations.
        inputs: names of the tensors that it reads: inputs of the model, and outputs of earlier steps.
        outputs: names of the tensors that it makes for later steps, or as outputs of the model.
    """

    device: str
    operations: tuple[int, ...]
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TemporaryLayout(msgspec.Struct, frozen=True):
    """Where temporaries lie in one region.

    Attributes:
        offsets: where each begins, by name; a multiple of `TEMPORARY_ALIGNMENT_BYTES`.
        size_bytes: how large the region must be.
    """

    offsets: Mapping[str, int]
    size_bytes: int


def step_token(whole: bytes, step: Step) -> bytes:
    """Return the token of a step: a digest of the whole model's token, and of what the step computes, reads and makes.

    The device is not part of it. A cache key names the device beside the token. An empty `whole` gives an empty token.
    """
    if not whole:
        return b""
    digest = blake3(whole, derive_key_context=_TOKEN_CONTEXT)
    digest.update(_LENGTH.pack(len(step.operations)))
    digest.update(b"".join(map(_LENGTH.pack, step.operations)))
    for names in (step.inputs, step.outputs):
        digest.update(_LENGTH.pack(len(names)))
        for name in names:
            encoded = name.encode("utf-8", "surrogatepass")
            digest.update(_LENGTH.pack(len(encoded)) + encoded)
    return digest.digest()


def check_steps(steps: Sequence[Step], inputs: Collection[str], outputs: Collection[str]) -> str | None:
    """Return the first reason why steps do not fit together, as one sentence, or None.

    Args:
        inputs, outputs: names of the whole model's.
    """
    known = set(inputs)
    made: set[str] = set()
    done: set[int] = set()
    for number, step in enumerate(steps):
        for name in step.inputs:
            if name not in known:
                return f"step {number} reads {name!r}, which no step before it makes"
        for name in step.outputs:
            if name in made:
                return f"step {number} makes {name!r}, which a step before it makes too"
        for operation in step.operations:
            if operation in done:
                return f"step {number} runs operation {operation}, which a step before it runs too"
        done.update(step.operations)
        made.update(step.outputs)
        known.update(step.outputs)
    missing = next((name for name in outputs if name not in made), None)
    return None if missing is None else f"no step makes the output {missing!r}"


def lifetimes(steps: Sequence[Step], outputs: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return for each temporary the number of the step that makes it, and of the last step that reads it.

    A temporary is what a step makes and what is not in `outputs`, the names of the whole model's outputs. Those have memory of the caller.
    """
    lives: dict[str, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        for name in step.inputs:
            if name in lives:
                lives[name] = (lives[name][0], number)
        for name in step.outputs:
            if name not in outputs:
                lives[name] = (number, number)
    return lives


def lay_out(sizes: Mapping[str, int], lives: Mapping[str, tuple[int, int]]) -> TemporaryLayout:
    """Give each temporary a place in one region. Temporaries that live at the same step never share a byte.

    The largest come first, and each gets the lowest gap that fits between those that live at the same time. The order of equal sizes is
    that of their steps, then of their names, so a layout is the same in every run.

    Args:
        sizes: bytes of each temporary, by name.
        lives: for each of these names, as `lifetimes` gives it. Other names are ignored.
    """
    placed: list[tuple[int, int, int, int]] = []
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], lives[name], name)):
        first, last = lives[name]
        size = -(-sizes[name] // TEMPORARY_ALIGNMENT_BYTES) * TEMPORARY_ALIGNMENT_BYTES
        taken = sorted((begin, until) for begin, until, born, dead in placed if born <= last and first <= dead)
        offsets[name] = _gap(taken, size)
        placed.append((offsets[name], offsets[name] + size, first, last))
        end = max(end, offsets[name] + size)
    return TemporaryLayout({name: offsets[name] for name in sizes}, end)


def _gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """Return where the first gap of that size begins between ranges in the order of their beginnings."""
    at = 0
    for begin, until in taken:
        if begin - at >= size:
            return at
        at = max(at, until)
    return at
