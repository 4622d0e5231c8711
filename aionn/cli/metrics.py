"""`aionn metrics`: one exporter for all runtimes of this user, read from their statistics pages."""

from __future__ import annotations

import re
import signal
import socket
import threading
from types import FrameType

from aionn.cli.printing import NotDoneError, UsageError, error_console, print_json

try:
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    from aionn.metrics import LOOK_S, AllRuntimes
except ImportError as error:
    raise UsageError("aionn metrics needs prometheus_client; install it with: pip install 'aionn[metrics]'") from error


def print_metrics(as_json: bool) -> None:
    """Print the metrics of now."""
    everything, registry = _collector()
    if not as_json:
        print(generate_latest(registry).decode(), end="")
        return
    print_json(
        [
            {
                "name": metric.name,
                "type": metric.type,
                "help": metric.documentation,
                "samples": [{"name": sample.name, "labels": sample.labels, "value": sample.value} for sample in metric.samples],
            }
            for metric in everything.collect()
        ]
    )


def serve_metrics(listen: str) -> None:
    """Serve the metrics until SIGINT or SIGTERM.

    Raises:
        UsageError: the address cannot be understood.
        NotDoneError: the address cannot be listened on.
    """
    host, port = address(listen)
    everything, registry = _collector()
    everything.look()
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise NotDoneError(f"cannot listen on {listen}: {reason}; give another address with --listen HOST:PORT") from error
    over = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        over.set()

    before = signal.signal(signal.SIGTERM, end)
    try:
        shown = f"[{host}]" if ":" in host else host
        text = f"aionn: serving metrics on http://{shown}:{server.server_address[1]}/metrics"
        error_console().print(text, markup=False, soft_wrap=True)
        while not over.wait(LOOK_S):
            everything.look()
    finally:
        signal.signal(signal.SIGTERM, before)
        server.shutdown()
        server.server_close()
        thread.join()
        everything.close()


def address(listen: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, with an IPv6 address in brackets.

    Raises:
        UsageError: it is not an address, or no such host is known.
    """
    parts = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})", listen)
    if parts is None or int(parts["port"]) > 65535:
        raise UsageError(f"--listen {listen!r} is not HOST:PORT; give an address such as 127.0.0.1:9787 or [::1]:9787")
    host = parts["six"] or parts["host"]
    try:
        socket.getaddrinfo(host, int(parts["port"]), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--listen {listen!r}: the host {host!r} is not known; give an address of this machine") from error
    return host, int(parts["port"])


def _collector() -> tuple[AllRuntimes, CollectorRegistry]:
    everything, registry = AllRuntimes(), CollectorRegistry()
    registry.register(everything)
    return everything, registry
