"""`Target`: what staging needs of a compilation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aionn.runtime.preparing.compile_acts import CompileRequest
from aionn.runtime.processes.devices import Devices
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging.measuring import Run


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a compilation for which stages are made.

    Staging refers to the parts and never to the compilation. So a compilation that the app no longer holds is collected, and
    its staging ends.

    Attributes:
        devices: all devices of the runtime.
        compiled: what serves, and the swap.
        live: returns what serves, which is prepared again if it does not live. It holds the compilation only while it runs.
        request: what was asked for, without a deadline.
        run: runs inputs on one prepared model.
        stages: names of all stages. A stage whose device cannot run the whole model shares it with their devices.
    """

    devices: Devices
    compiled: CompiledModel
    live: Callable[[], Awaitable[Serving]]
    request: CompileRequest
    run: Run
    stages: tuple[str, ...]
