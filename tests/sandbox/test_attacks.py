"""A hostile engine inside a real driver: no attack has success under the sandbox, and each could have without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aionn
from aionn.cli.checks.sandbox import files, system_calls
from tests.sandbox import evil_files, evil_kernel, evil_network, evil_processes
from tests.sandbox.asking import WORD, ask, attacked, targets
from tests.sandbox.evil_calls import ATTACKS, MADE_CODE, OPTIONAL, PRIVILEGED, Target
from tests.sandbox.evil_engine import EVIL, EVIL_COMPILER, Question

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

ROOT = Path(__file__).parents[2]
WHOLE = {"files", "system calls", "network", "processes", "signals", "no made code"}
BOTH = pytest.mark.parametrize("device", [EVIL, EVIL_COMPILER])


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with targets(tmp_path) as found:
        yield found
        assert Path(found.secret).read_text() == WORD


def holds(runtime: aionn.Runtime, device: str) -> set[str]:
    (found,) = (entry.sandbox for entry in runtime.devices if entry.name == device)
    assert found is not None
    return set(found.holds)


def allowed(device: str) -> set[str]:
    """What an engine may do because the app has said so."""
    return MADE_CODE if device == EVIL_COMPILER else set()


def allowed_to_lack(device: str) -> set[str]:
    return {"no made code"} if device == EVIL_COMPILER else set()


@BOTH
@pytest.mark.parametrize("template", [True, False])
@pytest.mark.skipif(any(row.status != "ok" for row in (files(), system_calls())), reason="this kernel confines no driver")
async def test_no_attack_from_inside_a_driver_has_success(device: str, template: bool, target: Target) -> None:
    async with attacked(device, "auto", target, template=template) as (runtime, compilation, aim):
        assert holds(runtime, device) >= WHOLE - allowed_to_lack(device)
        answer = await ask(compilation, Question(tuple(ATTACKS), aim))
    assert [text.partition(" ")[0] for text in answer.while_compiling] == ["denied", "denied"]
    assert answer.outcomes.keys() == ATTACKS.keys()
    wrong = {name: found for name, found in answer.outcomes.items() if not found.startswith(("denied E", "missing E"))}
    assert wrong == dict.fromkeys(allowed(device), "success")
    assert sorted(os.listdir(target.folder)) == ["empty", "file", "removed", "renamed"]


async def test_each_attack_has_success_without_a_sandbox(target: Target) -> None:
    """Else the test above would prove nothing."""
    async with attacked(EVIL, "off", target) as (_, compilation, aim):
        answer = await ask(compilation, Question(tuple(ATTACKS), aim))
    failed = {name: found for name, found in answer.outcomes.items() if found != "success"}
    failed = {name: found for name, found in failed.items() if not (name in OPTIONAL and found.startswith("missing"))}
    if os.geteuid() != 0:
        failed = {name: found for name, found in failed.items() if name not in PRIVILEGED}
    assert failed == {}
    assert len(ATTACKS) > 250


def of_files(name: str) -> bool:
    """Return whether only Landlock stands against an attack."""
    return ATTACKS[name].__module__ == evil_files.__name__ or name.startswith(
        ("open ", "write mem ", "write oom_score_adj ", "list ", "read the link ")
    )


@BOTH
def test_without_landlock_the_filter_alone_stands_against_all_but_files(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sandbox.old_kernel_app", device, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    outcomes, held = msgspec.json.decode(done.stdout, type=tuple[dict[str, str], list[str]])
    assert "files" not in held
    if "system calls" not in held:
        pytest.skip("this kernel takes no filter of system calls")
    assert outcomes["open the secret"] == "success"
    had_success = {name for name, found in outcomes.items() if not found.startswith(("denied E", "missing E"))}
    assert {name for name in had_success if not of_files(name)} == allowed(device)


def test_attacks_of_every_kind_are_there() -> None:
    modules = {found.__module__ for found in ATTACKS.values()}
    assert modules == {module.__name__ for module in (evil_files, evil_kernel, evil_network, evil_processes)}
