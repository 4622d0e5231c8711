"""What a node announces, and `aionn.ray` where Ray is not installed. No cluster is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from aionn.cli import main
from aionn.fleet.places import fingerprint
from aionn.ray import node_resources
from aionn.ray.resources import device_versions, resource_name
from aionn.testing import FakeDevice


def test_the_command_prints_what_ray_takes(capsys: pytest.CaptureFixture[str], fake: FakeDevice) -> None:
    assert main(["ray", "node-resources", "--device", fake.name, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    version = device_versions([fake.name])[fake.name]
    assert printed == {f"aionn-fp:{fingerprint(fake.name, version)[:16]}": 1.0} == node_resources([fake.name])
    assert main(["ray", "node-resources", "--device", fake.name]) == 0
    table = capsys.readouterr().out
    assert version in table
    assert resource_name(fake.name, version) in table


def test_another_version_is_another_resource(fake: FakeDevice) -> None:
    before = node_resources([fake.name])
    fake.tell(version="2")
    assert node_resources([fake.name]).keys().isdisjoint(before)


@pytest.mark.parametrize(("device", "why"), [("reference", "does not cache"), ("no such device", "no such device")])
def test_a_device_that_cannot_be_announced_is_an_error(capsys: pytest.CaptureFixture[str], device: str, why: str) -> None:
    assert main(["ray", "node-resources", "--device", device]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aionn: ")
    assert why in line


def test_ray_is_imported_when_it_is_needed_and_its_lack_is_one_sentence() -> None:
    program = """
        import sys
        sys.modules["ray"] = None
        import aionn.ray
        from aionn.ray import Farm, node_resources
        try:
            Farm("store")
        except ImportError as error:
            print(error)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "aionn.ray needs Ray; install it with: pip install 'aionn[ray]'\n"
