"""`AionnInferenceExecutor`: ONNX models of an app where LiveKit agents takes an `InferenceExecutor`.

LiveKit asks a model by the name of a method: `await executor.do_inference(method, data) -> bytes | None`. Its own executor sends the
bytes to one inference process. If that process dies, the calls that wait there never end. Here the driver process of a runtime runs the
model, so these calls end with `DriverDiedError`, and the next call has a new driver.

A job is a process that LiveKit forks from a server of preloaded modules. So each job opens a runtime in its entrypoint, after the fork. The
jobs share one driver and one copy of the weights through a service: `aionn serve`, and `aionn.Runtime(service="auto")` in the job.

This module imports nothing of LiveKit. The protocol is one async method, and a job that uses no LiveKit object starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import aionn
from aionn.errors import CallerError
from aionn.loopless import checked_count

if TYPE_CHECKING:
    from livekit.agents import JobContext

__all__ = ["AionnInferenceExecutor", "OnnxMethod"]

_EXECUTOR_OF_JOB = "_inf_executor"
"""The attribute that `JobContext.inference_executor` returns. LiveKit has no public way to set it."""


@dataclass(frozen=True, slots=True)
class OnnxMethod:
    """A model, and what the bytes of its callers mean. The callers choose these bytes: JSON, PCM, or any other encoding.

    Both functions run in the job's event loop. So they should take less than a few milliseconds, which a tokenizer does.

    Attributes:
        compilation: the model. Other methods, and the rest of the app, may use it too.
        decode: returns the model's inputs, arrays by name, for the bytes of a call. What it raises is raised by the call.
        encode: returns the bytes of the answer for the model's outputs, arrays by name. It may return None, as a runner of LiveKit may.
    """

    compilation: aionn.Compilation
    decode: Callable[[bytes], Mapping[str, Any]]
    encode: Callable[[aionn.Outputs], bytes | None]

    def __post_init__(self) -> None:
        compilation: Any = self.compilation
        if not isinstance(compilation, aionn.Compilation):
            found = type(compilation).__name__
            raise CallerError(f"OnnxMethod: compilation is a {found}; give what `await runtime.compile(model)` returns")
        functions: dict[str, Any] = {"decode": self.decode, "encode": self.encode}
        for name, function in functions.items():
            if not callable(function) or iscoroutinefunction(function):
                raise CallerError(f"OnnxMethod: {name}={function!r}; give a function that is not async")


class AionnInferenceExecutor:
    """Answers `do_inference` by compilations of a runtime, for one job. It fits LiveKit's protocol `InferenceExecutor`.

    The executor owns nothing. Close the runtime at the end of the job; its calls that wait end with `CallerError`.

    Examples:
        >>> method = OnnxMethod(compilation, decode, encode)
        >>> executor = AionnInferenceExecutor({"sentiment": method})
        >>> await executor.do_inference("sentiment", b"...")
        b'...'
    """

    def __init__(self, methods: Mapping[str, OnnxMethod], *, retry: int = 0) -> None:
        """Check the methods.

        Args:
            methods: each method's model by the name with which callers ask for it.
            retry: how often a call is made again after the death of its driver, 0 or 1. With 1, a death costs the callers time only.

        Raises:
            CallerError: an argument is wrong.
        """
        if not isinstance(methods, Mapping) or not methods:
            raise CallerError(f"AionnInferenceExecutor: methods={methods!r}; give at least one OnnxMethod by its name")
        given: Mapping[Any, Any] = methods
        for name, method in given.items():
            if not isinstance(name, str) or not isinstance(method, OnnxMethod):
                raise CallerError(f"AionnInferenceExecutor: methods has {name!r}: {type(method).__name__}; give an OnnxMethod by a text")
        self._methods = dict(methods)
        self._retry = checked_count("AionnInferenceExecutor: retry", retry, 0, 1)
        self._others: Any = None

    async def do_inference(self, method: str, data: bytes) -> bytes | None:
        """Run the model of a method once. Any number of calls may wait at once, and each may be cancelled.

        Args:
            method: the name of the method.
            data: what the method's `decode` takes.

        Returns:
            What the method's `encode` returns.

        Raises:
            CallerError: no model has this method. Or the inputs that `decode` returns do not fit the model.
            DriverDiedError: the process that ran the model died. The next call has a new one.
            DriverHungError: the process made no progress for the runtime's `hang_s`, and was killed.
            Exception: what `decode` or `encode` raises.
        """
        asked = self._methods.get(method)
        if asked is None:
            if self._others is not None:
                answer: bytes | None = await self._others.do_inference(method, data)
                return answer
            raise CallerError(f"do_inference: no model has the method {method!r}; the methods are {', '.join(map(repr, self._methods))}")
        outputs = await asked.compilation.compute(asked.decode(data), retry=self._retry)
        answer = asked.encode(outputs)
        if answer is not None and not isinstance(answer, bytes):
            raise CallerError(f"do_inference: encode of the method {method!r} returned a {type(answer).__name__}; return bytes or None")
        return answer

    def install(self, ctx: JobContext) -> None:
        """Let `ctx.inference_executor` be this executor, for the objects of LiveKit that ask the job's context.

        A method that this executor lacks goes to the executor that the job had. So runners that are registered with LiveKit go on.

        Raises:
            CallerError: this version of LiveKit keeps the job's executor elsewhere.
        """
        if not hasattr(ctx, _EXECUTOR_OF_JOB):
            raise CallerError(f"install: {type(ctx).__name__} has no executor to replace; pass this executor to the objects that take one")
        each = others = getattr(ctx, _EXECUTOR_OF_JOB)
        while isinstance(each, AionnInferenceExecutor) and each is not self:
            each = each._others
        if each is not self:  # else it is reached already, perhaps behind others that were installed later
            self._others = others
            setattr(ctx, _EXECUTOR_OF_JOB, self)
