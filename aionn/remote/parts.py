"""The parts that several control messages have in common: models, options, files, queues and pools. No I/O."""

from __future__ import annotations

import msgspec

from aionn.hal.model import Constant, Operation
from aionn.hal.queues import GrantorDescriptor, MQFlavor
from aionn.hal.types import ExecutionPreference, MemoryDescription, Priority
from aionn.hal.values import Border


class ControlMessage(msgspec.Struct, frozen=True, tag=True, tag_field="verb", forbid_unknown_fields=True, array_like=True):
    pass


class MQMessage(ControlMessage, frozen=True):
    """An `MQDescriptor`. `fds` counts its descriptors, which travel beside the message."""

    grantors: tuple[GrantorDescriptor, ...]
    quantum: int
    flavor: MQFlavor
    fds: int


class ModelMessage(ControlMessage, frozen=True):
    """A `hal.Model`. One descriptor per pool travels beside the message."""

    graph: bytes
    inputs: tuple[tuple[str, Border], ...]
    outputs: tuple[tuple[str, Border], ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...]
    pools: tuple[MemoryDescription, ...]
    token: bytes
    contents: bytes


class CacheMessage(ControlMessage, frozen=True):
    """`CacheHandles`, as numbers of files. Their descriptors travel beside the message, model files first."""

    model: int
    data: int
    token: bytes
    keyring: bytes = b""


class OptionsMessage(ControlMessage, frozen=True):
    """`PrepareOptions`, with the options and files of `EngineOptions` for this one device."""

    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None
    threads: int
    open_outputs: tuple[str, ...] = ()
    at_most: bool = False
    instances: int = 1
    options: dict[str, str | int | float | bool] = {}
    files: dict[str, bytes] = {}


class PoolMessage(ControlMessage, frozen=True):
    """A pool of an execution: a memory whose descriptor travels beside the message, or a buffer of the driver by token."""

    memory: MemoryDescription | None
    token: int = 0
