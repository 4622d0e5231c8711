"""What is confined when: one thread, before anything heavy is imported, and on kernels that lack mechanisms."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.testing import identity_model

ROOT = Path(__file__).parents[2]
BY_FILTER = {"system calls", "network", "processes", "signals"}
FILES = "files are free, and so is the memory of the user's other processes, because "
NO_LANDLOCK = FILES + "this kernel has no Landlock (it comes with Linux 5.13)"
SWITCHED_OFF = FILES + "Landlock is switched off on this machine (add landlock to `lsm=` on the kernel's command line)"
DENIED = FILES + "an outer sandbox denies Landlock (Operation not permitted)"
NO_FILTER = "system calls, network and processes are free, because the kernel or an outer sandbox refuses a filter of system calls (%s)"
MADE_CODE = "memory may be writable and executable, because neither the kernel (since Linux 6.3) nor a filter of system calls denies it"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def python(code: str, *arguments: str, pass_fds: tuple[int, ...] = (), path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that may use the tests."""
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=pass_fds,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path or str(ROOT)},
    )


def printed(code: str, *arguments: str) -> Any:
    ran = python(code, *arguments)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def of_app(answers: tuple[str, ...], *levels: str) -> list[dict[str, Any]]:
    """What a real model's app sees where calls are answered so."""
    app = (sys.executable, "-m", "tests.sandbox.confined_app", "onnxruntime", *levels)
    command = [sys.executable, "-m", "tests.sandbox.outer", *answers, "--", *app]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("answers", "lacks", "unmet"),
    [
        (("landlock_create_ruleset=ENOSYS",), [NO_LANDLOCK], [NO_LANDLOCK]),
        (("landlock_create_ruleset=EOPNOTSUPP",), [SWITCHED_OFF], [SWITCHED_OFF]),
        (("landlock_create_ruleset=EPERM",), [DENIED], [DENIED]),
        (("seccomp=EPERM",), [NO_FILTER % "Operation not permitted"], [NO_FILTER % "Operation not permitted"]),
        (("seccomp=EINVAL",), [NO_FILTER % "Invalid argument"], [NO_FILTER % "Invalid argument"]),
        (("prctl:65=EINVAL",), [], []),  # the filter denies made code instead
        (
            ("landlock_create_ruleset=ENOSYS", "seccomp=ENOSYS", "prctl:65=EINVAL"),
            [NO_LANDLOCK, NO_FILTER % "Function not implemented", MADE_CODE],
            [NO_LANDLOCK, NO_FILTER % "Function not implemented"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_auto_works_where_the_kernel_lacks_mechanisms_and_require_refuses(
    answers: tuple[str, ...], lacks: list[str], unmet: list[str]
) -> None:
    """Row A6, with a real model."""
    auto, require = of_app(answers, "auto", "require")
    assert (auto.get("sum"), auto["lacks"]) == (1.0, lacks)
    holds = set(auto["holds"])
    assert {"limits", "no new privileges", "environment"} <= holds
    assert ("files" in holds) == (not any(lack.startswith("files") for lack in lacks))
    assert ("network" in holds) == (not any(lack.startswith("system calls") for lack in lacks))
    assert ("no made code" in holds) == (MADE_CODE not in lacks)
    if unmet:
        assert require["error"] == "DeviceUnavailableError"
        assert require["text"] == f"device 'onnxruntime' cannot start: sandbox='require' cannot be had: {'; '.join(unmet)}"
    else:
        assert require["sum"] == 1.0


WITH_OLD_LANDLOCK = """
    import json, os, sys
    from aionn.sandbox import landlock
    from aionn.sandbox.confining import SandboxError, confine
    from aionn.needs import Needs
    folder, abi, level = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    landlock.best_abi = lambda: abi
    try:
        found = confine(level, Needs(reads=(folder + "/read",)), (folder + "/write",))
    except SandboxError as error:
        print(json.dumps(str(error)))
        raise SystemExit
    def tried(act):
        try:
            act()
        except OSError as error:
            return error.strerror
        return "done"
    file = folder + "/other/file"
    print(json.dumps({
        "holds": found.holds,
        "lacks": found.lacks,
        "read": tried(lambda: os.open(folder + "/read/file", os.O_RDONLY)),
        "write": tried(lambda: os.open(folder + "/write/file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
        "read other": tried(lambda: os.open(file, os.O_RDONLY)),
        "write other": tried(lambda: os.open(file, os.O_WRONLY)),
        "make other": tried(lambda: os.open(file + "2", os.O_WRONLY | os.O_CREAT)),
        "cut by path": tried(lambda: os.truncate(file, 0)),
        "cut by opening": tried(lambda: os.open(file, os.O_RDONLY | os.O_TRUNC)),
        "cut in access mode 3": tried(lambda: os.open(file, 3 | os.O_TRUNC)),
        "cut what may be read": tried(lambda: os.open(folder + "/read/file", os.O_RDONLY | os.O_TRUNC)),
        "list": tried(lambda: os.listdir(folder + "/other")),
    }))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("read", "write", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content", encoding="ascii")
    return tmp_path


@pytest.mark.parametrize("abi", [1, 2, 3, 5, 6])
def test_with_an_older_landlock_no_file_is_cut_and_require_refuses_before_version_3(folder: Path, abi: int) -> None:
    found = printed(WITH_OLD_LANDLOCK, str(folder), str(abi), "auto")
    alone = f"only the filter of system calls protects files from being cut, because this kernel's Landlock has version {abi}"
    assert found.pop("lacks") == ([alone] if abi < 3 else [])
    assert {"files", "signals"} <= set(found.pop("holds"))
    assert (found.pop("read"), found.pop("write")) == ("done", "done")
    assert {what for what, became in found.items() if became not in ("Permission denied", "Operation not permitted")} == set()
    assert (folder / "other" / "file").read_text() == (folder / "read" / "file").read_text() == "content"
    required = printed(WITH_OLD_LANDLOCK, str(folder), str(abi), "require")
    if abi < 3:
        assert required == f"sandbox='require' cannot be had: {alone}"
    else:
        assert required["lacks"] == []


BEGUN = """
    import json, os, sys
    from aionn.driver.beginning import begin
    begun = begin(["onnxruntime", sys.argv[1], "0", sys.argv[2], "auto"])
    heavy = {"numpy", "uvloop", "anyio", "asyncio", "onnxruntime", "onnx", "sqlite3"}
    print(json.dumps([len(os.listdir("/proc/self/task")), sorted(heavy & set(sys.modules)), begun.confinement.level, begun.refusal]))
"""


def test_a_driver_is_confined_with_one_thread_and_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Row A2."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ran = python(BEGUN, str(theirs.fileno()), str(tmp_path / "state"), pass_fds=(theirs.fileno(),))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [1, [], "auto", ""]


THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.anyio
async def test_a_driver_with_a_second_thread_refuses_to_serve(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREAD, encoding="ascii")
    model = aionn.Model.from_onnx(identity_model())
    for level in ("auto", "require"):
        async with aionn.Runtime(sandbox=level, driver_env={"PYTHONPATH": str(tmp_path)}) as runtime:
            with pytest.raises(aionn.DeviceUnavailableError) as caught:
                await runtime.compile(model, devices=("reference",))
        assert str(caught.value) == (
            "device 'reference' cannot start: it has 2 threads before it is confined, and each would keep its rights; remove what starts "
            "a thread when Python starts (sitecustomize, .pth files), or choose sandbox='off'"
        )
    async with aionn.Runtime(sandbox="off", driver_env={"PYTHONPATH": str(tmp_path)}) as runtime:
        await runtime.compile(model, devices=("reference",))


@pytest.mark.anyio
async def test_needs_that_cannot_be_read_keep_the_driver_from_starting(tmp_path: Path) -> None:
    (tmp_path / "wrong_engine.py").write_text("raise SystemExit('it was imported')", encoding="ascii")
    (tmp_path / "wrong_engine.aionn-engine.toml").write_text("reads = ['models']", encoding="ascii")
    async with aionn.Runtime(sandbox="auto", driver_env={"PYTHONPATH": str(tmp_path)}) as runtime:
        with pytest.raises(
            aionn.DeviceUnavailableError,
            match=r"/wrong_engine\.aionn-engine\.toml: reads is \['models'\]; it must be a list of absolute paths",
        ):
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("wrong_engine:Wrong",))


PERSONALITY = """
    import ctypes, json, mmap, os, sys
    libc = ctypes.CDLL(None)
    libc.personality(ctypes.c_ulong(0x040_0000))  # READ_IMPLIES_EXEC, as `setarch -X` does
    from aionn.sandbox.confining import confine
    from aionn.needs import Needs
    found = confine("auto", Needs())
    mmap.mmap(-1, 1 << 20).write(b"x")
    print(json.dumps("no made code" in found.holds))
"""


def test_a_process_whose_readable_memory_is_executable_gives_that_up() -> None:
    assert printed(PERSONALITY) is True


WITHIN = """
    import json, os
    from aionn.sandbox.confining import confine
    from aionn.needs import Needs
    confine("auto", Needs())
    def tried(path, flags):
        try:
            os.close(os.open(path, flags))
        except OSError as error:
            return error.strerror
        return "done"
    proc = ("/proc/self/mem", "/proc/self/clear_refs", "/proc/self/oom_score_adj", "/proc/self/coredump_filter", "/proc/self/comm")
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    print(json.dumps([{tried(path, os.O_RDWR) for path in proc} == {"Permission denied"}, tried("/proc/self/status", os.O_RDONLY),
                      str(os.getpid()), sorted(path for path in held if path.startswith("/proc"))]))
"""


def test_a_driver_reads_its_own_facts_and_writes_none() -> None:
    """A write to /proc/self/mem would pass by every protection of memory. And names in use are not dropped where memory is short."""
    denied, status, pid, held = printed(WITHIN)
    assert denied
    assert status == "done"
    assert {f"/proc/{pid}", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm"} <= set(held)
