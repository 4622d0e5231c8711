"""One Ray node for all tests of a run that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aionn.fleet import BuilderKey
from tests.ray.cluster import ENVIRONMENT, FARM_KEY, shared_cluster

os.environ.update(ENVIRONMENT)  # before any test imports Ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.own_process("ray"))  # Ray starts threads of gRPC that never end, and a fork beside them may hang
            if "ray_address" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.fleet)


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of one node, for `ray.init(address=...)` in programs that a test starts."""
    with shared_cluster(_run_folder(tmp_path_factory)) as address:
        yield address


@pytest.fixture(scope="session")
def farm_key(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> BuilderKey:
    """The key with which the node of the cluster signs what it compiles."""
    return BuilderKey.load(_run_folder(tmp_path_factory) / FARM_KEY)


def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all test processes of the run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="module")
def ray_cluster(ray_address: str) -> Iterator[str]:
    """The address of a cluster, to which this process is connected for the tests of one module."""
    import ray

    ray.init(address=ray_address, log_to_driver=False, configure_logging=False, namespace="aionn-tests")
    try:
        yield ray_address
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_serve(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the cluster, in which Ray Serve runs without a proxy. It ends with the cluster, because test processes share it."""
    from filelock import FileLock
    from ray import serve

    base = tmp_path_factory.getbasetemp()
    with FileLock((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "serve-lock"):
        serve.start(proxy_location="Disabled")
    return ray_cluster
