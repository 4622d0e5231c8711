"""The contract between an app's process and a driver's: types, the model, interfaces. No I/O lives here.

    queues      the description of a message queue
    types       the HAL's values (NNAPI 1.2/1.3, with the same numbers), and how quick a device says it is
    values      types of inputs and outputs that are not tensors: sequences, maps, optionals
    model       the ONNX graph with its large constants taken out
    interfaces  `IDevice` and its objects, which the runtime calls
    batching    how requests of several callers share a run
    options     what an app asks of one engine, as plain values by name
    trust       the builders whose compiled artifacts an app believes
    engine      `Engine` and what it makes, which a driver author writes

Header-only C for statistics pages, which `aionn.pages` includes, and `aionn.fmq` for the frame path:

    words.h       the words of a page, how they are stored, and the histogram's bucket
    burst_slot.h  what the app counts of a burst
    model_slot.h  begin and end of an execution in a driver
    sequence.h    rare changes of many words, which a reader sees as one
    trace_ring.h  records of single frames, while another process asks for them

This package is the public face for driver authors.
"""

from aionn.hal.engine import Artifact, CancelFlag, CompileOptions, Engine, Executable, ExecutionReport, IBlobCache
from aionn.hal.interfaces import CacheHandles, IBuffer, IBurstCallback, IBurstContext, IDevice, IPreparedModel, PrepareOptions
from aionn.hal.model import Constant, Operation, model_bytes
from aionn.hal.model import PooledModel as Model
from aionn.hal.options import EngineOptions, OptionValue
from aionn.hal.queues import GrantorDescriptor, MQDescriptor, MQFlavor
from aionn.hal.types import (
    CACHE_TOKEN_BYTES,
    CONSTANT_COPY_BYTES,
    MAX_CACHE_FILES,
    NO_TIMING,
    UNKNOWN_TIME_US,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DataLocation,
    Default,
    Dependency,
    DeviceType,
    ErrorStatus,
    ExecutionPreference,
    FencedResult,
    IMemory,
    MemoryDescription,
    MemoryKind,
    Operand,
    OperandType,
    OutputShape,
    Performance,
    PerformanceInfo,
    Priority,
    Request,
    RequestArgument,
    Result,
    Timing,
)
from aionn.hal.values import ValueKind, ValuesResult, ValueType
from aionn.needs import Needs

__all__ = [
    "CACHE_TOKEN_BYTES",
    "CONSTANT_COPY_BYTES",
    "MAX_CACHE_FILES",
    "NO_TIMING",
    "UNKNOWN_TIME_US",
    "Artifact",
    "BufferDesc",
    "BufferRole",
    "CacheFiles",
    "CacheHandles",
    "CancelFlag",
    "CompileOptions",
    "Constant",
    "DataLocation",
    "Default",
    "Dependency",
    "DeviceType",
    "Engine",
    "EngineOptions",
    "ErrorStatus",
    "Executable",
    "ExecutionPreference",
    "ExecutionReport",
    "FencedResult",
    "GrantorDescriptor",
    "IBlobCache",
    "IBuffer",
    "IBurstCallback",
    "IBurstContext",
    "IDevice",
    "IMemory",
    "IPreparedModel",
    "MQDescriptor",
    "MQFlavor",
    "MemoryDescription",
    "MemoryKind",
    "Model",
    "Needs",
    "Operand",
    "OperandType",
    "Operation",
    "OptionValue",
    "OutputShape",
    "Performance",
    "PerformanceInfo",
    "PrepareOptions",
    "Priority",
    "Request",
    "RequestArgument",
    "Result",
    "Timing",
    "ValueKind",
    "ValueType",
    "ValuesResult",
    "model_bytes",
]
