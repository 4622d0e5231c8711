"""A process without a free file descriptor cannot look for engines: one clear error, and never a shorter list of engines."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import aionn
from aionn.engines.installed import installed_engines
from tests.descriptors import free_descriptors

pytestmark = pytest.mark.anyio


async def test_entering_a_runtime_without_a_free_descriptor_is_one_clear_error() -> None:
    async with aionn.Runtime(start=()):
        pass  # what a runtime needs is imported from now on, and the next one reads no file for it
    runtime = aionn.Runtime()
    with free_descriptors(0), pytest.raises(aionn.MemoryAllocationError, match=r"no free file descriptor .*RLIMIT_NOFILE") as caught:
        async with runtime:
            pass
    assert isinstance(caught.value.__cause__, OSError)
    async with aionn.Runtime() as runtime:
        assert "reference" in [device.name for device in runtime.devices]


def test_few_descriptors_give_every_engine_or_the_error() -> None:
    every, refused = installed_engines().keys(), 0
    for count in range(4):
        with free_descriptors(count):
            try:
                found = installed_engines().keys()
            except aionn.MemoryAllocationError:
                refused += 1
            else:
                assert found == every
        assert installed_engines().keys() == every  # the shortage has left nothing behind
    assert refused == 1


def test_the_first_look_of_a_process_without_a_free_descriptor_is_the_same_error() -> None:
    """The first look also imports `importlib.metadata`, which reads files."""
    app = """
        import os, resource, sys
        from aionn import MemoryAllocationError
        from aionn.engines.installed import installed_engines

        assert "importlib.metadata" not in sys.modules
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            print(len(installed_engines()))
        except MemoryAllocationError as error:
            print(type(error.__cause__).__name__)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert "reference" in installed_engines()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(app)], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("OSError\n", "", 0)
