"""An app whose driver outlives it, which no sandbox allows (`orphaning_engine`). It prints the driver's number, then waits to be ended."""

from __future__ import annotations

import numpy as np

import aionn
from aionn.testing import identity_model

ENGINE = "tests.cli.orphaning_engine:OrphaningEngine"


async def main() -> None:
    async with aionn.Runtime(start=(), hang_s=None, sandbox="off") as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(ENGINE,))
        print("driver", next(device.pid for device in runtime.devices if device.name == ENGINE), flush=True)
        await compilation.compute({"input": np.zeros((1, 16), np.float32)})


if __name__ == "__main__":
    aionn.run(main)
