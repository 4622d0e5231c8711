"""Artifacts of other machines in an open runtime: one that is at hand, or what a backend offers at each miss."""

from __future__ import annotations

import os

from aionn.caching.offers import CompileBackend, Offered
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import CallerError
from aionn.runtime.opened import Opened
from aionn.runtime.runtime import Runtime, opened_of

__all__ = ["adopt", "use_backend"]


async def adopt(runtime: Runtime, cache_dir: str | os.PathLike[str], offered: Offered, *, device: str | None = None) -> CacheOutcome:
    """Put an artifact into a cache, and have the driver believe it. Later compiles of the model with that cache are hits.

    The driver checks the signed statement with the keys that this user trusts, the device and its version, and all bytes. It loads the
    artifact once, with the engine options that it was compiled with. An artifact whose options may name a file is refused, because a
    statement must not choose which file is opened. Have a compile with these options adopt it (`use_backend`).

    Args:
        runtime: open, in this event loop.
        cache_dir: the folder for `Runtime.compile(cache_dir=)`.
        offered: is closed when this returns.
        device: the name of the device that shall adopt it. None: the installed device that the statement names.

    Returns:
        An outcome of the kind HIT if the artifact is in the cache. `save_failure` says if it could be loaded but not kept.
        Else a MISS, whose `reason` says why the artifact was refused.

    Raises:
        CallerError: the runtime is not open, or belongs to another event loop.
        DeviceUnavailableError, DriverDiedError, DriverHungError: the device cannot be started.
    """
    from aionn.runtime.preparing.adopting import adopt_entry

    with offered:
        opened = _opened(runtime)
        choice = opened.cache(os.fspath(cache_dir), b"")
        assert choice is not None
        return await adopt_entry(opened.devices, choice.store, offered, device)


def use_backend(runtime: Runtime, backend: CompileBackend | None) -> None:
    """Have each compile with a `cache_dir` that finds nothing there ask a backend before it compiles. None: stop asking.

    What the backend offers is adopted if a trusted builder has signed it. Then the compile's outcome is a HIT. Otherwise the outcome is a
    MISS with the reason of the refusal, and the model is compiled here.

    A better stage and a swap ask the backend, too, unless `StagePolicy.backend` names another one. They also ask it without a `cache_dir`.

    Raises:
        CallerError: the runtime is not open, or belongs to another event loop.
    """
    _opened(runtime).devices.backend = backend


def _opened(runtime: Runtime) -> Opened:
    opened = opened_of(runtime)
    if opened is None:
        raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")
    return opened.check()
