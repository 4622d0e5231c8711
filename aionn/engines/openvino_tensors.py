"""OpenVINO's tensors over arrays, and arrays of what its tensors hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.engines.elements import PACKED_BITS, PackedRuns, as_bytes
from aionn.hal.types import OperandType

_KINDS = {
    "bf16": OperandType.BFLOAT16,
    "f8e4m3": OperandType.FLOAT8E4M3FN,
    "f8e5m2": OperandType.FLOAT8E5M2,
    "f8e8m0": OperandType.FLOAT8E8M0,
    "f4e2m1": OperandType.FLOAT4E2M1,
    "i4": OperandType.INT4,
    "u4": OperandType.UINT4,
}
"""By OpenVINO's name of a type that NumPy lacks."""


class Tensors:
    """The tensors of one executable.

    Attributes:
        ov: the package.
        packed: the packed types by the names of inputs and outputs.
        packed_runs: runs the executable where some type is packed.
    """

    def __init__(self, openvino: Any, inputs: Sequence[Any], outputs: Sequence[Any], given: Sequence[str], made: Sequence[str]) -> None:
        """`inputs`, `outputs`: ports of the compiled model. `given`, `made`: their names."""
        self.ov = openvino
        types = {name: port.get_element_type() for name, port in zip((*given, *made), (*inputs, *outputs), strict=True)}
        self._kinds = {
            name: (_KINDS[element.get_type_name()], element) for name, element in types.items() if element.get_type_name() in _KINDS
        }
        self.packed = {name: kind for name, (kind, _) in self._kinds.items() if kind in PACKED_BITS}
        self.packed_runs: PackedRuns | None = None

    def over(self, name: str, array: NDArray[Any]) -> Any:
        """Return a tensor over an array."""
        if name not in self._kinds:
            return self.ov.Tensor(array, shared_memory=True)
        return self.ov.Tensor(as_bytes(array), self.ov.Shape(array.shape), self._kinds[name][1])

    def copy_of(self, name: str, tensor: Any) -> NDArray[Any]:
        """Return a tensor's elements. One of a packed type stays packed, in an array of its shape."""
        if name not in self._kinds:
            return np.array(tensor.data)
        kind, content = self._kinds[name][0], as_bytes(tensor.data)
        array: NDArray[Any] = np.zeros(tuple(tensor.shape), np.uint8 if kind in PACKED_BITS else kind.dtype)
        as_bytes(array)[: content.size] = content
        return array
