"""A client of a service that speaks the protocol by hand, and so can break it at every place."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aionn.remote.calls import ConnectDriver, Fd, HalCall, Opened, OpenModel
from aionn.remote.control import HEADER, MAX_DESCRIPTORS, CallMessage, Failed, Message, Reply, decode, encode
from aionn.testing import identity_model

MODEL = identity_model({"input": (1, 16)})
DEFAULTS = ConnectDriver("reference", False, "auto", 0, {})


class Hostile:
    """A connection to the service, or to one of its drivers. `greeting` is its first message."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over the socket."""
        self.sock = sock
        self.sock.settimeout(30)
        self._last_id = 0
        self.greeting = self.read()

    @classmethod
    def at(cls, path: str) -> Hostile:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
        return cls(sock)

    def post(self, message: Message) -> None:
        body, fds = encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.sock.sendmsg([body], rights)
        if sent < len(body):
            self.sock.sendall(body[sent:])

    def read(self) -> Any:
        """Return the next message. Raises EOFError after the last one."""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        header, ancillary, _, _ = self.sock.recvmsg(HEADER.size, room)
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        while len(header) < HEADER.size:
            more = self.sock.recv(HEADER.size - len(header))
            if not more:
                raise EOFError
            header += more
        (length, _, _), body = HEADER.unpack(header), b""
        while len(body) < length:
            more = self.sock.recv(length - len(body))
            if not more:
                raise EOFError
            body += more
        self._fds = map(Fd, fds)
        return decode(body, self._fds.__next__)

    def begin(self, body: HalCall[Any]) -> int:
        self._last_id += 1
        self.post(CallMessage(self._last_id, body))
        return self._last_id

    def call(self, body: HalCall[Any]) -> Any:
        """Return the answer to a call, or `Failed`."""
        number = self.begin(body)
        while True:
            found = self.read()
            if isinstance(found, Failed) and found.id == number:
                return found
            if isinstance(found, Reply) and found.id == number:
                return decode(found.answer, self._fds.__next__, type(body))

    def open_model(self, folder: Path, **more: Any) -> Hostile:
        """Become a guest of a driver that has `MODEL` prepared."""
        path = folder / "model.onnx"
        if not path.exists():  # a file that is written again is another model
            path.write_bytes(MODEL)
        fd = os.open(path, os.O_RDONLY)
        try:
            opened = self.call(OpenModel(Fd(fd), "", ("reference",), **more))
        finally:
            os.close(fd)
        assert isinstance(opened, Opened), opened
        os.close(opened.pidfd)
        return Hostile(socket.socket(fileno=opened.socket))

    def driver(self, body: ConnectDriver = DEFAULTS) -> Hostile:
        """Become a guest of a driver."""
        found = self.call(body)
        os.close(found.pidfd)
        os.close(found.page)
        return Hostile(socket.socket(fileno=found.socket))

    def close(self) -> None:
        self.sock.close()


@contextmanager
def hostile(path: str) -> Iterator[Hostile]:
    made = Hostile.at(path)
    try:
        yield made
    finally:
        made.close()


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def begun_frame(length: int, descriptors: int) -> bytes:
    """The header of a frame whose body does not come."""
    return struct.pack("<IHH", length, descriptors, 0)
