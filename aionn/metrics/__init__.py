"""Metrics of runtimes for Prometheus. They need the extra `aionn[metrics]`, which is prometheus_client.

    Collector   of the runtimes of this process: `prometheus_client.REGISTRY.register(aionn.metrics.Collector())`
    AllRuntimes of all runtimes of this user, whatever their processes: what `aionn metrics` serves

    collector  both of them

A scrape reads memory. It calls nothing in an event loop and sends nothing to a driver, so any thread may do it. docs/reference/metrics.md
lists the metrics.
"""

try:
    import prometheus_client as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("aionn.metrics needs prometheus_client; install it with: pip install 'aionn[metrics]'") from error

from aionn.metrics.collector import LOOK_S, AllRuntimes, Collector

__all__ = ["LOOK_S", "AllRuntimes", "Collector"]
