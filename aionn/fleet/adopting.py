"""Artifacts of other machines in an open runtime: `adopt` takes one artifact, and `use_backend` has each miss ask a backend."""

from __future__ import annotations

import os

from aionn.caching.offers import CompileBackend, Offered
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import CallerError
from aionn.runtime.open_runtime import OpenRuntime
from aionn.runtime.runtime import Runtime, opened_of


async def adopt(runtime: Runtime, cache_dir: str | os.PathLike[str], offered: Offered, *, device: str | None = None) -> CacheOutcome:
    """Have the driver adopt an artifact, and put the artifact into a cache. Later compiles of the model with that cache are hits.

    The driver checks the signed statement with the keys that this user trusts, the device and its version, and all bytes. It loads the
    artifact once, with the engine options that it was compiled with. An artifact whose options may name a file is refused, because a
    statement must not choose which file is opened. Have a compile with these options adopt it (`use_backend`).

    Args:
        runtime: open, in this event loop.
        cache_dir: the folder for `Runtime.compile(cache_dir=)`.
        offered: the artifact. It is closed when this returns or raises.
        device: the name of the device that shall adopt it. None: the installed device that the statement names.

    Returns:
        A HIT if the driver loaded the artifact. `save_failure` is None if the cache has it now, or else says why it could not be stored.
        A MISS if the artifact was refused. `reason` and `detail` say why.

    Raises:
        CallerError: the runtime is not open, or belongs to another event loop.
        DeviceUnavailableError, DriverDiedError, DriverHungError: the device's driver cannot be started.
    """
    from aionn.runtime.asked import store_at
    from aionn.runtime.preparing.adopting import adopt_entry

    with offered:
        opened = _opened(runtime)
        return await adopt_entry(opened.devices, store_at(opened, cache_dir), offered, device)


def use_backend(runtime: Runtime, backend: CompileBackend | None) -> None:
    """Have each compile that misses its `cache_dir` ask a backend first. A compile without a `cache_dir` asks no backend.

    What the backend offers is adopted if a trusted builder has signed it. Then the compile's outcome is a HIT. Otherwise the outcome is a
    MISS with the reason of the refusal, and the model is compiled here.

    A better stage and a swap ask the backend, too, unless `StagePolicy.backend` names another one. They also ask it without a `cache_dir`.

    Args:
        runtime: open, in this event loop.
        backend: such as a `StoreBackend`. None: ask no backend any more.

    Raises:
        CallerError: the runtime is not open, or belongs to another event loop.
    """
    _opened(runtime).devices.backend = backend


def _opened(runtime: Runtime) -> OpenRuntime:
    opened = opened_of(runtime)
    if opened is None:
        raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")
    opened.session.check_open()
    return opened
