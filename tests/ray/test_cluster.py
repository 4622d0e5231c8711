"""The node that the other tests use: started once for all test processes, and gone with the last of them."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("number", range(2))
def test_a_task_runs_on_the_node(ray_cluster: str, number: int) -> None:
    import ray

    def twice(value: int) -> int:
        return 2 * value

    assert ray.get(ray.remote(twice).options(num_cpus=0).remote(number), timeout=60) == 2 * number
