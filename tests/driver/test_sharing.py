"""Models that one driver prepares more than once share their weights, and live and die independently."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.driver.device import EngineDevice
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.driver.sharing import identity_of
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.openvino import OpenVINOEngine
from aionn.hal import CacheHandles, EngineOptions, ExecutionPreference, Model, PrepareOptions, Priority
from aionn.hal.model import known_contents, known_token, may_change
from aionn.testing.fake_engine import FakeEngine
from tests.engines.onnx_graphs import model_of, value

pytestmark = pytest.mark.anyio
N = 64
W = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32)
X = np.ones((1, N), np.float32)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("AIONN_FAKE_DEVICE", raising=False)


@pytest.fixture(params=[OnnxRuntimeEngine, OpenVINOEngine], ids=["onnxruntime", "openvino"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[EngineDevice]:
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(request.param(), tasks)
        yield device
        device.close()


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[CacheHandles]:
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model0", "data0")]
    yield CacheHandles((fds[0],), (fds[1],), bytes(32))
    for fd in fds:
        os.close(fd)


def product() -> Any:
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [1, N])], [value("y", [1, N])], {"w": W})


def in_a_file(folder: Path) -> aionn.Model:
    """The same model with its weights in a file, which drivers read."""
    model = product()
    (folder / "weights").write_bytes(W.tobytes())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", "weights"), ("offset", "0"), ("length", str(W.nbytes))):
        tensor.external_data.add(key=key, value=entry)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return aionn.Model.from_onnx(folder / "model.onnx")


def computed(prepared: EnginePreparedModel) -> Any:
    return prepared._executables[0].run({"x": X}, {}, False).outputs["y"]


async def test_the_same_model_and_options_share_one_executable_which_goes_with_the_last(device: EngineDevice) -> None:
    model = aionn.Model.from_onnx(product().SerializeToString())
    first = await device.prepare_model(model, PrepareOptions())
    second = await device.prepare_model(model, PrepareOptions(deadline_ns=2**62))
    assert first._shared is second._shared
    assert first._executables[0] is not second._executables[0]
    expected = computed(first)
    np.testing.assert_array_equal(computed(second), expected)
    assert first._shared is not None
    gone = weakref.ref(first._shared)
    await first.aclose()
    np.testing.assert_array_equal(computed(second), expected)
    third = await device.prepare_model(model, PrepareOptions())
    await second.aclose()
    np.testing.assert_array_equal(computed(third), expected)
    await third.aclose()
    gc.collect()
    assert gone() is None
    fourth = await device.prepare_model(model, PrepareOptions())
    np.testing.assert_array_equal(computed(fourth), expected)
    await fourth.aclose()


OTHER_OPTIONS: list[dict[str, Any]] = [
    {"preference": ExecutionPreference.LOW_POWER},
    {"priority": Priority.HIGH},
    {"threads": 2},
    {"instances": 2},
    {"at_most": True},
    {"open_outputs": ("y",)},
]


@pytest.mark.parametrize("other", OTHER_OPTIONS, ids=lambda other: next(iter(other)))
async def test_different_options_are_not_shared(device: EngineDevice, other: dict[str, Any]) -> None:
    model = aionn.Model.from_onnx(product().SerializeToString())
    first = await device.prepare_model(model, PrepareOptions())
    second = await device.prepare_model(model, msgspec.structs.replace(PrepareOptions(), **other))
    assert first._shared is not second._shared
    np.testing.assert_array_equal(computed(first), computed(second))
    again = await device.prepare_model(model, msgspec.structs.replace(PrepareOptions(), **other))
    assert again._shared is second._shared
    assert len(again._executables) == other.get("instances", 1)
    for prepared in (first, second, again):
        await prepared.aclose()


@pytest.mark.parametrize("token", [True, False], ids=["with_a_token", "without_a_token"])
async def test_a_file_that_has_changed_is_not_shared(device: EngineDevice, tmp_path: Path, token: bool) -> None:
    read = in_a_file(tmp_path)
    model = Model(
        graph=read.graph,
        inputs=read.inputs,
        outputs=read.outputs,
        operations=read.operations,
        constants=read.constants,
        pools=read.pools,
        token=read.token if token else bytes(range(32)),
        _contents=known_contents(read) if token else b"",
    )
    first = await device.prepare_model(model, PrepareOptions())
    same = await device.prepare_model(model, PrepareOptions())
    assert same._shared is first._shared
    fd = os.open(tmp_path / "weights", os.O_WRONLY)
    os.pwrite(fd, (W * 2).tobytes(), 0)
    os.close(fd)
    changed = await device.prepare_model(model, PrepareOptions())
    assert changed._shared is not first._shared
    np.testing.assert_allclose(computed(changed), computed(first) * 2, rtol=1e-5)
    for prepared in (first, same, changed):
        await prepared.aclose()


async def test_loaded_models_that_were_never_digested_are_shared_by_their_contents(device: EngineDevice, tmp_path: Path) -> None:
    def write(path: Path, bias: float) -> Path:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("ReduceMean", ["b"], ["mean"], keepdims=1),
            helper.make_node("Add", ["h", "mean"], ["y"]),
        ]
        model = model_of(nodes, [value("x", [1, N])], [value("y", [1, N])], {"w": W})
        # In a typed field, so the app copies it into sealed memory.
        model.graph.initializer.append(helper.make_tensor("b", TensorProto.FLOAT, [64 * N], [bias] * (64 * N)))
        path.write_bytes(model.SerializeToString())
        return path

    first_path, other_path = write(tmp_path / "first.onnx", 1.0), write(tmp_path / "other.onnx", 2.0)
    loaded = [await aionn.Model.load(path) for path in (first_path, first_path, other_path)]
    models = []
    for model in loaded:
        await model.read()
        assert not known_token(model)
        fields = ("graph", "inputs", "outputs", "operations", "constants", "pools")
        models.append(Model(**{name: getattr(model, name) for name in fields}, token=b""))  # as it comes over the socket
        assert [may_change(pool) for pool in model.pools].count(False) == 1  # the case occurred: one of its pools is sealed
    first, same, other = [await device.prepare_model(model, PrepareOptions()) for model in models]
    assert first._shared is same._shared
    assert first._shared is not other._shared
    np.testing.assert_allclose(computed(other) - computed(same), 1, rtol=1e-4)
    for prepared in (first, same, other):
        await prepared.aclose()


async def test_memory_that_the_app_may_write_to_is_not_shared(device: EngineDevice, tmp_path: Path) -> None:
    in_a_file(tmp_path)
    with aionn.Memory.allocate(W.nbytes) as memory:
        memory.view()[:] = W.tobytes()
        model = aionn.Model.from_onnx((tmp_path / "model.onnx").read_bytes(), memories={"weights": memory})
        first = await device.prepare_model(model, PrepareOptions())
        second = await device.prepare_model(model, PrepareOptions())
        assert first._shared is not second._shared
        await first.aclose()
        await second.aclose()


async def test_hits_share_and_each_is_verified(device: EngineDevice, handles: CacheHandles, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr("aionn.driver.device.trim_arenas", trimmed.set)
    model = aionn.Model.from_onnx(product().SerializeToString())
    missed = await device.prepare_model(model, PrepareOptions(), handles)
    assert missed.save_outcome == "saved"
    assert await anyio.to_thread.run_sync(trimmed.wait, 30)  # what a compile has freed, also of a model as small as this one
    trimmed.clear()
    joined = await device.prepare_model_from_cache(PrepareOptions(), handles)
    assert joined._shared is missed._shared
    assert await anyio.to_thread.run_sync(trimmed.wait, 30)  # what was loaded in vain is given back beside the answer
    await missed.aclose()
    await joined.aclose()
    del missed, joined
    gc.collect()
    trimmed.clear()  # from now on nothing is loaded in vain
    first = await device.prepare_model_from_cache(PrepareOptions(), handles)
    second = await device.prepare_model_from_cache(PrepareOptions(), handles)
    assert first._shared is second._shared
    assert not trimmed.is_set()
    expected = computed(first)
    for fd in (*handles.model, *handles.data):
        byte = os.pread(fd, 1, 0)
        os.pwrite(fd, bytes([byte[0] ^ 1]), 0)
        with pytest.raises(aionn.CompilationError, match="wrong_bytes"):
            await device.prepare_model_from_cache(PrepareOptions(), handles)
        os.pwrite(fd, byte, 0)
    await first.aclose()
    np.testing.assert_array_equal(computed(second), expected)
    third = await device.prepare_model_from_cache(PrepareOptions(), handles)
    assert third._shared is second._shared
    await second.aclose()
    np.testing.assert_array_equal(computed(third), expected)
    await third.aclose()


@pytest.mark.parametrize("other", OTHER_OPTIONS, ids=lambda other: next(iter(other)))
async def test_hits_with_different_options_are_not_shared(device: EngineDevice, handles: CacheHandles, other: dict[str, Any]) -> None:
    model = aionn.Model.from_onnx(product().SerializeToString())
    await (await device.prepare_model(model, PrepareOptions(), handles)).aclose()
    gc.collect()
    options = msgspec.structs.replace(PrepareOptions(), **other)
    first = await device.prepare_model_from_cache(PrepareOptions(), handles)
    second = await device.prepare_model_from_cache(options, handles)
    again = await device.prepare_model_from_cache(options, handles)
    assert first._shared is not None
    assert second._shared is not None
    assert first._shared.executable is not second._shared.executable
    assert again._shared is second._shared
    for prepared in (first, second, again):
        np.testing.assert_array_equal(computed(prepared), computed(first))
    for prepared in (first, second, again):
        await prepared.aclose()


async def test_preparations_at_once_are_all_right_and_die_independently(device: EngineDevice, handles: CacheHandles) -> None:
    model = aionn.Model.from_onnx(product().SerializeToString())
    stored = await device.prepare_model(model, PrepareOptions(), handles)
    expected = computed(stored)
    await stored.aclose()
    for _ in range(5):
        made: list[EnginePreparedModel] = []

        async def prepare(hit: bool, made: list[EnginePreparedModel] = made) -> None:
            prepared = await (
                device.prepare_model_from_cache(PrepareOptions(), handles) if hit else device.prepare_model(model, PrepareOptions())
            )
            made.append(prepared)
            np.testing.assert_array_equal(computed(prepared), expected)

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(prepare, number % 2 == 0)
        while made:
            await made.pop().aclose()
            for prepared in made:
                np.testing.assert_array_equal(computed(prepared), expected)


async def test_an_engine_whose_executables_cannot_be_shared_prepares_again() -> None:
    model = aionn.Model.from_onnx(product().SerializeToString())
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(FakeEngine(), tasks)
        first, second = [await device.prepare_model(model, PrepareOptions()) for _ in range(2)]
        assert first._shared is not second._shared
        await first.aclose()
        await second.aclose()
        device.close()


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
async def test_a_driver_keeps_the_weights_once(tmp_path: Path, cached: bool) -> None:
    """112 MB of weights that ONNX Runtime lays out anew: once after the first compilation, and no more after the second."""
    side = 3072
    names = ["a", "b", "c"]
    nodes = [helper.make_node("MatMul", ["x" if not i else f"y{i}", name], [f"y{i + 1}"]) for i, name in enumerate(names)]
    weights = {name: np.full((side, side), (i + 1) / side, np.float32) for i, name in enumerate(names)}  # ONNX Runtime merges equal ones
    model = helper.make_model(
        helper.make_graph(
            nodes, "g", [value("x", [1, side])], [value("y3", [1, side])], [numpy_helper.from_array(w, n) for n, w in weights.items()]
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    total = 3 * side * side * 4
    read = aionn.Model.from_onnx(model.SerializeToString())
    del model, weights
    cache: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": read.token} if cached else {}
    if cached:
        async with aionn.Runtime() as runtime:
            await runtime.compile(read, devices=("onnxruntime",), **cache)
    async with aionn.Runtime() as runtime:
        tiny = aionn.Model.from_onnx(product().SerializeToString())
        await runtime.compile(tiny, devices=("onnxruntime",))
        pid = runtime.devices[0].pid
        assert pid is not None
        before = private_bytes(pid)
        compilations = [await runtime.compile(read, devices=("onnxruntime",), **cache)]
        assert compilations[0].outcomes[0].kind.name == ("HIT" if cached else "NO_CACHE")
        once = private_bytes(pid)
        assert 0.9 * total < once - before < 1.35 * total
        compilations.append(await runtime.compile(read, devices=("onnxruntime",), **cache))
        assert private_bytes(pid) - once < 0.1 * total
        for compilation in compilations:
            outputs = await compilation.compute({"x": np.ones((1, side), np.float32)})
            np.testing.assert_allclose(outputs["y3"], 6, rtol=1e-3)


def test_options_of_equal_values_and_other_types_are_two_models() -> None:
    """Python calls 1, 1.0 and True equal, and a shared executable would be the other one's."""
    model = aionn.Model.from_onnx(product().SerializeToString())
    values: list[Any] = [1, 1.0, True, "1", 0, 0.0, -0.0, False]
    identities = {identity_of(model, b"", PrepareOptions(options=(("a", EngineOptions({"x": value}, {})),))) for value in values}
    assert len(identities) == len(values)
    again = identity_of(model, b"", PrepareOptions(options=(("a", EngineOptions({"x": 1.0}, {})),)))
    assert again in identities


def test_files_of_equal_contents_are_one_option_wherever_they_lie() -> None:
    here, there = EngineOptions({"x": "/here"}, {"x": bytes(32)}), EngineOptions({"x": "/there"}, {"x": bytes(32)})
    assert here == there
    assert here != EngineOptions({"x": "/here"}, {"x": bytes([1] * 32)})
    assert here != EngineOptions({"x": "/here"}, {})
