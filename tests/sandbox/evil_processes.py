"""Attacks on other processes: the app, another driver, and one that may be killed. And ways to start one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Callable

from tests.sandbox.evil_calls import ATTACKS, Attack, Target, attack, call, privileged

_SO_PEERPIDFD = 77
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_FIOSETOWN = 0x8901
_F_SETOWN_EX = 15


def _child(pid: int) -> None:
    """End a copy of this process at once, and wait for it in the first."""
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@attack
def fork(target: Target) -> None:
    _child(os.fork())


@attack
def clone(target: Target) -> None:
    _child(call("clone", int(signal.SIGCHLD), 0, 0, 0, 0, copies=True))


@privileged
def clone_with_a_user_namespace(target: Target) -> None:
    _child(call("clone", int(signal.SIGCHLD) | _CLONE_NEWUSER, 0, 0, 0, 0, copies=True))


@privileged
def clone_with_a_network_namespace(target: Target) -> None:
    _child(call("clone", int(signal.SIGCHLD) | _CLONE_NEWNET, 0, 0, 0, 0, copies=True))


@attack
def clone3(target: Target) -> None:
    given = (ctypes.c_uint64 * 11)()
    given[4] = int(signal.SIGCHLD)
    _child(call("clone3", given, ctypes.sizeof(given), copies=True))


@attack
def spawn(target: Target) -> None:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


@attack
def subprocess_by_vfork(target: Target) -> None:
    subprocess.run(["/bin/true"], check=True)


@attack
def shell(target: Target) -> None:
    if ctypes.CDLL(None).system(b"exit 0") != 0:
        raise OSError(errno.EPERM, "system() had no success")


@attack
def execute(target: Target) -> None:
    """Of a program that is not there: the kernel looks for it."""
    call("execve", b"/no-such-file-of-aionn", None, None, reaches=(errno.ENOENT,))


@attack
def execute_memory(target: Target) -> None:
    fd = os.memfd_create("program")
    try:
        os.write(fd, b"no program")
        call("execveat", fd, b"", (ctypes.c_char_p * 1)(), None, 0x1000, reaches=(errno.ENOEXEC,))
    finally:
        os.close(fd)


# Signals


def _signals(name: str, send: Callable[[int], object]) -> None:
    """Register an attack on each of the processes that a signal could reach."""
    for who in ("app", "sibling", "victim"):

        def act(target: Target, who: str = who) -> object:
            return send(getattr(target, who))

        ATTACKS[f"{name} of the {who}"] = act


def _queue(pid: int) -> None:
    info = struct.pack("@iii", 0, 0, -1) + bytes(116)  # SI_QUEUE
    call("rt_sigqueueinfo", pid, 0, info)


def _queue_to_thread(pid: int) -> None:
    call("rt_tgsigqueueinfo", pid, pid, 0, struct.pack("@iii", 0, 0, -1) + bytes(116))


_signals("kill", lambda pid: os.kill(pid, 0))
_signals("tkill", lambda pid: call("tkill", pid, 0))
_signals("tgkill", lambda pid: call("tgkill", pid, pid, 0))
_signals("queue a signal", _queue)
_signals("queue a signal to a thread", _queue_to_thread)
_signals("pidfd", lambda pid: os.close(os.pidfd_open(pid)))
_signals("get robust list", lambda pid: call("get_robust_list", pid, bytes(8), bytes(8)))
_signals("compare", lambda pid: call("kcmp", pid, os.getpid(), 0, 3, 3, reaches=(errno.EBADF,)))
_signals("pin", lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
_signals("reschedule", lambda pid: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)))
_signals("set parameters", lambda pid: os.sched_setparam(pid, os.sched_param(0)))
_signals("set attributes", lambda pid: call("sched_setattr", pid, struct.pack("@IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0), 0))
_signals("renice", lambda pid: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)))
_signals("change input priority", lambda pid: call("ioprio_set", 1, pid, 0))
_signals("read limits", lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE))
_signals("set limits", lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE)))
_signals("move pages", lambda pid: call("move_pages", pid, 0, None, None, None, 0))
_signals("migrate pages", lambda pid: call("migrate_pages", pid, 64, bytes(8), bytes(8), reaches=(errno.EINVAL,)))


@attack
def kill_the_group(target: Target) -> None:
    os.kill(0, 0)


@attack
def kill_everything(target: Target) -> None:
    os.kill(-1, 0)


@attack
def kill_by_a_file_that_is_ready(target: Target) -> None:
    """The kernel sends a signal of choice to the owner of a descriptor when it becomes readable."""
    one, other = socket.socketpair()
    with one, other:
        fcntl.fcntl(one, fcntl.F_SETOWN, target.victim)
        fcntl.fcntl(one, fcntl.F_SETSIG, int(signal.SIGURG))
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
        other.send(b"x")


@attack
def own_a_file_for_a_thread(target: Target) -> None:
    one, other = socket.socketpair()
    with one, other:
        fcntl.fcntl(one, _F_SETOWN_EX, struct.pack("@ii", 0, target.app))


@attack
def choose_the_signal_of_a_file(target: Target) -> None:
    one, other = socket.socketpair()
    with one, other:
        fcntl.fcntl(one, fcntl.F_SETSIG, int(signal.SIGKILL))


@attack
def own_a_socket_by_ioctl(target: Target) -> None:
    one, other = socket.socketpair()
    with one, other:
        fcntl.ioctl(one, _FIOSETOWN, struct.pack("@i", target.app))


@attack
def notice_a_broken_lease(target: Target) -> None:
    fd = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    finally:
        os.close(fd)


# Memory and descriptors of others


def _vector(address: int, length: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * 2)(address, length)


@attack
def read_memory_of_the_app(target: Target) -> None:
    found = ctypes.create_string_buffer(len(target.word))
    ours, theirs = _vector(ctypes.addressof(found), len(target.word)), _vector(target.address, len(target.word))
    assert call("process_vm_readv", target.app, ours, 1, theirs, 1, 0) == len(target.word)
    assert found.raw == target.word.encode()


@attack
def write_memory_of_the_app(target: Target) -> None:
    same = ctypes.create_string_buffer(target.word.encode())
    ours, theirs = _vector(ctypes.addressof(same), 1), _vector(target.address, 1)
    assert call("process_vm_writev", target.app, ours, 1, theirs, 1, 0) == 1


@attack
def read_memory_of_the_sibling(target: Target) -> None:
    found = ctypes.create_string_buffer(8)
    call("process_vm_readv", target.sibling, _vector(ctypes.addressof(found), 8), 1, _vector(4096, 8), 1, 0, reaches=(errno.EFAULT,))


@attack
def trace_the_victim(target: Target) -> None:
    call("ptrace", 0x4206, target.victim, 0, 0)  # PTRACE_SEIZE; the end of this thread detaches


@attack
def let_itself_be_traced(target: Target) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(0x59616D61, ctypes.c_ulong(target.victim), 0, 0, 0) != 0:  # PR_SET_PTRACER
        failed = ctypes.get_errno()
        if failed != errno.EINVAL:  # the kernel has no Yama
            raise OSError(failed, os.strerror(failed))


def _pidfd_of_the_peer() -> int:
    """Return a pidfd of the app: a UNIX socket gives the one of its peer (Linux 6.5)."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family == socket.AF_UNIX and sock.getpeername() in ("", b"", None):
                    return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:
            continue
    raise OSError(errno.ENOSYS, "no socket has a peer")


