"""The TCP socket on which a command listens, and the signal that ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aionn.cli.printing import NotDoneError, address_of
from aionn.service.listening import Listening

BACKLOG = 2048
LOOK_S = 2.0
"""How often to look whether a socket still lies at its path."""


def tcp_socket(listen: str, option: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT.

    Args:
        option: the option by which another address can be given.

    Raises:
        UsageError: it is not an address.
        NotDoneError: the address cannot be listened on.
    """
    host, port = address_of(listen, option.partition(" ")[0])
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)
    except OSError as error:
        # The text of some errors has the address, too.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise NotDoneError(f"cannot listen on {listen}: {reason}; give another address with {option}") from error


@contextmanager
def until_sigterm(listening: Listening) -> Iterator[None]:
    """Cancel the body when SIGTERM comes, and go on behind it. For the main thread's event loop.

    Raises:
        NotDoneError: the socket on which the body listens has been removed, so no client finds it any more.
    """
    loop = asyncio.get_running_loop()

    def look() -> None:
        if listening.reachable:
            loop.call_later(LOOK_S, look)
        else:
            scope.cancel()

    with anyio.CancelScope() as scope:
        loop.add_signal_handler(signal.SIGTERM, scope.cancel)
        look()
        yield
    if not listening.reachable:
        raise NotDoneError(f"the socket {listening.path} has been removed; start this command again")
