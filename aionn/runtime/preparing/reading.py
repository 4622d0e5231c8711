"""A loaded model's files are digested and read in threads. A runtime that closes does not wait for them."""

from __future__ import annotations

from aionn.hal.model import Model
from aionn.runtime import model as models
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.preparing.step_model import StepModel
from aionn.tasks import Tasks


def unread(model: Model) -> bool:
    """Return whether a model's graph is still to be read from its file."""
    return isinstance(model, models.Model | StepModel) and not models.is_read(model)


async def digested(tasks: Tasks, model: Model) -> bytes:
    """Return the model's token, made now if it is not known.

    Raises:
        CallerError: a file is broken, or has changed; or the runtime was closed.
    """
    if isinstance(model, models.Model | StepModel):
        await in_time(tasks, model.digest, None, None)
    return model.token


async def read(tasks: Tasks, model: Model) -> None:
    """Have the model's graph read, if it has not been.

    Raises:
        CallerError, CompilationError: a file is broken, or has changed; or the runtime was closed.
    """
    if isinstance(model, models.Model | StepModel):
        await in_time(tasks, model.read, None, None)
