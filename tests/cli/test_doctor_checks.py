"""The doctor's checks one by one. The case is real where it can be made here, else the files of another machine are laid out."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.caching import blob_cache, integrity
from aionn.caching.private_folder import hold
from aionn.caching.store import index
from aionn.cli.checks import engines, folders, kernel, leavings, machine, processes
from aionn.pages.finding import find_headers
from aionn.pages.layout import RELEASE
from aionn.testing import FakeDevice, identity_model
from tests.apps import App, run_app
from tests.cli.doctor_runs import ROOT, Clinic, among_doctors
from tests.leaks import leak_check


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


# --- the kernel -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "status"), [("5.4.0-1", "ok"), ("6.18.44", "ok"), ("5.10", "ok"), ("5.3.18-lts", "fail"), ("4.19.0", "fail")]
)
def test_a_kernel_before_5_4_fails(release: str, status: str) -> None:
    assert kernel.kernel(release).status == status


def test_the_checks_of_the_kernel_pass_and_leave_nothing() -> None:
    with leak_check():
        rows = [check(Path("/")) for check in kernel.CHECKS] + kernel.child_processes()
    assert [row.check for row in rows if row.status != "ok"] == []


@pytest.mark.parametrize(("call", "row"), [("memfd_create", "memfd"), ("pidfd_open", "pidfd"), ("eventfd2", "eventfd")])
def test_a_call_that_seccomp_denies_is_named_and_no_engine_is_started(tmp_path: Path, call: str, row: str) -> None:
    clinic = Clinic(tmp_path)
    verdict = clinic.run("--device", "reference", first=f"from tests.cli.denying import deny; deny({call!r})")
    assert row in verdict.failed
    assert "Operation not permitted" in verdict.rows[row]["found"]
    assert "seccomp" in verdict.rows[row]["way_out"]
    assert "not started, because of" in verdict.rows["engines"]["found"]


# --- limits and containers --------------------------------------------------------------------------------------------------


def test_a_small_address_space_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, status in ((-1, "ok"), (8 << 30, "ok"), (2 << 30, "warn"), (1 << 28, "fail")):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, -1))
        assert machine.address_space().status == status


def test_a_hard_limit_on_files_has_another_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (200, 4096))
    assert "ulimit -n 1024" in machine.open_files().way_out
    monkeypatch.setattr("resource.getrlimit", lambda which: (200, 256))
    row = machine.open_files()
    assert row.status == "warn"
    assert "the hard limit is 256; leave the shell that has lowered it" in row.way_out


def test_an_app_that_is_frozen_or_has_no_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.python().status == "ok"
    for name, value, found in (("executable", "", "not set"), ("executable", "/no/such", "cannot be run"), ("frozen", True, "frozen")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, value, raising=False)
            row = machine.python()
            assert (row.status, found in row.found) == ("fail", True)


@pytest.mark.parametrize(
    ("quota", "status", "way_out"),
    [(100_000, "fail", "taskset -c 0"), (200_000, "warn", "Runtime(threads=1)"), (300_000, "ok", ""), (800_000, "ok", "")],
)
def test_a_quota_of_version_2_is_compared_with_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, status: str, way_out: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    files = {
        "proc/self/cgroup": "0::/app\n",
        "proc/self/mountinfo": "30 1 0:26 / /cg rw - cgroup2 cgroup2 rw\n",
        "cg/app/cpu.max": f"{quota} 100000\n",
        "cg/app/memory.max": str(64 << 20),
        "cg/app/memory.current": "0",
    }
    row = machine.cpus(lay_out(tmp_path, files))
    assert row.status == status
    assert way_out in row.way_out
    memory = machine.memory(tmp_path)
    assert (memory.status, "memory.max of cgroup /app leaves 67.1 MB" in memory.found) == ("fail", True)


# --- the machine ------------------------------------------------------------------------------------------------------------


def test_what_makes_a_machine_slow_is_a_warning_with_a_way_out(tmp_path: Path) -> None:
    clock = "sys/devices/system/clocksource/clocksource0"
    cpu = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {
        f"{clock}/current_clocksource": "hpet\n",
        f"{clock}/available_clocksource": "tsc hpet acpi_pm\n",
        f"{cpu}/scaling_governor": "powersave\n",
        f"{cpu}/scaling_driver": "acpi-cpufreq\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "proc/pressure/cpu": "some avg10=71.30 avg60=1 avg300=1 total=1\n",
    }
    slow = lay_out(tmp_path / "slow", files)
    checks = (machine.clock_source, machine.governor, machine.huge_pages, machine.busy)
    rows = [check(slow) for check in checks]
    assert [row.status for row in rows] == ["warn"] * 4
    assert rows[0].way_out == f"echo tsc > /{clock}/current_clocksource"
    lay_out(slow, {f"{cpu}/scaling_driver": "intel_pstate\n"})
    assert machine.governor(slow).status == "ok", "this driver speeds up under any governor"
    assert [check(tmp_path / "bare").status for check in checks] == ["ok"] * 4


def test_a_wall_clock_that_jumps_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now = machine.ClockWatch(), time.time()
    assert watch.row().status == "ok"
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert "-3600" in watch.row().found
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert watch.row().found == "it says 1970-01-01"


# --- engines ----------------------------------------------------------------------------------------------------------------


def test_two_packages_with_one_engine_name_fail_and_one_that_is_listed_twice_does_not() -> None:
    def point(name: str, value: str) -> EntryPoint:
        return EntryPoint(name, value, "aionn.engines")

    assert engines.engine_names([point("a", "x:A"), point("a", "x:A"), point("b", "y:B")]).status == "ok"
    row = engines.engine_names([point("a", "x:A"), point("a", "z:A")])
    assert row.status == "fail"
    assert "'a' is x:A of package ? and z:A of package ?" in row.found


@pytest.mark.anyio
async def test_a_provider_that_is_listed_and_does_not_load_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    name = "tests.cli.listing_engine:ListingEngine"
    rows = {row.check: row for row in await engines.engines([name])}
    assert {check: row.status for check, row in rows.items()} == {
        f"engine {name}": "ok",
        f"sandbox {name}": "ok",
        f"engine {name}:gone": "warn",
        "template": "ok",
    }
    assert "no card is plugged in" in rows[f"engine {name}:gone"].found


@pytest.mark.anyio
async def test_a_built_in_engine_without_its_library_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = await engines.engines(["onnxruntime", "openvino", "litert", "reference"])
    assert [(row.check, row.status) for row in rows] == [
        ("engine reference", "ok"),
        ("sandbox reference", "ok"),
        ("template", "ok"),
        ("engine onnxruntime", "ok"),
        ("engine openvino", "ok"),
        ("engine litert", "ok"),
        ("engines", "warn"),
    ]
    assert "pip install 'aionn[onnxruntime]'" in rows[3].found


# --- folders ----------------------------------------------------------------------------------------------------------------


def database(path: Path) -> Path:
    with sqlite3.connect(path) as made:
        integrity.make_tables(made)
        made.executemany("INSERT INTO tokens VALUES (?, 0)", [(str(number).encode() * 50,) for number in range(2000)])
    made.close()
    return path


def test_a_damaged_database_fails_until_it_is_removed_as_the_way_out_says(tmp_path: Path) -> None:
    for device in ("a", "b"):
        (tmp_path / device).mkdir()
    damaged = database(tmp_path / "a" / "integrity-a.sqlite")
    database(tmp_path / "b" / "integrity-b.sqlite")
    assert folders.state_directory(str(tmp_path))[0].found == f"{tmp_path}, 2 sound databases"
    content = bytearray(damaged.read_bytes())
    content[4096:12288] = b"\xff" * 8192
    damaged.write_bytes(content)
    row = folders.state_directory(str(tmp_path))[0]
    assert row.status == "fail"
    assert "a/integrity-a.sqlite" in row.found
    subprocess.run(["sh", "-c", row.way_out.rpartition("; to do so now, ")[2]], check=True)
    row = folders.state_directory(str(tmp_path))[0]
    assert row.found == f"{tmp_path}, 1 sound database"


@pytest.mark.parametrize("name", ["a/integrity-a.sqlite", "a/blobs-a.sqlite", "index.sqlite"])
def test_a_schema_that_a_driver_chose_is_refused_and_not_computed(tmp_path: Path, name: str) -> None:
    """SQLite's check of this one row takes 10 ** 13 steps."""
    (tmp_path / "a").mkdir()
    with closing(sqlite3.connect(tmp_path / name, isolation_level=None)) as made:
        made.execute("CREATE TABLE t (x TEXT)")
        made.execute("INSERT INTO t VALUES ('b')")
        made.execute("PRAGMA writable_schema=ON")
        slow = "y AS (instr(hex(zeroblob(5000000 + length(x))), hex(zeroblob(2500000 + length(x))) || x)) NOT NULL"
        made.execute("UPDATE sqlite_master SET sql=?", (f"CREATE TABLE t (x TEXT, {slow})",))
    check = folders.cache_directory if name == "index.sqlite" else folders.state_directory
    row = check(str(tmp_path))[0]
    assert (row.status, "not aionn's" in row.found) == ("fail", True)


