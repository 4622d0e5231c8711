"""Tensors of element types that NumPy lacks, as engines take them.

An array of bfloat16 or float8 has the engine's bytes already, and only the type's name is another one. Engines pack elements of 4 and
2 bits as ONNX does: the first element lies in the lowest bits of a byte. An array of ml_dtypes has a byte for each. So such tensors
are packed before a run, and unpacked after it (`PackedRuns`).

`deliver` moves outputs that an engine has made into the arrays that were given for them. `run_apart` is a second run for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.hal.engine import Executable, ExecutionReport
from aionn.hal.types import OperandType

PACKED_BITS = {OperandType.INT4: 4, OperandType.UINT4: 4, OperandType.FLOAT4E2M1: 4, OperandType.INT2: 2, OperandType.UINT2: 2}
"""The types whose elements engines pack."""


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array in C order, in place."""
    return array.reshape(-1).view(np.uint8)


def packed_bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)


def pack(array: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return a new array of the same shape, whose first bytes hold the elements packed."""
    per_byte = 8 // bits
    flat = as_bytes(np.ascontiguousarray(array))
    groups = np.zeros((packed_bytes(flat.size, bits), per_byte), np.uint8)
    groups.reshape(-1)[: flat.size] = flat & (2**bits - 1)
    packed = np.zeros(array.shape, np.uint8)
    packed.reshape(-1)[: len(groups)] = np.bitwise_or.reduce(groups << _shifts(bits), axis=1)
    return packed


def unpack(packed: NDArray[np.uint8], kind: OperandType) -> NDArray[Any]:
    """Return the elements of an array as `pack` makes it."""
    bits = PACKED_BITS[kind]
    flat = packed.reshape(-1)[: packed_bytes(packed.size, bits)]
    elements = (flat[:, np.newaxis] >> _shifts(bits)) & np.uint8(2**bits - 1)
    return elements.reshape(-1)[: packed.size].view(kind.dtype).reshape(packed.shape)


def _shifts(bits: int) -> NDArray[np.uint8]:
    return np.arange(0, 8, bits, dtype=np.uint8)


class PackedRuns:
    """Runs of an executable that takes tensors of packed types as `pack` makes them, and gives them back so."""

    def __init__(self, executable: Executable, kinds: Mapping[str, OperandType]) -> None:
        """`kinds`: the packed types by the names of inputs and outputs."""
        self._executable = executable
        self._kinds = kinds

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Do what `Executable.run` does, with arrays of ml_dtypes."""
        kinds = self._kinds
        given = {name: pack(array, PACKED_BITS[kinds[name]]) if name in kinds else array for name, array in inputs.items()}
        places = {name: np.zeros(array.shape, np.uint8) if name in kinds else array for name, array in outputs.items()}
        report = self._executable.run(given, places, timing)
        made = {name: unpack(array, kinds[name]) if name in kinds else array for name, array in report.outputs.items()}
        for name, array in outputs.items():
            if name in kinds and name not in made:
                array[...] = unpack(places[name], kinds[name])
        return ExecutionReport(made, report.on_device_ns)


def deliver(made: dict[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
    """Move outputs from `made` into the arrays of `outputs`. Keep an output in `made` if its array has another shape.

    NumPy would broadcast a smaller output over a larger array, so the shapes are compared.
    """
    for name, place in outputs.items():
        if made[name].shape == place.shape:
            place[...] = made.pop(name)


def run_apart(
    executable: Executable, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool, failure: Exception
) -> ExecutionReport:
    """Run again with outputs that the engine's library allocates, after a run that could not write into the given arrays.

    Raises:
        Exception: `failure`, if this run fails as well.
    """
    try:
        report = executable.run(inputs, {}, timing)
    except Exception:
        raise failure from None
    made = dict(report.outputs)
    deliver(made, outputs)
    return ExecutionReport(made, report.on_device_ns)