def _with_the_peer(name: str, *arguments: int | None, reaches: tuple[int, ...] = ()) -> None:
    pidfd = _pidfd_of_the_peer()
    try:
        call(name, pidfd, *arguments, reaches=reaches)
    finally:
        os.close(pidfd)


@attack
def take_a_descriptor_of_the_app(target: Target) -> None:
    pidfd = _pidfd_of_the_peer()
    try:
        fd = call("pidfd_getfd", pidfd, target.fd, 0)
        assert os.pread(fd, 64, 0).startswith(target.word.encode())
        os.close(fd)
    finally:
        os.close(pidfd)


@attack
def signal_the_peer_of_a_socket(target: Target) -> None:
    _with_the_peer("pidfd_send_signal", 0, None, 0)


@attack
def advise_the_memory_of_the_peer(target: Target) -> None:
    _with_the_peer("process_madvise", None, 0, 20, 0, reaches=(errno.EINVAL,))


@privileged
def enter_the_namespaces_of_the_peer(target: Target) -> None:
    _with_the_peer("setns", _CLONE_NEWNET)


@attack
def release_the_memory_of_the_peer(target: Target) -> None:
    _with_the_peer("process_mrelease", 0, reaches=(errno.EINVAL,))


def _files_of(who: str) -> None:
    def opened(name: str, flags: int = os.O_RDONLY) -> Attack:
        def act(target: Target) -> None:
            os.close(os.open(f"/proc/{getattr(target, who)}/{name.format(fd=target.fd)}", flags | os.O_NONBLOCK))

        return act

    for name in ("mem", "environ", "maps", "cmdline", "status", "stat", "auxv", "smaps", "pagemap", "io", "fdinfo", "task", "fd", "ns/net"):
        ATTACKS[f"open {name} of the {who}"] = opened(name)
    for name in ("root", "cwd"):
        ATTACKS[f"open {name} of the {who}"] = opened(name)
    ATTACKS[f"write mem of the {who}"] = opened("mem", os.O_WRONLY)
    ATTACKS[f"write oom_score_adj of the {who}"] = opened("oom_score_adj", os.O_WRONLY)
    ATTACKS[f"open the program of the {who}"] = opened("exe")
    ATTACKS[f"list the folder of the {who}"] = lambda target: os.listdir(f"/proc/{getattr(target, who)}")
    for name in ("exe", "cwd", "root", "fd/0"):
        ATTACKS[f"read the link {name} of the {who}"] = lambda target, name=name: os.readlink(f"/proc/{getattr(target, who)}/{name}")  # type: ignore[misc]