@pytest.mark.parametrize(
    ("name", "make_tables"),
    [
        ("a/integrity-a.sqlite", integrity.make_tables),
        ("a/blobs-a.sqlite", blob_cache.make_tables),
        ("index.sqlite", index.make_tables),
    ],
)
def test_a_database_of_each_kind_is_sound(tmp_path: Path, name: str, make_tables: Callable[[sqlite3.Connection], None]) -> None:
    (tmp_path / "a").mkdir()
    with closing(sqlite3.connect(tmp_path / name)) as made, made:
        make_tables(made)
    check = folders.cache_directory if name == "index.sqlite" else folders.state_directory
    assert "1 sound database" in check(str(tmp_path))[0].found


def test_no_way_out_has_a_name_that_a_driver_chose(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir(mode=0o700)
    for name in ("integrity-;id;.sqlite", "$(id).sqlite", "integrity-a.sqlite"):
        (tmp_path / "a b" / name).write_text("damaged")
    row = folders.state_directory(str(tmp_path / "a b" / ".."))[0]
    assert (row.status, "id" in row.found + row.way_out) == ("fail", False)


def test_owners_modes_links_and_parents_of_folders(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for row in (folders.state_directory(str(link))[0], folders.cache_directory(str(link))[0]):
        assert "symlink" in row.found
        assert "chown" not in row.way_out, "another owner makes no folder of it"
        assert "remove or rename it" in row.way_out
    assert folders.state_directory(str(tmp_path / "new"))[0].status == "ok"
    assert folders.cache_directory(str(tmp_path / "new" / "deeper"))[0].status == "ok"
    assert not (tmp_path / "new").exists()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    row = folders.cache_directory(str(open_to_all))[0]
    assert (row.status, "mode 0777" in row.found) == ("fail", True)
    open_to_all.chmod(0o755)
    assert folders.cache_directory(str(open_to_all))[0].status == "ok"
    if os.geteuid() == 0:
        os.chown(open_to_all, 12345, 12345)
        for row in (folders.state_directory(str(open_to_all))[0], folders.cache_directory(str(open_to_all))[0]):
            assert (row.status, "belongs to user 12345" in row.found) == ("fail", True)
            assert "chown 0" in row.way_out


def test_a_network_file_system_and_files_of_the_future_are_warnings(tmp_path: Path) -> None:
    place = tmp_path / "home" / "state"
    place.mkdir(parents=True)
    mounts = "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + f"2 1 0:50 / {tmp_path / 'home'} rw - nfs4 server:/home rw\n"
    root = lay_out(tmp_path / "root", {"proc/self/mountinfo": mounts})
    assert folders.file_system(tmp_path, root) == "ext4"
    rows = {row.check: row for row in folders.state_directory(str(place), root)}
    assert rows["state file system"].found == f"{place} lies on nfs4"
    (place / "device").mkdir()
    later = database(place / "device" / "integrity.sqlite")
    os.utime(later, (time.time() + 7200, time.time() + 7200))
    rows = {row.check: row for row in folders.state_directory(str(place))}
    assert "2.0 h in the future" in rows["state times"].found


def test_little_space_is_a_warning_and_none_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    for free_bytes, status in ((1 << 30, "ok"), (100 << 20, "warn"), (1 << 20, "fail")):
        fields = list(real)
        fields[4] = free_bytes // real.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda path, fields=fields: os.statvfs_result(fields))
        rows = {row.check: row for row in folders.state_directory(str(tmp_path))}
        assert rows["state space"].status == status


# --- leavings, and --fix ------------------------------------------------------------------------------------------------------


def test_fix_removes_what_a_killed_compile_left_and_nothing_else(tmp_path: Path) -> None:
    """A compile that is killed leaves its staging. One that still goes on keeps its own."""
    cache = tmp_path / "cache"
    (tmp_path / "a.onnx").write_bytes(identity_model())
    (tmp_path / "b.onnx").write_bytes(identity_model({"x": (1, 3)}))
    command = [sys.executable, "-m", "aionn", "compile", "--cache-dir", str(cache), "--state-dir", str(tmp_path / "state"), "--device"]

    def staged() -> set[Path]:
        return {path for path in cache.glob("entries/*/*") if path.is_dir()}

    with FakeDevice() as fake:
        run_app([*command, fake.name, str(tmp_path / "a.onnx")], check=True, capture_output=True, timeout=60)
        whole = staged()
        (stranger := cache / "trash" / "of an app").write_text("mine")
        fake.hang("compile")
        compiling = [App([*command, fake.name, str(tmp_path / "b.onnx")], stderr=subprocess.DEVNULL)]
        anyio.run(fake.heard, "compile")
        (left,) = staged() - whole
        assert leavings.cache_leavings(cache) == 0, "its compiler lives"
        assert leavings.clean_cache(cache) == []
        assert left.exists()
        compiling[0].kill()
        compiling[0].wait()
    assert leavings.cache_leavings(cache) == 1
    rows = {row.check: row for row in folders.cache_directory(str(cache))}
    assert rows["cache leavings"].status == "warn"
    verdict = Clinic(tmp_path).run("--fix", "--device", "reference", "--cache-dir", str(cache))
    # An app that another test has killed at this moment leaves something, too.
    assert [line for line in verdict.fixed if not line.startswith("/dev/shm/aionn-")] == [f"{cache}: 1 leavings removed"]
    assert "cache leavings" not in verdict.rows
    assert staged() == whole
    assert stranger.read_text() == "mine"


@pytest.mark.parametrize("device", ["", "onnxruntime"])
def test_fix_removes_half_a_key_of_an_ended_process_only(tmp_path: Path, device: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = tmp_path / device
    folder.mkdir(exist_ok=True)
    old, young, living, other = (
        folder / name
        for name in (
            f"blob-cache.key.{ended.pid}.00112233",
            f"blob-cache.key.{ended.pid}.44556677",
            f"blob-cache.key.{os.getpid()}.00112233",
            f"notes.key.{ended.pid}.00112233",
        )
    )
    for path in (old, young, living, other):
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    os.utime(young)
    assert [row.check for row in folders.state_directory(str(tmp_path)) if row.status == "warn"] == ["state leavings"]
    assert leavings.clean_state(tmp_path) == [f"{old}: removed"]
    assert sorted(folder.iterdir()) == sorted([young, living, other])


def test_fix_removes_the_folder_of_a_device_that_no_driver_has_used_for_long(tmp_path: Path) -> None:
    unused, held, used, foreign = (tmp_path / name for name in ("unused", "held", "used", "foreign"))
    for folder in (unused, held, used, foreign):
        folder.mkdir()
        database(folder / "integrity-x-00.sqlite")
    (foreign / "notes").write_text("mine")
    for path in (*tmp_path.glob("*/*"), *tmp_path.iterdir()):
        os.utime(path, (0, 0))
    os.utime(used / "integrity-x-00.sqlite")
    fd = hold(held)
    try:
        rows = {row.check: row for row in folders.state_directory(str(tmp_path))}
        assert rows["state leavings"].found == "1 devices unused for 30 days"
        assert leavings.clean_state(tmp_path) == [f"{unused}: removed"]
    finally:
        os.close(fd)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "held", "used"]
    assert leavings.clean_state(tmp_path) == [f"{held}: removed"]


def test_fix_removes_folders_for_temporary_files_that_no_driver_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.caching.private_folder._places", lambda: (str(tmp_path),))
    left, held = tmp_path / "aionn-exports-1-00", tmp_path / "aionn-exports-2-00"
    left.mkdir()
    (left / "artifact").write_bytes(b"half")
    fd = hold(held)
    try:
        (row,) = folders.export_folders()
        assert (row.status, str(left) in row.found, str(held) in row.found) == ("warn", True, False)
        assert leavings.clean_exports() == [f"{left}: removed"]
        assert folders.export_folders() == []
    finally:
        os.close(fd)
    assert list(tmp_path.iterdir()) == [held]


@pytest.mark.parametrize("part", ["folder", "file"])
def test_fix_leaves_alone_what_belongs_to_another_account(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (left := tmp_path / "blob-cache.key.4194305.00112233").write_bytes(b"half")
    os.utime(left, (0, 0))
    assert leavings.state_leavings(tmp_path).unfinished == (left,)
    look = Path.lstat

    def of_another(self: Path) -> os.stat_result:
        fields = list(look(self))
        fields[stat.ST_UID] += self == (tmp_path if part == "folder" else left)
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", of_another)
    assert leavings.clean_state(tmp_path) == []
    assert left.exists()


def test_fix_follows_no_symlink(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    (left := there / "blob-cache.key.4194305.00112233").write_bytes(b"half")
    os.utime(left, (0, 0))
    (link := tmp_path / "link").symlink_to(there)
    assert leavings.clean_state(link) == []
    assert left.exists()
    (cache := tmp_path / "cache").mkdir()
    for name in ("entries", "locks"):
        (cache / name).mkdir()
    (cache / "trash").symlink_to(there)
    (trash := there / f"{'ab' * 32}.00112233").mkdir()
    verdict = Clinic(tmp_path).run("--fix", "--device", "reference", "--cache-dir", str(cache))
    assert verdict.fixed == []
    assert verdict.rows["cache directory"]["status"] == "fail", "all rows are there"
    assert trash.exists()


# --- processes ---------------------------------------------------------------------------------------------------------------

APP = """
import sys, threading
import aionn
if sys.argv[1] != "same":
    from aionn.pages import layout
    layout.RELEASE = sys.argv[1]

async def main():
    async with aionn.Runtime(start=("reference",)) as runtime:
        await runtime.devices[0].restart()
        print("ready", flush=True)
        sys.stdin.read()

aionn.run(main)
"""


def test_another_release_in_a_running_app_is_a_warning() -> None:
    command = [sys.executable, "-c", APP, "9.9.9"]
    with among_doctors(fcntl.LOCK_SH), App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as app:
        assert app.stdout is not None
        assert app.stdout.readline() == b"ready\n"
        roles = {header.role: header for header in find_headers() if header.release in ("9.9.9", RELEASE)}
        assert "driver" in roles, "a driver's page says its release, too"
        row = processes.releases()
        assert row.status == "warn"
        assert f"9.9.9 in app {app.pid}" in row.found
        assert processes.orphans() == [], "a driver beside its app is no orphan"
        app.send_signal(signal.SIGKILL)


def test_memory_with_the_name_of_a_page_that_is_none_is_passed_over() -> None:
    fd = os.memfd_create("aionn-stats", os.MFD_CLOEXEC)
    try:
        os.write(fd, bytes(101))
        assert os.getpid() not in [header.pid for header in find_headers()]
    finally:
        os.close(fd)


def test_a_process_in_another_time_namespace_is_a_warning() -> None:
    command = ["unshare", "--time", "--monotonic", "1000", sys.executable, "-c", APP, "same"]
    if subprocess.run([*command[:4], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this account may make no time namespace")
    with subprocess.Popen([*command[:4], "--fork", *command[4:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as app:
        assert app.stdout is not None
        assert app.stdout.readline() == b"ready\n"
        row = processes.time_namespaces()
        app.communicate(b"")
    assert row.status == "warn"
    assert "another one in" in row.found
