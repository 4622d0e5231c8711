"""Libraries of operators (`options={"custom_ops": path}`), with the real one of the package onnxruntime-extensions."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import aionn
from aionn.testing import identity_model
from tests.engines.onnx_graphs import value

pytestmark = pytest.mark.anyio
X = np.array([1, -2, 3], np.float32)


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the library, which a test may change."""
    found = importlib.util.find_spec("onnxruntime_extensions")
    if found is None or found.origin is None:
        pytest.skip("the package onnxruntime-extensions is not installed, which carries a library of operators")
    (built,) = Path(found.origin).parent.glob("*.so")
    return Path(shutil.copy(built, tmp_path / "operators.so"))


def split() -> aionn.Model:
    """Its operator, of the library alone, parts an array into its negative and its positive numbers."""
    node = helper.make_node("NegPos", ["x"], ["n", "p"], domain="ai.onnx.contrib")
    graph = helper.make_graph([node], "split", [value("x", [3])], [value("n", [3]), value("p", [3])])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.contrib", 1)]
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())


def named(library: Path) -> dict[str, dict[str, Any]]:
    return {"onnxruntime": {"custom_ops": str(library)}}


def mapped_libraries(pid: int) -> set[str]:
    """The inodes of the copies that a driver has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:aionn-option" in line}


async def check(compilation: aionn.Compilation) -> None:
    outputs = await compilation.compute({"x": X})
    np.testing.assert_array_equal(outputs["n"], np.minimum(X, 0))
    np.testing.assert_array_equal(outputs["p"], np.maximum(X, 0))


async def test_operators_of_a_library_run_after_a_compile_and_after_a_hit(library: Path, tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CompilationError, match=r"cannot run operator ai\.onnx\.contrib\.NegPos"):
            await runtime.compile(split(), devices=("onnxruntime",))
        for kind in ("miss", "hit"):
            compilation = await runtime.compile(
                split(), devices=("onnxruntime",), options=named(library), cache_dir=tmp_path / "cache", token=bytes(32)
            )
            assert compilation.outcomes[0].kind.value == kind
            await check(compilation)


async def test_two_versions_of_a_library_at_one_path_are_two_entries_in_one_driver(library: Path, tmp_path: Path) -> None:
    """The C library would take the second for the first, because the path is loaded already."""
    async with aionn.Runtime(start=()) as runtime:

        async def compiled() -> aionn.Compilation:
            return await runtime.compile(split(), devices=("onnxruntime",), options=named(library), cache_dir=tmp_path / "cache")

        first = await compiled()
        with library.open("ab") as file:
            file.write(b"another version")  # behind the sections, where no loader looks
        second = await compiled()
        assert [one.outcomes[0].kind.value for one in (first, second)] == ["miss", "miss"]
        await check(first)
        await check(second)
        (device,) = [device for device in runtime.devices if device.pid]
        assert device.pid is not None
        assert len(mapped_libraries(device.pid)) == 2


async def test_a_library_that_is_missing_or_broken_is_one_sentence(tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match=r"^option 'custom_ops': the file '.*missing\.so' cannot be read \(No such"):
            await runtime.compile(model, devices=("onnxruntime",), options=named(tmp_path / "missing.so"))
        with pytest.raises(aionn.CallerError, match=r"ONNX Runtime cannot use the library \(file too short\); give one that exports Reg"):
            await runtime.compile(model, devices=("onnxruntime",), options=named(broken))
        with pytest.raises(aionn.CallerError, match=r"option 'custom_ops' of device 'onnxruntime' is 3 \(int\); it must be the path of"):
            await runtime.compile(model, devices=("onnxruntime",), options={"onnxruntime": {"custom_ops": 3}})


async def test_a_library_without_operators_is_one_sentence() -> None:
    from aionn.fmq import _ring

    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match=r"cannot use the library \(undefined symbol: RegisterCustomOps\)"):
            await runtime.compile(model, devices=("onnxruntime",), options=named(Path(_ring.__file__)))
