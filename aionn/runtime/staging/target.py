"""`Target`: what staging needs of a compilation."""

from __future__ import annotations

from dataclasses import dataclass

from aionn.runtime.preparing.request import CompileRequest
from aionn.runtime.processes.devices import Devices
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.staging.measuring import Run


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a compilation for which stages are made.

    Staging refers to the parts and never to the compilation. So a compilation that the app no longer holds is collected, and
    its staging ends.

    Attributes:
        devices: all devices of the runtime.
        compiled: what serves, and the swap.
        request: what was asked for, without a deadline.
        run: runs inputs on one prepared model.
        stages: names of all stages. A stage whose device cannot run the whole model shares it with their devices.
    """

    devices: Devices
    compiled: CompiledModel
    request: CompileRequest
    run: Run
    stages: tuple[str, ...]
