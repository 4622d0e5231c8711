"""A file as a user writes it. `test_types_of_a_user.py` gives it to type checkers, outside the checkout; nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import aionn

Picture = NDArray[np.float32]


def heard(event: aionn.events.Event) -> None:
    if isinstance(event, aionn.events.DriverEnded):
        print(event.device, event.cause)


async def camera(count: int) -> AsyncIterator[aionn.Item]:
    for number in range(count):
        yield aionn.Item({"x": np.full((1, 16), number, np.float32)}, tag=number)


def pictures() -> Iterator[dict[str, Picture]]:
    yield {"x": np.zeros((1, 16), np.float32)}


async def stream(burst: aionn.Burst) -> list[Picture]:
    found: list[Picture] = []
    async for result in burst.map(camera(3), policy="latest", depth=2, deadline_s=0.5):
        assert_type(result, aionn.StreamResult)
        print(result.seq, result.age_s, result.stage, result.tag)
        found.append(result.outputs["y"])
    found += [result.outputs["y"] async for result in burst.map(pictures())]
    return found


async def state_of(compilation: aionn.Compilation) -> aionn.DeviceMemory:
    state = await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(2, 1, 128))
    await state.copy_from(np.zeros((2, 1, 128), np.float32))
    await state.reset()
    assert_type(state.shape, tuple[int, ...] | None)
    print((await state.snapshot()).shape)
    return state


async def chain(first: aionn.Compilation, second: aionn.Compilation) -> aionn.Outputs:
    memory = aionn.Memory.allocate(64)
    begun = first.start({"x": np.ones((1, 16), np.float32)}, outputs={"y": memory})
    return await second.start({"x": memory}, after=(begun,))


def report(health: aionn.Health) -> list[str]:
    lines = [f"{device.name} {device.pid}: {device.reason}" for device in health.devices if device.state == "hung"]
    return lines + [f"{compilation.name}: {compilation.seconds:.1f} s" for compilation in health.compilations]


async def watch(runtime: aionn.Runtime) -> None:
    async for event in runtime.events():
        heard(event)


async def main(path: str) -> None:
    async with aionn.Runtime(threads=1, name="mine", start=("onnxruntime",)) as runtime:
        model = await runtime.load(path)
        for name, operand in model.inputs.items():
            print(name, operand.word, operand.dimensions)
        compilation = await runtime.compile(
            model, devices=("onnxruntime",), preference="sustained_speed", priority="high", cache_dir="cache", on_event=heard
        )
        kinds = [(outcome.kind.name, outcome.reason, outcome.saved_s) for outcome in compilation.outcomes]
        print(kinds, compilation.device, [step.device for step in compilation.plan])
        outputs = await compilation.compute({"x": np.ones((1, 16), np.float32)}, timeout_s=1.0, retry=1, measure_timing=True)
        y: Picture = outputs["y"]
        if outputs.timing is not None:
            print(y.shape, outputs.timing.on_device_us, outputs.device, outputs.stage)
        state = await state_of(compilation)
        async with compilation.burst(name="door", depth=2) as burst:
            async with burst.frame() as frame:
                frame["x"][:] = 1
                outputs = await burst.compute(frame, outputs={"stateN": state})
            print(len(await stream(burst)), burst.statistics()["computed"])
        started = compilation.start({"x": np.ones((1, 16), np.float32)}, timeout_s=1.0)
        print((await started)["y"].dtype, started.done())
        health = runtime.health()
        print(health.ready, health.state, [str(reason) for reason in health.reasons], report(health))
        for device in runtime.devices:
            print(device.name, device.pid, device.statistics()["starts"])


async def careful(path: str) -> None:
    try:
        await main(path)
    except aionn.DriverHungError as error:
        print(error.device, error.waited_s)
    except aionn.DriverDiedError as error:
        print(error.device, error.exit_code)
    except aionn.CompilationError as error:
        print(error.node, error.reason)
    except aionn.AionnError as error:
        print(error)


if __name__ == "__main__":
    aionn.run(careful, "model.onnx")
