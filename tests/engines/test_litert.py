"""The device `litert`: what `border` reads, and shapes that a file lacks. `test_check_engine.py` holds it to the contract of drivers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.engines.litert import border
from aionn.hal import Operand, OperandType
from tests.real_models import carried

pytestmark = pytest.mark.anyio


def model_of(path: Path, **inputs: Operand) -> aionn.Model:
    content = path.read_bytes()
    declared, outputs = border(content)
    return aionn.Model.from_bytes(content, inputs={**declared, **inputs}, outputs=outputs, format="tflite", name=path.name)


@pytest.fixture(scope="module")
def models() -> Path:
    pytest.importorskip("ai_edge_litert")
    return carried("wake_word").parent


def test_the_border_has_names_types_and_open_dimensions(models: Path) -> None:
    inputs, outputs = border((models / "embedding_model.tflite").read_bytes())
    assert [(one.type, one.dimensions) for one in inputs.values()] == [(OperandType.FLOAT32, (0, 76, 32, 1))]
    assert [(one.type, one.dimensions) for one in outputs.values()] == [(OperandType.FLOAT32, (0, 1, 1, 96))]


def test_a_broken_file_is_one_sentence_whatever_is_broken(models: Path) -> None:
    content = (models / "okay_nabu.tflite").read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        broken = bytearray(content[: int(random.integers(8, 6000))])
        broken[0:4] = random.bytes(4)  # where the first table lies
        try:
            border(bytes(broken))
        except aionn.CallerError as error:
            refused += 1
            assert "give a whole file" in str(error)
    assert refused > 400
    with pytest.raises(aionn.CallerError, match=r"not a \.tflite file"):
        border(b"<!doctype html>")


async def test_a_file_that_cannot_be_prepared_with_its_own_shape_is_prepared_with_the_declared_one(models: Path, tmp_path: Path) -> None:
    """XNNPACK refuses a spectrogram of one sample. The second driver has the shape from the cache alone."""
    path = models / "melspectrogram.tflite"
    (name,) = border(path.read_bytes())[0]
    sound = np.random.default_rng(1).normal(size=(1, 1760)).astype(np.float32)
    found = []
    for kind in ("MISS", "HIT"):
        async with aionn.Runtime() as runtime:
            model = model_of(path, **{name: Operand(OperandType.FLOAT32, (1, 1760))})
            compilation = await runtime.compile(model, devices=("litert",), cache_dir=tmp_path / "cache")
            assert compilation.outcomes[0].kind.name == kind
            (output,) = (await compilation.compute({name: sound})).values()
            found.append(output)
    assert found[0].shape == (1, 1, 8, 32)
    assert np.array_equal(found[0], found[1])


async def test_an_open_dimension_takes_any_extent_and_a_wrong_one_does_no_harm(models: Path) -> None:
    path = models / "embedding_model.tflite"
    (name,) = border(path.read_bytes())[0]
    rows = np.random.default_rng(2).normal(size=(3, 76, 32, 1)).astype(np.float32)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model_of(path), devices=("litert",))
        (together,) = (await compilation.compute({name: rows})).values()
        for number in range(3):
            (alone,) = (await compilation.compute({name: rows[number : number + 1]})).values()
            np.testing.assert_allclose(alone[0], together[number], rtol=1e-4, atol=1e-4)


async def test_a_type_that_the_file_does_not_have_is_refused_by_name(models: Path) -> None:
    path = models / "okay_nabu.tflite"
    (name,) = border(path.read_bytes())[0]
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CompilationError, match=f"declares input '{name}' of int32"):
            await runtime.compile(model_of(path, **{name: Operand(OperandType.INT32, (1, 16, 96))}), devices=("litert",))


async def test_a_declared_shape_that_the_file_cannot_take_fails_the_compile(models: Path) -> None:
    path = models / "embedding_model.tflite"
    (name,) = border(path.read_bytes())[0]
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CompilationError, match="litert cannot prepare the model"):
            await runtime.compile(model_of(path, **{name: Operand(OperandType.FLOAT32, (1, 76, 32, 2))}), devices=("litert",))
