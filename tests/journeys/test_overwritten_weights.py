"""Weights beside a model, written over in place while it is used: nothing is stored under a token that names other weights.

Each test goes to where a wrong hit would come from: the old weights are put back, the model is compiled again, and its outputs are
those of the old weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.caching.outcomes import CacheOutcomeKind, MissReason
from aionn.hal.model import known_contents
from aionn.testing import FakeDevice
from tests.conformance.test_app_memory import BYTES, WIDTH, X, numbers, two_additions
from tests.leaks import leak_check
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio

HIT, MISS = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS
OLD, NEW, REST = numbers(11), numbers(12), numbers(13)
TOKENS = pytest.mark.parametrize("own_token", [False, True], ids=["the_models_token", "the_apps_token"])


@pytest.fixture(params=[pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Nothing here depends on the loop."""
    return request.param


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Weights:
    """x + a + b, with both constants in a file beside the model."""

    def __init__(self, directory: Path) -> None:
        (directory / "model.onnx").write_bytes(two_additions(0, BYTES))
        self._path, self._model = directory / "weights", directory / "model.onnx"
        self._path.write_bytes(OLD.tobytes() + REST.tobytes())

    def overwrite(self, first: NDArray[np.float32]) -> None:
        """In place: the inode stays, and every mapping of the file shows it."""
        with open(self._path, "r+b", buffering=0) as file:
            file.write(first.tobytes())

    def read(self) -> aionn.Model:
        return aionn.Model.from_onnx(self._model)

    def chosen(self, model: aionn.Model, cache_dir: Path, *, own_token: bool) -> dict[str, Any]:
        return {"cache_dir": cache_dir, "token": bytes(range(32)) if own_token else model.token}


async def compiled(runtime: aionn.Runtime, model: aionn.Model, device: str, **chosen: Any) -> tuple[Any, NDArray[Any]]:
    async with await runtime.compile(model, devices=(device,), **chosen) as compilation:
        (outcome,) = compilation.outcomes
        return outcome, (await compilation.compute({"x": X}))["y"]


@TOKENS
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
async def test_weights_that_change_between_reading_and_compiling_are_not_stored_as_the_ones_read(
    engine: str, own_token: bool, tmp_path: Path
) -> None:
    weights, cache_dir = Weights(tmp_path), tmp_path / "cache"
    async with leak_check(), aionn.Runtime() as runtime:
        model = weights.read()
        chosen = weights.chosen(model, cache_dir, own_token=own_token)
        weights.overwrite(NEW)
        outcome, y = await compiled(runtime, model, engine, **chosen)
        np.testing.assert_allclose(y, X + NEW + REST, rtol=1e-5)  # the case occurred: these are what it was compiled from
        assert outcome.kind is MISS
        assert outcome.save_failure is not None
        assert outcome.save_failure.reason is MissReason.CHANGED_WEIGHTS
        assert "renaming" in outcome.save_failure.detail
        weights.overwrite(OLD)
        again = weights.read()
        assert again.token == model.token
        for kind in (MISS, HIT):
            outcome, y = await compiled(runtime, again, engine, **chosen)
            assert outcome.kind is kind
            assert outcome.save_failure is None
            np.testing.assert_allclose(y, X + OLD + REST, rtol=1e-5)
        weights.overwrite(NEW)
        other = weights.read()
        assert other.token != model.token
        outcome, y = await compiled(runtime, other, engine, **weights.chosen(other, cache_dir, own_token=own_token))
        assert outcome.kind is MISS
        np.testing.assert_allclose(y, X + NEW + REST, rtol=1e-5)
        del model, again, other


async def test_weights_that_change_and_change_back_while_they_are_compiled_are_stored_as_they_were_copied(
    fake: FakeDevice, tmp_path: Path
) -> None:
    """The driver has copied the old ones before it compiles, so what it stores is what the token names."""
    weights, cache_dir = Weights(tmp_path), tmp_path / "cache"
    async with leak_check(), aionn.Runtime() as runtime:
        model = weights.read()
        chosen = weights.chosen(model, cache_dir, own_token=False)
        fake.tell(hang=("compile", "export"))
        outcomes: list[Any] = []

        async def compile_it(model: aionn.Model) -> None:
            outcomes.append((await compiled(runtime, model, fake.name, **chosen))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compile_it, model)
            await fake.heard("compile")
            weights.overwrite(NEW)
            fake.tell(hang=("export",))
            await fake.heard("export")
            weights.overwrite(OLD)
            fake.behave()
        (outcome,) = outcomes
        assert outcome.kind is MISS
        assert outcome.save_failure is None
        stored = [path.read_bytes() for path in cache_dir.rglob("*") if path.is_file()]
        assert any(OLD.tobytes() + REST.tobytes() in content for content in stored)  # what the fake stores is what it was given
        assert not any(NEW.tobytes() in content for content in stored)
        assert (await compiled(runtime, model, fake.name, **chosen))[0].kind is HIT
        del model


async def test_weights_that_change_and_change_back_before_they_are_compiled_are_not_stored(fake: FakeDevice, tmp_path: Path) -> None:
    """The driver copies the new ones, while the file has the old ones before and after."""
    weights, cache_dir = Weights(tmp_path), tmp_path / "cache"
    async with leak_check(), aionn.Runtime() as runtime:
        model = weights.read()
        chosen = weights.chosen(model, cache_dir, own_token=False)
        fake.tell(hang=("supported", "compile"))
        outcomes: list[Any] = []

        async def compile_it(model: aionn.Model) -> None:
            outcomes.append((await compiled(runtime, model, fake.name, **chosen))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compile_it, model)
            await fake.heard("supported")
            weights.overwrite(NEW)
            fake.tell(hang=("compile",))
            await fake.heard("compile")
            weights.overwrite(OLD)
            fake.behave()
        (outcome,) = outcomes
        assert outcome.kind is MISS
        assert outcome.save_failure.reason is MissReason.CHANGED_WEIGHTS
        assert (await compiled(runtime, model, fake.name, **chosen))[0].kind is MISS
        assert (await compiled(runtime, model, fake.name, **chosen))[0].kind is HIT
        del model


async def test_memory_of_the_app_that_changes_before_it_is_compiled_is_not_stored(tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        with aionn.Memory.allocate(2 * BYTES) as memory:
            memory.array(np.float32, WIDTH)[:], memory.array(np.float32, WIDTH, BYTES)[:] = OLD, REST
            model = aionn.Model.from_onnx(two_additions(0, BYTES), memories={"weights": memory})
            chosen = {"cache_dir": tmp_path / "cache", "token": model.token}
            memory.array(np.float32, WIDTH)[:] = NEW
            outcome, _ = await compiled(runtime, model, "onnxruntime", **chosen)
            assert outcome.save_failure.reason is MissReason.CHANGED_WEIGHTS
            memory.array(np.float32, WIDTH)[:] = OLD
            for kind in (MISS, HIT):
                outcome, y = await compiled(runtime, model, "onnxruntime", **chosen)
                assert outcome.kind is kind
                np.testing.assert_allclose(y, X + OLD + REST, rtol=1e-5)
            del model


def test_weights_in_sealed_memory_are_not_read_again() -> None:
    assert known_contents(aionn.Model.from_onnx(scaled_model(np.arange(1000, dtype=np.float32)))) == b""
