"""Engines by name: entry points of the group `aionn.engines`, or "package.module:Class" for one that is not installed as such."""

from __future__ import annotations

import functools
import importlib

from aionn.engines.installed import installed_engines
from aionn.errors import DeviceUnavailableError
from aionn.hal.interfaces import Engine
from aionn.hal.types import CacheFiles


def find_engine(name: str, home: str = "") -> Engine:
    """Make the engine of that name.

    Args:
        name: of an entry point, or "package.module:Class".
        home: "package.module:Class", where whoever asks has looked the entry point up already.

    Raises:
        DeviceUnavailableError: there is none, or its package cannot be imported.
    """
    try:
        module, colon, attribute = (home or name).partition(":")
        if not colon:
            installed = installed_engines()
            if name not in installed:
                known = ", ".join(sorted(installed)) or "none"
                raise DeviceUnavailableError(name, f"device {name!r} is not installed here; installed are: {known}")
            module, attribute = installed[name].module, installed[name].attr
        factory = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise DeviceUnavailableError(
            name, f"device {name!r} cannot be loaded: {error}; a driver finds what is installed or in PYTHONPATH"
        ) from error
    try:
        engine: Engine = factory()  # type: ignore[operator]  # whatever the module has there; if it is no engine, that is said
    except DeviceUnavailableError:
        raise
    except Exception as error:
        raise DeviceUnavailableError(name, f"device {name!r} cannot start: {type(error).__name__}: {error}") from error
    _check(name, engine)
    return engine


_FACTS = (("name", str), ("version", str), ("cache_files", CacheFiles))
_VERBS = ("supported_operations", "compile", "export", "load")


def _check(name: str, engine: object) -> None:
    """A driver author learns here what is missing, and not from a traceback at the first call.

    Raises:
        DeviceUnavailableError: it is no `hal.Engine`.
    """
    for fact, kind in _FACTS:
        found = getattr(engine, fact, None)
        if not isinstance(found, kind):
            raise DeviceUnavailableError(
                name,
                f"device {name!r}: {type(engine).__name__}.{fact} is {found!r}; an engine has a {kind.__name__} there",
            )
    for verb in _VERBS:
        if not callable(getattr(engine, verb, None)):
            raise DeviceUnavailableError(name, f"device {name!r}: {type(engine).__name__} has no method {verb!r} (see aionn.hal.Engine)")
