"""Where drivers keep their records: one store per device and version, in a folder that the app may choose."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.caching.outcomes import CacheOutcome, MissReason
from aionn.caching.private_folder import device_folder
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio
X = np.arange(16, dtype=np.float32).reshape(1, 16)


@pytest.fixture(autouse=True)
def users_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that drivers use unless they are given another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "aionn"


async def compiled(runtime: aionn.Runtime, device: str, cache_dir: Path, features: int = 16) -> CacheOutcome:
    """Compile a model, one of its own for each number of features, and run it."""
    model = aionn.Model.from_onnx(identity_model({"input": (1, features)}))
    compilation = await runtime.compile(model, devices=(device,), cache_dir=cache_dir, token=model.token)
    x = np.full((1, features), 7, np.float32)
    np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)
    (outcome,) = compilation.outcomes
    return outcome


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def databases(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/integrity-*.sqlite"))


async def test_a_runtimes_drivers_keep_their_records_in_its_own_folder(fake: FakeDevice, tmp_path: Path, users_state: Path) -> None:
    cache_dir = tmp_path / "cache"
    async with aionn.Runtime(state_dir=tmp_path / "own" / "state") as runtime:
        assert (await compiled(runtime, fake.name, cache_dir)).reason is MissReason.ABSENT
        assert databases(users_state) == []
        async with aionn.Runtime() as other:  # another runtime of the same app keeps its own
            assert (await compiled(other, fake.name, cache_dir)).reason is MissReason.NO_INTEGRITY_RECORD
        assert databases(users_state) != []
    assert databases(tmp_path / "own" / "state") != []
    assert (tmp_path / "own" / "state").stat().st_mode & 0o777 == 0o700


async def test_a_stage_that_a_background_worker_made_is_recorded_in_the_runtimes_own_folder(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path, users_state: Path
) -> None:
    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime(state_dir=tmp_path / "own") as runtime:
        compilation = await runtime.compile(
            model, mode="staged", stages=(quick.name, best.name), cache_dir=tmp_path / "cache", token=model.token
        )
        for _ in range(20):
            await compilation.compute({"input": X})
        await compilation.wait_for_stage(best.name)
        (_, made) = compilation.stages
        assert made.made_by in ("cache", "worker")
    assert databases(users_state) == []
    async with aionn.Runtime(state_dir=tmp_path / "own") as runtime:
        assert (await compiled(runtime, best.name, tmp_path / "cache")).kind.name == "HIT"


@pytest.mark.parametrize("place", ["own", "the user's"])
async def test_records_lost_with_a_cache_that_survives_are_one_warning_with_the_folder_and_the_way_out(
    fake: FakeDevice, tmp_path: Path, users_state: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A container whose only volume is the cache: each start finds entries and no records."""
    state = tmp_path / "own" if place == "own" else users_state
    state_dir = state if place == "own" else None
    for start in range(3):
        caplog.clear()
        async with aionn.Runtime(state_dir=state_dir) as runtime:
            reasons = [(await compiled(runtime, fake.name, tmp_path / "cache", features)).reason for features in (8, 16, 24)]
        if start == 0:
            assert (reasons, warnings(caplog)) == ([MissReason.ABSENT] * 3, [])
        else:
            assert reasons == [MissReason.NO_INTEGRITY_RECORD] * 3
            (warning,) = warnings(caplog)
            for part in (str(tmp_path / "cache"), f" in {device_folder(state, fake.name)};", "Runtime(state_dir=)", "--state-dir"):
                assert part in warning
        shutil.rmtree(state)


async def test_a_state_folder_beside_the_cache_survives_with_it(fake: FakeDevice, tmp_path: Path, users_state: Path) -> None:
    volume = tmp_path / "volume"
    kinds = []
    for _ in range(3):
        async with aionn.Runtime(state_dir=volume / "state") as runtime:
            kinds.append((await compiled(runtime, fake.name, volume / "cache")).kind.name)
        shutil.rmtree(users_state, ignore_errors=True)
    assert kinds == ["MISS", "HIT", "HIT"]


@pytest.mark.parametrize("wrong", ["", 7, b"bytes", "a\0b"])
def test_a_state_folder_that_is_no_path_is_refused(wrong: object) -> None:
    with pytest.raises(aionn.CallerError, match="state_dir="):
        aionn.Runtime(state_dir=wrong)  # type: ignore[arg-type]


def test_a_folder_that_python_imports_from_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may write to its folder there, and an app would import the package "onnxruntime" from it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "app")
    monkeypatch.syspath_prepend(tmp_path / "link")
    with pytest.raises(aionn.CallerError, match="Python imports from this folder, and drivers write to it; give a folder below it"):
        aionn.Runtime(state_dir=tmp_path / "app")
    aionn.Runtime(state_dir=tmp_path / "app" / "state")
