"""Providers of ONNX Runtime and devices of OpenVINO: those that are there, those that are not, and those that do not load."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import aionn
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.onnxruntime_providers import nvidia_versions
from aionn.engines.openvino import OpenVINOEngine
from aionn.hal import CompileOptions, DeviceType
from tests.engines.onnx_graphs import model_of, value
from tests.engines.provider_shim import install_shim

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
N = 64
W = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((1, N)).astype(np.float32)


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def product() -> aionn.Model:
    """Two nodes that no optimisation joins."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["y"])]
    model = model_of(nodes, [value("x", [1, N])], [value("y", [1, N])], {"w": W})
    return aionn.Model.from_onnx(model.SerializeToString())


def shimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Path:
    options = install_shim(tmp_path / "shim", kind)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'shim'}{os.pathsep}{ROOT}")
    return options


async def expected() -> Any:
    async with aionn.Runtime(start=()) as runtime:
        return (await (await runtime.compile(product(), devices=("reference",))).compute({"x": X}))["y"]


async def test_a_provider_that_is_not_there_names_those_that_are() -> None:
    async with aionn.Runtime(start=()) as runtime:
        sentence = "device 'onnxruntime:tensorrt' is not there; the installed onnxruntime .* offers .*onnxruntime:cpu"
        with pytest.raises(aionn.DeviceUnavailableError, match=sentence):
            await runtime.compile(product(), devices=("onnxruntime:tensorrt", "onnxruntime"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("unloaded", r"CUDAExecutionProvider does not load here: libonnxruntime_providers_cuda\.so: cannot open shared object file"),
        ("raises", "CUDAExecutionProvider does not load here: CUDA failure 35: driver version is insufficient"),
    ],
)
async def test_a_provider_that_is_listed_and_does_not_load_is_an_error_and_not_a_cpu(
    kind: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shimmed(tmp_path, monkeypatch, kind)
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError, match=why):
            await runtime.compile(product(), devices=("onnxruntime:cuda",))
        assert (await runtime.compile(product(), devices=("onnxruntime",))).runs_on == "CPUExecutionProvider"


async def test_a_provider_that_runs_no_node_of_the_model_is_an_error() -> None:
    """ONNX Runtime lists Azure in its usual wheel, and runs every node on the CPU in its place."""
    engine = OnnxRuntimeEngine()
    assert "azure" in engine.providers, "the wheel has no longer such a provider; use another one here"
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CompilationError, match="no operation of the model runs on AzureExecutionProvider, all would run on CPU"):
            await runtime.compile(product(), devices=("onnxruntime:azure",))
        with pytest.raises(aionn.CompilationError, match="cpu_fallback=False forbids the CPU; leave the option out, or use another device"):
            options = {"onnxruntime:azure": {"cpu_fallback": False}}
            await runtime.compile(product(), devices=("onnxruntime:azure",), options=options)


async def test_a_provider_that_works_gets_its_options_and_shows_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = shimmed(tmp_path, monkeypatch, "works")
    options = {"onnxruntime:cuda": {"device_id": 1, "use_tf32": False, "allow_spinning": True}}
    async with aionn.Runtime(start=(), sandbox="off") as runtime:  # the shim writes down what it got, which a confined driver may not
        compilation = await runtime.compile(product(), devices=("onnxruntime:cuda",), options=options, cache_dir=tmp_path / "cache")
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], await expected(), atol=1e-6)
        assert compilation.device == "onnxruntime:cuda"
        assert compilation.runs_on == "CUDAExecutionProvider (2 nodes)"
        assert json.loads(written.read_text()) == {"device_id": "1", "use_tf32": "False"}
        assert [(one.kind.value, one.detail) for one in compilation.outcomes] == [("no_cache", "the device does not cache")]
        (device,) = [device for device in runtime.devices if device.pid]
        assert device.type is DeviceType.GPU
        assert device.runs_on == "CUDAExecutionProvider"
        assert device.providers is not None
        assert {"cuda", "cpu"} <= set(device.providers)


