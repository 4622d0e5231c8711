"""The contract: what a device offers to the runtime (NNAPI's HAL).

`IDevice` has three implementations: `driver.device` (over any engine), `remote.device` (the same device, seen from the app's
process) and the fakes of `aionn.testing`. All pass the same conformance suite, which checks what these docstrings say.

A HAL call that fails raises: `CallerError` for INVALID_ARGUMENT, `CompilationError` or `ExecutionError` for GENERAL_FAILURE,
`DeadlineError` for MISSED_DEADLINE_*, `DriverDiedError` for DEAD_OBJECT. The failure of an execution is a value (`Result.status`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from aionn.errors import CallerError
from aionn.hal.batching import Batching
from aionn.hal.model import PooledModel
from aionn.hal.options import NO_OPTIONS, EngineOptions
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import (
    MAX_INSTANCES,
    MAX_THREADS,
    BufferDesc,
    BufferRole,
    CacheFiles,
    Dependency,
    DeviceType,
    ExecutionPreference,
    FencedResult,
    IMemory,
    Operand,
    Priority,
    Request,
    Result,
)


class CacheHandles(msgspec.Struct, frozen=True):
    """The open cache files of one entry, as descriptors opened read-write, and the entry's token.

    The caller keeps owning the descriptors. A device that touches a file after the call has returned (JIT) duplicates them.
    A device holds flock on the first file while it writes. The lock belongs to the open file description. So a caller that gives the same
    files to devices in several processes opens them once for each, as `remote.device` does.
    HAL 1.2: modelCache, dataCache, token.

    Attributes:
        keyring: the keys of builders that the caller trusts now (`trust.encode_keyring`). A device believes contents that it has adopted
            only if the key that signed them is among these. Empty: the caller has not read them. A device that needs them then refuses
            with `KEYRING_NEEDED`.
    """

    model: tuple[int, ...]
    data: tuple[int, ...]
    token: bytes
    keyring: bytes = b""


class PrepareOptions(msgspec.Struct, frozen=True):
    """How a model is to be prepared.

    Attributes:
        preference: HAL 1.1.
        priority: HAL 1.3.
        deadline_ns: when the call fails with `DeadlineError`, in CLOCK_MONOTONIC, or None.
        threads, at_most: as in `CompileOptions`.
        open_outputs: names of outputs whose declared shape has proven wrong before. A device also finds them itself.
        instances: how many executions of the model may run beside each other. 0 leaves the choice to the engine.
        options: of engines, by the name of the device. A device takes its own (`of`).
        batching: how requests of several bursts are joined, or None. A device written by hand may join nothing.

    Raises:
        CallerError: `threads` is not from 0 to `MAX_THREADS`, or `instances` is not from 0 to `MAX_INSTANCES`.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    deadline_ns: int | None = None
    threads: int = 0
    open_outputs: tuple[str, ...] = ()
    at_most: bool = False
    instances: int = 1
    options: tuple[tuple[str, EngineOptions], ...] = ()
    batching: Batching | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise CallerError(f"threads={self.threads}: a run has 1 to {MAX_THREADS} threads, or 0 for the engine's own choice")
        if not 0 <= self.instances <= MAX_INSTANCES:
            raise CallerError(
                f"instances={self.instances}: a prepared model has 1 to {MAX_INSTANCES} instances, or 0 for the engine's own choice"
            )

    def of(self, device: str) -> EngineOptions:
        """Return the options for the engine of that device."""
        return dict(self.options).get(device, NO_OPTIONS)

    @property
    def encoded(self) -> tuple[tuple[str, tuple[tuple[str, bytes], ...]], ...]:
        """The options of all engines, encoded as for a cache key, by the name of the device."""
        return tuple((device, own.encoded) for device, own in self.options)


class IBuffer(Protocol):
    """Memory that lives in the driver (HAL 1.3: IBuffer). Freed by `aclose`, or with its client."""

    @property
    def token(self) -> int:
        """The number that names the buffer in requests. It is positive, and one driver process never uses it twice."""
        ...

    async def copy_from(self, source: IMemory, dimensions: tuple[int, ...]) -> None:
        """Fill the whole buffer.

        A copy that fails leaves the buffer uninitialized. A copy that is refused because the buffer is in use changes nothing.
        """
        ...

    async def copy_to(self, target: IMemory) -> None:
        """Copy the whole buffer into a memory."""
        ...

    async def aclose(self) -> None: ...


class IBurstCallback(Protocol):
    """The runtime's end of a burst's memory cache (HAL 1.2: IBurstCallback).

    It may have `brought`, too: by slot, memories that the first request mostly uses. A device may take them when it attaches to the burst,
    and need not ask for them then.
    """

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        """Return the memory of each slot, in the same order.

        Raises:
            CallerError: one of the slots is not in use. Then no memory is returned.
        """
        ...


