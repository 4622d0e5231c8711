"""Wait for work that may hang, such as a disk, for no longer than a deadline allows.

A loaded model's files are digested and read in threads. A runtime that closes does not wait for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio

from aionn.errors import CallerError
from aionn.file_ranges import until
from aionn.hal.model import Model
from aionn.runtime import model as models
from aionn.runtime.preparing.step_model import StepModel
from aionn.runtime.processes.devices import Devices
from aionn.runtime.progress import READING, step
from aionn.tasks import Answer, Tasks, running_loop

T = TypeVar("T")


async def in_time(
    tasks: Tasks, work: Callable[[], Awaitable[T]], seconds: float | None, late: Callable[[T], Awaitable[None]] | None
) -> T | None:
    """Return the result of `work`, or None if `work` takes longer than `seconds`.

    `work` runs as a task of the runtime's. A thread in it may wait for a disk that hangs, and the caller need not wait for that
    thread. When the runtime closes, the call ends with `CallerError`.

    Args:
        seconds: how long to wait. None waits for the end.
        late: gets a result that comes too late, or whose caller was cancelled. `work` is then cancelled. If `late` is None, `work`
            goes on after the caller has stopped waiting.
    """
    answer: Answer[T] = Answer(running_loop())
    scope = anyio.CancelScope()

    async def run() -> None:
        try:
            with scope:
                result = await work()
                if not answer.settled:
                    answer.set(result)
                elif late is not None:
                    await late(result)
        except Exception as error:
            answer.fail(error)
        except BaseException:
            answer.fail(CallerError("the runtime was closed"))
            raise

    tasks.start_soon(run, name="cache")
    try:
        with anyio.move_on_after(seconds):
            return await answer.wait()
    except BaseException:
        if late is not None:
            scope.cancel()
            if answer.result is not None:  # the result came together with the cancellation
                await late(answer.result)
        raise
    result = answer.result
    answer.abandon()
    if result is None and late is not None:
        scope.cancel()
    return result


async def digested(devices: Devices, model: Model) -> bytes:
    """Return the model's token, made now if it is not known.

    Raises:
        CallerError: a file is broken, or has changed; or the runtime was closed.
    """
    if isinstance(model, StepModel) or models.is_loaded(model):
        devices.check_open()
        # The thread goes on if its caller leaves, for the next one. It ends when the runtime closes.
        await devices.disk.ask(until, lambda: devices.closed, partial(_digest, model))
    return model.token


async def read(devices: Devices, model: Model, device: str = "", *, digest: bool = False) -> None:
    """Have the model's graph read, if it has not been.

    Args:
        device: for which it is read. It shows that step.
        digest: have the model digested before, so that what is read is compared with it.

    Raises:
        CallerError, CompilationError: a file is broken, or has changed; or the runtime was closed.
    """
    if isinstance(model, StepModel) or models.is_loaded(model):
        if device and not models.is_read(model):
            step(device, READING)
        devices.check_open()
        await devices.disk.ask(until, lambda: devices.closed, partial(_read, model, digest))


def _digest(model: models.Model | StepModel) -> None:
    digest = model.digest_here if isinstance(model, StepModel) else partial(models.digest_here, model)
    digest()


def _read(model: models.Model | StepModel, digest: bool) -> None:
    if digest:
        _digest(model)
    read = model.read_here if isinstance(model, StepModel) else partial(models.read_here, model)
    read()
