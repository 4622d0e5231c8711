"""Import modules in a thread, so that the loop goes on meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from aionn.tasks import Answer, running_loop


async def import_in_thread(modules: Sequence[str]) -> None:
    """Import modules, and raise what an import raises. A caller that is cancelled leaves at once, and the imports go on."""
    if all(module in sys.modules for module in modules):
        return
    loop = running_loop()
    answer: Answer[None] = Answer(loop)

    def work() -> None:
        error: BaseException | None = None
        try:
            for module in modules:
                import_module(module)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer.set, None) if error is None else loop.call_soon_threadsafe(answer.fail, error)

    threading.Thread(target=work, name="aionn imports", daemon=True).start()
    await answer.wait()
