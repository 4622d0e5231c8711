"""Every error of aionn that a Ray task raises: `except aionn.X` catches it, and text and attributes are as they were raised."""

from __future__ import annotations

from typing import Any

import pytest

import aionn
from aionn.errors import AionnError, again
from tests.test_errors import KINDS, assert_same, sample

IN_TIME_S = 120


def raising() -> Any:
    """Return a task that raises what it gets. One worker runs all calls, because each one is waited for."""
    import ray

    def raise_it(error: BaseException) -> None:
        raise error

    return ray.remote(raise_it).options(num_cpus=0, max_retries=0)


def test_every_error_comes_back_as_itself(ray_cluster: str) -> None:
    import ray
    from ray.exceptions import RayTaskError

    task = raising()
    for name, kind in KINDS.items():
        wanted = sample(name)
        with pytest.raises(kind) as caught:
            ray.get(task.remote(sample(name)), timeout=IN_TIME_S)
        twin: Any = caught.value
        assert isinstance(twin, RayTaskError)
        assert_same(twin.cause, wanted)
        assert str(wanted) in str(twin)
        for attribute, value in vars(wanted).items():
            assert getattr(twin, attribute) == value, (name, attribute)


@pytest.mark.parametrize("kind", [aionn.DeadlineError, TimeoutError, AionnError])
def test_an_error_is_caught_by_its_name_and_by_its_bases(ray_cluster: str, kind: type[BaseException]) -> None:
    import ray

    with pytest.raises(kind, match="what was found; what was expected") as caught:
        ray.get(raising().remote(sample("DeadlineError")), timeout=IN_TIME_S)
    assert isinstance(caught.value, aionn.DeadlineError)
    assert caught.value.transient is False


def test_a_copy_for_one_more_caller_is_caught_as_well(ray_cluster: str) -> None:
    import ray

    with pytest.raises(aionn.DriverDiedError) as caught:
        ray.get(raising().remote(sample("DriverDiedError")), timeout=IN_TIME_S)
    for error in (caught.value, again(caught.value)):
        assert isinstance(error, aionn.DriverDiedError)
        assert (error.device, error.exit_code) == ("onnxruntime", -9)
        assert "ended by signal 9" in str(error)
