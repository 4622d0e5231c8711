"""A device that was written by hand works like an engine: found by class or entry point, named in `devices=`, with bursts of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.driver import find_engine
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.hal import Needs
from aionn.testing.models import identity_model
from tests.driver.handmade_device import VARIABLE
from tests.leaks import leak_check
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: the app's loop does not matter to a driver."""
    return "asyncio", {"use_uvloop": True}


BY_CLASS = "tests.driver.handmade_device:DoublingDevice"
X = np.arange(16, dtype=np.float32).reshape(1, 16)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    notes = tmp_path / "notes"
    notes.touch()
    package = tmp_path / "site" / "doubling-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[aionn.engines]\ndoubling = {BY_CLASS}\n")
    monkeypatch.setenv(VARIABLE, str(notes))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return notes


def writing(notes: Path) -> Needs:
    """Let a confined driver write to the notes: they count as a device file."""
    return Needs(devices=(str(notes),))


@pytest.mark.parametrize("name", [BY_CLASS, "doubling"])
async def test_it_computes_and_streams_from_the_public_face(notes: Path, name: str, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime(engine_needs={name: writing(notes)}) as runtime:
        model = aionn.Model.from_onnx(identity_model())
        async with await runtime.compile(model, devices=(name,), cache_dir=tmp_path / "cache") as compilation:
            assert compilation.device == name
            assert [outcome.kind.name for outcome in compilation.outcomes] == ["NO_CACHE"]
            outputs = await compilation.compute({"input": X})
            assert np.array_equal(outputs["input_out"], 2 * X)
            async with compilation.burst() as burst:
                seen = [result.outputs["input_out"][0, 1] async for result in burst.map([{"input": X * n} for n in range(20)])]
            assert seen == [2.0 * n for n in range(20)]
            memory = aionn.Memory.allocate(64)
            memory.array(np.float32, (1, 16))[...] = X
            assert np.array_equal((await compilation.compute({"input": memory}))["input_out"], 2 * X)
            with pytest.raises(CallerError, match="has no memory of its own"):
                await compilation.allocate(inputs=("input",))
            memory.close()
        (device,) = [device for device in runtime.devices if device.name == name]
        assert device.type is not None
        assert device.type.name == "ACCELERATOR"
    heard = notes.read_text().splitlines()  # noqa: ASYNC240 -- nothing waits for this loop
    assert heard[0] == "entered"
    assert heard[-1] == "left"
    assert heard.count("burst") == heard.count("burst over") == 2
    assert "released" in heard


async def test_a_model_that_it_cannot_run_is_refused_by_node(notes: Path) -> None:
    async with aionn.Runtime(engine_needs={BY_CLASS: writing(notes)}) as runtime:
        with pytest.raises(CompilationError, match=r"ai\.onnx\.Mul") as caught:
            await runtime.compile(aionn.Model.from_onnx(scaled_model(np.ones(4, np.float32))), devices=(BY_CLASS,))
        assert caught.value.node is not None


async def test_its_death_ends_its_calls_and_the_next_use_starts_it_again(notes: Path) -> None:
    async with aionn.Runtime(engine_needs={BY_CLASS: writing(notes)}) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(BY_CLASS,))
        await compilation.compute({"input": X})
        (device,) = [device for device in runtime.devices if device.name == BY_CLASS]
        before = device.pid
        await device.restart()
        assert device.pid != before
        assert np.array_equal((await compilation.compute({"input": X}))["input_out"], 2 * X)


async def test_what_a_device_lacks_is_one_sentence(notes: Path) -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(DeviceUnavailableError, match=r"Lame\.type is None; it must be a DeviceType"):
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("tests.driver.handmade_device:Lame",))


def test_there_is_no_engine_behind_it(notes: Path) -> None:
    with pytest.raises(DeviceUnavailableError, match="written by hand"):
        find_engine(BY_CLASS)
