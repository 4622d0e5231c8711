"""`RequestRefusal`: an answer that is an error, and `refusal_of`: the one that an error of aionn becomes."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

import aionn
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeadlineError,
    DeviceBusyError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    ExecutionError,
    MemoryAllocationError,
    text_of,
)
from aionn.hal.types import ErrorStatus

RESTART_S = 1
"""Seconds that a client is asked to wait while a driver starts again."""

_MOST_CHARACTERS = 2000
"""A sentence may quote a name from the request, which may be as long as the request. The middle of a longer sentence is left out."""

_MAY_PASS = (DeviceBusyError, DriverDiedError, DriverHungError, DeviceUnavailableError, MemoryAllocationError, CompilationError)

_HTTP_STATUS = {
    ErrorStatus.INVALID_ARGUMENT: 400,
    ErrorStatus.DEVICE_UNAVAILABLE: 503,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: 503,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: 503,
}
_NOT_COMPUTED = 422
"""The request is well formed and fits the model, but the model does not compute these values."""


class RequestRefusal(Exception):
    """A request is answered with an error.

    Attributes:
        status: of HTTP.
        headers: of the answer.
    """

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        most = _MOST_CHARACTERS // 2
        super().__init__(sentence if len(sentence) <= _MOST_CHARACTERS else f"{sentence[:most]} ... {sentence[-most:]}")
        self.status = status
        self.headers = headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self), self.headers), dict(self.__dict__)

    def response(self) -> JSONResponse:
        """Return the answer. Its body has the form that the protocol prescribes for errors."""
        return JSONResponse({"error": str(self)}, self.status, self.headers)


def refusal_of(error: AionnError, runtime: aionn.Runtime) -> RequestRefusal:
    """Return the answer for an error of a call."""
    status, sentence = 500, text_of(error)
    if isinstance(error, CallerError):
        status = 400
        if runtime.health().state in ("closing", "closed"):  # which ends calls with this error, too
            status, sentence = 503, "the runtime of this server was closed; ask another server, or try again later"
    elif isinstance(error, DeadlineError):
        status = 504
    elif isinstance(error, ExecutionError):
        status = _HTTP_STATUS.get(ErrorStatus(error.status), _NOT_COMPUTED)
    elif isinstance(error, _MAY_PASS):
        status = 503
    return RequestRefusal(status, sentence, {"Retry-After": str(RESTART_S)} if status == 503 else None)
