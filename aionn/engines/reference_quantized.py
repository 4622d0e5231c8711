"""Operators, mostly of quantised models, as the standard defines them, where `onnx.reference` lacks a version or computes another value.

    DequantizeLinear        onnx has none below operator set 19
    QuantizeLinear          onnx wraps around for values beyond 32 bits
    DynamicQuantizeLinear   onnx gives another scale for an input of zeros, and none for an empty input
    QLinearConv             onnx scales per channel in two spatial dimensions only, and rounds after the zero point
    QLinearMatMul           onnx takes scales and zero points of rows for those of columns, as for `MatMulInteger`; rounding as above
    MatMulInteger, ConvInteger
    BatchNormalization      onnx normalises by the input instead of the given mean and variance below operator set 14

A quotient is rounded half to even, then the zero point is added, then the sum is clipped. A scale or a zero point belongs to the whole
tensor, to one index of an axis, or to a block. Importing this module imports `onnx`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import load_op

Array = NDArray[Any]
_SMALL_INTEGERS = frozenset(map(np.dtype, ("uint8", "int8", "uint16", "int16")))
_INTEGERS = _SMALL_INTEGERS | {np.dtype("int32")}

_Quantize: Any = load_op("", "QuantizeLinear")
_Dequantize: Any = load_op("", "DequantizeLinear")
_Convolution: Any = load_op("", "ConvInteger")
_Normalization: Any = load_op("", "BatchNormalization")


class QuantizeLinear(_Quantize):  # type: ignore[misc]
    """y = saturate(round(x / scale) + zero point)."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero_point: Array | None = None, **given: Any) -> tuple[Array, ...]:
        kind = (
            zero_point.dtype
            if zero_point is not None
            else np.dtype(tensor_dtype_to_np_dtype(given.get("output_dtype") or TensorProto.UINT8))
        )
        if kind not in _SMALL_INTEGERS:
            return super()._run(x, scale, zero_point, **given)  # type: ignore[no-any-return]
        axis, block = given.get("axis", 1), given.get("block_size") or 0
        precision = given.get("precision")
        wide = tensor_dtype_to_np_dtype(precision) if precision else scale.dtype
        with np.errstate(over="ignore"):
            quotient = x.astype(wide) / _along(scale, x.shape, axis, block).astype(wide)
        return (_quantised(quotient, None if zero_point is None else _along(zero_point, x.shape, axis, block), kind),)


class DequantizeLinear(_Dequantize):  # type: ignore[misc]
    """y = (x - zero point) * scale."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero_point: Array | None = None, **given: Any) -> tuple[Array, ...]:
        if x.dtype not in _INTEGERS:
            return super()._run(x, scale, zero_point, **given)  # type: ignore[no-any-return]
        axis, block = given.get("axis", 1), given.get("block_size") or 0
        shifted = _shifted(x, None if zero_point is None else _along(zero_point, x.shape, axis, block))
        made = given.get("output_dtype")
        with np.errstate(over="ignore"):
            y = shifted.astype(np.float32) * _along(scale, x.shape, axis, block).astype(np.float32)
            return (y.astype(tensor_dtype_to_np_dtype(made) if made else scale.dtype),)


class DynamicQuantizeLinear(OpRun):
    """Quantise to uint8 by the range of the values, which always includes 0."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array, ...]:
        highest, lowest = np.max(x, initial=np.float32(0)), np.min(x, initial=np.float32(0))
        scale = np.float32(1) if highest == lowest else np.float32((highest - lowest) / np.float32(255))
        zero_point = np.uint8(np.clip(np.rint(-lowest / scale), 0, 255))
        return _quantised(x / scale, np.asarray(zero_point), np.uint8), np.asarray(scale), np.asarray(zero_point)


