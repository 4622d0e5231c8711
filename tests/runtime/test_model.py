"""`aionn.Model`: one shared, frozen pool per model, freed with it."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from aionn.errors import CallerError, CompilationError
from aionn.graph.arrays import constant_arrays
from aionn.hal import OperandType
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import identity, matmul, weights
from tests.real_models import carried


def test_a_real_model_tells_its_inputs_outputs_and_token() -> None:
    model = Model.from_onnx(carried("silero"))
    assert {name: operand.dimensions for name, operand in model.inputs.items()} == {"input": (1, 576), "state": (2, 1, 128)}
    assert {name: operand.type for name, operand in model.outputs.items()} == {"output": OperandType.FLOAT32, "stateN": OperandType.FLOAT32}
    assert len(model.token) == 32
    assert model.token == Model.from_onnx(str(carried("silero"))).token == Model.from_onnx(carried("silero").read_bytes()).token


def test_the_weights_are_in_a_pool_of_which_nobody_gets_a_writable_mapping() -> None:
    model = Model.from_onnx(matmul(16, 16).SerializeToString())
    (pool,) = model.pools
    assert not pool.description.writable
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fileno(), pool.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(pool.fileno(), pool.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
        np.testing.assert_array_equal(np.frombuffer(mapped[: 16 * 16 * 4], np.float32).reshape(16, 16), weights(16, 16))
    np.testing.assert_array_equal(constant_arrays(model)["w"], weights(16, 16))


def test_a_model_without_large_constants_has_no_pool() -> None:
    assert Model.from_onnx(identity(TensorProto.FLOAT).SerializeToString()).pools == ()


def test_the_pool_goes_with_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(matmul().SerializeToString())
    gc.collect()
    before = os.listdir("/proc/self/fd")
    model = Model.from_onnx(path)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_failed_read_leaves_nothing_behind(tmp_path: Path) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CallerError, match="there is no such file"):
        Model.from_onnx(tmp_path / "missing.onnx")
    broken = matmul()
    broken.graph.node[0].input[0] = "nowhere"
    with pytest.raises(CompilationError) as caught:
        Model.from_onnx(broken.SerializeToString())
    assert caught.value.node == "multiply"
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
