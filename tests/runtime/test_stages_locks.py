"""Four processes make and load one entry, JIT and in stages, while they are killed and the entry is removed at random: it stays whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.caching.outcomes import Refusal
from aionn.caching.store import CacheStore
from tests.apps import App
from tests.leaks import processes_with, wait_for_end
from tests.runtime.staging_app import BEST, MODEL

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_processes_killed_at_random_never_spoil_the_entry_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # drivers find the app's engines there
    mark = uuid.uuid4().hex
    monkeypatch.setenv("AIONN_TEST_MARK", mark)
    chance = random.Random(mark)
    cache_dir, log = tmp_path / "cache", tmp_path / "log"

    def start(mode: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            command = [sys.executable, "-m", "tests.runtime.staging_app", mode, str(cache_dir)]
            return App(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def told(*kinds: str) -> list[str]:
        lines = log.read_text(encoding="utf-8").splitlines()
        return [what for kind, _, what in (line.partition(" ") for line in lines) if kind in kinds]

    apps = {start(mode): mode for mode in ("jit", "staged", "jit", "staged")}
    until = time.monotonic() + seconds
    seen = 0
    try:
        # On a busy machine a process would never come to anything between two kills: something must have been stored or loaded.
        while time.monotonic() < until or len(told("stored")) < 2 or not told("loaded"):
            app = chance.choice(list(apps))
            while len(told("stored", "loaded")) <= seen:
                assert not wait_for_end(app.pid, 0.02), log.read_text(encoding="utf-8")
            seen = len(told("stored", "loaded"))
            # Its own end would be an answer that is not right; the time is drawn, so that it is killed anywhere.
            assert not wait_for_end(app.pid, chance.uniform(0.1, 1.5)), log.read_text(encoding="utf-8")
            app.kill()
            app.wait()
            apps.pop(app)
            mode = "staged" if chance.random() < 0.5 else "jit"
            apps[start(mode)] = mode
            if chance.random() < 0.3:  # or the first one's entry would be all that anybody loads
                async with CacheStore(cache_dir) as store:
                    assert not isinstance(await store.prune(0), Refusal)
    finally:
        for app in apps:
            app.kill()
            app.wait()
    for line in processes_with("AIONN_TEST_MARK", mark):
        assert wait_for_end(int(line.split()[1].rstrip(":")), 30), line
    async with CacheStore(cache_dir) as store:
        assert [bad async for bad in store.verify()] == []
    async with aionn.Runtime() as runtime:  # no lock is left behind
        model = aionn.Model.from_onnx(MODEL)
        for _ in range(2):
            compilation = await runtime.compile(model, devices=(BEST,), cache_dir=cache_dir, token=model.token, timeout_s=60)
        assert compilation.outcomes[0].kind.name == "HIT"
    assert "AssertionError" not in log.read_text(encoding="utf-8")
    # Every artifact that was found in the cache was one writer's, whole and recorded.
    assert told("mixed") == []
    assert told("refused") == []
    assert len(set(told("stored"))) == len(told("stored"))
    assert set(told("loaded")) <= set(told("stored"))
    assert told("loaded") != []
