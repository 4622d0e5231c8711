"""Allocation never lies: each limit is reported beforehand, by name, with need and have; no process is killed for asking."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aionn import cgroups
from aionn.errors import MemoryAllocationError
from aionn.memory import limits
from aionn.memory.limits import Limit

MIB = 2**20


def machine(root: Path, *, cgroup: str, mounts: str, available_kb: int | None = None, files: dict[str, str] | None = None) -> Path:
    """A machine's /proc and cgroup mounts, laid out in a folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mounts)
    if available_kb is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\n")
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_MOUNT = "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def v2(path: str, limit: str, used: int, inactive_file: int = 0, active_file: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    stat = f"anon 5\nfile 7\ninactive_file {inactive_file}\nactive_file {active_file}\n"
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n", f"{folder}/memory.stat": stat}


def of_cgroups(root: Path) -> list[Limit]:
    return [limit for limit in limits.limits(root) if "cgroup" in limit.name]


def test_every_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    files = v2("/app/driver", "max", 10) | v2("/app", str(100 * MIB), 60 * MIB) | v2("", str(90 * MIB), 70 * MIB)
    root = machine(tmp_path, cgroup="0::/app/driver\n", mounts=V2_MOUNT, files=files)
    assert of_cgroups(root) == [Limit("memory.max of cgroup /app", 40 * MIB), Limit("memory.max of cgroup /", 20 * MIB)]
    limits.require(20 * MIB, root)
    with pytest.raises(MemoryAllocationError, match=r"memory.max of cgroup / leaves") as caught:
        limits.require(20 * MIB + 1, root)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (20 * MIB + 1, 20 * MIB)


def test_page_cache_that_can_be_dropped_is_not_in_use(tmp_path: Path) -> None:
    files = v2("/app", str(100 * MIB), 99 * MIB, inactive_file=50 * MIB, active_file=20 * MIB)
    root = machine(tmp_path, cgroup="0::/app\n", mounts=V2_MOUNT, files=files)
    assert of_cgroups(root) == [Limit("memory.max of cgroup /app", 61 * MIB)]


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/app\n", mounts=V2_MOUNT, files=v2("/app", "100", 200))
    assert of_cgroups(root) == [Limit("memory.max of cgroup /app", 0)]


def test_cgroup_v1_and_hybrid_mounts_are_read(tmp_path: Path) -> None:
    mounts = (
        "31 1 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    files = {
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{64 * MIB}\n",
        "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": f"{60 * MIB}\n",
        "sys/fs/cgroup/memory/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * MIB}\ntotal_active_file {2 * MIB}\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5\n",
    }
    root = machine(tmp_path, cgroup="9:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n", mounts=mounts, files=files)
    assert of_cgroups(root) == [Limit("memory.limit_in_bytes of cgroup /a/b", 7 * MIB)]


def test_a_container_that_is_told_the_hosts_path_finds_its_own_part(tmp_path: Path) -> None:
    mounts = "30 1 0:26 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files = v2("", str(50 * MIB), 10 * MIB) | v2("/sub", str(30 * MIB), 10 * MIB)
    told = [Limit("memory.max of cgroup /sub", 20 * MIB), Limit("memory.max of cgroup /", 40 * MIB)]
    assert of_cgroups(machine(tmp_path / "a", cgroup="0::/docker/ab/sub\n", mounts=mounts, files=files)) == told
    # In a cgroup namespace the path does not begin with the mount's root; what is mounted is all there is to see.
    assert of_cgroups(machine(tmp_path / "b", cgroup="0::/\n", mounts=mounts, files=files)) == told[1:]
    assert of_cgroups(machine(tmp_path / "c", cgroup="0::/docker/abc\n", mounts=mounts, files=files)) == told[1:]


def test_a_machine_that_tells_nothing_forbids_nothing(tmp_path: Path) -> None:
    assert of_cgroups(tmp_path) == []
    limits.require(2**40, tmp_path)
    root = machine(tmp_path / "odd", cgroup="", mounts="garbage\n\n1 - 2\n", available_kb=None)
    assert of_cgroups(root) == []


def test_the_machines_own_memory_is_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT, available_kb=1000)
    assert limits.tightest(root) == Limit("MemAvailable of the machine", 1_024_000)
    with pytest.raises(MemoryAllocationError, match="1024001 bytes of shared memory are needed and MemAvailable"):
        limits.require(1_024_001, root)


# --- what was read lately ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of `limits` in nanoseconds."""
    now = [10**12]
    monkeypatch.setattr(limits, "monotonic_ns", lambda: now[0])
    return now


@pytest.fixture
def container(tmp_path: Path, clock: list[int]) -> Path:
    """A container of 64 MiB, of which 24 are in use."""
    return machine(tmp_path, cgroup="0::/app\n", mounts=V2_MOUNT, files=v2("/app", str(64 * MIB), 24 * MIB))


def use(root: Path, used: int) -> None:
    (root / "sys/fs/cgroup/app/memory.current").write_text(str(used))


