"""O15: one fault each. That row alone fails, its way out works, and a healthy machine has no failing row."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps import App
from tests.cli.doctor_runs import NOT_POSSIBLE, ROOT, Clinic, RealCgroup, among_doctors, limit
from tests.leaks import wait_for_end

QUICK = ("--device", "reference")


@pytest.fixture
def clinic(tmp_path: Path) -> Clinic:
    return Clinic(tmp_path)


def names_a_living_process(name: str) -> bool:
    """Return whether the name of a file is one that aionn gives, with the process that made it, and that process lives."""
    found = re.fullmatch(r"aionn-\w+-(\d+)-\w+", name)
    return found is not None and os.path.exists(f"/proc/{found[1]}")


def test_a_healthy_machine_passes_and_nothing_is_left(clinic: Clinic) -> None:
    before = set(os.listdir("/dev/shm"))
    verdict = clinic.run()
    assert verdict.failed == []
    for name in ("kernel", "memfd", "eventfd", "futex", "sockets", "pidfd", "parent death", "open files", "cpus", "memory"):
        assert verdict.ok(name), verdict.rows[name]
    for name in ("engine onnxruntime", "engine openvino", "engine reference"):
        assert "loads, compiles" in verdict.rows[name]["found"]
        assert verdict.ok(f"sandbox {name.removeprefix('engine ')}")
    assert verdict.ok("engine litert")
    assert "reads no ONNX" in verdict.rows["engine litert"]["found"]
    assert verdict.ok("sandbox litert")
    reference = (ROOT / "docs" / "reference" / "doctor.md").read_text()
    assert [name for name in verdict.rows if f"`{name}`" not in reference and not name.startswith(("engine ", "sandbox "))] == []
    # Names of processes that live are those of tests beside this one.
    assert [name for name in set(os.listdir("/dev/shm")) - before if not names_a_living_process(name)] == []
    assert list(clinic.directory.iterdir()) == [], "not even the state directory was made"


def test_a_memory_cgroup_of_64_mb_fails_alone(clinic: Clinic) -> None:
    with RealCgroup("memory") as cgroup:
        cgroup.set("memory.limit_in_bytes", 64 << 20)
        verdict = clinic.run(first=cgroup.enter)
        assert verdict.failed == ["memory"]
        assert "memory.limit_in_bytes of cgroup /aionn-doctor" in verdict.rows["memory"]["found"]
        assert verdict.rows["engines"]["found"] == "not started, because of memory"
        cgroup.set("memory.limit_in_bytes", 1 << 30)
        healed = clinic.run(*QUICK, first=cgroup.enter)
        assert healed.failed == []
        assert healed.ok("memory")
        assert healed.ok("engine reference")


def test_a_quota_of_one_cpu_fails_alone(clinic: Clinic) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU cannot exceed a quota of one")
    with RealCgroup("cpu") as cgroup:
        cgroup.set("cpu.cfs_period_us", 100_000)
        cgroup.set("cpu.cfs_quota_us", 100_000)
        verdict = clinic.run(*QUICK, first=cgroup.enter)
        assert verdict.failed == ["cpus"]
        assert "allows 1 of" in verdict.rows["cpus"]["found"]
        assert "a driver plans 1 thread" in verdict.rows["cpus"]["found"]
        one = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])"
        assert clinic.run(*QUICK, first=f"{cgroup.enter}\n{one}").ok("cpus"), "the second way out"
        cgroup.set("cpu.cfs_quota_us", 100_000 * os.cpu_count())  # type: ignore[operator]
        assert clinic.run(*QUICK, first=cgroup.enter).failed == []


def test_files_of_half_a_mb_fail_alone_and_name_the_way_out(clinic: Clinic) -> None:
    verdict = clinic.run(first=limit("RLIMIT_FSIZE", 512 << 10))
    assert verdict.failed == ["memory"]
    assert "RLIMIT_FSIZE of the process leaves 524.3 kB" in verdict.rows["memory"]["found"]
    assert "ulimit -f unlimited" in verdict.rows["memory"]["way_out"]
    assert "because of memory" in verdict.rows["engines"]["found"]


ENTER = """
import sys
from pathlib import Path
from tests.caching.required_cache import FAULTS
from tests.caching.unprivileged import NotPossibleError
place = Path({!r})
place.mkdir()
try:
    FAULTS[{!r}](place / "cache")
except NotPossibleError as error:
    print(error, file=sys.stderr)
    sys.exit({})
