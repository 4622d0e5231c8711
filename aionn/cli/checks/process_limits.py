"""What this process, and so an app beside it, may use: open files, address space, the Python for its drivers."""

from __future__ import annotations

import os
import resource
import sys

from aionn.cli.checks.row import Row, fail, ok, warn
from aionn.cli.printing import size

BASE_FILES, FILES_PER_BURST = 40, 6
"""Descriptors of an app with a few devices, and of each burst: five, and one for each further piece of memory that its frames take."""

_LEAST_BURSTS, _GOOD_BURSTS = 8, 64
_LEAST_ADDRESS_BYTES, _GOOD_ADDRESS_BYTES = 1 << 30, 4 << 30
"""A driver maps 0.4 to 0.7 GB before it has loaded a model."""


def open_files() -> Row:
    """Check the limit on open files against what bursts take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    bursts = max(0, soft - BASE_FILES) // FILES_PER_BURST
    found = f"RLIMIT_NOFILE is {soft}, enough for {bursts} bursts"
    if bursts >= _GOOD_BURSTS:
        return ok("open files", found)
    good = BASE_FILES + FILES_PER_BURST * _GOOD_BURSTS
    needed = f"{BASE_FILES} + {FILES_PER_BURST} for each burst; {good} for {_GOOD_BURSTS} bursts"
    if hard == resource.RLIM_INFINITY or hard >= good:
        way_out = f"raise it before the app starts: ulimit -n {max(1024, good)}"
    else:
        way_out = (
            f"the hard limit is {hard}; leave the shell that has lowered it, or raise it: docker run --ulimit nofile=1024, "
            "LimitNOFILE=1024 of systemd, or a line in /etc/security/limits.conf"
        )
    return (fail if bursts < _LEAST_BURSTS else warn)("open files", found, needed, way_out)


def address_space() -> Row:
    """Check the limit on the address space. Each process has it for itself."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return ok("address space", "no limit")
    found = f"RLIMIT_AS is {size(soft)}"
    if soft >= _GOOD_ADDRESS_BYTES:
        return ok("address space", found)
    judge = fail if soft < _LEAST_ADDRESS_BYTES else warn
    return judge("address space", found, "4 GB for each process, and more for large models", "remove the limit: ulimit -v unlimited")


def python() -> Row:
    """Check that there is a Python to start drivers with."""
    check, needed = "python", "a Python that has aionn installed, which starts the drivers"
    if getattr(sys, "frozen", False):
        return fail(
            check, "sys.executable is the app itself, because the app is frozen", needed, "set sys.executable before the Runtime opens"
        )
    if not sys.executable:
        return fail(check, "sys.executable is not set", needed, "set sys.executable to the path of a Python before the Runtime opens")
    if not os.access(sys.executable, os.X_OK):
        return fail(check, f"sys.executable is {sys.executable}, which cannot be run", needed, "install it again, or name another one")
    return ok(check, f"{sys.executable}, {'.'.join(map(str, sys.version_info[:3]))}")
