"""One compilation by an engine: of private copies of what may change, and with a second attempt without an artifact."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from aionn.caching.outcomes import MissReason, Refusal
from aionn.driver.engine_errors import report_bug, way_out
from aionn.errors import AionnError, CompilationError, ExecutionError, text_of
from aionn.hal.engine import CompileOptions, Engine, Executable
from aionn.hal.model import Model, known_contents, may_change
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


def compiled_model(engine: Engine, model: Model, options: CompileOptions) -> Compiled:
    """Compile a model. Blocks. Private copies of its constants go when the engine has returned.

    Raises:
        AionnError: the model cannot be compiled. An engine's own exceptions become `CompilationError`.
    """
    own, contents = model, b""
    if any(map(may_change, model.pools)):
        from aionn.graph.unchanged import own_constants  # most models have no such constants

        own, contents = own_constants(model, files_only=not options.may_export)
    if options.may_export and known_contents(model) not in (b"", contents):
        changed = "the weights beside the model have changed since the model was read"
        refusal = Refusal(MissReason.CHANGED_WEIGHTS, f"{changed}; read the model again, and replace such files by renaming")
        executable, _ = _attempts(engine, own, msgspec.structs.replace(options, may_export=False))
        outcome = str(refusal)
    else:
        executable, outcome = _attempts(engine, own, options)
    _check_values(engine, model, executable)
    return Compiled(executable, outcome, contents)


def _check_values(engine: Engine, model: Model, executable: Executable) -> None:
    """Check that an executable takes the model's inputs and outputs.

    Raises:
        CompilationError: some are not tensors of numbers, and the engine runs no others.
    """
    strange = outside_frames(model)
    if strange and not hasattr(executable, "run_values"):
        why = f"{strange}, but it runs tensors of numbers only"
        raise CompilationError(f"device {engine.name!r} cannot run the model: {why}; use another device", reason=why)


def _attempts(engine: Engine, model: Model, options: CompileOptions) -> tuple[Executable, str]:
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
