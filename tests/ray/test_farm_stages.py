"""F10: a farm makes a better stage, or is stopped while it does. The stream goes on in both cases.

The second case has a cluster of its own, whose processes are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest

from aionn.fleet import BuilderKey
from aionn.testing import FakeDevice
from tests.fleet.builders import trust
from tests.ray.cluster import ENVIRONMENT, FARM_KEY, shared_cluster

pytestmark = [pytest.mark.anyio, pytest.mark.fleet, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def own_cluster(tmp_path: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster whose workers follow the fake's orders. What its killed processes leave is removed."""
    folder = tempfile.mkdtemp(prefix="f10")  # Ray makes sockets below it, whose paths must be short
    monkeypatch.setenv("TMPDIR", folder)
    try:
        with shared_cluster(tmp_path) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class App:
    """The streaming app, in a process."""

    def __init__(self, folder: Path, address: str, *stages: str) -> None:
        (folder / "store").mkdir()
        (folder / "trusted").mkdir(mode=0o755)
        trust(folder / "trusted", BuilderKey.load(folder / FARM_KEY))
        environment = os.environ | ENVIRONMENT | {"AIONN_TRUSTED_BUILDERS": str(folder / "trusted")}
        command = [sys.executable, "-m", "tests.ray.streaming_app", address, str(folder), *stages]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pidfd = os.pidfd_open(self.process.pid)

    async def heard(self, fake: FakeDevice) -> int:
        """Wait until a driver compiles, and return its process id. The app must not end before."""
        pids: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.wait_readable(self.pidfd)
                pytest.fail(f"the app has ended: {self.process.communicate()[1]}")

            tasks.start_soon(end)
            pids.append(await fake.heard("compile"))
            tasks.cancel_scope.cancel()
        return pids[0]

    async def ended(self) -> dict[str, object]:
        output, errors = await asyncio.to_thread(self.process.communicate)
        assert self.process.returncode == 0, errors
        answer: dict[str, object] = json.loads(output)
        return answer


@pytest.mark.soak
async def test_the_stream_never_notices_a_farm_that_is_stopped(
    own_cluster: str, tmp_path: Path, fake: FakeDevice, best: FakeDevice
) -> None:
    fake.hang("compile")
    app = App(tmp_path, own_cluster, best.name, fake.name)
    try:
        with anyio.fail_after(150):
            driver = psutil.Process(await app.heard(fake))
            assert driver.ppid() != app.process.pid
            stop_cluster(tmp_path)
            while (compiling := await app.heard(fake)) == driver.pid:
                pass
            assert psutil.Process(compiling).ppid() == app.process.pid  # the app's own worker
            fake.behave()
            found = await app.ended()
    finally:
        app.process.kill()
        os.close(app.pidfd)
    assert (found["state"], found["made_by"]) == ("serving", "worker")
    assert "farm" in str(found["local_reason"]) or "backend" in str(found["local_reason"]), found
    assert int(str(found["frames"])) > 0


def stop_cluster(folder: Path) -> None:
    """SIGKILL the head of the node and all that it has started."""
    for process in psutil.process_iter():
        try:
            if str(folder / "ray-address") in process.cmdline():
                family = [process, *process.children(recursive=True)]
                break
        except psutil.Error:
            continue
    else:
        pytest.fail("there is no cluster")
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
