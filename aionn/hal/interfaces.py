"""The contract: what a device offers to the runtime (NNAPI's HAL), and what a driver author writes (`Engine`).

`IDevice` has three implementations: `driver.device` (over any engine), `remote.device` (the same, seen from the
app's process) and the fakes of `aionn.testing`. All pass the same conformance suite; these docstrings are what it checks.

Failures of a HAL call are raised: `CallerError` for INVALID_ARGUMENT, `CompilationError` / `ExecutionError` for
GENERAL_FAILURE, `DeadlineError` for MISSED_DEADLINE_*, `DriverDiedError` for DEAD_OBJECT. An execution's failure is
a value: `Result.status`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from aionn.hal.model import Model
from aionn.hal.types import (
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceType,
    ExecutionPreference,
    IMemory,
    MQDescriptor,
    Operand,
    Priority,
    Request,
    Result,
)

# --- what the runtime talks to ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheHandles:
    """Open cache files of one entry, as descriptors opened read-write, and the entry's token.

    The caller keeps owning the descriptors; a device that wants to touch a file after the call has returned (JIT)
    takes duplicates. HAL 1.2: modelCache, dataCache, token.
    """

    model: tuple[int, ...]
    data: tuple[int, ...]
    token: bytes


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a model is to be prepared.

    Attributes:
        preference: HAL 1.1.
        priority: HAL 1.3.
        deadline_ns: CLOCK_MONOTONIC, or None. After it the call fails with `DeadlineError`.
        threads: how many threads the engine may use; 0 leaves it to the engine's own choice for this machine.
        open_outputs: names of outputs whose declared shape has proven wrong before. A device finds that out itself, too.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    deadline_ns: int | None = None
    threads: int = 0
    open_outputs: tuple[str, ...] = ()


class IBuffer(Protocol):
    """Memory that lives in the driver (HAL 1.3: IBuffer). Freed by `aclose`, or with its client."""

    @property
    def token(self) -> int:
        """Names the buffer in requests; positive, never used twice by one driver process."""
        ...

    async def copy_from(self, source: IMemory, dimensions: tuple[int, ...]) -> None:
        """Fill the whole buffer. A copy that fails leaves it uninitialized, unless it was refused because the buffer is in use."""
        ...

    async def copy_to(self, target: IMemory) -> None: ...

    async def aclose(self) -> None: ...


class IBurstCallback(Protocol):
    """The runtime's end of a burst's memory cache (HAL 1.2: IBurstCallback)."""

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        """The memory behind each slot, same order.

        Raises:
            CallerError: one of the slots is not in use; then nothing is returned for any.
        """
        ...


class IBurstContext(Protocol):
    """The driver's end of a burst (HAL 1.2: IBurstContext). `aclose` ends the listener and frees all it holds."""

    async def free_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`. An unknown slot is ignored. When this returns the slot may be reused."""
        ...

    async def aclose(self) -> None: ...


class IPreparedModel(Protocol):
    """A model prepared by one device (HAL 1.2/1.3: IPreparedModel). Executions may overlap; the device orders them."""

    @property
    def inputs(self) -> Mapping[str, Operand]:
        """Operand by name, in the order in which a request lists them. Known also when no model was sent (a cache hit)."""
        ...

    @property
    def outputs(self) -> Mapping[str, Operand]: ...

    @property
    def save_outcome(self) -> str:
        """What became of the cache files given to `prepare_model`: "saved", "declined", or why saving failed; "" without any."""
        ...

    async def execute(
        self, request: Request, pools: Sequence[IMemory | IBuffer], measure_timing: bool = False, deadline_ns: int | None = None
    ) -> Result:
        """Compute `request`; its outputs lie in `pools` when this returns.

        Touches no byte outside the request's arguments, and none at all after it has returned. Cancelling the
        caller does not stop the device: the pools stay mapped, and may be written to, until the device is done.
        """
        ...

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor
    ) -> IBurstContext: ...

    async def aclose(self) -> None:
        """Let the device free the model. Executions in flight finish first."""
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
        """Whether compilations of different priority differ. If not, they share one cache entry."""
        ...

    async def get_supported_operations(self, model: Model) -> Sequence[bool]:
        """Per entry of `model.operations`, whether the device can run it. Looks at the memory handles too."""
        ...

    async def get_number_of_cache_files_needed(self) -> CacheFiles: ...

    async def prepare_model(self, model: Model, options: PrepareOptions, cache: CacheHandles | None = None) -> IPreparedModel:
        """Compile `model`. With `cache`, also store the result there; a failed save never fails the call."""
        ...

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> IPreparedModel:
        """Prepare from verified cache contents alone.

        Raises:
            CompilationError: the contents are not what this device stored under this token, or it cannot load them.
            CallerError: the number of handles is not what the device asks for.
        """
        ...

    async def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[IPreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> IBuffer: ...


# --- what a driver author writes -------------------------------------------------------------------------------------


class CancelFlag:
    """Set once to ask an engine to stop. `when_set` lets an engine forward it to its library's own flag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._callbacks: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._lock:
            self._set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the thread that sets the flag, or at once if it is set."""
        with self._lock:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback()


class IBlobCache(Protocol):
    """A small persistent map from bytes to bytes, kept for one version of one device across driver processes.

    Nothing raises for the state of the disk: what was lost, evicted or altered is absent. Blocking, thread-safe.
    """

    def get(self, key: bytes) -> bytes | None:
        """Return the value that was set under `key`, or None."""
        ...

    def set(self, key: bytes, value: bytes) -> bool:
        """Keep `value` under `key`; return whether it is kept. A value has at most 64 KiB, a key 12 KiB."""
        ...

    def delete(self, key: bytes) -> None:
        """Forget `key`, if it is there."""
        ...


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What an engine gets when it compiles or loads.

    Attributes:
        preference, priority: as the app chose them.
        threads: how many threads the engine may use; 0 leaves the choice to the engine.
        cancelled: set when the caller no longer waits for the result.
        may_export: whether `export` may be called on the result. An engine that can write its artifact only while it
            compiles may leave that out if not, and `export` then declines.
        blob_cache: for an engine's own small things: kernels, tunings. Opened at its first use. None where no driver runs the engine.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    threads: int = 0
    cancelled: CancelFlag = field(default_factory=CancelFlag)
    may_export: bool = True
    blob_cache: IBlobCache | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """What an engine wants stored: one bytes-like object per cache file it asked for.

    Attributes:
        model: security-sensitive files (compiled code, graphs).
        data: preprocessed constants.
    """

    model: tuple[Any, ...]
    data: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What `Executable.run` returns.

    Attributes:
        outputs: arrays of exactly those outputs that had no array to be written into, because their shape was open; and of those
            whose array had another shape than the output has. What that array then holds is not used.
        on_device_ns: time spent computing, or None where the engine cannot tell.
    """

    outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    on_device_ns: int | None = None


class Executable(Protocol):
    """A model ready to run in this process. `run` is called by one thread at a time; it releases the GIL while it computes."""

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Run once.

        Args:
            inputs: one array per model input that was given, C-contiguous, in shared memory; not to be written to.
            outputs: C-contiguous arrays to write into, of the shape that the model declares; an output whose shape is not known
                yet is missing and goes back in the report. So does one that comes out in another shape: files do declare
                wrong shapes.
            timing: whether `on_device_ns` is wanted.

        Raises:
            Exception: anything; it becomes GENERAL_FAILURE with its message. The engine must stay usable.
        """
        ...


class Engine(Protocol):
    """An inference engine, found through the entry point group `aionn.engines`. Made once per driver process, without arguments.

    Everything else (HAL calls, integrity, JIT, memory domains, bursts, death) comes from `aionn.driver`.

    Attributes:
        name: the device's name.
        version: of the engine *and* of what its artifacts depend on (library, ISA, options).
        cache_files: how many files `export` fills. (0, 0) means that the engine does not cache.

    Optional attributes: `device_type` (`DeviceType`, default CPU) and `priority_matters` (whether artifacts of different
    priority differ, default False).
    """

    name: str
    version: str
    cache_files: CacheFiles

    def supported_operations(self, model: Model) -> Sequence[bool]:
        """Per entry of `model.operations`, whether the engine can run it."""
        ...

    def compile(self, model: Model, options: CompileOptions) -> Executable:
        """Blocking; runs in a thread. Constants lie in `model.pools`, mapped read-only: use them in place where possible.

        Raises:
            CompilationError: with `.node` and `.reason` where known.
        """
        ...

    def export(self, executable: Executable) -> Artifact | None:
        """What to store for next time, or None to decline."""
        ...

    def load(self, artifact: Artifact, options: CompileOptions) -> Executable:
        """The reverse of `export`. Only ever given verified bytes, which stay alive as long as the executable."""
        ...
