"""What `aionn doctor` says of the sandbox: the kernel's mechanisms, an outer sandbox that denies them, and each driver."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aionn.cli.checks import sandbox
from aionn.needs import Confinement
from aionn.sandbox import landlock
from tests.cli.doctor_runs import ROOT, Clinic
from tests.leaks import leak_check

HOLDS = ("limits", "no new privileges", "environment", "files", "system calls", "network", "processes", "signals")
FILTERED = "Name:\tpython\nSeccomp:\t2\n"


def filtered(root: Path) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(FILTERED)
    return root


def test_the_checks_change_nothing() -> None:
    before = confinement_of_this_process()
    with leak_check():
        rows = [check(Path("/")) for check in sandbox.CHECKS]
    assert [row.check for row in rows] == ["landlock", "seccomp", "made code"]
    assert confinement_of_this_process() == before


def confinement_of_this_process() -> list[str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("NoNewPrivs", "Seccomp"))]


@pytest.mark.parametrize("call", ["landlock_create_ruleset", "seccomp"])
def test_an_outer_sandbox_that_denies_a_mechanism_is_a_warning_and_drivers_run(tmp_path: Path, call: str) -> None:
    clinic = Clinic(tmp_path)
    outer = f"from tests.cli.denying import deny; deny({call!r})"
    row = call.partition("_")[0]
    clinic.environment["AIONN_SANDBOX"] = "auto"
    verdict = clinic.run("--device", "reference", first=outer)
    assert verdict.failed == []
    warned = [name for name, row in verdict.rows.items() if row["status"] == "warn"]
    assert {row, "sandbox reference"} <= set(warned)
    assert "Operation not permitted" in verdict.rows[row]["found"]
    assert f"allow {'the call seccomp' if row == 'seccomp' else call}" in verdict.rows[row]["way_out"]
    assert "see the rows landlock and seccomp" in verdict.rows["sandbox reference"]["way_out"]
    assert verdict.ok("engine reference")
    clinic.environment["AIONN_SANDBOX"] = "require"
    verdict = clinic.run("--device", "reference", first=outer)
    assert verdict.failed == ["engine reference"]
    assert "sandbox='require' cannot be had" in verdict.rows["engine reference"]["found"]


def test_a_sandbox_that_is_off_is_a_warning(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path, {"AIONN_SANDBOX": "off"})
    verdict = clinic.run("--device", "reference")
    assert verdict.rows["sandbox reference"]["status"] == "warn"
    assert "unset AIONN_SANDBOX" in verdict.rows["sandbox reference"]["way_out"]


def test_an_engine_that_states_no_needs_is_confined(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(
        "from aionn.engines.reference import ReferenceEngine\nclass Stranger(ReferenceEngine):\n    name = 'stranger'\n"
    )
    clinic = Clinic(tmp_path, {"PYTHONPATH": f"{ROOT}:{tmp_path}", "AIONN_SANDBOX": "auto"})
    row = clinic.run("--device", "stranger:Stranger").rows["sandbox stranger:Stranger"]
    assert row["status"] == "ok"
    assert row["found"].startswith("confined: files, ")


@pytest.mark.parametrize(
    ("number", "container", "way_out"),
    [
        (errno.ENOSYS, False, "built with CONFIG_SECURITY_LANDLOCK"),
        (errno.ENOSYS, True, "in the profile of the container"),
        (errno.EPERM, True, "in the profile of the container"),
        (errno.EOPNOTSUPP, False, "lsm="),
    ],
)
def test_a_kernel_without_landlock_has_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, container: bool, way_out: str
) -> None:
    def none() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(landlock, "best_abi", none)
    row = sandbox.files(filtered(tmp_path) if container else tmp_path)
    assert (row.status, way_out in row.way_out) == ("warn", True)
    assert os.strerror(number) in row.found


def test_an_early_landlock_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for abi, status in ((1, "warn"), (2, "warn"), (3, "ok"), (7, "ok")):
        monkeypatch.setattr(landlock, "best_abi", lambda abi=abi: abi)
        assert sandbox.files().status == status


def test_another_architecture_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    row = sandbox.system_calls()
    assert (row.status, row.way_out) == ("warn", "run on x86_64 or aarch64")


def test_a_driver_that_lacks_what_its_engine_asks_for_is_fine() -> None:
    (row,) = sandbox.confined("openvino", Confinement("auto", HOLDS, ("the engine makes code at run time",)))
    assert row.status == "ok"
    assert row.found == "confined: files, system calls, network, processes, signals; the engine makes code at run time"
    assert sandbox.confined("openvino", None) == []
