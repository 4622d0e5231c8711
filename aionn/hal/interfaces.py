"""The contract: what a device offers to the runtime (NNAPI's HAL), and what a driver author writes (`Engine`).

`IDevice` has three implementations: `driver.device` (over any engine), `remote.device` (the same device, seen from the app's
process) and the fakes of `aionn.testing`. All pass the same conformance suite, which checks what these docstrings say.

A HAL call that fails raises: `CallerError` for INVALID_ARGUMENT, `CompilationError` or `ExecutionError` for GENERAL_FAILURE,
`DeadlineError` for MISSED_DEADLINE_*, `DriverDiedError` for DEAD_OBJECT. The failure of an execution is a value (`Result.status`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.hal.model import Model
from aionn.hal.types import (
    MAX_INSTANCES,
    MAX_THREADS,
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
    """The open cache files of one entry, as descriptors opened read-write, and the entry's token.

    The caller keeps owning the descriptors. A device that touches a file after the call has returned (JIT) duplicates them.
    A device holds flock on the first file while it writes. The lock belongs to the open file description. So a caller that gives the same
    files to devices in several processes opens them once for each, as `remote.device` does.
    HAL 1.2: modelCache, dataCache, token.
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
        deadline_ns: when the call fails with `DeadlineError`, in CLOCK_MONOTONIC, or None.
        threads, at_most: as in `CompileOptions`.
        open_outputs: names of outputs whose declared shape has proven wrong before. A device also finds them itself.
        instances: how many executions of the model may run beside each other.

    Raises:
        CallerError: `threads` is not from 0 to `MAX_THREADS`, or `instances` is not from 1 to `MAX_INSTANCES`.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    deadline_ns: int | None = None
    threads: int = 0
    open_outputs: tuple[str, ...] = ()
    at_most: bool = False
    instances: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise CallerError(f"threads={self.threads}: a run has 1 to {MAX_THREADS} threads, or 0 for the engine's own choice")
        if not 1 <= self.instances <= MAX_INSTANCES:
            raise CallerError(f"instances={self.instances}: a prepared model has 1 to {MAX_INSTANCES} instances")


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
    """The runtime's end of a burst's memory cache (HAL 1.2: IBurstCallback)."""

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        """Return the memory of each slot, in the same order.

        Raises:
            CallerError: one of the slots is not in use. Then no memory is returned.
        """
        ...


