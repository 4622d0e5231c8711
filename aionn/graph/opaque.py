"""Models of other formats than ONNX: bytes that only a device for that format reads, with declared inputs and outputs. Without `onnx`.

operations  one, whose domain is the format; so a device says for the whole model whether it can run it
constants   one, which is all the model's bytes, in sealed memory
graph       empty
token       the digest of the format, the name and the operand of each input and output, and the bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from blake3 import blake3

from aionn.errors import CallerError
from aionn.hal.model import OPAQUE, Constant, Operation, PooledModel
from aionn.hal.options import is_unicode
from aionn.hal.types import DataLocation, IMemory, Operand, OperandType

_TOKEN_CONTEXT = "aionn 2026-11-22 token of a model that is not ONNX"


def opaque_model(
    content: object,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    kind: tuple[str, str],
    allocate: Callable[[int], IMemory],
) -> PooledModel:
    """Return the model, with one copy of its bytes in memory that `allocate` returns.

    Args:
        kind: the format, and the model's name or an empty text.

    Raises:
        CallerError: a value has the wrong type, or is empty.
    """
    form, name = kind
    if not isinstance(form, str) or not form or form == "onnx":
        raise CallerError(f"format={form!r}: give the name of the format, such as 'tflite'; an ONNX model is read by Model.from_onnx")
    if not is_unicode(form):
        raise CallerError(f"format={form!r}: give Unicode without surrogates")
    data = _bytes_of(content)
    _check_operands("inputs", inputs)
    _check_operands("outputs", outputs)
    if not outputs:
        raise CallerError("outputs: the model has none; declare at least one output")
    pool = allocate(data.nbytes)
    pool.view()[: data.nbytes] = data
    whole = Constant(form, Operand(OperandType.UINT8, (data.nbytes,)), DataLocation(0, 0, data.nbytes))
    return PooledModel(
        graph=b"",
        inputs=inputs,
        outputs=outputs,
        operations=(Operation(name or form, OPAQUE, form),),
        constants=(whole,),
        pools=(pool,),
        token=_token(form, inputs, outputs, data),
    )


def _bytes_of(content: object) -> memoryview:
    try:
        data = memoryview(content).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise CallerError(f"data: expected bytes in one piece, got {type(content).__name__} ({error}); read the model's file") from error
    if not data.nbytes:
        raise CallerError("data: the model has no bytes; give the contents of its file")
    return data


def _check_operands(what: str, operands: Mapping[str, Operand]) -> None:
    if not isinstance(operands, Mapping):
        raise CallerError(f"{what}: expected a dict of aionn.hal.Operand by name, got {type(operands).__name__}")
    for name, operand in operands.items():
        if not isinstance(name, str) or not isinstance(operand, Operand):
            raise CallerError(f"{what}[{name!r}]: expected an aionn.hal.Operand under a name, got {type(operand).__name__}")
        if not is_unicode(name):
            raise CallerError(f"{what}[{name!r}]: give a name of Unicode without surrogates")


def _token(form: str, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand], data: memoryview) -> bytes:
    border = [
        [(name, operand.word, operand.dimensions, operand.symbols, operand.default) for name, operand in operands.items()]
        for operands in (inputs, outputs)
    ]
    declared = msgspec.msgpack.encode((form, border, data.nbytes))
    return blake3(declared + blake3(data).digest(), derive_key_context=_TOKEN_CONTEXT).digest()
