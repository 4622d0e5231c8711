"""An engine that states no needs is confined in "auto", and what it lacks reaches the caller with the need that would allow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.cli.checks.sandbox import files, system_calls
from aionn.hal import Needs
from aionn.testing import identity_model
from aionn.testing.fake_engine import FakeEngine
from tests.sandbox import strangers
from tests.sandbox.confinement import assert_confined, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

MODEL = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
X = {"x": np.arange(16, dtype=np.float32).reshape(1, 16)}
ALLOWS = "; the sandbox of its driver allows it with {} in aionn-engine.toml, or in Runtime(engine_needs=)"
WHOLE = {"files", "system calls", "network", "processes", "signals", "no made code"}
TEMPORARY = "writes_by_path = true"


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text("a word", encoding="ascii")
    monkeypatch.setenv(strangers.FILE, str(path))
    return path


def named(engine: type) -> str:
    return f"{engine.__module__}:{engine.__name__}"


def needs_of(engine: type[FakeEngine], secret: Path) -> tuple[str, Needs]:
    """Return what the error of a driver of this engine recommends, and the same as an app gives it."""
    return {
        strangers.ListsToCompile: (f'reads = ["{secret.parent}"]', Needs(reads=(str(secret.parent),))),
        strangers.OpensADevice: ('devices = ["/dev/full"]', Needs(devices=("/dev/full",))),
        strangers.MakesATemporaryFile: (TEMPORARY, Needs(writes_by_path=True)),
        strangers.MakesCode: ("makes_code = true", Needs(makes_code=True)),
    }.get(engine, (f'reads = ["{secret}"]', Needs(reads=(str(secret),))))


@pytest.mark.skipif(any(row.status != "ok" for row in (files(), system_calls())), reason="this kernel confines no driver")
@pytest.mark.parametrize("sandbox", ["auto", "require"])
async def test_an_engine_that_states_nothing_is_confined_as_one_that_needs_nothing(sandbox: str, secret: Path) -> None:
    async with aionn.Runtime(sandbox=sandbox, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=("reference",))
        other = await runtime.compile(MODEL, devices=(named(strangers.ReadsToLoad),))
        assert all(map(np.array_equal, (await compilation.compute(X)).values(), (await other.compute(X)).values()))
        ours, theirs = (device.sandbox for device in sorted(runtime.devices, key=lambda device: device.name) if device.pid)
        assert theirs == ours
        assert theirs is not None
        assert set(theirs.holds) >= WHOLE
        assert theirs.lacks == ()
        for pid in serving(runtime):
            assert_confined(pid)


@pytest.mark.parametrize(
    "engine",
    [
        strangers.ReadsWhenMade,
        strangers.ReadsToJudge,
        strangers.ReadsToCompile,
        strangers.ListsToCompile,
        strangers.OpensADevice,
        strangers.MakesATemporaryFile,
        strangers.MakesCode,
    ],
)
async def test_what_is_denied_before_a_model_runs_comes_with_the_need(engine: type[FakeEngine], secret: Path) -> None:
    words, needs = needs_of(engine, secret)
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises((aionn.CompilationError, aionn.DeviceUnavailableError)) as caught:
            await runtime.compile(MODEL, devices=(named(engine),))
    assert str(caught.value).endswith(ALLOWS.format(words))
    async with aionn.Runtime(start=(), engine_needs={named(engine): needs}) as runtime:
        compilation = await runtime.compile(MODEL, devices=(named(engine),))
        np.testing.assert_array_equal((await compilation.compute(X))["y"], X["x"])


async def test_what_is_denied_to_a_run_comes_with_the_need(secret: Path) -> None:
    engine = named(strangers.ReadsToRun)
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(engine,))
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute):
                with pytest.raises(aionn.ExecutionError) as caught:
                    await compute(X)
                assert str(caught.value).endswith(ALLOWS.format(f'reads = ["{secret}"]'))


async def test_what_is_denied_to_the_cache_is_in_its_outcome(secret: Path, tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        exporting = await runtime.compile(MODEL, devices=(named(strangers.ReadsToExport),), cache_dir=tmp_path / "cache")
        assert ALLOWS.format(f'reads = ["{secret}"]') in str(exporting.outcomes[0].save_failure)
        for _ in range(2):
            loading = await runtime.compile(MODEL, devices=(named(strangers.ReadsToLoad),), cache_dir=tmp_path / "cache")
        assert ALLOWS.format(f'reads = ["{secret}"]') in str(loading.outcomes[0])


async def test_an_error_that_no_need_would_end_recommends_none(secret: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CompilationError) as caught:
            await runtime.compile(MODEL, devices=(named(strangers.ReadsWhatNobodyMay),))
        assert str(caught.value).endswith("'/nowhere at all/file'")
        with pytest.raises(aionn.CompilationError) as caught:
            await runtime.compile(MODEL, devices=(named(strangers.MakesAFile),))
        assert str(caught.value).endswith(ALLOWS.format(f"{TEMPORARY}, and in the folder that TMPDIR names"))


async def test_a_class_that_declares_needs_is_refused_after_its_import(secret: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError) as caught:
            await runtime.compile(MODEL, devices=(named(strangers.DeclaresInItsClass),))
    assert "DeclaresInItsClass declares reads, makes_code in its class, where no driver reads it; state needs in" in str(caught.value)
    assert "strangers.aionn-engine.toml beside its module, or in Runtime(engine_needs=)" in str(caught.value)


async def test_needs_of_the_app_take_the_place_of_those_of_the_file(tmp_path: Path, secret: Path) -> None:
    (code := tmp_path / "code").mkdir()
    (code / "stating.py").write_text("from tests.sandbox.strangers import ReadsWhenMade as Mine", encoding="ascii")
    (code / "stating.aionn-engine.toml").write_text(f'makes_code = true\nreads = ["{secret}"]', encoding="ascii")
    path = f"{Path(aionn.__file__).parents[1]}:{code}"
    for given, made in (None, True), ({"stating:Mine": Needs(makes_code=True)}, False), ({"stating:Mine": Needs((str(secret),))}, True):
        async with aionn.Runtime(start=(), driver_env={"PYTHONPATH": path}, engine_needs=given) as runtime:
            try:
                await runtime.compile(MODEL, devices=("stating:Mine",))
            except aionn.DeviceUnavailableError:
                assert not made
            else:
                assert made
                (found,) = (device for device in runtime.devices if device.name == "stating:Mine")
                assert found.runs_on == "a word"
                assert found.sandbox is not None
                assert ("no made code" in found.sandbox.holds) == (given is not None)
