"""What a driver author writes: an `Engine`, its executables and artifacts, and what `driver.device` gives it.

An engine is the smallest thing that computes. Everything else (HAL calls, integrity, bursts, memory domains) is written once around it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aionn.hal.model import PooledModel
from aionn.hal.options import OptionValue
from aionn.hal.types import CacheFiles, ExecutionPreference, Priority

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


class CompileOptions(msgspec.Struct, frozen=True):
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
        options: what the app asks of this engine beyond that, by name. Names and types are those of `Engine.options`. A file
            is the path of a private copy, which exists as long as the process.
        give_back: frees writable parts of the artifact that `Engine.load` needs no more, in any thread. None: it must stay whole.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    threads: int = 0
    cancelled: CancelFlag = msgspec.field(default_factory=CancelFlag)
    may_export: bool = True
    blob_cache: IBlobCache | None = None
    at_most: bool = False
    instances: int = 1
    give_back: Callable[[memoryview], None] | None = None
    options: Mapping[str, OptionValue] = msgspec.field(default_factory=dict)


class Artifact(msgspec.Struct, frozen=True):
    """What an engine stores: one bytes-like object per cache file that it asks for.

    Attributes:
        model: security-sensitive files (compiled code, graphs).
        data: preprocessed constants.
    """

    model: tuple[Any, ...]
    data: tuple[Any, ...]


class ExecutionReport(msgspec.Struct, frozen=True):
    """The result of `Executable.run`.

    Attributes:
        outputs: the arrays of exactly two kinds of outputs: those without a given array, because their shape was open, and those whose
            given array has another shape than the output. The contents of such a given array are not used.
        on_device_ns: time spent computing, or None if the engine cannot measure it.
    """

    outputs: Mapping[str, NDArray[Any]] = msgspec.field(default_factory=dict)
    on_device_ns: int | None = None


class Executable(Protocol):
    """A model that is ready to run in this process.

    One thread at a time calls `run`, which releases the GIL while it computes. The other methods are optional.

    Two of them make executables that may run beside this one over one copy of the weights. `lanes(count: int) -> Sequence[Executable]` is
    called once, before the first run, with `CompileOptions.instances`, and may return this one among them. `share() -> Executable` is
    called at any time and in any thread. Where the app has not chosen a number, `lanes` is called with the attribute `best_instances`, if
    an executable has it and it is above 1.

    `run_values(inputs: Mapping[str, Any]) -> Mapping[str, Any]` runs a model once that has strings, sequences, maps or optionals as inputs
    or outputs, in place of `run`. Values are as `hal.values` says. Arrays among the inputs are read-only. Arrays among the outputs may be
    those of the inputs. Without this method such models are refused.

    Two of them say when executions come as a stream: `stream_began() -> None` when the first burst opens, `stream_ended() -> None` when
    the last one has ended. An engine may keep clocks or threads awake in between. They are called in another thread, perhaps beside a run,
    and take turns. A short stream may be over before they are called; then neither is.

    An engine that tunes while it runs has `export_again() -> Artifact | None`. It is called in another thread, perhaps beside a run, when
    a burst has ended and before the model is released. It returns an artifact that is better than what it exported or loaded before, or
    None. Where the app has a cache, the better artifact takes the place of the stored one.
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

    Some attributes are optional.

    device_type: `DeviceType`, default CPU.
    priority_matters: whether artifacts of different priority differ, default False.
    performance: `Performance`, default that of a CPU.
    options: the options that an app may give, as a mapping from names to types. A type is `str`, `int`, `float`, `bool`, `Path` for
        the path of a file, or a tuple of these. The name "*" stands for any other name, which the engine checks itself. An engine
        that has options takes them as the second argument of `supported_operations`, with a default.
    providers: names that may follow the engine's name and a colon in a device's name, as in "onnxruntime:cuda". The class then has a
        class method `for_provider(provider: str) -> Engine`. It raises `DeviceUnavailableError` for a provider that does not work.
    runs_on: what the engine computes with, for people. An executable may have the same attribute for its model.

    Needs of the driver's sandbox stand in the file `aionn-engine.toml` of the engine's package, or in `Runtime(engine_needs=)` (`Needs`). A
    driver reads them before it imports the class, so an attribute cannot state them. An engine without the file needs nothing.
    """

    name: str
    version: str
    cache_files: CacheFiles

    def supported_operations(self, model: PooledModel) -> Sequence[bool]:
        """Return per entry of `model.operations` whether the engine can run it."""
        ...

    def compile(self, model: PooledModel, options: CompileOptions) -> Executable:
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
