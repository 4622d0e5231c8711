"""An app for F10: it streams frames through one stage while a farm makes the better one, and prints one JSON object at its end.

    python -m tests.ray.streaming_app ADDRESS FOLDER STAGE...

The farm's store is FOLDER/store. The app ends when the last stage is decided.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.ray import Farm
from aionn.testing.models import identity_model


async def main(folder: Path, *stages: str) -> None:
    async with aionn.Runtime(state_dir=folder / "state", start=()) as runtime:
        model = aionn.Model.from_onnx(identity_model())
        policy = aionn.StagePolicy(executions=1, min_gain=None, backend=Farm(folder / "store"))
        kept = folder / "cache"
        compilation = await runtime.compile(model, mode="staged", stages=stages, stage_policy=policy, cache_dir=kept, timeout_s=60)
        ((name, operand),) = model.inputs.items()
        decided = anyio.Event()

        async def decide() -> None:
            await compilation.wait_for_stage(stages[-1])
            decided.set()

        frames = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(decide)
            async with compilation.burst() as burst:
                while not decided.is_set():
                    frame = np.full(operand.dimensions or (), frames % 100, np.float32)
                    outputs = await burst.compute({name: frame})
                    assert all((output == frame).all() for output in outputs.values())
                    frames += 1
                    await anyio.sleep(0.02)  # 50 frames a second
        last = compilation.stages[-1]
        print(json.dumps({"frames": frames, "state": last.state, "made_by": last.made_by, "local_reason": last.local_reason}))


if __name__ == "__main__":
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    aionn.run(main, Path(sys.argv[2]), *sys.argv[3:])
