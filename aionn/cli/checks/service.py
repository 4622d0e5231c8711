"""The service of all apps: its socket, who may use it, and whether its release fits this one."""

from __future__ import annotations

import asyncio
import os
import stat

from aionn.cli.checks import Row, fail, ok, warn
from aionn.errors import AionnError, CallerError
from aionn.needs import Confinement
from aionn.remote.attaching import service_path
from aionn.remote.calls import ReadService
from aionn.runtime.processes.handed import ServiceLink

_CHECK = "service"


def service() -> Row:
    """Look at the service of this user. That none runs is fine."""
    try:
        path = service_path()
    except CallerError as error:
        return warn(_CHECK, str(error), "a folder for the socket of a service", "set XDG_RUNTIME_DIR, or leave out the service")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ok(_CHECK, f"none listens at {path}; apps start their drivers")
    except OSError as error:
        return fail(_CHECK, f"{path}: {error.strerror}", "a socket that this user may use", "remove it, and start `aionn serve`")
    if stat.S_ISSOCK(mode) and mode & 0o077:
        return fail(_CHECK, f"others may use {path} (mode {stat.S_IMODE(mode):o})", "a socket of this user alone", f"chmod 600 {path}")
    try:
        confined = ", ".join(asyncio.run(_sandbox(path)).holds)
    except AionnError as error:
        return fail(_CHECK, str(error), "a service of this release", "restart it: aionn serve --replace")
    return ok(_CHECK, f"a service listens at {path}, confined by: {confined or 'nothing'}")


async def _sandbox(path: str) -> Confinement:
    link = ServiceLink(path)
    try:
        facts, _ = await (await link.attach()).call(ReadService())
        return facts.sandbox
    finally:
        link.end()
