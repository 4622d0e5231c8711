"""Surroundings that an app may find itself in. Run as `python -m tests.runtime.odd_surroundings DIRECTORY NAME...`.

A process of its own enters them, compiles a model through a cache, computes by both ways and writes `DIRECTORY/result.json`.
It has `entered` (by name, whether the surroundings were odd), and `error`, or what became of the cache. Exit code 77: the kernel forbids
them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.caching.unprivileged import NotPossibleError, _libc, mount_read_only, obey_modes

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_REC, _PRIVATE = 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_ADDR_NO_RANDOMIZE = 0x40000
MIB = 1 << 20

SURROUNDINGS: dict[str, Callable[[Path], object]] = {}
"""By name: what enters them, in the directory of the run. It returns what shows that they were entered, which is never false."""


def odd(enter: Callable[[Path], object]) -> Callable[[Path], object]:
    SURROUNDINGS[enter.__name__] = enter
    return enter


# --- the home directory and other folders


def _home(path: str) -> str:
    os.environ.pop("XDG_STATE_HOME", None)
    os.environ["HOME"] = path
    return path


@odd
def no_home(place: Path) -> object:
    return os.environ.pop("HOME", None) is None or "HOME" not in os.environ


@odd
def a_home_that_does_not_exist(place: Path) -> object:
    return not os.path.exists(_home(f"{place}/no/home"))


@odd
def a_home_that_is_a_file(place: Path) -> object:
    (place / "home").write_bytes(b"")
    return os.path.isfile(_home(f"{place}/home"))


@odd
def a_removed_working_directory(place: Path) -> object:
    (place / "gone").mkdir()
    os.chdir(place / "gone")
    (place / "gone").rmdir()
    return not os.path.exists(place / "gone")


@odd
def a_cache_of_a_strange_name(place: Path) -> object:
    os.chdir(place)
    os.environ["CACHE"] = "a b\n\u00fc'$(c)"
    return not os.path.isabs(os.environ["CACHE"])


@odd
def a_cache_below_a_long_path(place: Path) -> object:
    os.environ["CACHE"] = str(place.joinpath(*["d" * 200] * 15, "cache"))
    return len(os.environ["CACHE"]) > 3000


@odd
def a_cache_of_another_account(place: Path) -> object:
    (place / "cache").mkdir()
    _as_root()
    os.chown(place / "cache", 12345, 12345)
    return (place / "cache").stat().st_uid == 12345


@odd
def a_cache_that_others_may_write_to(place: Path) -> object:
    (place / "cache").mkdir()
    (place / "cache").chmod(0o777)
    return stat.S_IMODE((place / "cache").stat().st_mode) & 0o022


@odd
def a_cache_that_is_a_file(place: Path) -> object:
    (place / "cache").write_bytes(b"")
    return (place / "cache").is_file()


@odd
def a_read_only_cache(place: Path) -> object:
    (place / "cache").mkdir()
    mount_read_only(place / "cache")
    return not os.access(place / "cache", os.W_OK)


@odd
def a_full_cache(place: Path) -> object:
    return _full(place / "cache", 64 << 10)


@odd
def a_full_state_directory(place: Path) -> object:
    return _full(place / "state", 64 << 10)


@odd
def full_shared_memory_and_temporary_folders(place: Path) -> object:
    return [_full(path, 4096) for path in map(Path, ("/dev/shm", "/var/tmp")) if path.is_dir()]


@odd
def umask_777(place: Path) -> object:
    os.umask(0o777)
    return os.umask(0o777) == 0o777


@odd
def umask_0(place: Path) -> object:
    os.umask(0)
    return os.umask(0) == 0


def _as_root() -> None:
    if os.geteuid():
        raise NotPossibleError("only root can do this")


def _unshare(flags: int) -> bool:
    _as_root()
    _libc("unshare", flags)
    if flags & _NEWNS:
        _libc("mount", None, b"/", None, _REC | _PRIVATE, None)
    return True


def _mount(kind: str, path: Path, options: str = "") -> None:
    _libc("mount", kind.encode(), os.fsencode(path), kind.encode(), 0, options.encode() or None)


def _full(path: Path, size: int) -> bool:
    """Mount a small file system there, and fill it."""
    path.mkdir(exist_ok=True)
    _unshare(_NEWNS)
    _mount("tmpfs", path, f"size={size},nr_inodes=64,mode=0700")
    with (path / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    return os.statvfs(path).f_bavail == 0


# --- descriptors and limits


@odd
def closed_stdin(place: Path) -> object:
    return _close(0)


@odd
def closed_stdin_stdout_and_stderr(place: Path) -> object:
    return _close(0, 1, 2)


def _close(*fds: int) -> bool:
    for fd in fds:
        os.close(fd)
    return not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds)


@odd
def full_stdout_and_stderr(place: Path) -> object:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    return os.readlink("/proc/self/fd/2") == "/dev/full"


def _limit(which: int, most: int) -> bool:
    resource.setrlimit(which, (most, most))
    return resource.getrlimit(which) == (most, most)


@odd
def twenty_four_descriptors(place: Path) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 24


@odd
def twenty_four_descriptors_and_never_more(place: Path) -> object:
    return _limit(resource.RLIMIT_NOFILE, 24)


@odd
def files_of_1_mib(place: Path) -> object:
    return _limit(resource.RLIMIT_FSIZE, MIB)


@odd
def files_of_4_mib(place: Path) -> object:
    return _limit(resource.RLIMIT_FSIZE, 4 * MIB)


@odd
def no_core_files_and_no_locked_memory(place: Path) -> object:
    return _limit(resource.RLIMIT_CORE, 0) and _limit(resource.RLIMIT_MEMLOCK, 0)


@odd
def small_stacks(place: Path) -> object:
    return _limit(resource.RLIMIT_STACK, MIB)


@odd
def no_queued_signals(place: Path) -> object:
    return _limit(resource.RLIMIT_SIGPENDING, 0)


# --- processes, signals, scheduling


@odd
def pid_1(place: Path) -> object:
    _into_pids(_NEWNS)
    _mount("proc", Path("/proc"))
    return os.getpid() == 1 == int(os.readlink("/proc/self"))


@odd
def the_proc_of_another_pid_namespace(place: Path) -> object:
    _into_pids(0)
    return os.getpid() == 1 != int(os.readlink("/proc/self"))


@odd
def no_proc(place: Path) -> object:
    _unshare(_NEWNS)
    _mount("tmpfs", Path("/proc"))
    return not os.path.exists("/proc/self")


@odd
def a_proc_that_hides_processes(place: Path) -> object:
    _unshare(_NEWNS)
    _mount("proc", Path("/proc"), "hidepid=2")
    return os.path.exists("/proc/self/stat")


@odd
def no_sys(place: Path) -> object:
    _unshare(_NEWNS)
    _mount("tmpfs", Path("/sys"))
    return not os.path.exists("/sys/devices")


def _into_pids(more: int) -> None:
    """Go on in a child that is the first process of its namespace."""
    _unshare(_NEWPID | more)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


@odd
def every_signal_blocked(place: Path) -> object:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@odd
def ignored_sigchld(place: Path) -> object:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN


@odd
def usual_sigpipe(place: Path) -> object:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL


@odd
def sched_idle(place: Path) -> object:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return os.sched_getscheduler(0) == os.SCHED_IDLE


@odd
def sched_batch_and_nice(place: Path) -> object:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return os.nice(19) == 19


@odd
def one_cpu(place: Path) -> object:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return len(os.sched_getaffinity(0)) == 1


@odd
def a_session_without_terminal(place: Path) -> object:
    if os.getpid() != os.getsid(0):
        os.setsid()
    return os.getpid() == os.getsid(0)


@odd
def a_subreaper_without_new_privileges(place: Path) -> object:
    _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return "NoNewPrivs:\t1" in Path("/proc/self/status").read_text(encoding="ascii")


@odd
def a_process_without_dumps(place: Path) -> object:
    _libc("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0


@odd
def the_same_addresses_each_time(place: Path) -> object:
    return ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE) >= 0 and ctypes.CDLL(None).personality(0xFFFFFFFF) & _ADDR_NO_RANDOMIZE


@odd
def root_that_obeys_modes(place: Path) -> object:
    _as_root()
    obey_modes()
    (place / "closed").mkdir(mode=0o500)
    return not os.access(place / "closed", os.W_OK)


@odd
def no_network(place: Path) -> object:
    return _unshare(_NEWNET | _NEWIPC | _NEWUTS)


@odd
def a_user_namespace(place: Path) -> object:
    user, group = os.geteuid(), os.getegid()
    _libc("unshare", _NEWUSER)
    Path("/proc/self/setgroups").write_bytes(b"deny")
    Path("/proc/self/uid_map").write_bytes(b"%d %d 1" % (user, user))
    Path("/proc/self/gid_map").write_bytes(b"%d %d 1" % (group, group))
    return os.geteuid() == user


# --- the environment


@odd
def an_empty_environment(place: Path) -> object:
    os.environ.clear()
    return not os.environ


@odd
def an_unknown_locale_and_time_zone(place: Path) -> object:
    os.environ |= {"LC_ALL": "xx_XX.none", "LANG": "xx", "TZ": "Nowhere/None", "PYTHONUTF8": "0"}
    return os.environ["TZ"]


@odd
def ten_thousand_variables(place: Path) -> object:
    os.environ |= {f"VARIABLE_{number}": "x" * 40 for number in range(10_000)}
    return len(os.environ) > 10_000


@odd
def a_loop_in_another_thread(place: Path) -> object:
    return threading.current_thread() is threading.main_thread()  # `main` runs the app in a thread


def app(place: Path, found: dict[str, object]) -> None:
    """Compile, compute by both ways, compile again with the cache removed meanwhile."""
    import numpy as np

    import aionn
    from aionn.testing import identity_model

    cache = Path(os.environ.get("CACHE", place / "cache"))
    x = np.full((1, 16), 7, np.float32)

    async def run() -> None:
        async with aionn.Runtime(start=()) as runtime:
            for again in (False, True):
                if again and found["removed"]:
                    shutil.rmtree(cache)
                model = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
                compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=cache)
                np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x)
                async with compilation.burst() as burst:
                    np.testing.assert_array_equal((await burst.compute({"x": x}))["y"], x)
                (outcome,) = compilation.outcomes
                found.setdefault("outcomes", []).append(outcome.kind.value)  # type: ignore[attr-defined]
                if not again:
                    failure = outcome.save_failure
                    found.update(reason=failure and failure.reason.value, words=str(failure), health=str(runtime.health()))

    try:
        aionn.run(run)
    except aionn.AionnError as error:
        found["error"] = f"{type(error).__name__}: {error}"


def main(directory: str, *names: str) -> None:
    place = Path(directory)
    os.environ["XDG_STATE_HOME"] = str(place / "state")
    entered = {name: bool(SURROUNDINGS[name](place)) for name in names}
    found: dict[str, object] = {"entered": entered, "removed": "a_removed_cache" in names}
    if "a_loop_in_another_thread" in names:
        (thread := threading.Thread(target=app, args=(place, found))).start()
        thread.join()
    else:
        app(place, found)
    (place / "result.json").write_text(json.dumps(found), encoding="utf-8")


@odd
def a_removed_cache(place: Path) -> object:
    return True  # `app` removes it between two compiles


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NotPossibleError as error:
        print(error, file=sys.stderr)
        sys.exit(77)
