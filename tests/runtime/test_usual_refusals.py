"""What happens at every start of a healthy app is not a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore
from aionn.testing import FakeDevice, identity_model
from tests.caching.entries import fill, miss, replacing, stored, wanted

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_stage_that_a_comparison_rejects_is_no_warning_at_any_start(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    best.tell(outputs_offset=1.0)
    model = aionn.Model.from_onnx(identity_model())
    for _ in range(2):
        caplog.clear()
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(
                model,
                mode="staged",
                stages=(quick.name, best.name),
                cache_dir=tmp_path / "cache",
                token=model.token,
                stage_policy=aionn.StagePolicy(min_gain=None),
            )
            for _ in range(20):
                await compilation.compute({"input": np.ones((1, 16), np.float32)})
            with pytest.raises(aionn.StageRejected):
                await compilation.wait_for_stage(best.name)
        assert "was not swapped in" in caplog.text
        assert warnings(caplog) == []


async def test_a_process_that_another_one_was_quicker_than_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with CacheStore(tmp_path / "cache") as store:
        await stored(store, wanted())
        async with await replacing(store, wanted()) as better:
            fill(better.handles, b"better")
            better.based_on -= 1  # as if the stored generation had come since
            refusal = await better.publish()
        assert isinstance(refusal, Refusal)
        assert refusal.reason is MissReason.SUPERSEDED
        async with await miss(store, wanted(1)), await store.open(wanted(1), wait_s=0.0) as late:
            assert late.outcome.reason is MissReason.BUSY
            assert late.outcome.save_failure is not None
            store.warn(late.outcome.save_failure)
    assert "superseded" in caplog.text
    assert "busy" in caplog.text
    assert warnings(caplog) == []
