"""A cache that cannot be used shows in `health()`, and raises where the app requires it, in each mode and over several devices."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.errors import CallerError
from aionn.testing import FakeDevice, identity_model
from tests.apps import run_app
from tests.caching.required_cache import FAULTS, MODES

ROOT = Path(__file__).parents[2]

AT_ONCE = dict.fromkeys(MODES, "compile")
LATER = {**AT_ONCE, "jit": "compute", "staged": "stage"}
"""The cache holds another model, so only its own lookup shows that it does not hold this one."""

EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    "file": ("unsafe", AT_ONCE),
    "symlink": ("unsafe", AT_ONCE),
    "loose": ("unsafe", AT_ONCE),
    "of_another_user": ("unsafe", AT_ONCE),
    "nowhere": ("unsafe", AT_ONCE),
    "read_only": ("no_permission", AT_ONCE),
    "read_only_without_entries": ("no_permission", AT_ONCE),
    "read_only_with_another_model": ("no_permission", LATER),
    "read_only_with_the_model": ("no_permission", {"plan": "compile"}),
    "full": ("no_space", AT_ONCE),
    "full_with_another_model": ("no_space", LATER),
    "records_of_another_user": ("unsafe", LATER),
}
USUAL = {"loose", "read_only_with_another_model", "read_only_with_the_model", "full"}


def ran(fault: str, directory: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Return where an app heard of the fault, and the sentence, by mode and by whether the app requires the cache."""
    command = [sys.executable, "-m", "tests.caching.required_cache", fault, str(directory)]
    done = run_app(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(f"the system does not allow it: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        mode, how, where, sentence = line.split(" ", 3)
        found[mode, how] = where.rstrip(":"), sentence
    return found


def test_a_sound_cache_serves_an_app_in_each_mode(tmp_path: Path) -> None:
    assert ran("none", tmp_path) == {(mode, "wanted"): ("served", "the runtime is serving") for mode in MODES}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in USUAL else pytest.mark.soak) for fault in FAULTS if fault != "none"]
)
def test_a_cache_that_cannot_be_used_is_never_silent(fault: str, tmp_path: Path) -> None:
    found, (reason, heard) = ran(fault, tmp_path), EXPECTED[fault]
    for mode in MODES:
        if mode not in heard:
            assert found[mode, "wanted"] == found[mode, "required"] == ("served", "the runtime is serving")
            continue
        where, sentence = found[mode, "wanted"]
        if fault == "records_of_another_user" and mode == "staged":  # an artifact without a record cannot leave its worker
            assert (where, found[mode, "required"][0]) == ("stage", "stage")
            continue
        what = "stage 'onnxruntime' of compilation 'door'" if mode == "staged" else "compilation 'door'"
        reasons = 2 if fault == "records_of_another_user" and mode == "plan" else 1  # each of the two drivers names its own records
        assert (where, sentence.count("the cache does not keep")) == ("health", reasons), sentence
        assert f"the cache does not keep {what} ({reason}: " in sentence
        where, sentence = found[mode, "required"]
        assert where == heard[mode], sentence
        assert f"cache_required: cache {tmp_path}/home/cache cannot keep compilation 'door' ({reason}: " in sentence
        assert sentence.endswith("mend that, give another cache_dir, or leave cache_required out")


@pytest.mark.anyio
async def test_a_required_cache_needs_a_directory(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(CallerError, match="cache_required=True without cache_dir; give the folder where the compilation is kept"):
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,), cache_required=True)


@pytest.mark.anyio
async def test_a_cache_that_is_lost_later_does_not_stop_a_compilation_that_serves(fake: FakeDevice, tmp_path: Path) -> None:
    """After a driver's death the model is compiled again, and health says that it is not kept."""
    x = np.ones((1, 16), np.float32)
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(identity_model())
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache", cache_required=True)
        assert (await compilation.compute({"input": x})).stage
        (tmp_path / "cache").rename(tmp_path / "gone")
        (tmp_path / "cache").write_bytes(b"")
        (device,) = [device for device in runtime.devices if device.pid]
        await device.restart()
        np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)
        assert [outcome.kind.name for outcome in compilation.outcomes] == ["MISS"]
        assert "the cache does not keep compilation" in str(runtime.health())
