"""`Target`: what staging needs of a compilation."""

from __future__ import annotations

from dataclasses import dataclass

from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.runtime.preparing.cached import CacheChoice
from aionn.runtime.preparing.progress import CompilationReports
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
        model: what is computed.
        options: how to prepare the model, without a deadline.
        cache: where the compilation is kept, or None.
        run: runs inputs on one prepared model.
        reports: how the compilation is shown.
        stages: names of all stages. A stage whose device cannot run the whole model shares it with their devices.
    """

    devices: Devices
    compiled: CompiledModel
    model: Model
    options: PrepareOptions
    cache: CacheChoice | None
    run: Run
    stages: tuple[str, ...]
    reports: CompilationReports
