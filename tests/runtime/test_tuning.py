"""A better artifact that an engine offers while it runs takes the place of the stored one, under the entry's lock."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing.models import identity_model
from tests.leaks import leak_check
from tests.runtime.tuning_engine import RUNS

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: what is stored does not depend on it."""
    return "asyncio", {"use_uvloop": True}


DEVICE = "tests.runtime.tuning_engine:TuningEngine"


@pytest.fixture(autouse=True)
def drivers_find_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


X = {"input": np.zeros((1, 16), np.float32)}


async def level(compilation: aionn.Compilation) -> float:
    return float((await compilation.compute(X))["input_out"][0, 0])


async def compiled(runtime: aionn.Runtime, cache: Path, device: str = DEVICE) -> aionn.Compilation:
    return await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(device,), cache_dir=cache)


async def test_what_was_tuned_before_the_compilation_closed_is_loaded_next_time(tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        for start, kind in enumerate(("MISS", "HIT", "HIT")):
            async with await compiled(runtime, tmp_path) as compilation:
                assert compilation.outcomes[0].kind.name == kind
                for _ in range(RUNS):
                    assert await level(compilation) == start


async def test_a_model_that_was_used_little_leaves_the_entry_as_it_is(tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        for _ in range(3):
            async with await compiled(runtime, tmp_path) as compilation:
                assert await level(compilation) == 0


async def test_a_bursts_end_is_asked_about_while_the_compilation_goes_on(tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await compiled(runtime, tmp_path)
        async with compilation.burst() as burst:
            for _ in range(RUNS):
                await burst.compute(X)
        with anyio.fail_after(30):
            while True:
                async with aionn.Runtime() as other, await compiled(other, tmp_path) as second:
                    if await level(second) == 1:
                        break
        assert await level(compilation) == 0  # what serves stays as it is


async def test_an_offer_that_fails_costs_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aionn.runtime")
    async with aionn.Runtime() as runtime:
        compilation = await compiled(runtime, tmp_path, "tests.runtime.tuning_engine:BrokenOffer")
        assert await level(compilation) == 0
        await compilation.aclose()
    lines = [record.message for record in caplog.records]
    assert any("was not asked for a better artifact" in line and "a fault of the engine" in line for line in lines)


async def test_without_a_cache_nothing_is_asked() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(DEVICE,))
        for _ in range(RUNS):
            assert await level(compilation) == 0
        await compilation.aclose()


async def test_an_entry_that_was_removed_meanwhile_is_not_made_anew(tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        async with await compiled(runtime, tmp_path) as compilation:
            for _ in range(RUNS):
                await level(compilation)
            for entry in (tmp_path / "entries").iterdir():
                for path in sorted(entry.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
        async with await compiled(runtime, tmp_path) as compilation:
            assert compilation.outcomes[0].kind.name == "MISS"
