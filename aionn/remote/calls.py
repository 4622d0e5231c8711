"""The table of HAL calls: what the app and a driver ask each other. No I/O.

Each call is one class. Its name and fields are the name and the arguments of the call, and `HalCall[...]` names the type of the answer.
A field of type `Fd` is a descriptor, which travels beside the message. `control` derives the encoding and the check of everything that
comes in from these types. A new call needs a class here, a method of `remote.device` that makes it, and a case in `driver.service`.
"""

# No `from __future__ import annotations`: msgspec would have to evaluate each annotation, which takes 2 ms of a start.
from typing import Generic, TypeVar

import msgspec

from aionn.hal.batching import Batching, RowAxes
from aionn.hal.model import Constant, Operation
from aionn.hal.options import OptionValue
from aionn.hal.queues import GrantorDescriptor, MQFlavor
from aionn.hal.types import BufferDesc, BufferRole, ExecutionPreference, FencedResult, MemoryDescription, Priority, Request, Result
from aionn.hal.values import Border
from aionn.needs import Confinement

A = TypeVar("A")


class Fd(int):
    """A descriptor in a message. Its sender keeps owning it, and its receiver gets a new one (`connection.Descriptors`)."""

    __slots__ = ()


class ControlMessage(msgspec.Struct, frozen=True, tag=True, tag_field="verb", forbid_unknown_fields=True, array_like=True):
    pass


class HalCall(ControlMessage, Generic[A], frozen=True):
    """A call with an answer of type `A`. Its peer may also answer with an error."""


# --- what several calls have in common ---------------------------------------------------------------------------------


class LentMemory(ControlMessage, frozen=True):
    """A memory, which the receiver maps."""

    description: MemoryDescription
    fd: Fd


class ModelMessage(ControlMessage, frozen=True):
    """A `hal.Model`."""

    graph: bytes
    inputs: tuple[tuple[str, Border], ...]
    outputs: tuple[tuple[str, Border], ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...]
    pools: tuple[LentMemory, ...]
    token: bytes
    contents: bytes


class EngineOptionsMessage(ControlMessage, frozen=True):
    """The `EngineOptions` of one device. `files` has the digest of each file that an option names, and the open file."""

    values: dict[str, OptionValue] = {}
    files: dict[str, tuple[bytes, Fd]] = {}


class OptionsMessage(ControlMessage, frozen=True):
    """`PrepareOptions`, with the options of this one device's engine."""

    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None
    threads: int
    open_outputs: tuple[str, ...] = ()
    at_most: bool = False
    instances: int = 1
    engine: EngineOptionsMessage = EngineOptionsMessage()
    batching: Batching | None = None


class CacheMessage(ControlMessage, frozen=True):
    """`CacheHandles`."""

    model: tuple[Fd, ...]
    data: tuple[Fd, ...]
    token: bytes
    keyring: bytes = b""


class MQMessage(ControlMessage, frozen=True):
    """An `MQDescriptor`."""

    grantors: tuple[GrantorDescriptor, ...]
    quantum: int
    flavor: MQFlavor
    fds: tuple[Fd, ...]


class DependencyMessage(ControlMessage, frozen=True):
    """A `Dependency`."""

    fd: Fd
    is_event: bool


# --- answers that have several fields ----------------------------------------------------------------------------------


class Prepared(ControlMessage, frozen=True):
    """A prepared model, with its operands for an app that has loaded the model from a cache.

    Attributes:
        outcome: what the device did with the cache files of the call; see `IPreparedModel.save_outcome`.
        contents: what `known_contents` is for the constants that were compiled, if the device copied them.
        runs_on: what computes the model, if the engine says so.
        tunes: whether the model may offer a better artifact while it runs.
        rows: whether the device joins requests, and along which axes. None if that was not asked for.
        shown: the number by which the driver's page shows the model, or 0.
        instances: how many executions may run beside each other.
    """

    prepared: int
    inputs: tuple[tuple[str, Border], ...]
    outputs: tuple[tuple[str, Border], ...]
    outcome: str = ""
    contents: bytes = b""
    runs_on: str = ""
    tunes: bool = False
    rows: RowAxes | None = None
    shown: int = 0
    instances: int = 1


class Values(ControlMessage, frozen=True):
    """Strings, sequences, maps or optionals; see `remote.values`.

    Attributes:
        tree: the values. data: what their tensors hold, if it is small.
        memory: else the memory that holds it.
    """

    tree: bytes = b""
    data: bytes = b""
    memory: LentMemory | None = None


