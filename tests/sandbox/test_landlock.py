"""What Landlock is asked for, by the version that the kernel has."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from aionn.sandbox import landlock

FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16, 8: 16, 9: 17}
"""How many rights about files each version has. Source: linux/landlock.h; REFER, TRUNCATE, IOCTL_DEV and RESOLVE_UNIX came later."""
ATTRIBUTE_BYTES = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16, 6: 24, 7: 24, 8: 24, 9: 24}
ONLY_OF_FOLDERS = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13))
MAKE_DEVICE_SOCKET_LINK = sum(1 << bit for bit in (6, 9, 10, 11, 12, 13))
EXECUTE, WRITE_FILE = 1 << 0, 1 << 1


class Kernel:
    """Notes the calls to Landlock."""

    def __init__(self) -> None:
        self.attributes: list[bytes] = []
        self.rules: dict[str, int] = {}
        self.restricted = False

    def __call__(self, number: int, *arguments: Any) -> int:
        if number == 444:
            attributes, size, flags = arguments
            assert (len(attributes), flags) == (size, 0)
            self.attributes.append(attributes)
            return os.open("/dev/null", os.O_RDONLY)
        if number == 445:
            _, kind, attribute, flags = arguments
            assert (kind, len(attribute), flags) == (1, 12, 0)
            rights, fd = struct.unpack("=Qi", attribute)
            self.rules[os.readlink(f"/proc/self/fd/{fd}")] = rights
            return 0
        assert (number, arguments[1]) == (446, 0)
        self.restricted = True
        return 0


@pytest.mark.parametrize("abi", FILE_RIGHTS)
def test_each_version_gets_what_it_knows(abi: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(landlock, "_syscall", kernel)
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    open_before = len(os.listdir("/proc/self/fd"))
    rules = [
        (str(file), landlock.WRITE),
        (str(folder), landlock.WRITE),
        ("/dev/zero", landlock.DEVICE),
        ("/usr/lib", landlock.READ_AND_RUN),
        (str(tmp_path / "missing"), landlock.READ),
        (str(file / "below"), landlock.READ),
    ]
    landlock.restrict(rules, abi)
    assert kernel.restricted
    assert len(os.listdir("/proc/self/fd")) == open_before
    (attributes,) = kernel.attributes
    assert len(attributes) == ATTRIBUTE_BYTES[abi]
    handled, *rest = struct.unpack(f"={len(attributes) // 8}Q", attributes)
    assert handled == (1 << FILE_RIGHTS[abi]) - 1
    assert rest == [3, 3][: len(rest)]  # TCP, scopes
    assert kernel.rules.keys() == {str(file), str(folder), "/dev/zero", "/usr/lib"}
    for path, rights in kernel.rules.items():
        assert rights, path
        assert rights & ~handled == 0, path  # else the kernel refuses the rule
        assert not rights & MAKE_DEVICE_SOCKET_LINK, path
        assert not (rights & EXECUTE and rights & WRITE_FILE), path
    assert not (kernel.rules[str(file)] | kernel.rules["/dev/zero"]) & ONLY_OF_FOLDERS
    assert not kernel.rules["/usr/lib"] & WRITE_FILE


def test_the_kernel_of_this_machine_has_a_known_version() -> None:
    """Else the test of rights by version says nothing about it."""
    try:
        abi = landlock.best_abi()
    except OSError as error:
        pytest.skip(f"this kernel has no Landlock: {error}")
    assert landlock.rights_of(abi) == (1 << FILE_RIGHTS[min(abi, 9)]) - 1
