"""What aionn needs of the kernel, found by trying it. A sandbox may forbid a call that the kernel has."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from aionn.cgroups import text_of
from aionn.cli.checks import ROOT, Row, fail, ok, warn
from aionn.errors import AionnError, DeadlineError
from aionn.loopless import is_readable

LEAST = (5, 4)
"""The first kernel with pidfd_open and waitid on a pidfd."""

_ENDS_WITHIN_S = 5.0
"""How long a killed process may take to end on a busy machine."""

_CHILD = """
import ctypes, os
refused = ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
os.write(1, b"n" if refused else b"y")
os.read(0, 1)
"""
"""A child that asks for SIGKILL at its parent's end (PR_SET_PDEATHSIG), answers whether it may, and waits for the end of its stdin."""


def kernel(release: str = "") -> Row:
    """Check the kernel's version."""
    release = release or os.uname().release
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if numbers >= LEAST:
        return ok("kernel", f"Linux {release}")
    return fail("kernel", f"Linux {release}", "Linux 5.4 or later", "run a newer kernel; in a container it is the host's")


def _refused(check: str, call: str, error: OSError, root: Path) -> Row:
    """Return a row for a call that the kernel refused."""
    filtered = "Seccomp:\t2" in text_of(root / "proc/self/status")
    why = "a seccomp filter is active in this process, so allow the call in the profile of the container" if filtered else "allow the call"
    return fail(check, f"{call} fails: {error.strerror or error}", call, f"{why}, or run aionn outside the sandbox")


