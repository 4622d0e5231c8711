"""The fixture `fake_device`: it works in a project without any engine, and names what a test leaves behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aionn.testing import FakeDevice
from aionn.testing.fake_engine import FakeEngine

PROJECT = """
import asyncio, os
import numpy as np
import pytest
import aionn
from aionn.testing import identity_model

async def use(fake_device):
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake_device.name,))
        await compilation.compute({"input": np.zeros((1, 16), np.float32)})

def test_clean_on_uvloop(fake_device):
    aionn.run(use, fake_device)

def test_clean(fake_device):
    asyncio.run(use(fake_device))

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_clean_in_a_loop_of_pytests(fake_device, anyio_backend):
    await use(fake_device)

def test_leaky(fake_device):
    global kept
    kept = os.pidfd_open(os.getpid())
"""


def test_acts_in_several_threads_are_each_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two acts that begin at the same moment are the second and the third, whichever looks first."""
    with FakeDevice() as fake:
        engine = FakeEngine()
        fake.fail(act="run", after=2)
        together = threading.Barrier(3)
        announce = engine.announce

        def announced_together(event: str) -> None:
            announce(event)
            together.wait(30)

        monkeypatch.setattr(engine, "announce", announced_together)
        failures: list[str] = []

        def act() -> None:
            try:
                engine.act("run")
            except RuntimeError as error:
                failures.append(str(error))

        threads = [threading.Thread(target=act) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == ["failed on demand"]


def test_a_clean_test_passes_and_a_leak_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_app.py").write_text(PROJECT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "5 passed, 1 error" in done.stdout, done.stdout
    assert "the test left behind: 1 descriptor(s) of" in done.stdout