def test_small_reservations_read_the_limits_once_and_are_counted(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    text = cgroups.text_of

    def counted(path: str | Path) -> str:
        nonlocal reads
        reads += 1
        return text(path)

    monkeypatch.setattr(cgroups, "text_of", counted)
    limits.require(MIB, container)
    first, reads = reads, 0
    assert first > 0
    for _ in range(4):
        limits.require(MIB, container)
    assert reads == 0
    limits.require(MIB, container)  # more than an eighth of 39 MiB with the four before it
    assert 0 < reads < first  # where the files are is known


def test_reservations_on_one_reading_are_an_eighth_of_what_was_left_at_most(container: Path) -> None:
    limits.require(MIB, container)
    use(container, 63 * MIB)  # another process has taken the rest
    taken = 0
    with pytest.raises(MemoryAllocationError, match=r"memory.max of cgroup /app leaves 1048576"):
        while True:
            limits.require(2 * MIB, container)
            taken += 2 * MIB
    assert 0 < taken <= 39 * MIB // 8


def test_a_reading_serves_for_a_tenth_of_a_second(container: Path, clock: list[int]) -> None:
    limits.require(4096, container)
    use(container, 64 * MIB)
    clock[0] += round(limits.REMEMBERED_S * 1e9) - 1
    limits.require(4096, container)
    clock[0] += 1
    with pytest.raises(MemoryAllocationError, match=r"4096 bytes of shared memory are needed and memory.max of cgroup /app leaves 0"):
        limits.require(4096, container)
    use(container, 0)
    limits.require(4096, container)  # a refusal is never remembered
    assert limits.REMEMBERED_S == 0.1


def test_a_large_reservation_is_judged_by_what_is_left_now(container: Path) -> None:
    limits.require(4096, container)
    use(container, 0)
    limits.require(64 * MIB, container)
    use(container, 44 * MIB)
    with pytest.raises(MemoryAllocationError, match="leaves 20971520"):
        limits.require(20 * MIB + 1, container)


def test_a_process_that_was_moved_has_the_limits_of_its_new_cgroup(container: Path, clock: list[int]) -> None:
    limits.require(4096, container)
    machine_files = v2("/other", str(MIB), MIB)
    for name, content in machine_files.items():
        (container / name).parent.mkdir(exist_ok=True)
        (container / name).write_text(content)
    (container / "proc/self/cgroup").write_text("0::/other\n")
    clock[0] += 10**9
    with pytest.raises(MemoryAllocationError, match=r"memory.max of cgroup /other leaves 0"):
        limits.require(4096, container)


# --- in a process of its own, under real limits ----------------------------------------------------------------------------

ASK = """
import fcntl, os, resource, sys
from aionn.errors import MemoryAllocationError
from aionn.hal import MemoryDescription, MemoryKind
from aionn.memory.region import MappingError, Region
MIB = 2**20

def refused(size):
    try:
        region = Region.allocate(size)
    except MemoryAllocationError as error:
        assert error.needed_bytes == size, error
        print(error)
        return error
    raise SystemExit(f"{size} bytes were promised")

def used(size):
    region = Region.allocate(size)
    view = region.view()
    view[:] = bytes([1]) * size
    return region
"""


def in_a_process(body: str) -> str:
    """Run it to its end; a process that is killed, or fails, is an error here."""
    done = subprocess.run([sys.executable, "-c", ASK + body], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_rlimit_fsize_is_named() -> None:
    said = in_a_process(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
assert refused(4 * MIB + 1).available_bytes == 4 * MIB
used(4 * MIB)
"""
    )
    assert "RLIMIT_FSIZE of the process leaves 4194304" in said


def test_limits_of_the_process_are_never_remembered() -> None:
    said = in_a_process(
        """
used(MIB)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
assert refused(4097).available_bytes == 4096
"""
    )
    assert "4097 bytes of shared memory are needed and RLIMIT_FSIZE of the process leaves 4096" in said


def test_rlimit_as_is_named_and_mapping_beyond_it_is_a_mapping_error() -> None:
    said = in_a_process(
        """
peer = Region.allocate(256 * MIB)
fd, description = os.dup(peer.fileno()), peer.description
peer.close()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, size + 64 * MIB))
assert refused(128 * MIB).available_bytes <= 64 * MIB
used(8 * MIB)
try:
    Region.attach(fd, description)
except MappingError as error:
    assert error.status == 2
else:
    raise SystemExit("it was mapped")
"""
    )
    assert "RLIMIT_AS of the process leaves" in said


def test_rlimit_nofile_is_named() -> None:
    said = in_a_process(
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
held = []
try:
    while True:
        held.append(Region.allocate(4096))
except MemoryAllocationError as error:
    print(error)
held.pop().close()
before = len(os.listdir("/proc/self/fd"))
for _ in range(50):
    try:
        Region.allocate(4096).close()
    except MemoryAllocationError:
        pass
assert len(os.listdir("/proc/self/fd")) == before
"""
    )
    assert "RLIMIT_NOFILE is 20" in said


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 48 MiB below our own, where the machine lets us make one."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in own:
        folder, limit_file = Path("/sys/fs/cgroup/memory" + own["memory"]), "memory.limit_in_bytes"
    else:
        folder, limit_file = Path("/sys/fs/cgroup" + own.get("", "/")), "memory.max"
    folder = folder / f"aionn-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / limit_file).write_text(str(48 * MIB))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_a_process_in_a_small_cgroup_is_told_and_never_killed(small_cgroup: Path) -> None:
    # What the interpreter and its modules take (pages read from disk count as well) is not charged: the process goes in afterwards.
    said = in_a_process(
        f"open({str(small_cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        """
refused(64 * MIB)
held = [used(8 * MIB)]
error = refused(48 * MIB)
assert error.available_bytes is not None and error.available_bytes < 48 * MIB
while True:
    try:
        held.append(used(4 * MIB))
    except MemoryAllocationError:
        break
assert 3 <= len(held) <= 12, len(held)
# Memory that a peer has only promised must not be paid for by the process that maps it.
fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 64 * MIB)
fcntl.fcntl(fd, 1033, 2)
try:
    Region.attach(fd, MemoryDescription(MemoryKind.ASHMEM, 64 * MIB))
except MemoryAllocationError as error:
    assert error.needed_bytes == 64 * MIB
else:
    raise SystemExit("the holes were taken for memory")
"""
    )
    assert small_cgroup.name in said
