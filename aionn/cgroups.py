"""The cgroups of this process: where their files are, and the CPU quota that they set.

A limit of any cgroup above the process counts. So `folders` yields the process's own cgroup first, then each one above it that the process
can see. Cgroup v2, v1 and both beside each other (hybrid) are read. Only the places are remembered, as long as /proc/self/cgroup stays the
same, because limits change and a process can be moved.

`root` is the directory of /proc and the cgroup mounts, so that tests can lay out another machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from os.path import join
from typing import NamedTuple, TypeAlias

Place: TypeAlias = str | os.PathLike[str]

ROOT = "/"


class Folder(NamedTuple):
    """One cgroup: its path as an administrator knows it, the directory of its files, and whether it is of version 2."""

    name: str
    path: str
    unified: bool


class Quota(NamedTuple):
    """How much CPU time a cgroup allows: `cpus` at once on average, and the name of the file that says it."""

    cpus: float
    name: str


def cpu_quota(root: Place = ROOT) -> Quota | None:
    """Return the tightest CPU quota over this process, or None if there is no quota."""
    found = [quota for folder in folders("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(found, key=lambda quota: quota.cpus, default=None)


def _quota_of(folder: Folder) -> Quota | None:
    if folder.unified:
        file, words = "cpu.max", text_of(join(folder.path, "cpu.max")).split()
    else:
        file = "cpu.cfs_quota_us"
        words = text_of(join(folder.path, file)).split() + text_of(join(folder.path, "cpu.cfs_period_us")).split()
    # "max" in version 2 and -1 in version 1 stand for no quota.
    if len(words) != 2 or not "".join(words).isdecimal() or not int(words[0]) or not int(words[1]):
        return None
    return Quota(int(words[0]) / int(words[1]), f"{file} of cgroup {folder.name}")


def folders(controller: str, root: Place = ROOT) -> tuple[Folder, ...]:
    """Return the process's cgroup of that controller and those above it, as far up as this container can see."""
    return _folders(controller, os.fspath(root), text_of(join(root, "proc/self/cgroup")))


@functools.lru_cache(maxsize=8)
def _folders(controller: str, root: str, cgroup: str) -> tuple[Folder, ...]:
    own = {controllers: path for line in cgroup.splitlines() for _, controllers, path in [line.split(":", 2)]}
    found: list[Folder] = []
    for line in text_of(join(root, "proc/self/mountinfo")).splitlines():
        place, _, rest = line.partition(" - ")
        fields, kind = place.split(), rest.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        mount_root, mount_point = _unescaped(fields[3]), join(root, _unescaped(fields[4]).lstrip("/"))
        if kind[0] == "cgroup2" and "" in own:
            found += _hierarchy(mount_point, mount_root, own[""], unified=True)
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            path = next((path for controllers, path in own.items() if controller in controllers.split(",")), None)
            if path is not None:
                found += _hierarchy(mount_point, mount_root, path, unified=False)
    return tuple(found)


def _hierarchy(mount_point: str, mount_root: str, path: str, *, unified: bool) -> Iterator[Folder]:
    # A container without a cgroup namespace reads the host's path, but sees only one part of the tree. The root of
    # the mount says which part. If the path lies outside that part, only the mounted cgroup can be seen.
    prefix_path = mount_root.rstrip("/")
    inside = path[len(prefix_path) :] if path == prefix_path or path.startswith(prefix_path + "/") else "/"
    parts = [part for part in inside.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield Folder(f"/{'/'.join(parts[:depth])}", join(mount_point, *parts[:depth]), unified)


def text_of(path: Place) -> str:
    """Return the text of a small file, or "" if it cannot be read."""
    # Without a file object, which would cost more than all else here.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        content = b""
        while part := os.read(fd, 65536):
            content += part
    except OSError:
        return ""
    finally:
        os.close(fd)
    return content.decode("utf-8", "surrogateescape")


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, which writes blank, tab, newline and backslash as octal numbers."""
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, character)
    return os.fsdecode(os.fsencode(field))
