"""Engines by name: entry points of the group `aionn.engines`, or "package.module:Class" for an engine without an entry point."""

from __future__ import annotations

import functools
import importlib

from aionn.driver import by_hand
from aionn.engines.installed import installed_engines
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.hal.engine import Engine
from aionn.hal.interfaces import IDevice
from aionn.hal.types import CacheFiles, Performance


def find_engine(name: str, home: str = "") -> Engine:
    """Make the engine of that name. See `find`.

    Raises:
        DeviceUnavailableError: as `find`; or it is a device that was written by hand.
    """
    found = find(name, home)
    if by_hand.is_device(found):
        raise DeviceUnavailableError(name, f"device {name!r} is an IDevice written by hand, so there is no engine; use the device itself")
    return found


def find(name: str, home: str = "") -> Engine | IDevice:
    """Make the engine of that name, or the device that was written by hand.

    Args:
        name: the name of an entry point, or "package.module:Class".
        home: "package.module:Class", if the caller has looked up the entry point already.

    Raises:
        DeviceUnavailableError: the engine does not exist, or its package cannot be imported.
    """
    try:
        module, colon, attribute = (home or name).partition(":")
        if not colon:
            installed = installed_engines()
            if name not in installed:
                known = ", ".join(sorted(installed)) or "none"
                raise DeviceUnavailableError(name, f"device {name!r} is not installed here (installed: {known})")
            module, attribute = installed[name].module, installed[name].attr
        factory = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except CallerError as error:  # a value of the HAL that the engine's module makes wrongly
        raise DeviceUnavailableError(name, f"device {name!r} cannot be used: {error}") from error
    except (ImportError, AttributeError, ValueError) as error:
        raise DeviceUnavailableError(
            name, f"device {name!r} cannot be loaded ({error}); install its package, or add its directory to PYTHONPATH"
        ) from error
    try:
        engine: Engine | IDevice = factory()  # type: ignore[operator]  # `_check` refuses what is not an engine
    except DeviceUnavailableError:
        raise
    except CallerError as error:
        raise DeviceUnavailableError(name, f"device {name!r} cannot be used: {error}") from error
    except Exception as error:
        raise DeviceUnavailableError(name, f"device {name!r} cannot start: {type(error).__name__}: {error}") from error
    _check(name, engine)
    return engine


_FACTS = (("name", str), ("version", str), ("cache_files", CacheFiles))
_OPTIONAL_FACTS = (("performance", Performance),)
_VERBS = ("supported_operations", "compile", "export", "load")


def _check(name: str, engine: object) -> None:
    """Check that an engine has all facts and methods, so that its author need not read a traceback of the first call.

    Raises:
        DeviceUnavailableError: the object is neither a `hal.Engine` nor a `hal.IDevice`. The text says what is missing.
    """
    facts, verbs, face = (by_hand.FACTS, by_hand.VERBS, "IDevice") if by_hand.is_device(engine) else (_FACTS, _VERBS, "Engine")
    for fact, kind in (*facts, *((fact, kind) for fact, kind in _OPTIONAL_FACTS if hasattr(engine, fact))):
        found = getattr(engine, fact, None)
        if not isinstance(found, kind):
            raise DeviceUnavailableError(
                name,
                f"device {name!r} cannot be used, because {type(engine).__name__}.{fact} is {found!r}; it must be a {kind.__name__}",
            )
    for verb in verbs:
        if not callable(getattr(engine, verb, None)):
            raise DeviceUnavailableError(
                name, f"device {name!r} cannot be used, because {type(engine).__name__} has no method {verb!r}; see aionn.hal.{face}"
            )
