"""An app in an image: nothing may be written to, and the artifacts lie in a folder of the image. Prints one JSON value.

    python -m tests.fleet.image_app MODEL STORE CACHE STATE

It gives up root's right to override modes first, so read-only folders bind it as they bind any account.
"""

from __future__ import annotations

import json
import sys

import aionn
from aionn.fleet import StoreBackend, use_backend
from tests.caching.unprivileged import obey_modes
from tests.fleet.outputs import digest_of_outputs


async def main() -> None:
    model_path, store, cache, state = sys.argv[1:]
    async with aionn.Runtime(state_dir=state, start=()) as runtime:
        use_backend(runtime, StoreBackend(store))
        model = await runtime.load(model_path)
        compilation = await runtime.compile(model, devices=["onnxruntime"], cache_dir=cache)
        (outcome,) = compilation.outcomes
        said = {
            "kind": outcome.kind.value,
            "reason": None if outcome.reason is None else outcome.reason.value,
            "detail": outcome.detail,
            "save_failure": None if outcome.save_failure is None else outcome.save_failure.reason.value,
            "outputs": await digest_of_outputs(compilation, model),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    obey_modes()
    aionn.run(main)