class ExecutedValues(ControlMessage, frozen=True):
    """The result, and the outputs if it is a success."""

    result: Result
    outputs: Values = Values()


class GuestFacts(ControlMessage, frozen=True):
    """One app that a driver serves beside its owner.

    Attributes:
        guest: its number, as the owner counts them.
        models, bursts, buffers: how many it has now.
    """

    guest: int
    models: int
    bursts: int
    buffers: int


class ConnectedDriver(ControlMessage, frozen=True):
    """A driver of the service, and the app's connection to it. It greets over the socket.

    Attributes:
        pid, started_ns: of the driver's process.
        page: its statistics page, which the app may read.
    """

    socket: Fd
    pidfd: Fd
    page: Fd
    pid: int
    started_ns: int


class SharedModelFacts(ControlMessage, frozen=True):
    """An executable that a shared driver keeps for its apps.

    Attributes:
        key: the first 16 hexadecimal digits of the digest of its identity; see `driver.sharing.CompiledIdentity`.
        label: a short name, which an app has given.
        size_bytes: of its weights, or of its cache files.
        apps: the numbers of the apps that hold it.
        executions: how many of them have finished so far.
        idle_s: for how many seconds no app has held it, or 0.
    """

    key: str
    label: str
    size_bytes: int
    apps: tuple[int, ...]
    executions: int
    idle_s: float


class DriverFacts(ControlMessage, frozen=True):
    """One driver of the service, the apps that use it, and the models that it keeps for them."""

    device: str
    pid: int
    when_idle: bool
    guests: tuple[GuestFacts, ...]
    models: tuple[SharedModelFacts, ...] = ()


class ServiceFacts(ControlMessage, frozen=True):
    """What a service holds now. `apps` has the process of each connection, so one app may stand there several times.

    `sandbox`: what confines the service itself.
    """

    pid: int
    release: str
    seconds: float
    apps: tuple[int, ...]
    drivers: tuple[DriverFacts, ...]
    sandbox: Confinement = Confinement()


class TakenOver(ControlMessage, frozen=True):
    """The socket on which the service has listened, and the lock that says who listens."""

    listening: Fd
    lock: Fd


# --- the app asks the driver -------------------------------------------------------------------------------------------


class GetSupportedOperations(HalCall[tuple[bool, ...]], frozen=True):
    model: ModelMessage
    options: EngineOptionsMessage = EngineOptionsMessage()


class PrepareModel(HalCall[Prepared], frozen=True):
    model: ModelMessage
    options: OptionsMessage
    cache: CacheMessage | None


class PrepareModelFromCache(HalCall[Prepared], frozen=True):
    options: OptionsMessage
    cache: CacheMessage


class Adopt(HalCall[Prepared], frozen=True):
    """Prepare from an artifact that another machine has compiled; see `IDevice.adopt`. The token in `cache` is the entry's key."""

    options: OptionsMessage
    cache: CacheMessage
    model_digest: bytes
    signed: bytes


class ReleasePreparedModel(HalCall[None], frozen=True):
    prepared: int


class ExportAgain(HalCall[str], frozen=True):
    """Ask for a better artifact of a prepared model, or store it in the cache files. The answer is the outcome."""

    prepared: int
    cache: CacheMessage | None


class Execute(HalCall[Result], frozen=True):
    """Execute. A pool is a memory, or the token of a buffer in the driver."""

    prepared: int
    request: Request
    pools: tuple[LentMemory | int, ...]
    measure_timing: bool
    deadline_ns: int | None


class ExecuteFenced(HalCall[FencedResult], frozen=True):
    """Execute after the dependencies, and signal the fence. See `IPreparedModel.execute_fenced`."""

    prepared: int
    request: Request
    pools: tuple[LentMemory | int, ...]
    measure_timing: bool
    deadline_ns: int | None
    fence: Fd
    after: tuple[DependencyMessage, ...] = ()


class ExecuteValues(HalCall[ExecutedValues], frozen=True):
    prepared: int
    inputs: Values
    measure_timing: bool
    deadline_ns: int | None


class ConfigureExecutionBurst(HalCall[int], frozen=True):
    """Open a burst. The answer is its number. `brought`: memories by slot that the driver need not ask for."""

    prepared: int
    request_channel: MQMessage
    result_channel: MQMessage
    anticipate: bool = False
    brought: dict[int, LentMemory] = {}


class FreeMemory(HalCall[None], frozen=True):
    burst: int
    slot: int


class HasRequest(HalCall[bool], frozen=True):
    """Ask whether a burst's listener still has a request to answer. `identity` is that of the request's packet."""

    burst: int
    identity: int