class IBurstContext(Protocol):
    """The driver's end of a burst (HAL 1.2: IBurstContext). `aclose` ends the listener and frees all it holds.

    It may have one more method. `has_request(identity: int) -> bool` returns whether the listener still has that request to answer.
    The app asks for a request that is unanswered for `Runtime(hang_s=)`, and ends the burst if the driver does not know it.
    """

    async def free_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`. An unknown slot is ignored. When this returns the slot may be reused."""
        ...

    async def aclose(self) -> None: ...


class IPreparedModel(Protocol):
    """A model prepared by one device (HAL 1.2/1.3: IPreparedModel). Executions may overlap, and the device orders them.

    A device that runs models with strings, sequences, maps or optionals has one more method. `async def execute_values(inputs:
    Mapping[str, Any], measure_timing: bool = False, deadline_ns: int | None = None)` returns a `ValuesResult`; see `hal.values`.
    """

    @property
    def inputs(self) -> Mapping[str, Operand]:
        """The input operands by name, in the order of a request. They are known also after a cache hit, which sends no model."""
        ...

    @property
    def outputs(self) -> Mapping[str, Operand]:
        """The output operands by name, in the order of a request."""
        ...

    @property
    def save_outcome(self) -> str:
        """The outcome of saving to the cache files of `prepare_model`: "saved", "declined", a reason, or "" without files."""
        ...

    async def execute(
        self, request: Request, pools: Sequence[IMemory | IBuffer], measure_timing: bool = False, deadline_ns: int | None = None
    ) -> Result:
        """Compute `request`. Its outputs lie in `pools` when this returns.

        The device touches no byte outside the request's arguments, and no byte at all after the return. Cancelling the caller does not
        stop the device. The pools stay mapped, and may be written to, until the device is done.
        """
        ...

    async def execute_fenced(
        self,
        request: Request,
        pools: Sequence[IMemory | IBuffer],
        after: Sequence[Dependency],
        fence: int,
        measure_timing: bool = False,
        deadline_ns: int | None = None,
    ) -> FencedResult:
        """Compute `request` when everything in `after` is done, and signal `fence` then (HAL 1.3: executeFenced).

        `fence` is an eventfd (`remote.fences`). The device signals a success or a failure before this returns, also when it raises.
        It leaves the fence to the caller in two cases: an output did not fit, or has another shape than the request gives.
        The caller may then send the request again, with more room and the same fence.

        A dependency that has failed ends the wait (GENERAL_FAILURE, `FencedResult.failed`), and so does the deadline (MISSED_DEADLINE_*).
        The release of the model ends it, too (INVALID_ARGUMENT). Cancelling the caller stops the wait, but no run that has begun.

        A device that is written by hand may leave this method out. Its driver process then waits, calls `execute` and signals.
        """
        ...

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> IBurstContext:
        """Attach to the two queues of a burst, and listen. `anticipate`: the device may run the model before it expects a request."""
        ...

    async def aclose(self) -> None:
        """Free the model. Executions in flight finish first."""
        ...


class IDevice(Protocol):
    """A device as the runtime sees it (HAL 1.2/1.3: IDevice)."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def type(self) -> DeviceType: ...

    @property
    def priority_matters(self) -> bool:
        """Whether compilations of different priority differ. If they do not, they share one cache entry."""
        ...

    async def get_supported_operations(self, model: PooledModel, *, options: EngineOptions = NO_OPTIONS) -> Sequence[bool]:
        """Return per entry of `model.operations` whether the device can run it under these options. Check the memory handles, too."""
        ...

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        """Return how many cache files of each kind the device needs."""
        ...

    async def prepare_model(self, model: PooledModel, options: PrepareOptions, cache: CacheHandles | None = None) -> IPreparedModel:
        """Compile `model`. With `cache`, also store the result there. A failed save never fails the call."""
        ...

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> IPreparedModel:
        """Prepare from verified cache contents alone.

        Raises:
            CompilationError: the device has not stored these contents under this token, or cannot load them.
            CallerError: the number of handles is not the one that the device asks for.
        """
        ...

    async def adopt(self, options: PrepareOptions, cache: CacheHandles, model_digest: bytes, signed: bytes) -> IPreparedModel:
        """Prepare from contents that another machine has compiled and signed, and believe them from now on. No file is written to.

        `cache` has descriptors that are open for reading, the entry's key as the token, and the keyring. `model_digest` is that of the
        model which the caller wants, and `signed` the statement (`caching.statement`). The model's `save_outcome` is "saved" if
        `prepare_model_from_cache` takes the same contents from now on. A device that is written by hand may leave this method out.

        Raises:
            CompilationError: the contents or the statement are refused, or cannot be loaded. `.reason` begins with the `MissReason`.
        """
        ...

    async def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[IPreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> IBuffer:
        """Allocate a buffer that can be used in all these roles.

        Raises:
            CallerError: the roles and `desc` contradict each other, or name no operand.
        """
        ...
