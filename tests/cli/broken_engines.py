"""Engines that are broken, each in its own way."""

from __future__ import annotations

import os
import signal
from typing import Any

from aionn.engines.reference import ReferenceEngine


class Missing:
    name = "broken"

    def __init__(self) -> None:
        raise RuntimeError("the licence has expired")


class Wrong(ReferenceEngine):
    name = "broken"

    def compile(self, model: Any, options: Any) -> Any:
        made = super().compile(model, options)

        class Off:
            def run(self, inputs: Any, outputs: Any, timing: Any) -> Any:
                return made.run({name: value + 1 for name, value in inputs.items()}, outputs, timing)

        return Off()


class Dying(ReferenceEngine):
    name = "broken"

    def compile(self, model: Any, options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