class CloseBurst(HalCall[None], frozen=True):
    burst: int


class Allocate(HalCall[int], frozen=True):
    """Allocate a buffer. The answer is its token."""

    desc: BufferDesc
    prepared_models: tuple[int, ...]
    input_roles: tuple[BufferRole, ...]
    output_roles: tuple[BufferRole, ...]


class CopyFrom(HalCall[None], frozen=True):
    """Copy a part of a memory into a buffer.

    Attributes:
        offset: where the part begins in the memory.
        length: how long the part is. With None it reaches to the memory's end.
    """

    token: int
    source: LentMemory
    dimensions: tuple[int, ...]
    offset: int = 0
    length: int | None = None


class CopyTo(HalCall[None], frozen=True):
    """Copy a buffer into a part of a memory. `offset` and `length` are as in `CopyFrom`."""

    token: int
    target: LentMemory
    offset: int = 0
    length: int | None = None


class FreeBuffer(HalCall[None], frozen=True):
    token: int


class ListShared(HalCall[tuple[SharedModelFacts, ...]], frozen=True):
    """Ask a shared driver for its executables. Only its owner may."""


class Evict(HalCall[int], frozen=True):
    """Free the idle executables with that key, or all of them if it is empty. The answer is how many. Only the owner may."""

    key: str


class Quarantine(HalCall[None], frozen=True):
    """Refuse to prepare the models with these keys until those times of CLOCK_MONOTONIC. Replaces the list. Only the owner may."""

    keys: tuple[tuple[int, int], ...]


class Guests(HalCall[tuple[GuestFacts, ...]], frozen=True):
    """Ask who else uses the driver, and how much."""


class EndGuest(HalCall[None], frozen=True):
    """Free everything of a guest, whose process has ended."""

    guest: int


class Drain(HalCall[None], frozen=True):
    """Wait until the last guest has gone."""


# --- an app asks the service -------------------------------------------------------------------------------------------


class ConnectDriver(HalCall[ConnectedDriver], frozen=True):
    """Ask for a connection to the driver of a device. Drivers with other settings are other processes.

    Attributes:
        when_idle: whether the driver gets only CPU time that no other process wants.
        sandbox, threads, environment: as `runtime.processes.Settings`.
        needs: of the device, as JSON with the fields of `aionn.needs.Needs`, or empty.
    """

    device: str
    when_idle: bool
    sandbox: str
    threads: int
    environment: dict[str, str]
    needs: bytes = b""


class ReadService(HalCall[ServiceFacts], frozen=True):
    """Ask what the service holds, for `aionn ps`."""


class TakeOver(HalCall[TakenOver], frozen=True):
    """Ask a service to let another one serve. It takes no new work from then on, and ends with its last guest."""


class Opened(ControlMessage, frozen=True):
    """A prepared model in a driver of the service.

    Attributes:
        socket: of a new client of that driver. pidfd: of its process.
        prepared: the model, with its number for that client.
        device: the name of the device.
    """

    socket: Fd
    pidfd: Fd
    prepared: Prepared
    device: str


class OpenModel(HalCall[Opened], frozen=True):
    """Ask for a driver that has a model prepared.

    Attributes:
        file: the model's bytes: a file that is read from its beginning, or a sealed memfd.
        name: of the model, for people. The service opens nothing by it.
        devices: the names of the devices that may serve, the best first. Empty leaves the choice to the service.
        options: how it is prepared, as msgpack.
        beside: the files beside the model's, by the names that its graph has for them.
    """

    file: Fd
    name: str = ""
    devices: tuple[str, ...] = ()
    options: bytes = b""
    beside: tuple[tuple[str, Fd], ...] = ()


class DigestModel(HalCall[tuple[tuple[str | None, int, int, bytes], ...]], frozen=True):
    """Ask for BLAKE3 of each range of a model's files. The service reads them once for all apps.

    The answer has for each range the name of its file as in `beside`, or None for the model's own, its offset, its length and its digest.

    Attributes:
        file, beside: as `OpenModel` has them.
    """

    file: Fd
    beside: tuple[tuple[str, Fd], ...] = ()


# --- the driver asks the app -------------------------------------------------------------------------------------------


class GetMemories(HalCall[tuple[LentMemory, ...]], frozen=True):
    """Ask for the memories of slots. The answer has them in the same order."""

    burst: int
    slots: tuple[int, ...]


class LogLine(HalCall[None], frozen=True):
    """A line of the driver's log. Level and logger are as in `logging`."""

    level: int
    logger: str
    text: str