def sealed_memory(root: Path = ROOT) -> Row:
    """Check that memory can be made without a file, and sealed."""
    policy = text_of(root / "proc/sys/vm/memfd_noexec").strip()
    try:
        fd = os.memfd_create("aionn-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if policy == "2":
            return fail(
                "memfd", "memfd_create fails, and vm.memfd_noexec is 2", "vm.memfd_noexec 0 or 1", "set it with sysctl -w vm.memfd_noexec=1"
            )
        return _refused("memfd", "memfd_create", error, root)
    try:
        os.ftruncate(fd, 4096)
        os.posix_fallocate(fd, 0, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return _refused("memfd", "fcntl(F_ADD_SEALS) on a memfd", error, root)
    finally:
        os.close(fd)
    return ok("memfd", f"memory without a file, sealed{f', vm.memfd_noexec {policy}' if policy else ''}")


def event_descriptors(root: Path = ROOT) -> Row:
    """Check that eventfds wake `poll`."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        return _refused("eventfd", "eventfd", error, root)
    try:
        os.eventfd_write(fd, 1)
        woken = is_readable(fd, 1.0)
    finally:
        os.close(fd)
    if woken:
        return ok("eventfd", "works")
    return fail("eventfd", "poll does not see an eventfd that was written to", "an eventfd that poll sees", "run aionn on a Linux kernel")


def shared_queue(root: Path = ROOT) -> Row:
    """Check a queue in shared memory: a wait by futex on the empty queue ends with its deadline."""
    try:
        from aionn.fmq import MessageQueue

        queue = MessageQueue.create("u1", 64)
        try:
            queue.read_in_thread(1, 0.001)
        except DeadlineError:
            return ok("futex", "a queue in shared memory works, and a wait by futex ends in time")
        finally:
            queue.close()
    except OSError as error:
        return _refused("futex", "a futex in shared memory", error, root)
    except AionnError as error:
        return fail("futex", str(error), "a queue in shared memory", "free memory or descriptors, or raise their limits")
    return fail("futex", "a wait by futex on an empty queue came back with data", "a wait that ends in time", "report this to aionn")


def descriptors_over_sockets(root: Path = ROOT) -> Row:
    """Check that a Unix socket carries descriptors, as from the app to a driver."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [ours.fileno()])
            _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
            for fd in fds:
                os.close(fd)
    except OSError as error:
        return _refused("sockets", "sending a descriptor over a Unix socket", error, root)
    if fds:
        return ok("sockets", "Unix sockets carry descriptors")
    return fail(
        "sockets", "a Unix socket dropped the descriptor that was sent", "descriptors over Unix sockets", "allow SCM_RIGHTS in the sandbox"
    )


def child_processes(root: Path = ROOT) -> list[Row]:
    """Check with a throw-away child that it dies with its parent, and that a pidfd follows it.

    The kernel sends the parent's death signal when the *thread* ends that has started the child. So a short thread starts it.
    """
    from aionn.runtime.processes.spawning import start_python

    (child_reads, we_write), (we_read, child_writes) = map(_high, os.pipe()), map(_high, os.pipe())
    opened = {child_reads, we_write, we_read, child_writes}
    started: list[int | OSError] = []
    answers: list[bytes] = []

    def close(*fds: int) -> None:
        for fd in opened.intersection(fds):
            opened.remove(fd)
            os.close(fd)

    def start() -> None:
        try:
            started.append(start_python(_CHILD, child_reads, child_writes))
        except OSError as error:
            started.append(error)
        close(child_reads, child_writes)
        if is_readable(we_read, 10 * _ENDS_WITHIN_S):
            answers.append(os.read(we_read, 1))

    try:
        (thread := threading.Thread(target=start, name="aionn doctor")).start()
        thread.join()
        if isinstance(child := started[0], OSError):
            return [_refused("parent death", "starting a child process", child, root)]
        died = is_readable(we_read, _ENDS_WITHIN_S) and not os.read(we_read, 1)
        close(we_write)  # a child that lives on ends by this
        return [_pidfd(child, root), _parent_death(b"".join(answers), died)]
    finally:
        close(*opened)


def _high(fd: int) -> int:
    """Return the same pipe under a number above the standard streams, which a daemon has closed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)


def _pidfd(pid: int, root: Path) -> Row:
    """Wait for the child by a pidfd, and without one if that is refused."""
    call = "pidfd_open"
    try:
        fd = os.pidfd_open(pid)
        try:
            if not is_readable(fd, _ENDS_WITHIN_S):
                call = "pidfd_send_signal"
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            call = "waitid(P_PIDFD)"
            os.waitid(os.P_PIDFD, fd, os.WEXITED)
        finally:
            os.close(fd)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still the child's
        os.waitpid(pid, 0)
        return _refused("pidfd", call, error, root)
    return ok("pidfd", "the end of a process is seen by its pidfd")


def _parent_death(answer: bytes, died: bool) -> Row:
    check, needed = "parent death", "SIGKILL to a child whose parent has ended (PR_SET_PDEATHSIG)"
    if not answer:
        return fail(check, "the child process ended before it answered", needed, "see stderr for what kept Python from starting")
    if answer != b"y":
        return fail(check, "prctl(PR_SET_PDEATHSIG) is refused", needed, "allow prctl in the seccomp profile of the container")
    if not died:
        return fail(check, "the child lived on after its parent", needed, "run aionn on a real Linux kernel, not on an imitated one")
    return ok(check, "a driver dies with its app")


def idle_priority(root: Path = ROOT) -> Row:
    """Check that a thread may go below all others (SCHED_IDLE), as drivers of low priority do."""
    refused: list[OSError] = []

    def go_below() -> None:
        try:
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:
            refused.append(error)

    (thread := threading.Thread(target=go_below, name="aionn doctor")).start()
    thread.join()
    if not refused:
        return ok("idle priority", "drivers of low priority leave the CPU to others")
    row = _refused("idle priority", "sched_setscheduler(SCHED_IDLE)", refused[0], root)
    return warn(row.check, row.found, 'SCHED_IDLE, for compile(priority="low")', row.way_out)


CHECKS: tuple[Callable[[Path], Row], ...] = (
    sealed_memory,
    event_descriptors,
    shared_queue,
    descriptors_over_sockets,
    idle_priority,
)
