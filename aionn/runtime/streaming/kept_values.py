"""`KeptValues`: what `Compilation.compute` uses for a model with strings, sequences, maps or optionals.

Invariant
    `_calls` holds each call that is with the driver. `end` ends their waits, so that closing settles every caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from aionn.errors import CallerError
from aionn.runtime.executing.arguments import check_mapping
from aionn.runtime.executing.attempt import Call
from aionn.runtime.executing.control import control_route
from aionn.runtime.executing.frame_layout import Outputs
from aionn.runtime.executing.link import CLOSE_S
from aionn.runtime.executing.values import compute_values
from aionn.runtime.streaming.connection import Connections
from aionn.runtime.streaming.kept_burst import CLOSED, KeptBurst
from aionn.tasks import bounded_shield, deadline_of


class KeptValues(KeptBurst):
    """Runs each call over the control socket, without a burst, and orders calls as `KeptBurst` does."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._calls: set[anyio.CancelScope] = set()
        self._settled = anyio.Event()

    async def compute(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None, measure_timing: bool, timeout_s: float | None
    ) -> Outputs:
        """See `Compilation.compute`."""
        self._renewal.check_usable()
        check_mapping(inputs)
        call = Call(dict(inputs), outputs or {}, measure_timing, deadline_of(timeout_s), inputs)
        if self._places:
            self._places -= 1
        else:
            await self._turn(call.deadline_ns)
        try:
            return await self._run(call)
        except CallerError:
            if self._closed:
                raise CallerError(CLOSED) from None
            raise
        finally:
            self._leave()

    async def _run(self, call: Call) -> Outputs:
        executor = self._without_burst()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                found = await compute_values(executor, control_route(self._renewal), call)
            except BaseException as error:
                executor.ended(error)
                raise
            finally:
                self._calls.discard(scope)
                if not self._calls:
                    self._settled.set()
            if self.last_inputs is None:
                assert executor.shown is not None
                executor.shown.on(self._renewal.device, found.stage)
            self.last_inputs = call.inputs
            return found
        raise CallerError(CLOSED)

    async def aclose(self) -> None:
        """Close for good. Calls that wait end with `CallerError`. Those under way are given `CLOSE_S` to be answered."""
        self.refuse()
        try:
            with bounded_shield(CLOSE_S):
                while self._calls:
                    self._settled = anyio.Event()
                    await self._settled.wait()
        finally:
            self.end()

    def end(self) -> None:
        """Close for good, without waiting."""
        for scope in self._calls:
            scope.cancel()
        super().end()
