"""An app for `test_never_stale`: compile a model with a cache in another process, and print what the cache did.

    python -m tests.conformance.stale_app HOW MODEL CACHE_DIR STATE_DIR "a child" | "a reader"

A reader obeys the modes of files, although it may be root's. Prints one JSON object: the outcome and the outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

import aionn
from tests.caching.unprivileged import obey_modes
from tests.conformance.stale_case import X, read_model, token_of


async def main(how: str, path: str, cache_dir: str, state_dir: str) -> None:
    model = await read_model(how, Path(path))
    async with aionn.Runtime(state_dir=state_dir) as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=cache_dir, token=await token_of(model))
        (x,) = model.inputs
        outputs = await compilation.compute({x: X})
        (outcome,) = compilation.outcomes
    found = {"outcome": outcome, "outputs": {name: array.tolist() for name, array in outputs.items()}}
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    if sys.argv[-1] == "a reader":
        obey_modes()
    aionn.run(main, *sys.argv[1:-1])
