"""The way back from a better stage that serves and fails: the stage before takes its place again.

A failure is an execution that the driver answers with an error, or a death of the driver while an execution was in flight. The app's
own restarts and shortages of the machine do not count. `FAILURES` failures within `WITHIN_S` end the stage's service. There are two ways
to the stage before:

    the driver died      the next use prepares the stage before, in place of preparing the bad stage anew (`devices_for`)
    the driver answers   the stage before is prepared, then swapped in like a better one: streams go on, device memories move along

Inputs in memory that cannot be read fail on every stage, so those failures are not reported here (`Executor.placed_failure`).
The stage before is first tried on the inputs that failed. If it cannot run them either, the inputs are at fault, and the better stage
goes on serving. The caller of each failed execution gets its error. Nothing here runs an execution of the app's again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from aionn import trace
from aionn.errors import AionnError, OutputInsufficientSizeError
from aionn.hal.types import ErrorStatus
from aionn.loopless import deadline_of
from aionn.runtime.executing.arguments import as_array
from aionn.runtime.record import about
from aionn.runtime.serving.planned_model import Prepared
from aionn.runtime.serving.serving import CompiledModel, NotNowError, Serving
from aionn.runtime.staging.measuring import RUN_TIMEOUT_S, Inputs, Run

logger = logging.getLogger("aionn.stages")

FAILURES = 3
WITHIN_S = 60.0

_SHORTAGES = (ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT)

_SWAP_TRIES = 20
"""How often the swap is tried. A stage that fails is worth more tries than a better stage."""


class WayBack:
    """Counts the failures of the stage that serves, and swaps the stage before in again."""

    def __init__(
        self,
        compiled: CompiledModel,
        before: Callable[[str], Sequence[str]],
        prepare: Callable[[str], Awaitable[Prepared]],
        run: Run,
        gone_back: Callable[[Serving, Serving, str, int], None],
        name: str,
    ) -> None:
        """Watch over the stages of one compilation.

        Args:
            before: returns the usable stages before one, the best first.
            prepare: prepares the model for a stage.
            run: runs inputs on one prepared model.
            gone_back: called with the bad stage, the stage that serves in its place, the reason, and for how many nanoseconds
                executions were held back.
            name: of the compilation.
        """
        self._compiled = compiled
        self._before = before
        self._prepare = prepare
        self._run = run
        self._gone_back = gone_back
        self._name = name
        self._failures: deque[tuple[int, Inputs | None]] = deque(maxlen=FAILURES)
        self._stage = ""
        self._bad: dict[str, str] = {}
        self._errors = anyio.Event()
        compiled.on_failure = self._failed
        compiled.devices_for = self.devices_for
        compiled.replaced = self._replaced

    def _failed(self, serving: Serving, error: AionnError, inputs: Mapping[str, Any] | None) -> None:
        if serving is not self._compiled.serving or _says_nothing(error) or not self._before(serving.stage):
            return
        if serving.stage != self._stage:
            self._stage = serving.stage
            self._failures.clear()
        now_ns = time.monotonic_ns()
        self._failures.append((now_ns, _copies(inputs)))
        trace.count("stage.failed", stage=serving.stage, reason=str(error))
        if len(self._failures) == FAILURES and now_ns - self._failures[0][0] <= WITHIN_S * 1e9:
            self._bad[serving.stage] = f"it failed {FAILURES} times within {WITHIN_S:g} s while it served, at last with the error: {error}"
            self._errors.set()

    def devices_for(self, dead: Serving) -> list[str]:
        """Return the devices that may serve after the driver of that stage has died, the best first."""
        return [*(self._before(dead.stage) if dead.stage in self._bad else ()), dead.stage]

    def _replaced(self, dead: Serving, serving: Serving) -> None:
        """Note that the next use after a driver's death has prepared `serving`."""
        if serving.stage != dead.stage:
            self._gone_back(dead, serving, self._bad.pop(dead.stage, "its driver has died"), 0)

    async def watch(self) -> None:
        """Swap the stage before in whenever a stage whose driver lives is bad."""
        while True:
            await self._errors.wait()
            self._errors = anyio.Event()
            bad = self._compiled.serving
            if bad is None or not bad.alive or bad.stage not in self._bad:
                continue  # the next use prepares the stage before
            failing = [inputs for _, inputs in self._failures if inputs is not None]
            self._failures.clear()
            try:
                await self._go_back(bad, failing)
            except AionnError as error:
                words = "stage %r of model %r fails, and the stage before cannot take its place: %s"
                logger.warning(words, bad.stage, self._name, error, extra=about(model=self._name, stage=bad.stage))
            except Exception:  # a defect here must not end the app's runtime, and with it the stream
                words = "stage %r of model %r fails, and the stage before cannot take its place"
                logger.exception(words, bad.stage, self._name, extra=about(model=self._name, stage=bad.stage))

    async def _go_back(self, bad: Serving, failing: Sequence[Inputs]) -> None:
        (name, *_) = self._before(bad.stage)
        base = Serving(await self._prepare(name), bad.model, bad.use, name)
        try:
            if failing and not await self._runs_any(base, failing):
                del self._bad[bad.stage]
                logger.info("stage %r failed on inputs that stage %r cannot run either, so it goes on serving", bad.stage, name)
                return
            for attempt in range(_SWAP_TRIES):
                if self._compiled.serving is not bad:
                    return  # the driver has died meanwhile
                try:
                    held_ns = await self._compiled.swap(base)
                    break
                except NotNowError:
                    if attempt == _SWAP_TRIES - 1:
                        raise
            self._gone_back(bad, base, self._bad.pop(bad.stage), held_ns)
        finally:
            if self._compiled.serving is not base:
                base.release()

    async def _runs_any(self, base: Serving, failing: Sequence[Inputs]) -> bool:
        for inputs in failing:
            try:
                await self._run(base, inputs, deadline_of(RUN_TIMEOUT_S))
                return True
            except AionnError:
                base.check_alive()
        return False


def _says_nothing(error: AionnError) -> bool:
    """Return whether the stage is not at fault: an output's memory was too small, or the machine is short of something."""
    return isinstance(error, OutputInsufficientSizeError) or getattr(error, "status", None) in _SHORTAGES


def _copies(inputs: Mapping[str, Any] | None) -> Inputs | None:
    """Return copies of the inputs, to run them later. Returns None if some of them are memory of the app or of a driver."""
    try:
        copies = None if inputs is None else {name: np.array(as_array(name, inputs[name])) for name in inputs}
    except AionnError:
        return None
    return None if copies is None or any(array.dtype.hasobject for array in copies.values()) else copies
