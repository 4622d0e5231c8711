"""An app for `test_cache_journey`: compiles one model with a cache, runs it once, and tells what the cache did.

    python -m tests.journeys.caching_app MODEL CACHE_DIR DEVICE [MODE]

Prints one JSON line: pid, kind, reason, waited_s, save_failure, and the BLAKE3 of all outputs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

import numpy as np
from blake3 import blake3

import aionn
from tests.real_models import some_input


async def main(path: str, directory: str, device: str, mode: Literal["eager", "jit"] = "eager") -> None:
    model = aionn.Model.from_onnx(path)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(device,), cache_dir=directory, token=model.token, mode=mode)
        outputs = await compilation.compute({name: some_input(operand) for name, operand in model.inputs.items()})
        (outcome,) = compilation.outcomes
    digest = blake3(b"".join(np.ascontiguousarray(array).tobytes() for array in outputs.values())).hexdigest()
    told = {
        "pid": os.getpid(),
        "kind": outcome.kind.value,
        "reason": outcome.reason.value if outcome.reason else None,
        "waited_s": outcome.waited_s,
        "save_failure": str(outcome.save_failure) if outcome.save_failure else None,
        "outputs": digest,
    }
    os.write(1, (json.dumps(told) + "\n").encode())  # in one piece: several processes share the pipe


if __name__ == "__main__":
    aionn.run(main, *sys.argv[1:])
