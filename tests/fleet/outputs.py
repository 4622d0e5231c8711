"""What a compilation computes, as one digest: to compare outputs of two machines bit by bit."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

import aionn
from tests.real_models import some_input


async def digest_of_outputs(compilation: aionn.Compilation, model: aionn.Model) -> str:
    """Run a model on inputs made from a seed, and return the digest of all its outputs."""
    inputs = {name: some_input(operand, seed=number) for number, (name, operand) in enumerate(model.inputs.items())}
    outputs = await compilation.compute(inputs)
    hasher = blake3()
    for name in sorted(outputs):
        hasher.update(name.encode())
        hasher.update(np.ascontiguousarray(outputs[name]).tobytes())
    return hasher.hexdigest()
