"""`compiled`: one call of `Runtime.compile`, from what it asks for to the compilation that the runtime owns."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec

from aionn import trace
from aionn.errors import DeadlineError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.runtime.compilation import Compilation
from aionn.runtime.opened import Opened
from aionn.runtime.parts import CompilationParts, compiled_parts, staged_parts
from aionn.runtime.preparations import READING
from aionn.runtime.preparing.options import with_options
from aionn.runtime.preparing.progress import CompilationReports, Named, Progress
from aionn.runtime.preparing.reading import digested
from aionn.runtime.preparing.renewal import Order
from aionn.tasks import seconds_until

if TYPE_CHECKING:  # most apps make no stages
    from aionn.runtime.staging.stage import StagePolicy

T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `Runtime.compile` asks for. All of it has been checked.

    Attributes:
        candidates: names of devices, best first, or None for every installed one. For mode "staged" those of the stages.
        engine_options: `options` of the call, by device.
        named: how the compilation is shown.
    """

    model: Model
    options: PrepareOptions
    engine_options: Mapping[str, Mapping[str, object]] | None
    candidates: Sequence[str] | None
    mode: str
    cache_dir: str | Path | None
    token: bytes | None
    idle_s: float | None
    timeout_s: float | None
    named: Named


async def compiled(opened: Opened, wanted: Wanted, policy: StagePolicy | None) -> Compilation:
    """Make the compilation. `policy`: of the stages, for mode "staged" alone.

    Raises: as `Runtime.compile`.
    """
    session, named = opened.session, wanted.named
    reports = CompilationReports(session.reports, named, wanted.options.priority)
    first = next(iter(opened.devices.installed if wanted.candidates is None else wanted.candidates), "")
    with session.reports.preparations.preparing(named.name, named.required, first) as shown:
        preparing = nullcontext() if wanted.mode == "jit" else Progress(reports, first, shown=shown)
        with trace.about(model=named.name), trace.span("compile", preference=wanted.options.preference.name.lower()), preparing as progress:
            work = _parts(opened, wanted, reports, policy, progress)
            parts = await _within(wanted.timeout_s, wanted.options.deadline_ns, work)
            opened.add(parts)
    return Compilation(parts)


async def _parts(
    opened: Opened, wanted: Wanted, reports: CompilationReports, policy: StagePolicy | None, progress: Progress | None
) -> CompilationParts:
    session, model, token = opened.session, wanted.model, wanted.token
    complete = await with_options(opened.devices, wanted.options, wanted.engine_options, wanted.candidates)
    if wanted.cache_dir is not None and token is None:
        if progress is not None and not model.known_token:
            progress.step(next(iter(wanted.candidates or opened.devices.installed), ""), READING)
        token = await digested(session.tasks, model)
    order = Order(complete, wanted.candidates, opened.cache(wanted.cache_dir, token), wanted.idle_s, reports=reports)
    if policy is not None and progress is not None:
        return await staged_parts(session, model, order, policy, progress)
    return await compiled_parts(session, model, order, progress)


async def _within(timeout_s: float | None, deadline_ns: int | None, work: Awaitable[T]) -> T:
    with anyio.move_on_after(seconds_until(deadline_ns)):
        return await work
    raise DeadlineError(f"the model was not prepared within {timeout_s} s; the compile has been cancelled")
