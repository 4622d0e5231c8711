"""The node that the other tests use: started once for all test processes, and gone with the last of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from tests.leaks import wait_for_end
from tests.ray.cluster import shared_cluster


@pytest.mark.parametrize("number", range(2))
def test_a_task_runs_on_the_node(ray_cluster: str, number: int) -> None:
    import ray

    def twice(value: int) -> int:
        return 2 * value

    assert ray.get(ray.remote(twice).options(num_cpus=0).remote(number), timeout=60) == 2 * number


@pytest.mark.soak  # a node takes as long to start as a hundred tests, and all users of a run come to the same one
@pytest.mark.fleet
def test_a_user_that_comes_after_the_last_one_gets_a_node_that_runs(tmp_path: Path) -> None:
    for _ in range(2):
        with shared_cluster(tmp_path) as address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
            with shared_cluster(tmp_path) as same:
                assert same == address
            (node,) = nodes_of(tmp_path)
        assert wait_for_end(node, 60)


def nodes_of(folder: Path) -> list[int]:
    fifo = os.fspath(folder / "ray-cluster")
    return [process.pid for process in psutil.process_iter(["cmdline"]) if fifo in (process.info["cmdline"] or ())]
