"""`PooledModel`: an ONNX graph with its large constants taken out. It is frozen and checked once.

The graph stays the standard's own protobuf, without constants of more than `CONSTANT_COPY_BYTES`. The initializer of such a constant
is marked EXTERNAL (location "pool:<index>", offset, length), and its bytes lie in `pools`. NNAPI calls that CONSTANT_REFERENCE.
Smaller constants are inside the graph (CONSTANT_COPY).

Invariants, checked here because a model also arrives over a socket
    Each constant's location lies within its pool, and its length is exactly the operand's size. A pool with constants is never an image.
    `inputs` and `outputs` keep the graph's order. Initializers are left out of `inputs`.

A model of another format than ONNX has no graph. All its bytes are one constant, and it has one operation of the type `OPAQUE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from aionn.errors import CallerError, CompilationError
from aionn.hal.types import CACHE_TOKEN_BYTES, DataLocation, IMemory, MemoryKind, Operand

OPAQUE = "Opaque"
"""The type of the one operation of a model that is not ONNX. Its domain is the model's format."""


class Operation(msgspec.Struct, frozen=True):
    """The facts of one node of the main graph that decide about its device. `name` is never empty ("Conv_3" if ONNX has none)."""

    name: str
    op_type: str
    domain: str


class Constant(msgspec.Struct, frozen=True):
    """A large constant: the initializer's name, its type and shape, and where its bytes lie in the model's pools."""

    name: str
    operand: Operand
    location: DataLocation


@dataclass(frozen=True, kw_only=True)
class PooledModel:
    """An ONNX graph whose large constants lie in pools: shared memory, or files that drivers copy from.

    Attributes:
        graph: a serialized `onnx.ModelProto` without the large constants.
        inputs: operand by name, in the graph's order.
        outputs: operand by name, in the graph's order.
        operations: the nodes of the main graph, in order; `get_supported_operations` answers per entry.
        constants: the large constants.
        pools: where the large constants' bytes are.
        token: 32 bytes that name the content: the graph and every constant. Empty where no digest has been made, which only a
            model for a preparation without cache files may leave out.
    """

    graph: bytes = field(repr=False)
    inputs: Mapping[str, Operand]
    outputs: Mapping[str, Operand]
    operations: tuple[Operation, ...] = field(repr=False)
    constants: tuple[Constant, ...] = field(repr=False)
    pools: tuple[IMemory, ...] = field(repr=False)
    token: bytes
    _contents: bytes = field(default=b"", repr=False)

    @property
    def format(self) -> str:
        """The format of the model: "onnx", or that of a model of opaque bytes, such as "tflite"."""
        operations: tuple[Operation, ...] = self.__dict__.get("operations", ())  # a loaded model that is not read yet has none
        return operations[0].domain if len(operations) == 1 and operations[0].op_type == OPAQUE and not self.graph else "onnx"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        object.__setattr__(self, "outputs", MappingProxyType(dict(self.outputs)))
        if len(self.token) not in (0, CACHE_TOKEN_BYTES):
            raise CallerError(
                f"the model's token has {len(self.token)} bytes, but a token has {CACHE_TOKEN_BYTES}; give a digest of that size"
            )
        for constant in self.constants:
            place = constant.location
            if not 0 <= place.pool_index < len(self.pools):
                raise CallerError(f"constant {constant.name!r} names pool {place.pool_index}, but the model has {len(self.pools)} pools")
            if self.pools[place.pool_index].description.kind is MemoryKind.HARDWARE_BUFFER:
                raise CallerError(
                    f"constant {constant.name!r} lies in pool {place.pool_index}, an image (hardware_buffer) that only executions use; "
                    "keep constants in ashmem, mmap_fd or a blob"
                )
            have = self.pools[place.pool_index].size_bytes
            if place.offset < 0 or place.length < 0 or place.offset + place.length > have:
                raise CallerError(
                    f"constant {constant.name!r} lies in bytes {place.offset} to {place.offset + place.length} of a pool, "
                    f"but the pool has {have} bytes"
                )
            if place.length != constant.operand.size_bytes and 0 not in (constant.operand.dimensions or ()):
                raise CallerError(
                    f"constant {constant.name!r} has {place.length} bytes, but its shape and type need {constant.operand.size_bytes}"
                )


def known_token(model: PooledModel) -> bytes:
    """Return the token, or nothing where no digest has been made."""
    token: bytes = model.__dict__.get("token", b"")
    return token


def known_contents(model: PooledModel) -> bytes:
    """Return the digest of the constants that can still be written to, as they were when the token was made (`aionn.graph.unchanged`).

    It is empty without such constants, or where the digest is not known.
    """
    return model._contents


def label(model: PooledModel) -> str:
    """Return a short name for log lines and pages: the first 16 digits of the token, or the file's name."""
    return known_token(model).hex()[:16] or getattr(model, "name", "")


def short_label(model: PooledModel) -> str:
    """Return at most 12 characters of the label, for lines that name several models or executions."""
    return label(model).removesuffix(".onnx")[:12]


def model_bytes(model: PooledModel, format: str) -> memoryview:  # noqa: A002 - the name of the property
    """Return the bytes of a model of another format than ONNX, in place and read-only. The view keeps them alive.

    Raises:
        CompilationError: the model has another format.
    """
    if model.format != format or format == "onnx":
        raise CompilationError(f"the model has the format {model.format!r}, but this device reads {format!r}; compile it on another device")
    (whole,) = model.constants
    place = whole.location
    return model.pools[place.pool_index].view()[place.offset : place.offset + place.length].toreadonly()


def may_change(pool: IMemory) -> bool:
    """Return whether the constants in a pool may change: it is a file or writable memory. Other pools are sealed."""
    return pool.description.kind is MemoryKind.MMAP_FD or pool.description.writable
