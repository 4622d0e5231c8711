"""Tensors of other libraries as inputs: whatever offers `__dlpack__` in the CPU's memory is read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.errors import CallerError
from aionn.runtime.executing.arguments import as_array
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: what an array holds does not depend on it."""
    return "asyncio", {"use_uvloop": True}


class Tensor:
    """A tensor of another library, which offers DLPack and nothing else."""

    def __init__(self, array: NDArray[Any], device: tuple[int, int] = (1, 0), refuses: Exception | None = None) -> None:
        self.array, self.device, self.refuses = array, device, refuses
        self.exports = 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.refuses is not None:
            raise self.refuses
        self.exports += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OldTensor(Tensor):
    """A tensor of a library from before DLPack 1.0: it takes no version."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class Broken:
    def __init__(self) -> None:
        self.__array_interface__ = {"shape": (1, 16)}


def numbers() -> NDArray[np.float32]:
    return np.arange(16, dtype=np.float32).reshape(1, 16)


def read_only() -> NDArray[np.float32]:
    array = numbers()
    array.flags.writeable = False
    return array


TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: Tensor(numbers()),
    "read-only": lambda: Tensor(read_only()),
    "strided": lambda: Tensor(np.repeat(numbers(), 2, axis=1)[:, ::2]),
    "turned": lambda: Tensor(numbers().reshape(16, 1).T),
    "pinned": lambda: Tensor(numbers(), (3, 0)),
    "old": lambda: OldTensor(numbers()),
}


@pytest.mark.parametrize("kind", TENSORS)
async def test_a_tensor_of_another_library_is_taken_on_every_path(fake: FakeDevice, kind: str) -> None:
    x = numbers()
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        np.testing.assert_array_equal((await compilation.compute({"input": TENSORS[kind]()}))["input_out"], x)
        async with compilation.burst() as burst:
            for _ in range(3):
                np.testing.assert_array_equal((await burst.compute({"input": TENSORS[kind]()}))["input_out"], x)
            async for result in burst.map([{"input": TENSORS[kind]()} for _ in range(5)]):
                np.testing.assert_array_equal(result.outputs["input_out"], x)
            async with burst.frame() as frame:
                frame["input"] = TENSORS[kind]()
                np.testing.assert_array_equal((await burst.compute(frame))["input_out"], x)
        async with await compilation.allocate(inputs=("input",)) as memory:
            source: Any = TENSORS[kind]()
            await memory.copy_from(source)
            np.testing.assert_array_equal(await memory.snapshot(), x)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_read_where_it_lies(kind: str) -> None:
    tensor = TENSORS[kind]()
    assert np.shares_memory(as_array("x", tensor), tensor.array)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "CUDA": (
        lambda: Tensor(numbers(), (2, 0)),
        r"'input': this Tensor lies in a device's memory \(DLPack's type 2\).*input\.cpu\(\)",
    ),
    "needs gradients": (
        lambda: Tensor(numbers(), refuses=BufferError("Can't export tensors that require gradient, use tensor.detach()")),
        r"cannot be read through DLPack \(Can't export tensors that require gradient, use tensor.detach\(\)\)",
    ),
    "a type that DLPack lacks": (
        lambda: Tensor(numbers().astype(ml_dtypes.bfloat16)),
        "cannot be read through DLPack .*pass a NumPy array",
    ),
    "another dtype": (lambda: Tensor(numbers().astype(np.float64)), "dtype float64 does not fit the model's float32"),
    "another shape": (lambda: Tensor(numbers().reshape(16)), r"shape \(16,\) does not fit the model's \(1, 16\)"),
    "a broken array": (lambda: Broken(), r"'input': this Broken cannot be read as an array \(Missing __array_interface__ typestr\); pass"),
    "a list": (lambda: [[0.0] * 16], "expected a NumPy array, got list"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_tensor_that_cannot_be_read_is_refused_in_one_sentence(fake: FakeDevice, kind: str) -> None:
    make, words = REFUSED[kind]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute):
                with pytest.raises(CallerError, match=words) as caught:
                    await compute({"input": make()})
                assert "\n" not in str(caught.value)
            np.testing.assert_array_equal((await burst.compute({"input": numbers()}))["input_out"], numbers())
