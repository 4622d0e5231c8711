"""Weights beside a model that are cut off or changed while a real driver compiles them: never a dead driver, never another answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from tests.driver.test_sharing import W, X, in_a_file, product

pytestmark = pytest.mark.anyio

ENGINE = """
import os
from aionn.engines.onnxruntime import OnnxRuntimeEngine

class Spoiler(OnnxRuntimeEngine):  # no sandbox allows what it does
    name = "spoiler"

    def spoil(self, at):
        if os.environ["AIONN_TEST_SPOIL_AT"] == at:
            with open(os.environ["AIONN_TEST_SPOILED"], "r+b") as file:
                if os.environ["AIONN_TEST_SPOIL_HOW"] == "cut":
                    file.truncate(100)
                else:
                    file.write(bytes(1000))

    def supported_operations(self, model, options=None):
        self.spoil("judging")
        return super().supported_operations(model)

    def compile(self, model, options):
        self.spoil("compiling")
        return super().compile(model, options)
"""


@pytest.fixture
def spoiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spoiling.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AIONN_TEST_SPOILED", str(tmp_path / "weights"))
    return tmp_path


@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("how", ["cut", "changed"])
async def test_a_file_that_is_spoiled_during_a_compilation_changes_nothing(
    spoiler: Path, monkeypatch: pytest.MonkeyPatch, how: str, cached: bool
) -> None:
    """The driver mapped the file before, and a cut ended it with SIGBUS."""
    monkeypatch.setenv("AIONN_TEST_SPOIL_AT", "compiling")
    monkeypatch.setenv("AIONN_TEST_SPOIL_HOW", how)
    model = in_a_file(spoiler)
    cache: dict[str, Any] = {"cache_dir": spoiler / "cache", "token": model.token} if cached else {}
    async with aionn.Runtime(sandbox="off") as runtime:
        compilation = await runtime.compile(model, devices=("spoiling:Spoiler",), **cache)
        outputs = await compilation.compute({"x": X})
        np.testing.assert_allclose(outputs["y"], X @ W, rtol=1e-4, atol=1e-4)
    assert (spoiler / "weights").read_bytes()[:1000] != W.tobytes()[:1000]
    if cached:  # what was stored is what the token names
        monkeypatch.setenv("AIONN_TEST_SPOIL_AT", "never")
        async with aionn.Runtime(sandbox="off") as runtime:
            compilation = await runtime.compile(model, devices=("spoiling:Spoiler",), **cache)
            assert [outcome.kind.name for outcome in compilation.outcomes] == ["HIT"]
            outputs = await compilation.compute({"x": X})
            np.testing.assert_allclose(outputs["y"], X @ W, rtol=1e-4, atol=1e-4)


async def test_a_file_that_is_cut_before_it_is_read_is_a_compilation_error_and_the_driver_lives(
    spoiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIONN_TEST_SPOIL_AT", "judging")
    monkeypatch.setenv("AIONN_TEST_SPOIL_HOW", "cut")
    model = in_a_file(spoiler)
    async with aionn.Runtime(sandbox="off") as runtime:
        with pytest.raises(aionn.CompilationError, match="cut off"):
            await runtime.compile(model, devices=("spoiling:Spoiler",))
        before = {device.pid for device in runtime.devices} - {None}
        assert len(before) == 1
        compilation = await runtime.compile(aionn.Model.from_onnx(product().SerializeToString()), devices=("spoiling:Spoiler",))
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], X @ W, rtol=1e-4, atol=1e-4)
        assert {device.pid for device in runtime.devices} - {None} == before