async def test_nodes_on_the_cpu_beside_a_provider_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shimmed(tmp_path, monkeypatch, "part")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(product(), devices=("onnxruntime:cuda",))
        assert compilation.runs_on == "CUDAExecutionProvider (1 node), CPUExecutionProvider (1 node)"


async def test_the_cpu_by_name_caches_like_the_engine_without_a_provider(tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        for name in ("onnxruntime:cpu", "openvino:CPU", "openvino:HETERO:CPU"):
            for kind in ("miss", "hit"):
                compilation = await runtime.compile(product(), devices=(name,), cache_dir=tmp_path / "cache")
                assert compilation.outcomes[0].kind.value == kind, name
                np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], await expected(), atol=1e-6)


async def test_without_onnxruntime_the_sentence_names_the_extra_and_another_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after `pip install aionn`, which brings the reference engine alone."""
    for package in ("onnxruntime", "openvino"):
        (tmp_path / "none" / package).mkdir(parents=True)
        (tmp_path / "none" / package / "__init__.py").write_text(f"raise ImportError('No module named {package}')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'none'}{os.pathsep}{ROOT}")
    async with aionn.Runtime(start=()) as runtime:
        for name in ("onnxruntime", "onnxruntime:cuda", "openvino:GPU"):
            extra = name.partition(":")[0]
            with pytest.raises(aionn.DeviceUnavailableError, match=rf"needs the package {extra}, .*; pip install 'aionn\[{extra}\]'$"):
                await runtime.compile(product(), devices=(name,))
        compilation = await runtime.compile(product())
        assert compilation.device == "reference"
    assert re.search("device 'onnxruntime' is passed over for model .*: device 'onnxruntime' needs the package onnxruntime", caplog.text)


# --- options of ONNX Runtime's CPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_a_level_of_optimisation_reaches_the_session(level: str) -> None:
    engine = OnnxRuntimeEngine()
    options: dict[str, Any] = {"graph_optimization_level": level, "denormals_as_zero": False, "allow_spinning": True}
    compiled: Any = engine.compile(product(), CompileOptions(options=options, threads=2))
    settings = compiled._session.get_session_options()
    name = "ORT_DISABLE_ALL" if level == "disabled" else f"ORT_ENABLE_{level.upper()}"
    assert settings.graph_optimization_level.name == name
    assert settings.get_session_config_entry("session.set_denormal_as_zero") == "0"
    assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "1"


TINY = np.array([1e-20, 1], np.float32)


@pytest.mark.parametrize(
    ("device", "keeps"), [("onnxruntime", {"denormals_as_zero": False}), ("openvino", {"CPU_DENORMALS_OPTIMIZATION": False})]
)
async def test_denormals_are_kept_only_where_the_app_says_so(device: str, keeps: dict[str, Any], tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "k"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
        [numpy_helper.from_array(TINY[:1].copy(), "k")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = aionn.Model.from_onnx(proto.SerializeToString())
    found = []
    async with aionn.Runtime(start=()) as runtime:
        for options in ({}, keeps, {}, keeps):
            compilation = await runtime.compile(model, devices=(device,), options={device: options}, cache_dir=tmp_path)
            outputs = await compilation.compute({"x": TINY})
            async with compilation.burst() as burst:
                assert (await burst.compute({"x": TINY}))["y"][0] == outputs["y"][0]
            found.append((compilation.outcomes[0].kind.value, bool(outputs["y"][0])))
    assert found == [("miss", False), ("miss", True), ("hit", False), ("hit", True)]


def test_an_unknown_level_is_one_sentence() -> None:
    with pytest.raises(aionn.CallerError, match=r"'graph_optimization_level' of device 'onnxruntime' is 'best'; it is one of \['all', "):
        OnnxRuntimeEngine().compile(product(), CompileOptions(options={"graph_optimization_level": "best"}))


# --- OpenVINO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPU", "NPU", "gpu.1", "AUTO:GPU", "HETERO:NPU,CPU", "HETERO", "FPGA"])
async def test_a_device_that_openvino_has_not_names_those_that_it_has(name: str) -> None:
    async with aionn.Runtime(start=()) as runtime:
        sentence = f"device 'openvino:{name.upper()}' is not there, because OpenVINO has no device .*openvino:CPU, openvino:AUTO"
        with pytest.raises(aionn.DeviceUnavailableError, match=sentence):
            await runtime.compile(product(), devices=(f"openvino:{name}",))


@pytest.mark.parametrize("name", ["", "CPU", "cpu", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_every_way_to_the_cpu_computes_in_float32_and_says_what_it_runs_on(name: str) -> None:
    engine = OpenVINOEngine.for_provider(name) if name else OpenVINOEngine()
    executable = engine.compile(product(), CompileOptions())
    y = np.zeros((1, N), np.float32)
    executable.run({"x": X}, {"y": y}, False)
    h = X @ W
    np.testing.assert_allclose(y, np.exp(h - h.max()) / np.exp(h - h.max()).sum(), atol=1e-6)
    assert executable.runs_on == "CPU"


def test_a_lower_precision_is_the_apps_choice_and_is_shown() -> None:
    executable = OpenVINOEngine().compile(product(), CompileOptions(options={"INFERENCE_PRECISION_HINT": "bf16"}))
    assert executable.runs_on in ("CPU (bf16)", "CPU"), "a CPU without bf16 computes in float32"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"NOPE": 1}, "device 'openvino' has no option 'NOPE'; OpenVINO's properties for it are .*INFERENCE_PRECISION_HINT"),
        ({"INFERENCE_NUM_THREADS": 3}, "option 'INFERENCE_NUM_THREADS' of device 'openvino': give threads= to compile in its place"),
        ({"NUM_STREAMS": 3}, "option 'NUM_STREAMS' of device 'openvino': give instances= to compile in its place"),
    ],
)
def test_a_property_that_openvino_has_not_or_compile_sets_is_one_sentence(options: Any, sentence: str) -> None:
    engine = OpenVINOEngine()
    with pytest.raises(aionn.CallerError, match=sentence):
        engine.compile(product(), CompileOptions(options=options))
    with pytest.raises(aionn.CallerError, match=sentence):
        engine.supported_operations(product(), options)


def test_a_value_that_openvino_refuses_is_one_sentence() -> None:
    with pytest.raises(aionn.CompilationError, match="openvino cannot prepare the model: Wrong value f7 for property key"):
        OpenVINOEngine().compile(product(), CompileOptions(options={"INFERENCE_PRECISION_HINT": "f7"}))


def test_the_version_of_a_named_device_names_the_hardware() -> None:
    assert "FULL_DEVICE_NAME=" in OpenVINOEngine.for_provider("CPU").version
    assert OpenVINOEngine.for_provider("CPU").version.startswith(OpenVINOEngine().version)


# --- versions of accelerators ----------------------------------------------------------------------------------------------


def test_versions_name_the_gpu_its_driver_and_the_loaded_libraries(tmp_path: Path) -> None:
    gpu = tmp_path / "nvidia/gpus/0000:01:00.0/information"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t NVIDIA L4\nIRQ:   \t\t 40\n")
    (tmp_path / "nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Feb 20 22:22:35 UTC 2024\nGCC version:  gcc version 12.3.0\n"
    )
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 00000000 00:00 1   {tmp_path}/libcudnn.so.9.5.1\n7f02-7f03 rw-p 0 00:00 0 [heap]\n")
    found = nvidia_versions(tmp_path / "nvidia", tmp_path / "maps")
    assert found == "gpu=NVIDIA L4;driver=550.54.15;cudnn=libcudnn.so.9.5.1"


def test_a_machine_without_a_gpu_has_no_versions(tmp_path: Path) -> None:
    assert nvidia_versions(tmp_path, tmp_path / "maps") == ""
