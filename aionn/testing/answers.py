"""What the fake device answers, as the test says: arrays, or a function that runs in the test's own process.

The engine runs in a driver process, to which no function can travel. So the engine sends the inputs of each run through a Unix socket,
and a thread of the test's process sends the outputs back. One request is one connection, and one is served at a time, in the order in
which they come.

Invariants
    A function is called in one thread, by one run at a time.
    Whatever goes wrong in the test's process reaches the engine as a text, and stays in `AnswerThread.errors` for the test.
    Closing ends every wait of the engine.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, text_of
from aionn.hal.types import Operand, OperandType

Arrays: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = Arrays | Callable[[dict[str, NDArray[Any]]], Arrays]
"""Outputs by name, or a function that makes them of the inputs by name."""

_CLOSES_WITHIN_S = 5.0
_LENGTH_BYTES = 8


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """An array. `kind` is the value of an `OperandType`, which is also the name of a dtype."""

    name: str
    kind: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, name: str, array: NDArray[Any]) -> _Tensor:
        return cls(name, array.dtype.name, array.shape, array.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.content, OperandType(self.kind).dtype).reshape(self.shape)


class _Declared(msgspec.Struct, frozen=True, array_like=True):
    """An output as the model declares it. Dimensions are as in `Operand`."""

    name: str
    kind: str
    dimensions: tuple[int, ...] | None


class _Request(msgspec.Struct, frozen=True, array_like=True):
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Declared, ...]


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    """`outputs` are None where nothing is to be answered. `error` says why there is no answer."""

    outputs: tuple[_Tensor, ...] | None
    error: str = ""


def ask(folder: Path, inputs: Mapping[str, NDArray[Any]], operands: Mapping[str, Operand]) -> dict[str, NDArray[Any]] | None:
    """Return the outputs that the test wants, or None if it wants none any longer. For the engine.

    Args:
        folder: where the socket of the `AnswerThread` is.
        operands: the outputs that the model declares.

    Raises:
        RuntimeError: the test's function raised, its outputs do not fit the model, or the test has ended.
    """
    declared = tuple(_Declared(name, operand.type.value, operand.dimensions) for name, operand in operands.items())
    request = _Request(tuple(_Tensor.of(name, array) for name, array in inputs.items()), declared)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, _path_of_socket(folder) as path:
            sock.connect(path)
            _send(sock, msgspec.msgpack.encode(request))
            reply = msgspec.msgpack.decode(_receive(sock), type=_Reply)
    except (OSError, EOFError) as error:
        raise RuntimeError("the fake device was closed before its answer() had answered this run") from error
    if reply.error:
        raise RuntimeError(reply.error)
    return None if reply.outputs is None else {tensor.name: tensor.array() for tensor in reply.outputs}


class AnswerThread:
    """Answers the runs of the fake engine from the test's process. `close` must follow.

    Attributes:
        errors: what functions raised, and answers that did not fit the model.
    """

    def __init__(self, folder: Path) -> None:
        self.errors: list[BaseException] = []
        self._answers: Iterator[Answer] | None = None
        self._connection: socket.socket | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _path_of_socket(folder) as path:
                self._listener.bind(path)
            self._listener.listen(128)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="aionn fake answers", daemon=True)
        self._thread.start()

    def order(self, answer: Answer | Sequence[Answer] | None) -> None:
        """Answer so from now on, or not at all. The last one of several stays.

        Raises:
            CallerError: it is neither a mapping, nor a function, nor a sequence of these.
        """
        answers = list(answer) if isinstance(answer, list | tuple) else [answer]
        for one in answers if answer is not None else ():
            if not callable(one) and not isinstance(one, Mapping):
                raise CallerError(
                    f"answer() got {type(one).__name__}; give a dict of arrays by output name, a function that returns one, or a list"
                )
        if not answers:
            raise CallerError("answer() got an empty list; give at least one dict or function")
        with self._lock:
            self._answers = None if answer is None else _last_stays(answers)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the thread, and every wait for it. A function that has not returned is noted as an error."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSES_WITHIN_S)
        self._listener.close()
        if self._thread.is_alive():
            text = f"the function given to answer() has not returned {_CLOSES_WITHIN_S:.0f} s after the end of the test; let it end"
            self.errors.append(TimeoutError(text))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # `close` shuts the listener down
            with connection:
                with self._lock:
                    if self._closed:
                        return
                    self._connection = connection
                try:
                    request = msgspec.msgpack.decode(_receive(connection), type=_Request)
                    _send(connection, msgspec.msgpack.encode(self._reply(request)))
                except (OSError, EOFError):
                    pass  # the driver has died meanwhile, or the device is being closed
                finally:
                    with self._lock:
                        self._connection = None

    def _reply(self, request: _Request) -> _Reply:
        with self._lock:
            answer = None if self._answers is None else next(self._answers)
        if answer is None:
            return _Reply(None)
        try:
            made = answer({tensor.name: tensor.array() for tensor in request.inputs}) if callable(answer) else answer
            return _Reply(tuple(_checked(made, request.outputs)))
        except BaseException as error:  # the test's own function may raise anything; pytest.fail() raises no Exception
            self.errors.append(error)
            kind = "" if isinstance(error, CallerError) else f"the function given to answer() raised {type(error).__name__}: "
            return _Reply(None, f"{kind}{text_of(error)}")


def _last_stays(answers: Sequence[Answer]) -> Iterator[Answer]:
    yield from answers
    while True:
        yield answers[-1]


def _checked(made: object, declared: Sequence[_Declared]) -> Iterator[_Tensor]:
    """Yield the answered outputs, checked against the model.

    Raises:
        CallerError: an output is missing, unknown, or has another shape or type.
    """
    if not isinstance(made, Mapping):
        raise CallerError(f"the function given to answer() returned {type(made).__name__}; return a dict of arrays by output name")
    names = [output.name for output in declared]
    if set(made) != set(names):
        raise CallerError(f"answer() gives the outputs {sorted(map(str, made))}; give exactly those of the model, {sorted(names)}")
    for output in declared:
        wanted = OperandType(output.kind).dtype
        value = made[output.name]
        array = value if isinstance(value, np.ndarray) else np.asarray(value, wanted)
        if array.dtype != wanted:
            raise CallerError(
                f"answer() gives output {output.name!r} as {array.dtype}, but the model declares {wanted}; use .astype({wanted})"
            )
        dimensions = output.dimensions
        if dimensions is not None and (
            len(dimensions) != array.ndim or any(extent not in (0, found) for extent, found in zip(dimensions, array.shape, strict=True))
        ):
            shown = tuple(extent or "any" for extent in dimensions)
            raise CallerError(f"answer() gives output {output.name!r} the shape {array.shape}, but the model declares {shown}")
        yield _Tensor.of(output.name, np.ascontiguousarray(array).reshape(array.shape))


@contextmanager
def _path_of_socket(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough, wherever the folder is: the kernel takes 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/answers"
    finally:
        os.close(fd)


def _send(sock: socket.socket, content: bytes) -> None:
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "little") + content)


def _receive(sock: socket.socket) -> bytes:
    """Return one message.

    Raises:
        EOFError: the other side has gone.
    """
    with sock.makefile("rb") as stream:
        length = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "little")
        return _exactly(stream, length)


def _exactly(stream: Any, count: int) -> bytes:
    content: bytes = stream.read(count)
    if len(content) < count:
        raise EOFError("the other side of an answer has gone")
    return content
