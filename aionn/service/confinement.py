"""What the service gives away before it accepts an app: it reads models and messages of others, and needs few rights for that.

It writes to its cache and to the folder of its socket, and reads what any driver reads. It makes no socket and starts no program. A
process that was there before starts its drivers (`runtime.processes.starter`). They confine themselves, and by other rules.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from aionn.needs import Confinement, Needs
from aionn.runtime.processes.starter import Starter
from aionn.sandbox.confining import SandboxError, confine
from aionn.sandbox.paths import holds_a_home
from aionn.service.models import cache_folder

logger = logging.getLogger("aionn.service")

_NEEDS = Needs(reads=("/proc",))
"""How drivers do (`liveness`). Landlock keeps the service from the memory, the descriptors and the environment of other processes."""


def confine_service(level: str, state_dir: str, path: str) -> tuple[Starter | None, Confinement]:
    """Confine this process, which has one thread. Returns what starts its drivers from now on, and what holds.

    Without such a process, as at level "off", this process is not confined and starts its drivers.

    Args:
        state_dir: of all drivers.
        path: of the socket, or an empty text if systemd has made it.

    Raises:
        SandboxError: level "require" or "strict" cannot be had.
    """
    starter: Starter | None = None
    found = Confinement(level)
    try:
        starter = None if level == "off" else Starter(state_dir, path)
    except OSError as error:
        found = Confinement(level, (), (f"the service is not confined, because no process can start its drivers then ({error.strerror})",))
        if level in ("require", "strict"):
            raise SandboxError(f"sandbox={level!r} cannot be had: {found.lacks[0]}") from error
    if starter is not None:
        folder = os.path.dirname(path)
        writable = [cache_folder(), *([folder] if path and not holds_a_home(folder) else [])]
        with suppress(OSError):  # then a compilation says that its cache cannot be used
            os.makedirs(writable[0], 0o700, exist_ok=True)
        found = confine(level, _NEEDS, tuple(writable), serves=True)
    logger.info("the service is confined by: %s", "; ".join((", ".join(found.holds) or "nothing", *found.lacks)))
    return starter, found