class IBurstContext(Protocol):
    """The driver's end of a burst (HAL 1.2: IBurstContext). `aclose` ends the listener and frees all it holds."""

    async def free_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`. An unknown slot is ignored. When this returns the slot may be reused."""
        ...

    async def aclose(self) -> None: ...


class IPreparedModel(Protocol):
    """A model prepared by one device (HAL 1.2/1.3: IPreparedModel). Executions may overlap, and the device orders them."""

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

    async def get_supported_operations(self, model: Model) -> Sequence[bool]:
        """Return per entry of `model.operations` whether the device can run it. Check the memory handles, too."""
        ...

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        """Return how many cache files of each kind the device needs."""
        ...

    async def prepare_model(self, model: Model, options: PrepareOptions, cache: CacheHandles | None = None) -> IPreparedModel:
        """Compile `model`. With `cache`, also store the result there. A failed save never fails the call."""
        ...

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> IPreparedModel:
        """Prepare from verified cache contents alone.

        Raises:
            CompilationError: the device has not stored these contents under this token, or cannot load them.
            CallerError: the number of handles is not the one that the device asks for.
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


# --- what a driver author writes -------------------------------------------------------------------------------------


class CancelFlag:
    """A flag that is set once to ask an engine to stop. By `when_set` an engine forwards it to the flag of its library."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._callbacks: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Return whether the engine should stop."""
        return self._set

    def set(self) -> None:
        """Ask the engine to stop."""
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

    No method raises because of the state of the disk. A value that was lost, evicted or altered is absent. Every method blocks and is
    thread-safe. It is there for parity with Android's blob cache.
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
    """The options of an engine that compiles or loads.

    Attributes:
        preference: what the app prefers.
        priority: how urgent the app's executions are.
        threads: how many threads one run may use. 0 leaves the choice to the engine.
        cancelled: set when the caller no longer waits for the result.
        may_export: whether `export` may be called on the result. Without it, an engine that can write its artifact only while it
            compiles may leave the artifact out, and `export` then declines.
        blob_cache: keeps small data of the engine, such as kernels and tunings. It is opened at its first use. None if no driver runs
            the engine.
        at_most: whether fewer than `threads` are as good. Then the engine chooses, up to that number.
        instances: how many executables `Executable.lanes` will be asked for.
        give_back: frees writable parts of the artifact that `Engine.load` needs no more, in any thread. None: it must stay whole.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    threads: int = 0
    cancelled: CancelFlag = field(default_factory=CancelFlag)
    may_export: bool = True
    blob_cache: IBlobCache | None = None
    at_most: bool = False
    instances: int = 1
    give_back: Callable[[memoryview], None] | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """What an engine stores: one bytes-like object per cache file that it asks for.

    Attributes:
        model: security-sensitive files (compiled code, graphs).
        data: preprocessed constants.
    """

    model: tuple[Any, ...]
    data: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """The result of `Executable.run`.

    Attributes:
        outputs: the arrays of exactly two kinds of outputs: those without a given array, because their shape was open, and those whose
            given array has another shape than the output. The contents of such a given array are not used.
        on_device_ns: time spent computing, or None if the engine cannot measure it.
    """

    outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    on_device_ns: int | None = None


class Executable(Protocol):
    """A model that is ready to run in this process.

    One thread at a time calls `run`, which releases the GIL while it computes. Two methods are optional. Both make executables that may run
    beside this one over one copy of the weights. `lanes(count: int) -> Sequence[Executable]` is called once, before the first run, with
    `CompileOptions.instances`, and may return this one among them. `share() -> Executable` is called at any time and in any thread.
    """

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Run once.

        Args:
            inputs: one array per given model input, C-contiguous, in shared memory. The engine must not write to them.
            outputs: C-contiguous arrays to write into, of the shape that the model declares. An output whose shape is not known yet is
                missing here, and goes back in the report. An output with another shape goes back there, too, because some files
                declare wrong shapes.
            timing: whether `on_device_ns` is wanted.

        Raises:
            Exception: any error. It becomes GENERAL_FAILURE with its message. The engine must stay usable.
        """
        ...


class Engine(Protocol):
    """An inference engine, found through the entry point group `aionn.engines`.

    Each driver process makes one, without arguments. Everything else comes from `aionn.driver`: HAL calls, integrity, JIT, memory
    domains, bursts, death.

    Attributes:
        name: the device's name.
        version: the version of the engine *and* of everything that its artifacts depend on (library, ISA, options).
        cache_files: how many files `export` fills. (0, 0) means that the engine does not cache.

    Two attributes are optional: `device_type` (`DeviceType`, default CPU) and `priority_matters` (whether artifacts of different
    priority differ, default False).
    """

    name: str
    version: str
    cache_files: CacheFiles

    def supported_operations(self, model: Model) -> Sequence[bool]:
        """Return per entry of `model.operations` whether the engine can run it."""
        ...

    def compile(self, model: Model, options: CompileOptions) -> Executable:
        """Compile a model. This call blocks, and runs in a thread.

        Constants lie in `model.pools`. Use them in place where possible, and never write to them.

        Raises:
            CompilationError: the model cannot be compiled. `.node` and `.reason` are set where they are known.
        """
        ...

    def export(self, executable: Executable) -> Artifact | None:
        """Return what to store for the next start, or None to decline."""
        ...

    def load(self, artifact: Artifact, options: CompileOptions) -> Executable:
        """Make an executable of an artifact. Its bytes are always verified, and stay alive as long as the executable.

        `options.threads` and `options.instances` may differ from those of the compilation. An engine whose artifact fixes one of them
        refuses an artifact that was made for another number. Then the model is compiled again.

        Raises:
            CompilationError: the artifact cannot be loaded under these options.
        """
        ...
