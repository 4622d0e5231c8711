"""`aionn metrics`: one exporter for all runtimes of this user, read from their statistics pages."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from aionn.cli.printing import NotDoneError, UsageError, address_of, print_json, say, url_of

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
    host, port = address_of(listen)
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
        say(f"serving metrics on {url_of(host, server.server_address[1])}/metrics")
        while not over.wait(LOOK_S):
            everything.look()
    finally:
        signal.signal(signal.SIGTERM, before)
        server.shutdown()
        server.server_close()
        thread.join()
        everything.close()


def _collector() -> tuple[AllRuntimes, CollectorRegistry]:
    everything, registry = AllRuntimes(), CollectorRegistry()
    registry.register(everything)
    return everything, registry