"""


@pytest.mark.parametrize(
    ("fault", "status", "found"),
    [
        ("read_only", "fail", "is read-only: it holds no entry and can get none, so every start compiles again"),
        ("read_only_with_the_model", "warn", "is read-only: it is used, and nothing new is stored"),
        ("full", "fail", "No space left on device: nothing new is stored, so every start compiles again"),
    ],
)
def test_a_cache_that_cannot_keep_anything_fails_its_row(fault: str, status: str, found: str, clinic: Clinic, tmp_path: Path) -> None:
    entering = ENTER.format(str(tmp_path / "home"), fault, NOT_POSSIBLE)
    verdict = clinic.run(*QUICK, "--cache-dir", str(tmp_path / "home" / "cache"), first=entering)
    row = verdict.rows["cache directory"]
    assert (row["status"], found in row["found"]) == (status, True), row
    assert "give another cache_dir" in row["way_out"]


def test_a_cache_that_cannot_be_made_fails_its_row(clinic: Clinic) -> None:
    row = clinic.run(*QUICK, "--cache-dir", "/proc/nowhere/cache").rows["cache directory"]
    assert (row["status"], "is not there, and" in row["found"]) == ("fail", True), row


def test_64_open_files_fail_alone(clinic: Clinic) -> None:
    verdict = clinic.run(first=limit("RLIMIT_NOFILE", 64))
    assert verdict.failed == ["open files"]
    assert "enough for 4 bursts" in verdict.rows["open files"]["found"]
    healed = clinic.run(*QUICK, first=limit("RLIMIT_NOFILE", 1024))
    assert healed.failed == []
    assert healed.ok("open files")


OBEY = "from tests.caching.unprivileged import obey_modes; obey_modes()"


def test_a_state_directory_that_cannot_be_written_to_fails_alone(clinic: Clinic) -> None:
    clinic.state.mkdir(mode=0o500)
    verdict = clinic.run(*QUICK, first=OBEY)
    assert verdict.failed == ["state directory"]
    assert "mode 0500" in verdict.rows["state directory"]["found"]
    assert f"chmod 0700 {clinic.state}" in verdict.rows["state directory"]["way_out"]
    clinic.state.chmod(0o700)
    healed = clinic.run(*QUICK, first=OBEY)
    assert healed.failed == []
    assert healed.ok("state directory")


def install(folder: Path, package: str, name: str, place: str) -> Path:
    """What pip notes of a package with one engine."""
    dist = folder / f"{package}-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text(f"[aionn.engines]\n{name} = {place}\n")
    return dist


@pytest.mark.parametrize(
    ("kind", "found"),
    [("Missing", "the licence has expired"), ("Wrong", "its outputs differ from the reference"), ("Dying", "ended by signal 9")],
)
def test_a_broken_engine_fails_alone(clinic: Clinic, kind: str, found: str) -> None:
    dist = install(clinic.directory, "broken", "broken", f"tests.cli.broken_engines:{kind}")  # the command's folder is on its path
    verdict = clinic.run(*QUICK, "--device", "broken")
    assert verdict.failed == ["engine broken"]
    assert found in verdict.rows["engine broken"]["found"]
    assert verdict.ok("engine reference")
    if kind == "Missing":  # the way out: uninstall it
        for file in dist.iterdir():
            file.unlink()
        dist.rmdir()
        assert clinic.run().failed == []


def test_an_orphan_driver_fails_alone_and_fix_kills_it_and_no_other(clinic: Clinic) -> None:
    """A driver without its parent death signal whose loop stands still, and beside it the driver of an app that lives."""

    def start() -> tuple[subprocess.Popen[bytes], int]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        app = App([sys.executable, "-m", "tests.cli.orphaning_app"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert app.stdout is not None
        driver = int(app.stdout.readline().split()[1])
        assert app.stdout.readline() == b"orphaning\n", "its driver stands still from now on"
        return app, driver

    clinic.alone = True
    with among_doctors(fcntl.LOCK_EX):
        (dead, orphan), (live, driver) = start(), start()
        with dead, live:
            try:
                dead.kill()
                dead.wait()
                assert not wait_for_end(orphan, 0.5), "it lives on, so the case occurred"
                verdict = clinic.run(*QUICK)
                assert verdict.failed == ["orphan drivers"]
                assert verdict.rows["orphan drivers"]["found"] == f"process {orphan} of app {dead.pid}"
                healed = clinic.run("--fix", *QUICK)
                assert healed.failed == []
                assert healed.fixed == [f"driver {orphan} of app {dead.pid}: killed"]
                assert wait_for_end(orphan, 30)
                assert not wait_for_end(driver, 0), "the driver of a living app goes on"
            finally:
                for pid in (orphan, driver):
                    if not wait_for_end(pid, 0):
                        os.kill(pid, signal.SIGKILL)
                live.kill()