class MatMulInteger(OpRun):
    """The product of two integer matrices in 32 bits, without their zero points."""

    op_domain = ""

    def _run(self, a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> tuple[Array, ...]:
        return (_product(a, a_zero_point, b, b_zero_point),)


class QLinearMatMul(OpRun):
    """The product of two quantised matrices, quantised again."""

    op_domain = ""

    def _run(self, *given: Array) -> tuple[Array, ...]:
        a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point = given
        factor = _of_rows(a_scale, a) * b_scale / _of_rows(y_scale, a)
        y = _product(a, a_zero_point, b, b_zero_point).astype(np.float32) * factor.astype(np.float32)
        return (_quantised(y, _of_rows(y_zero_point, a), y_zero_point.dtype),)


class ConvInteger(_Convolution):  # type: ignore[misc]
    """The convolution of two integer tensors in 32 bits, without their zero points."""

    op_domain = ""

    def _run(
        self, x: Array, w: Array, x_zero_point: Array | None = None, w_zero_point: Array | None = None, **given: Any
    ) -> tuple[Array, ...]:
        filters = None if w_zero_point is None else _along(w_zero_point, w.shape, 0)
        return super()._run(_shifted(x, x_zero_point), _shifted(w, filters), **given)  # type: ignore[no-any-return]


class QLinearConv(ConvInteger):
    """The convolution of two quantised tensors with a bias, quantised again."""

    def _run(self, *tensors: Array, **given: Any) -> tuple[Array, ...]:  # type: ignore[override]
        x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, *bias = tensors
        (y,) = super()._run(x, w, x_zero_point, w_zero_point, **given)
        if bias and bias[0] is not None:
            y = y + _along(bias[0], y.shape, 1)
        factor = x_scale.reshape(()) * _along(w_scale, y.shape, 1) / y_scale.reshape(())
        return (_quantised(y.astype(np.float32) * factor.astype(np.float32), y_zero_point, y_zero_point.dtype),)


class BatchNormalization(_Normalization):  # type: ignore[misc]
    """The same by the given mean and variance in every operator set, where a node does not say that it is in training."""

    op_domain = ""

    def _run(self, *tensors: Array, epsilon: float, momentum: float, training_mode: int = 0, **_: Any) -> tuple[Array, ...]:
        return super()._run(*tensors, epsilon=epsilon, momentum=momentum, training_mode=training_mode)  # type: ignore[no-any-return]


OPERATORS: tuple[type[OpRun], ...] = (
    QuantizeLinear,
    DequantizeLinear,
    DynamicQuantizeLinear,
    MatMulInteger,
    QLinearMatMul,
    ConvInteger,
    QLinearConv,
    BatchNormalization,
)
"""The operators, by the names of their classes and by `op_domain`."""


class Evaluator(ReferenceEvaluator):
    """onnx's evaluator with these operators, also in bodies and in the model's own functions."""

    def __init__(self, proto: Any, **given: Any) -> None:
        super().__init__(proto, **{**given, "new_ops": list(OPERATORS)})  # onnx hands none on to functions


def _along(value: Array, shape: tuple[int, ...], axis: int, block: int = 0) -> Array:
    """Return a scale or a zero point so that it broadcasts to `shape`: of the whole tensor, of each index of `axis`, or of blocks."""
    if value.size == 1:
        return value.reshape(())
    if block:
        return np.repeat(value, block, axis).take(range(shape[axis]), axis)
    if value.ndim != 1 or value.size != shape[axis]:
        raise ValueError(
            f"scale or zero point of shape {value.shape} for axis {axis} of a tensor of shape {shape}; expected ({shape[axis]},)"
        )
    extents = [1] * len(shape)
    extents[axis] = value.size
    return value.reshape(extents)


def _of_rows(value: Array, matrix: Array) -> Array:
    """Return a scale or a zero point so that a vector belongs to the rows of `matrix`."""
    return value[:, np.newaxis] if value.ndim == 1 and value.size > 1 and matrix.ndim > 1 else value


def _shifted(x: Array, zero_point: Array | None) -> Array:
    return x.astype(np.int32) if zero_point is None else x.astype(np.int32) - zero_point.astype(np.int32)


def _product(a: Array, a_zero_point: Array | None, b: Array, b_zero_point: Array | None) -> Array:
    rows = None if a_zero_point is None else _of_rows(a_zero_point, a)
    product: Array = np.matmul(_shifted(a, rows), _shifted(b, b_zero_point))
    return product


def _quantised(x: Array, zero_point: Array | None, kind: DTypeLike) -> Array:
    limits = np.iinfo(kind)
    rounded = np.rint(x.astype(np.float32))
    with np.errstate(invalid="ignore"):  # what is not a number may become any number
        made: Array = np.clip(rounded if zero_point is None else rounded + zero_point, limits.min, limits.max).astype(kind)
    return made
