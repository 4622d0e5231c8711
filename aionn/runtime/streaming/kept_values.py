"""`KeptValues`: what `Compilation.compute` uses for a model with strings, sequences, maps or optionals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aionn.errors import CallerError
from aionn.runtime.executing.arguments import check_mapping
from aionn.runtime.executing.attempt import Call
from aionn.runtime.executing.control import control_route
from aionn.runtime.executing.frame_layout import Outputs
from aionn.runtime.executing.values import compute_values
from aionn.runtime.streaming.kept_burst import CLOSED, KeptBurst
from aionn.tasks import deadline_of


class KeptValues(KeptBurst):
    """Runs each call over the control socket, without a burst, and orders calls as `KeptBurst` does."""

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
            executor = self._without_burst()
            found = await compute_values(executor, control_route(self._renewal), call)
            if self.last_inputs is None:
                self._renewal.session.page.rename(executor.counts, "", self._renewal.device, found.stage)
            self.last_inputs = call.inputs
            return found
        except CallerError:
            if self._closed:
                raise CallerError(CLOSED) from None
            raise
        finally:
            self._leave()
