"""`aionn.ray.MultiplexedHolder` in Ray Serve: Serve's own table of models beside the replica's."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
import aionn.ray
from tests.ray.applications import MARK, Application
from tests.ray.multiplexing import factor_of, written_models

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore"),  # Ray Serve makes many
]

SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]
CALLERS = 8


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio"


class Shop(Application):
    """An application with many models."""

    async def run(self, models: int, most: int, **options: Any) -> Any:
        """Deploy it with so many models, of which `most` are compiled at once. Return its handle once it is ready."""
        from ray import serve

        from tests.ray.deployments import Multiplexed

        multiplexed = written_models(self.folder, models)
        multiplexed["broken"] = aionn.ray.ModelSpec(b"not a model")
        runtime = {"state_dir": str(self.folder / "state"), "driver_env": {MARK: self.mark}}
        options = aionn.ray.serve_options(max_ongoing_requests=CALLERS, ray_actor_options={"num_cpus": 1}, **options)
        made = serve.deployment(**options)(Multiplexed).bind(multiplexed, max_models=most, runtime=runtime)
        return await self.launch(made)


@pytest.fixture
async def shop(ray_serve: str, tmp_path: Path) -> AsyncIterator[Shop]:
    """An application, which is deleted at the end. None of its drivers may be left."""
    made = Shop(tmp_path)
    yield made
    await made.delete()


async def call(handle: Any, model_id: str, number: float) -> None:
    """Call a model, and look whether the answer is its answer."""
    x = np.full((1, 16), number, np.float32)
    outputs = await handle.options(multiplexed_model_id=model_id).infer.remote({"x": x})
    assert outputs["y"].tolist() == (x * factor_of(model_id)).tolist()


async def random_calls(handle: Any, models: int, count: int, seed: int) -> None:
    """Make so many calls from `CALLERS` callers, each with a random model."""
    chance = random.Random(seed)
    orders = [(f"m{chance.randrange(models)}", number) for number in range(count)]

    async def caller() -> None:
        while orders:
            await call(handle, *orders.pop())

    async with anyio.create_task_group() as callers:
        for _ in range(CALLERS):
            callers.start_soon(caller)


@pytest.mark.parametrize(("models", "most", "count"), [pytest.param(*each, marks=SOAK) for each in ((6, 2, 60), (20, 4, 2000))])
async def test_random_calls_get_their_models_and_few_are_compiled_at_once(shop: Shop, models: int, most: int, count: int) -> None:
    handle = await shop.run(models, most)
    warm = count // 10
    await random_calls(handle, models, warm, 1)
    first, began = await handle.counts.remote(), time.monotonic()
    await random_calls(handle, models, count - warm, 2)
    seconds, last = time.monotonic() - began, await handle.counts.remote()
    assert (last["most"], last["wrong"], last["pid"]) == (most, 0, first["pid"])
    assert last["live"] <= most
    assert last["compiles"] > models
    assert len(await handle.open_models.remote()) <= most
    sizes = [f"{counts[name] / 2**20:.1f}" for name in ("rss", "driver_rss") for counts in (first, last)]
    print(f"\n{count} calls, {last['compiles']} compiles; the last {count - warm} calls took {seconds:.1f} s")
    print(f"MiB of the replica after {warm} and after {count} calls: {sizes[0]} and {sizes[1]}; of its drivers: {sizes[2]} and {sizes[3]}")
    if count >= 1000:  # fewer calls do not show a leak
        for name in ("rss", "driver_rss"):
            assert last[name] < first[name] * 1.1 + 8 * 2**20


async def test_errors_and_streams_of_multiplexed_models_arrive(shop: Shop) -> None:
    handle = await shop.run(3, 1)
    for _ in range(2):
        with pytest.raises(aionn.CallerError):
            await handle.options(multiplexed_model_id="broken").infer.remote({"x": np.ones((1, 16), np.float32)})
        await call(handle, "m1", 3)
    with pytest.raises(aionn.CallerError, match="has no model 'm7'"):
        await call(handle, "m7", 1)
    with pytest.raises(aionn.CallerError, match="the call names no model"):
        await handle.infer.remote({"x": np.ones((1, 16), np.float32)})
    frames = [{"x": np.full((1, 16), number, np.float32)} for number in range(5)]
    streamed = handle.options(stream=True, multiplexed_model_id="m2").stream.remote(frames)
    assert [float(outputs["y"][0, 0]) async for outputs in streamed] == [0, 3, 6, 9, 12]
    response = handle.options(multiplexed_model_id="m0").infer.remote(frames[0])
    response.cancel()
    await call(handle, "m1", 4)
    counts = await handle.counts.remote()
    assert (counts["most"], counts["wrong"]) == (1, 0)


async def test_a_call_goes_to_a_replica_that_has_its_model(shop: Shop) -> None:
    handle = await shop.run(4, 2, num_replicas=2)
    for _ in range(20):
        for number in range(4):
            await call(handle, f"m{number}", 1)
    compiles: dict[int, int] = {}
    while len(compiles) < 2:
        counts = await handle.counts.remote()
        compiles[counts["pid"]] = counts["compiles"]
    assert sum(compiles.values()) < 80
    print(f"\n80 calls of 4 models; compiles by replica: {compiles}")
