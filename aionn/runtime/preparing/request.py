"""`CompileRequest`: what an app asks of one compile. It travels whole, and who needs a field reads it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from aionn.caching.outcomes import Refusal
from aionn.caching.store import CacheStore
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.runtime.progress import CompilationReports


class CacheChoice(msgspec.Struct, frozen=True):
    """Where an app wants a compilation kept, and under which token.

    Attributes:
        token: the app's, 32 bytes.
        operations: indices of the operations, for one step of a plan. None for a whole model.
        required: whether the first preparation fails if the cache cannot keep the compilation.
    """

    store: CacheStore
    token: bytes
    operations: tuple[int, ...] | None = None
    required: bool = False


class CompileRequest(msgspec.Struct, frozen=True):
    """What an app asks of one compile. All of it has been checked.

    Attributes:
        model: what is compiled, or one step of it.
        options: how to prepare the model, and until when.
        reports: how the compilation is shown.
        candidates: names of the devices that may be used, best first, or None for every installed one. For mode "staged" the stages.
        cache: where the compilation is kept, or None.
        idle_s: after so long without use, the driver's memory is given back. None: never.
        stage: the stage that serves from the start, in mode "staged". None: the stage is named after its device.
    """

    model: Model
    options: PrepareOptions
    reports: CompilationReports
    candidates: Sequence[str] | None = None
    cache: CacheChoice | None = None
    idle_s: float | None = None
    stage: str | None = None

    def of(self, model: Model, cache: CacheChoice | None, open_outputs: tuple[str, ...] = ()) -> CompileRequest:
        """Return the same for another model, or one step of the model, kept elsewhere."""
        return msgspec.structs.replace(self, model=model, cache=cache, options=dataclasses.replace(self.options, open_outputs=open_outputs))

    def without_deadline(self, open_outputs: tuple[str, ...] = ()) -> CompileRequest:
        """Return the same for work that no caller waits for. `open_outputs`: as in `PrepareOptions`."""
        return msgspec.structs.replace(self, options=dataclasses.replace(self.options, deadline_ns=None, open_outputs=open_outputs))

    def unkept(self, refusal: Refusal) -> str:
        """Return the sentence for an app that requires the cache, which does not keep the compilation. Returns an empty text for others."""
        if self.cache is None or not self.cache.required:
            return ""
        kept = f"cache_required: cache {self.cache.store.path} cannot keep compilation {self.reports.named.name!r} ({refusal})"
        return f"{kept}; mend that, give another cache_dir, or leave cache_required out"
