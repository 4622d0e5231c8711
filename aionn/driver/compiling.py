"""One compilation by an engine: of private copies of what may change, and with a second attempt without an artifact.

An engine that tunes while it runs offers a better artifact, which takes the place of the stored one (`Tuning`). The app asks when a burst
has ended, and before it releases the model. It owns the cache, so it opens the entry's files under the entry's lock only when there is an
offer. An offer is kept until it is stored, or until a later one takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aionn.caching.outcomes import MissReason, Refusal
from aionn.driver.artifacts import Artifacts, LentHandles
from aionn.driver.engine_errors import report_bug, way_out
from aionn.driver.threads import Threads
from aionn.errors import AionnError, CallerError, CompilationError, ExecutionError, text_of
from aionn.hal.batching import RowAxes
from aionn.hal.engine import Artifact, CompileOptions, Engine, Executable
from aionn.hal.interfaces import CacheHandles
from aionn.hal.model import PooledModel, known_contents, may_change
from aionn.hal.types import Operand
from aionn.hal.values import outside_frames


class Compiled(NamedTuple):
    """A compiled model.

    Attributes:
        outcome: why it must not or cannot be stored, or "".
        contents: the digest of the constants that may change, as they were compiled.
    """

    executable: Executable
    outcome: str
    contents: bytes


def compiled_model(engine: Engine, model: PooledModel, options: CompileOptions, files_only: bool = True) -> Compiled:
    """Compile a model. Blocks. Private copies of its constants go when the engine has returned.

    Args:
        files_only: leave constants in memory that the app gave where they are, unless the artifact is to be stored.

    Raises:
        AionnError: the model cannot be compiled. An engine's own exceptions become `CompilationError`.
    """
    own, contents = model, b""
    if any(map(may_change, model.pools)):
        from aionn.graph.unchanged import own_constants  # most models have no such constants

        own, contents = own_constants(model, files_only=files_only and not options.may_export)
    if options.may_export and known_contents(model) not in (b"", contents):
        changed = "the weights beside the model have changed since the model was read"
        refusal = Refusal(MissReason.CHANGED_WEIGHTS, f"{changed}; read the model again, and replace such files by renaming")
        executable, _ = _attempts(engine, own, msgspec.structs.replace(options, may_export=False))
        outcome = str(refusal)
    else:
        executable, outcome = _attempts(engine, own, options)
    _check_values(engine, model, executable)
    return Compiled(executable, outcome, contents)


def _check_values(engine: Engine, model: PooledModel, executable: Executable) -> None:
    """Check that an executable takes the model's inputs and outputs.

    Raises:
        CompilationError: some are not tensors of numbers, and the engine runs no others.
    """
    strange = outside_frames(model)
    if strange and not hasattr(executable, "run_values"):
        why = f"{strange}, but it runs tensors of numbers only"
        raise CompilationError(f"device {engine.name!r} cannot run the model: {why}; use another device", reason=why)


def _attempts(engine: Engine, model: PooledModel, options: CompileOptions) -> tuple[Executable, str]:
    """Compile. Return also why the model cannot be saved, where compiling worked only without preparing the export, or ""."""
    try:
        return engine.compile(model, options), ""
    except Exception as error:  # an engine's own exception types end here
        failed = compilation_error(engine.name, error)
        if not options.may_export or options.cancelled.is_set() or getattr(failed, "node", None) is not None:
            raise failed from error
    # Some engines write their artifact while they compile. A full disk must not fail the compilation then.
    try:
        executable = engine.compile(model, msgspec.structs.replace(options, may_export=False))
    except Exception as error:
        raise compilation_error(engine.name, error) from error
    return executable, str(Refusal(MissReason.IO_ERROR, f"it compiles only without an artifact to store: {failed}"))


def compilation_error(device: str, error: Exception) -> AionnError:
    """Return an engine's error as one that the device may raise."""
    if isinstance(error, AionnError) and not isinstance(error, ExecutionError):
        return error
    reason = f"{text_of(error)}{way_out(error)}"
    made = CompilationError(f"device {device!r} cannot prepare the model: {type(error).__name__}: {reason}", reason=reason)
    if place := report_bug(error, device, "prepare"):
        made.add_note(place)
    return made


class Tuning:
    """The offers of one prepared model.

    Args:
        device: its name.
        executables: of the prepared model.
        description: the model's token, inputs, outputs and rows, which are stored with an artifact.

    Attributes:
        possible: whether its engine may ever offer anything.
    """

    def __init__(
        self,
        device: str,
        executables: Sequence[Executable],
        threads: Threads,
        artifacts: Artifacts,
        description: tuple[bytes, Mapping[str, Operand], Mapping[str, Operand], RowAxes | None],
    ) -> None:
        self._device = device
        self._ask: Callable[[], Any] | None = next(
            (executable.export_again for executable in executables if hasattr(executable, "export_again")), None
        )
        self.possible = self._ask is not None
        self._threads, self._artifacts, self._description = threads, artifacts, description
        self._offer: Artifact | None = None
        self._lock = threading.Lock()

    async def export_again(self, cache: CacheHandles | None) -> str:
        """Ask the engine for a better artifact, or store the one that it has offered.

        Args:
            cache: where to store the offer. None asks for one.

        Returns:
            "offered" or "" to a question; "saved", or the reason why nothing was stored.

        Raises:
            CallerError: there is no offer to store.
            CompilationError: the engine raised an error.
        """
        if cache is None:
            try:
                return "offered" if await self._threads.run(self._offered) else ""
            except Exception as error:  # an engine's own exception types end here
                raise compilation_error(self._device, error) from error
        offer, self._offer = self._offer, None
        if offer is None:
            raise CallerError("the prepared model has offered no artifact; ask for one first")
        lent = LentHandles(cache)
        try:
            return await self._threads.run(
                lambda: lent.during(lambda handles: self._artifacts.store_again(offer, handles, *self._description))
            )
        finally:
            lent.release()

    def _offered(self) -> bool:
        with self._lock:
            offer = None if self._ask is None else self._ask()
            self._offer = offer or self._offer
            return self._offer is not None
