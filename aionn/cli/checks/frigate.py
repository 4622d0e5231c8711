"""The endpoint at which Frigate's detectors ask: pyzmq, and the socket."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from aionn.adapters.frigate import ENDPOINT
from aionn.cli.checks import Row, fail, ok, warn

_CHECK = "frigate"


def frigate(endpoint: str = ENDPOINT) -> Row:
    """Look at the socket that Frigate's detector uses by default. That no server listens is fine."""
    if find_spec("zmq") is None:
        return ok(_CHECK, "pyzmq is not installed; aionn serve-frigate needs it (pip install 'aionn[frigate]')")
    path = endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except FileNotFoundError:
            return ok(_CHECK, f"no server listens at {endpoint}, which is Frigate's default; other endpoints are not looked at")
        except ConnectionRefusedError:
            return warn(_CHECK, f"{path} is left over, and no server listens there", "a server, or no socket", "start aionn serve-frigate")
        except OSError as error:
            found = f"{path}: {error.strerror}"
            return fail(_CHECK, found, "a socket that this user may use", "run aionn serve-frigate and its clients as the same user")
    return ok(_CHECK, f"a server listens at {endpoint}")
