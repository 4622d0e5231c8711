"""The seccomp filter, asked by an interpreter of BPF: every number, on both architectures, and the arguments of checked calls."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from aionn.sandbox.filter import ALLOWED, ANSWERED, CHECKED, DENIED, ERRORS, LAST_KNOWN, MACHINES, program
from tests.sandbox.bpf import Call, Program

ALLOW, ERROR, TRAP = 0x7FFF_0000, 0x0005_0000, 0x0003_0000
I386, X32 = 0x4000_0003, 0x4000_0000
HIGH = 1 << 32
"""A bit of an argument that the kernel ignores where the argument is an int, but not where it is a pointer."""

HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}
OTHER_WORDS = {"newfstatat": "fstatat"}  # asm-generic's word for the same call

ME = os.getpid()
STREAM, DATAGRAM, SEQUENCED, CLOEXEC, NONBLOCK = 1, 2, 5, 0o2000000, 0o4000
THREAD = 0x3D0F00  # what the C library passes to clone for a thread
NEW_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)

# name, arguments, whether it is allowed
CASES: list[tuple[str, tuple[int, ...], bool]] = [
    ("clone", (THREAD,), True),
    ("clone", (THREAD | HIGH,), True),
    ("clone", (0x1200011,), False),  # fork
    ("clone", (0x4111,), False),  # vfork
    *(("clone", (THREAD | flag,), False) for flag in NEW_NAMESPACES),
    ("ioctl", (1, 0x5401), True),
    ("ioctl", (1, 0x5413), True),
    ("ioctl", (1, 0x541B), True),
    ("ioctl", (1, 0x5421), True),
    ("ioctl", (1, 0x4008_6200), True),
    ("ioctl", (1, 0x5412), False),  # TIOCSTI
    ("ioctl", (1, 0x5412 | HIGH), False),
    ("ioctl", (1, 0x541C), False),  # TIOCLINUX
    ("ioctl", (1, 0x8901), False),  # FIOSETOWN
    ("ioctl", (1, 0x5452), False),  # FIOASYNC
    ("ioctl", (1, 0x4004_6601), False),
    ("prctl", (15,), True),
    ("prctl", (15 | HIGH,), True),
    ("prctl", (0x5356_4D41,), True),
    ("prctl", (1,), False),  # PR_SET_PDEATHSIG
    ("prctl", (4, 1), False),  # PR_SET_DUMPABLE
    ("prctl", (22, 2), False),  # PR_SET_SECCOMP
    ("prctl", (38, 1), False),
    ("prctl", (0x59616D61, 1), False),  # PR_SET_PTRACER
    ("socketpair", (1, STREAM), True),
    ("socketpair", (1, STREAM | CLOEXEC), True),
    ("socketpair", (1, STREAM | NONBLOCK), True),
    ("socketpair", (1, STREAM | CLOEXEC | NONBLOCK), True),
    ("socketpair", (1, DATAGRAM), False),  # could send to any named socket
    ("socketpair", (1, DATAGRAM | CLOEXEC), False),
    ("socketpair", (1, 3), False),  # SOCK_RAW is a datagram socket here
    ("socketpair", (1, SEQUENCED), False),
    ("socketpair", (2, STREAM), False),
    ("socketpair", (30, STREAM), False),  # AF_TIPC
    ("sendto", (3, 0x1000, 8, 0, 0, 0), True),
    ("sendto", (3, 0x1000, 8, 0, 0x2000, 16), False),
    ("sendto", (3, 0x1000, 8, 0, HIGH, 16), False),
    ("kill", (ME, 6), True),
    ("kill", (0, 9), False),
    ("kill", (-1, 9), False),
    ("kill", (ME + 1, 9), False),
    ("kill", (1, 0), False),
    ("tgkill", (ME, 5, 6), True),
    ("tgkill", (ME + 1, ME + 1, 6), False),
    ("prlimit64", (0, 7, 0, 0x1000), True),
    ("prlimit64", (ME, 7, 0, 0x1000), True),
    ("prlimit64", (ME + 1, 7, 0, 0x1000), False),
    ("prlimit64", (0, 7, 0x1000, 0), False),
    ("prlimit64", (ME, 7, HIGH, 0), False),
    ("utimensat", (3, 0, 0, 0), True),
    ("utimensat", (3, 0x1000, 0, 0), False),
    ("utimensat", (3, HIGH, 0, 0), False),
    ("sched_setaffinity", (0, 128, 0x1000), True),
    ("sched_setaffinity", (ME, 128, 0x1000), True),
    ("sched_setaffinity", (1, 128, 0x1000), False),
    ("madvise", (0x1000, 4096, 4), True),
    ("madvise", (0x1000, 4096, 100), False),  # MADV_HWPOISON
    ("madvise", (0x1000, 4096, 101), False),  # MADV_SOFT_OFFLINE
    ("fcntl", (3, 1030, 0), True),
    ("fcntl", (3, 4, 0o4000), True),
    ("fcntl", (3, 1033, 0xF), True),
    ("fcntl", (3, 8, 1), False),  # F_SETOWN
    ("fcntl", (3, 10, 9), False),  # F_SETSIG
    ("fcntl", (3, 15, 0x1000), False),  # F_SETOWN_EX
    ("fcntl", (3, 1024, 1), False),  # F_SETLEASE
    ("fcntl", (3, 1026, 1), False),  # F_NOTIFY
    *(("openat", (-100, 0x1000, flags, 0o666), allowed) for flags, allowed in (
        (os.O_RDONLY, True),
        (os.O_RDONLY | os.O_CLOEXEC, True),
        (os.O_WRONLY, True),
        (os.O_RDWR | os.O_CREAT, True),
        (os.O_WRONLY | os.O_TRUNC, True),
        (os.O_RDWR | os.O_TRUNC | os.O_CREAT, True),
        (os.O_RDONLY | os.O_TRUNC, False),
        (3, False),
        (3 | os.O_TRUNC, False),
    )),
    ("mmap", (0, 4096, 7, 0x22), True),  # without the rule about made code
    ("mprotect", (0x1000, 4096, 7), True),
]  # fmt: skip


def asked(machine: str, name: str, arguments: tuple[int, ...], **settings: bool) -> int:
    column, architecture = MACHINES[machine]
    for table in (ALLOWED, CHECKED, ANSWERED, DENIED):
        if name in table:
            return Program(program(machine, **settings)).answer(Call(table[name][column], architecture, arguments))
    raise KeyError(name)


def numbers_of(header: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(encoding="ascii"), re.MULTILINE):
        found.setdefault(name, int(number))
    return found


@pytest.mark.parametrize("machine", sorted({"aarch64", os.uname().machine}))  # each system has the header of aarch64
def test_the_numbers_are_the_kernels(machine: str) -> None:
    header = HEADERS[machine]
    assert header.is_file(), f"this test needs {header}; install the kernel's headers (linux-libc-dev)"
    column, known = MACHINES[machine][0], numbers_of(header)
    tables = [(name, numbers[column]) for table in (ALLOWED, CHECKED, ANSWERED, DENIED) for name, numbers in table.items()]
    kernels = {name: known.get(name, known.get(OTHER_WORDS.get(name, ""), -1)) for name, _ in tables}
    assert [(name, number, kernels[name]) for name, number in tables if number != kernels[name]] == []
    assert len(tables) == len(dict(tables))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strict", [False, True])
def test_every_call_gets_the_answer_of_its_table(machine: str, strict: bool) -> None:
    column, architecture = MACHINES[machine]
    deny = TRAP if strict else ERROR | errno.EPERM
    filtered = Program(program(machine, strict=strict))
    expected = dict.fromkeys(range(LAST_KNOWN + 1), deny)
    expected.update({numbers[column]: ALLOW for numbers in ALLOWED.values()})
    expected.update({numbers[column]: ERROR | getattr(errno, ERRORS.get(name, "ENOSYS")) for name, numbers in ANSWERED.items()})
    for name, numbers in CHECKED.items():
        expected.pop(numbers[column], name)
    expected.pop(-1, None)
    for number in (*range(LAST_KNOWN + 1, 601), *(X32 | number for number in range(601)), 0x7FFF_FFFF, -1):
        expected[number] = ERROR | errno.ENOSYS
    answers = {number: filtered.answer(Call(number, architecture, (1, 2, 3, 4, 5, 6))) for number in expected}
    assert {number: answer for number, answer in answers.items() if answer != expected[number]} == {}


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_are_denied(machine: str) -> None:
    filtered = Program(program(machine))
    others = [architecture for _, architecture in MACHINES.values() if architecture != MACHINES[machine][1]]
    answers = {filtered.answer(Call(number, architecture)) for number in range(601) for architecture in (I386, 0, *others)}
    assert answers == {ERROR | errno.EPERM}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "arguments", "allowed"), CASES)
def test_checked_calls_depend_on_their_arguments(machine: str, name: str, arguments: tuple[int, ...], allowed: bool) -> None:
    assert asked(machine, name, arguments) == (ALLOW if allowed else ERROR | errno.EPERM)
    assert asked(machine, name, arguments, strict=True) == (ALLOW if allowed else TRAP)


def test_open_is_checked_as_openat_is() -> None:
    for name, arguments, allowed in CASES:
        if name == "openat":
            assert asked("x86_64", "open", arguments[1:]) == (ALLOW if allowed else ERROR | errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_without_the_kernels_rule_the_filter_denies_made_code(machine: str) -> None:
    read, write, execute = 1, 2, 4
    for protection in range(8):
        for call in ("mprotect", "pkey_mprotect"):
            answer = asked(machine, call, (0x1000, 4096, protection), no_made_code=True)
            assert (answer == ALLOW) == (not protection & execute), (call, protection)
        answer = asked(machine, "mmap", (0, 4096, protection, 0x22, -1, 0), no_made_code=True)
        assert (answer == ALLOW) == (protection & (write | execute) != write | execute), protection
    assert asked(machine, "mmap", (0, 4096, read | execute, 2, 3, 0), no_made_code=True) == ALLOW  # a library


@pytest.mark.parametrize("machine", MACHINES)
def test_an_engine_with_devices_may_control_them_but_no_terminal(machine: str) -> None:
    allowed = {number: asked(machine, "ioctl", (3, number), any_ioctl=True) == ALLOW for number in (0xC020_462A, 0x6401, 0x5401, 0x5421)}
    denied = {number: asked(machine, "ioctl", (3, number), any_ioctl=True) == ALLOW for number in (0x5412, 0x541C, 0x8901, 0x8902, 0x5452)}
    assert set(allowed.values()) == {True}, allowed
    assert set(denied.values()) == {False}, denied


@pytest.mark.parametrize("machine", MACHINES)
def test_no_instruction_is_there_for_nothing(machine: str) -> None:
    """A wrong offset leaves instructions that no call reaches."""
    column, architecture = MACHINES[machine]
    filtered = Program(program(machine, no_made_code=True))
    calls = [Call(number, architecture) for number in range(LAST_KNOWN + 2)] + [Call(0, I386)]
    calls += [Call(CHECKED[name][column], architecture, arguments) for name, arguments, _ in CASES if CHECKED[name][column] >= 0]
    ints = {"ioctl": 1, "fcntl": 1, "prctl": 0}
    calls += [
        Call(CHECKED[name][column], architecture, (value,) * 2)
        for name in ints
        for value in (*range(1100), 0x4008_6200, *range(0x5400, 0x5500))
    ]
    if column == 0:
        calls += [Call(2, architecture, arguments[1:]) for name, arguments, _ in CASES if name == "openat"]
    protections = [(CHECKED[name][column], value) for name in ("mmap", "mprotect", "pkey_mprotect") for value in range(8)]
    calls += [Call(number, architecture, (0, 0, value)) for number, value in protections]
    reached = {at for call in calls for at in filtered.path(call)}
    assert sorted(set(range(len(filtered.instructions))) - reached) == []
