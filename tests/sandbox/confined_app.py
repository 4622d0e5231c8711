"""An app that runs a real model: `python -m tests.sandbox.confined_app DEVICE LEVEL...`. Prints a line of JSON per level.

Each line has the level, what holds, what lacks, whether the outputs are right, and the error instead of them.
"""

from __future__ import annotations

import json
import sys

import anyio
import numpy as np

import aionn
from tests.real_models import carried


async def run(device: str, level: str) -> dict[str, object]:
    model = aionn.Model.from_onnx(carried("magika"))
    try:
        async with aionn.Runtime(sandbox=level) as runtime:
            compilation = await runtime.compile(model, devices=(device,))
            outputs = await compilation.compute({"bytes": np.full((1, 2048), 32, np.int32)})
            (found,) = (entry.sandbox for entry in runtime.devices if entry.name == device)
    except aionn.AionnError as error:
        return {"level": level, "error": type(error).__name__, "text": str(error)}
    assert found is not None
    (output,) = outputs.values()
    return {"level": found.level, "holds": found.holds, "lacks": found.lacks, "sum": round(float(output.sum()), 3)}


if __name__ == "__main__":
    for level in sys.argv[2:]:
        print(json.dumps(anyio.run(run, sys.argv[1], level)), flush=True)