_files_of("app")
_files_of("sibling")


@attack
def open_a_descriptor_of_the_app(target: Target) -> None:
    fd = os.open(f"/proc/{target.app}/fd/{target.fd}", os.O_RDONLY)
    assert os.pread(fd, 64, 0).startswith(target.word.encode())
    os.close(fd)


@attack
def open_the_secret_by_the_root_of_the_app(target: Target) -> None:
    os.close(os.open(f"/proc/{target.app}/root{target.secret}", os.O_RDONLY))


@attack
def list_all_processes(target: Target) -> None:
    os.listdir("/proc")


# Its own limits


@attack
def raise_the_limit_of_core_files(target: Target) -> None:
    call("prlimit64", 0, int(resource.RLIMIT_CORE), struct.pack("@QQ", 0, 0), None)


@attack
def set_a_limit(target: Target) -> None:
    call("setrlimit", int(resource.RLIMIT_NOFILE), struct.pack("@qq", *resource.getrlimit(resource.RLIMIT_NOFILE)))


@attack
def become_another_user(target: Target) -> None:
    call("setuid", os.getuid())


@attack
def change_groups(target: Target) -> None:
    call("setgid", os.getgid())


@attack
def leave_the_session(target: Target) -> None:
    call("setsid", reaches=() if os.getsid(0) != os.getpid() else (errno.EPERM,))


@attack
def outlive_the_app(target: Target) -> None:
    """Without the signal at its parent's end it would go on alone. The value that it sets is the usual one."""
    if ctypes.CDLL(None, use_errno=True).prctl(1, ctypes.c_ulong(int(signal.SIGKILL)), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@attack
def change_its_own_group(target: Target) -> None:
    call("setpgid", 0, os.getpgid(0), reaches=(errno.EPERM,) if os.getsid(0) == os.getpid() else ())
