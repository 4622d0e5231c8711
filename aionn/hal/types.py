"""The values of the contract between an app's process and a driver's. They are plain and frozen, and do no I/O.

Names and numbers follow NNAPI's HAL 1.2/1.3 (`types.hal`), and tensors are ONNX's. What `__post_init__` checks at construction is
not checked again below. Units stand in the names: `_bytes`, `_ns`, `_us`, `_s`.

A dimension of 0 in an `Operand`, or of an output in a request, means "not known until execution" (NNAPI's convention). The dimensions
of an input in a request and the `OutputShape` of a finished execution are true extents, where 0 is an empty axis.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from aionn.errors import CallerError

if TYPE_CHECKING:  # a service describes tensors, and computes nothing with them
    import numpy as np

CONSTANT_COPY_BYTES = 128
"""Constants up to this size travel in the graph, larger ones by reference into a pool (as NNAPI's setOperandValue does)."""

MAX_CACHE_FILES = 32
"""A driver that asks for more cache files of one kind gets no cache (HAL 1.2: Constant.MAX_NUMBER_OF_CACHE_FILES)."""

CACHE_TOKEN_BYTES = 32
"""HAL 1.2: Constant.BYTE_SIZE_OF_CACHE_TOKEN."""

MAX_THREADS = 1024
"""The most threads that a run of an engine may be given."""

MAX_INSTANCES = 256
"""The most executions of one prepared model that may run beside each other."""

NO_LANES = "its engine runs one execution of a model at a time"
"""The `reason` of the `CompilationError` for several instances of a model whose executable has no `lanes`."""


KEYRING_NEEDED = "it was adopted, and the caller has sent no keyring"
"""The end of the `reason` of the `CompilationError` for adopted contents that come without a keyring. With one the call may succeed."""


class OperandType(enum.Enum):
    """Element type of a tensor. The value is the name of the same type in NumPy or in ml_dtypes.

    Each element of an array has at least one byte. ONNX packs the types of 4 and 2 bits in files, and ml_dtypes does not.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    BFLOAT16 = "bfloat16"
    FLOAT8E4M3FN = "float8_e4m3fn"
    FLOAT8E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8E5M2 = "float8_e5m2"
    FLOAT8E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8E8M0 = "float8_e8m0fnu"
    FLOAT6E2M3 = "float6_e2m3fn"
    FLOAT6E3M2 = "float6_e3m2fn"
    FLOAT4E2M1 = "float4_e2m1fn"
    INT4 = "int4"
    UINT4 = "uint4"
    INT2 = "int2"
    UINT2 = "uint2"
    STRING = "string"

    __hash__ = object.__hash__  # a member equals only itself, and the hash of `Enum` is written in Python

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of one element, in native byte order. The first use of a type that NumPy lacks imports ml_dtypes.

        Arrays of strings have the dtype object, and their elements are `str`.
        """
        return _DTYPES[self]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element, or 0 for a string."""
        return _ELEMENT_BYTES[self]

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy itself has the type. Arrays of the others have a dtype of ml_dtypes, or hold Python objects (strings)."""
        return self not in _OF_ML_DTYPES and self is not OperandType.STRING


_OF_ML_DTYPES = frozenset(
    {
        OperandType.BFLOAT16,
        OperandType.FLOAT8E4M3FN,
        OperandType.FLOAT8E4M3FNUZ,
        OperandType.FLOAT8E5M2,
        OperandType.FLOAT8E5M2FNUZ,
        OperandType.FLOAT8E8M0,
        OperandType.FLOAT6E2M3,
        OperandType.FLOAT6E3M2,
        OperandType.FLOAT4E2M1,
        OperandType.INT4,
        OperandType.UINT4,
        OperandType.INT2,
        OperandType.UINT2,
    }
)


class _Dtypes(dict[OperandType, "np.dtype[np.generic]"]):
    """The dtypes that were asked for. A process pays for the import of NumPy, or of ml_dtypes, when it asks for such a type."""

    def __missing__(self, member: OperandType) -> np.dtype[np.generic]:
        import numpy as np

        name: Any = object if member is OperandType.STRING else member.value
        if member in _OF_ML_DTYPES:
            import ml_dtypes

            name = getattr(ml_dtypes, member.value)
        dtype: np.dtype[np.generic] = np.dtype(name)
        self[member] = dtype
        return dtype


_DTYPES = _Dtypes()
_ELEMENT_BYTES = {member: int("".join(filter(str.isdigit, member.value)) or 8) // 8 for member in OperandType if member.in_numpy}
_ELEMENT_BYTES |= dict.fromkeys(_OF_ML_DTYPES, 1) | {OperandType.BFLOAT16: 2, OperandType.STRING: 0}


class Default(msgspec.Struct, frozen=True):
    """What an input holds where an app gives nothing for it: a tensor's shape, and its content.

    The content is the elements' bytes in C order, as NumPy and ml_dtypes have them. That of texts is as `hal.values.joined_texts` makes it.
    """

    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor at a model's border: its element type and its shape.

    Attributes:
        type: element type.
        dimensions: the extents. An extent of 0 is open until execution. None means that even the rank is open.
            () is a scalar.
        symbols: per axis ONNX's name of an open dimension ("N", "height"), or None. Empty where the model gives no names.
            Two axes of one model with the same symbol have the same extent in one execution.
        default: what the input holds where an app leaves it out. None: it must be given.
    """

    type: OperandType
    dimensions: tuple[int, ...] | None
    symbols: tuple[str | None, ...] = ()
    default: Default | None = None

    def __post_init__(self) -> None:
        if self.dimensions and min(self.dimensions) < 0:
            raise CallerError(f"an operand has the dimensions {self.dimensions}, but none may be negative; write 0 for an open one")

    @property
    def in_frames(self) -> bool:
        """Whether its values may lie in a frame: they are tensors whose elements have a fixed size.

        A model with another input or output runs by control calls only (`hal.values`).
        """
        return self.type is not OperandType.STRING

    @property
    def word(self) -> str:
        """The type in words, without the shape."""
        return self.type.value

    @property
    def size_bytes(self) -> int | None:
        """Size of the whole tensor in bytes, or None while a dimension is unknown, or for strings."""
        if self.dimensions is None or 0 in self.dimensions or not self.in_frames:
            return None
        return prod(self.dimensions) * self.type.element_bytes

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that concrete shape fits."""
        if self.dimensions is None or shape == self.dimensions:
            return True
        return len(shape) == len(self.dimensions) and all(want in (0, got) for want, got in zip(self.dimensions, shape, strict=True))


class DataLocation(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + length) of the pool with that index."""

    pool_index: int
    offset: int
    length: int


class RequestArgument(msgspec.Struct, frozen=True):
    """Where one input or output of an execution lies, and its shape.

    The `dimensions` of an input are its true extents. Those of an output may hold 0 for an open extent. Without dimensions, the
    model's count. An omitted optional argument has `has_no_value`, an all-zero location and no dimensions.
    """

    location: DataLocation
    dimensions: tuple[int, ...]
    has_no_value: bool = False


class Request(msgspec.Struct, frozen=True):
    """The arguments of one execution, in the model's order. The pools travel beside the request."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]


class ErrorStatus(enum.IntEnum):
    """The status of an execution (HAL 1.3: ErrorStatus, with the same numbers)."""

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8


UNKNOWN_TIME_US = 2**64 - 1
"""The value of a `Timing` field that the driver cannot measure (HAL 1.2)."""


class Timing(msgspec.Struct, frozen=True):
    """How long one execution took in microseconds (HAL 1.2). The time on the device is part of the time in the driver."""

    on_device_us: int = UNKNOWN_TIME_US
    in_driver_us: int = UNKNOWN_TIME_US


NO_TIMING = Timing()


class OutputShape(msgspec.Struct, frozen=True):
    """The true extents of one output, and whether the memory given for it was large enough."""

    dimensions: tuple[int, ...]
    is_sufficient: bool = True


class Result(msgspec.Struct, frozen=True):
    """The answer to one execution.

    Invariants (HAL 1.2): `output_shapes` is empty unless status is NONE or OUTPUT_INSUFFICIENT_SIZE. `timing` is
    NO_TIMING unless status is NONE and timing was asked for. `message` is the reason of a failure in the driver's words.
    """

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""


class Dependency(msgspec.Struct, frozen=True):
    """What a fenced execution waits for: its descriptor becomes readable.

    Attributes:
        fd: the descriptor, which the caller keeps owning.
        is_event: whether it is a fence of aionn, whose counter says whether its execution succeeded.
    """

    fd: int
    is_event: bool = False


class FencedResult(msgspec.Struct, frozen=True):
    """The answer to one fenced execution.

    Attributes:
        result: as for any other execution. Its `timing` begins when the dependencies were done.
        failed: the index of a dependency that has failed, so that the execution did not begin, or None.
        since_launch: the time in the driver from the arrival of the request on, with the wait.
    """

    result: Result
    failed: int | None = None
    since_launch: Timing = NO_TIMING


class ExecutionPreference(enum.IntEnum):
    """What an app prefers: less power, a quick answer, or sustained speed (HAL 1.1, with the same numbers)."""

    LOW_POWER = 0
    FAST_SINGLE_ANSWER = 1
    SUSTAINED_SPEED = 2


class Priority(enum.IntEnum):
    """How urgent an app's executions are (the NDK's numbers). MEDIUM is the default."""

    LOW = 90
    MEDIUM = 100
    HIGH = 110


class DeviceType(enum.IntEnum):
    """The kind of hardware that a device uses (the NDK's device types)."""

    UNKNOWN = 0
    OTHER = 1
    CPU = 2
    GPU = 3
    ACCELERATOR = 4


class CacheFiles(msgspec.Struct, frozen=True):
    """How many cache files of each kind a device needs (HAL 1.2: getNumberOfCacheFilesNeeded). With (0, 0) it does not cache."""

    model: int = 0
    data: int = 0

    @property
    def supported(self) -> bool:
        """Whether such a device caches: it has files to store, and no more than the HAL allows."""
        return (self.model > 0 or self.data > 0) and 0 <= self.model <= MAX_CACHE_FILES and 0 <= self.data <= MAX_CACHE_FILES


class MemoryKind(enum.Enum):
    """The kinds of memory pools, by name (HAL: `hidl_memory.name`)."""

    ASHMEM = "ashmem"
    MMAP_FD = "mmap_fd"
    HARDWARE_BUFFER_BLOB = "hardware_buffer_blob"
    HARDWARE_BUFFER = "hardware_buffer"


class MemoryDescription(msgspec.Struct, frozen=True):
    """What a peer needs beside the descriptor to map a pool.

    Attributes:
        kind: how the pool is mapped.
        size_bytes: bytes from `offset_bytes` on that belong to the pool.
        writable: whether the peer may write (mmap_fd: PROT_WRITE).
        offset_bytes: where the pool begins in the file. It has 64 bits and is page-aligned. Only mmap_fd has another offset than 0.
    """

    kind: MemoryKind
    size_bytes: int
    writable: bool = True
    offset_bytes: int = 0


@runtime_checkable
class IMemory(Protocol):
    """A memory pool as one process holds it: a description, a descriptor and a mapping."""

    @property
    def description(self) -> MemoryDescription: ...

    @property
    def size_bytes(self) -> int: ...

    def fileno(self) -> int:
        """The descriptor to send to a peer. The memory keeps owning it."""
        ...

    def view(self) -> memoryview:
        """Return all bytes of the pool in place, read-only if the mapping is. The view keeps the mapping alive."""
        ...


class BufferRole(msgspec.Struct, frozen=True):
    """A use of a buffer that the device owns: input or output `io_index` of model `model_index` in the list of `allocate`."""

    model_index: int
    io_index: int
    frequency: float = 1.0


class BufferDesc(msgspec.Struct, frozen=True):
    """Extents for `IDevice.allocate`, to combine with those of the roles. 0 is an open extent, () gives no extents."""

    dimensions: tuple[int, ...] = ()


class PerformanceInfo(msgspec.Struct, frozen=True):
    """How long a device takes, and how much power it uses, where a CPU has 1.0 (HAL 1.0: PerformanceInfo). Less is better."""

    execution_time: float = 1.0
    power_usage: float = 1.0

    def __post_init__(self) -> None:
        for name in ("execution_time", "power_usage"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
                raise CallerError(f"a performance has {name}={value!r}, but it is a positive number relative to a CPU, which has 1.0")


class Performance(msgspec.Struct, frozen=True):
    """What a device declares of its speed, for the plan that cuts a model over several devices (HAL 1.2: Capabilities).

    Attributes:
        default: for every element type that `by_type` lacks.
        by_type: by the element type of an operation's first input.
    """

    default: PerformanceInfo = PerformanceInfo()
    by_type: Mapping[OperandType, PerformanceInfo] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.default, PerformanceInfo):
            raise CallerError(f"a performance has default={self.default!r}, but it must be a PerformanceInfo")
        if not isinstance(self.by_type, Mapping):
            raise CallerError(f"a performance has by_type={self.by_type!r}, but it must be a mapping from OperandType to PerformanceInfo")
        for kind, info in self.by_type.items():
            if not isinstance(kind, OperandType) or not isinstance(info, PerformanceInfo):
                raise CallerError(f"a performance has by_type[{kind!r}]={info!r}, but it must map OperandType to PerformanceInfo")

    def cost(self, kind: OperandType | None, preference: ExecutionPreference) -> float:
        """Return what an operation costs here relative to a CPU: power for LOW_POWER, else time. `kind`: type of its first input."""
        info = self.default if kind is None else self.by_type.get(kind, self.default)
        return info.power_usage if preference is ExecutionPreference.LOW_POWER else info.execution_time
