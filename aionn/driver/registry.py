"""Engines and devices by name: entry points of the group `aionn.engines`, or "package.module:Class" without an entry point.

Either may go on with a colon and the name of a provider, as in "onnxruntime:cuda". What stands before the first colon is an engine's name
if an engine of that name is installed.

A device that its author has written by hand (`hal.IDevice`) is found like an engine. Each driver process makes one, without arguments, in
a thread. If it is an asynchronous context manager, the driver enters it in its event loop before it greets, and leaves it when its client
has gone. So a device may keep a task group there for the listeners of its bursts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aionn.driver.engine_errors import report_bug, way_out
from aionn.engines.installed import BUILT_IN, installed_engines, meant
from aionn.engines.needs import FILE
from aionn.errors import CallerError, DeviceUnavailableError, text_of
from aionn.hal.engine import Engine
from aionn.hal.interfaces import IDevice
from aionn.hal.types import CacheFiles, DeviceType, Performance
from aionn.needs import NAMES

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def find_engine(name: str) -> Engine:
    """Make the engine of that name. See `find`.

    Raises:
        DeviceUnavailableError: as `find`; or it is a device that was written by hand.
    """
    found = find(name)
    if is_device(found):
        raise DeviceUnavailableError(name, f"device {name!r} is an IDevice written by hand, so there is no engine; use the device itself")
    return found


def find(name: str, home: str = "") -> Engine | IDevice:
    """Make the engine of that name, or the device that was written by hand.

    Args:
        name: the name of an entry point, or "package.module:Class"; with ":provider" behind it if a provider is wanted.
        home: "package.module:Class", if the caller has looked up the entry point already.

    Raises:
        DeviceUnavailableError: the engine or the provider does not exist, or its package cannot be imported.
    """
    place, provider = _parted(name, home)
    module, _, attribute = place.partition(":")
    try:
        factory = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except CallerError as error:  # a value of the HAL that the engine's module makes wrongly
        raise DeviceUnavailableError(name, f"device {name!r} cannot be used: {error}") from error
    except PermissionError as error:
        raise DeviceUnavailableError(name, f"device {name!r} cannot be loaded ({error}){way_out(error)}") from error
    except (ImportError, AttributeError, ValueError) as error:
        found = f"device {name!r} cannot be loaded ({error}); install its package, or add its directory to PYTHONPATH"
        raise DeviceUnavailableError(name, found + meant(module, BUILT_IN)) from error  # no look at what is installed: it is confined
    try:
        engine = _made(name, factory, provider)
    except DeviceUnavailableError:
        raise
    except CallerError as error:
        raise DeviceUnavailableError(name, f"device {name!r} cannot be used: {error}") from error
    except Exception as error:
        failed = DeviceUnavailableError(name, f"device {name!r} cannot start: {type(error).__name__}: {text_of(error)}{way_out(error)}")
        if place := report_bug(error, name, "start"):
            failed.add_note(place)
        raise failed from error
    _check(name, engine)
    return engine


def _parted(name: str, home: str) -> tuple[str, str]:
    """Return "package.module:Class" of the engine, and the name of the provider or an empty text."""
    engine, colon, rest = name.partition(":")
    if home:
        return home, rest
    if engine in BUILT_IN or not colon:
        installed = installed_engines()
        if engine not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise DeviceUnavailableError(name, f"device {name!r} is not installed here (installed: {known})")
        return installed[engine], rest
    attribute, _, provider = rest.partition(":")
    return f"{engine}:{attribute}", provider


def _made(name: str, factory: Any, provider: str) -> Engine | IDevice:
    engine: Engine | IDevice
    if not provider:
        engine = factory()  # `_check` refuses what is not an engine
        return engine
    if not callable(getattr(factory, "for_provider", None)):
        first = name.removesuffix(f":{provider}")
        raise DeviceUnavailableError(name, f"device {name!r} is not there, because {first!r} has no providers; use {first!r}")
    engine = factory.for_provider(provider)
    return engine


_FACTS = (("name", str), ("version", str), ("cache_files", CacheFiles))
_OPTIONAL_FACTS = (("performance", Performance),)
_DEVICE_VERBS = ("get_supported_operations", "get_number_of_cache_files_needed", "prepare_model", "prepare_model_from_cache", "allocate")
_DEVICE_FACTS = (("name", str), ("version", str), ("type", DeviceType), ("priority_matters", bool))
_VERBS = ("supported_operations", "compile", "export", "load")


def _check(name: str, engine: object) -> None:
    """Check that an engine has all facts and methods, so that its author need not read a traceback of the first call.

    Raises:
        DeviceUnavailableError: the object is neither a `hal.Engine` nor a `hal.IDevice`. The text says what is missing.
    """
    facts, verbs, face = (_DEVICE_FACTS, _DEVICE_VERBS, "IDevice") if is_device(engine) else (_FACTS, _VERBS, "Engine")
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
    _check_optional(name, engine)
    if found := declared_needs(engine):
        raise DeviceUnavailableError(name, f"device {name!r} cannot be used, because {found}")


def declared_needs(engine: object) -> str:
    """Return a clause if the engine's class has attributes with the names of needs, where no driver reads them. Else an empty text."""
    kind = type(engine)
    found = [name for name in NAMES if not callable(getattr(kind, name, callable))]
    if not found:
        return ""
    module = kind.__module__.rpartition(".")[2]
    return (
        f"{kind.__name__} declares {', '.join(found)} in its class, where no driver reads it; state needs in {FILE} in its package, in "
        f"{module}.{FILE} beside its module, or in Runtime(engine_needs=)"
    )


_OPTION_KINDS = (str, int, float, bool, Path)


def _check_optional(name: str, engine: object) -> None:
    """Check the facts that an engine may leave out."""
    wrong, fault = f"device {name!r} cannot be used, because {type(engine).__name__}", ""
    providers, options = getattr(engine, "providers", ()), getattr(engine, "options", {})
    if isinstance(providers, str) or not isinstance(providers, Sequence) or not all(isinstance(one, str) for one in providers):
        fault = f"{wrong}.providers is {providers!r}; it must be a sequence of names"
    elif not isinstance(options, Mapping) or not all(_is_option(option, kinds) for option, kinds in options.items()):
        fault = f"{wrong}.options is {options!r}; it must be a mapping from names to str, int, float, bool or Path"
    elif options and not _takes_options(engine):
        fault = f"{wrong} has options, but its supported_operations takes none; give it a second parameter with a default"
    elif not isinstance(getattr(engine, "runs_on", ""), str):
        fault = f"{wrong}.runs_on is {getattr(engine, 'runs_on', '')!r}; it must be a text"
    if fault:
        raise DeviceUnavailableError(name, fault)


def _takes_options(engine: object) -> bool:
    signature = inspect.signature(engine.supported_operations)  # type: ignore[attr-defined]  # `_check` has found it
    try:
        signature.bind(None, {})
        signature.bind(None)
    except TypeError:
        return False
    return True


def _is_option(name: object, kinds: object) -> bool:
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    return isinstance(name, str) and bool(several) and all(kind in _OPTION_KINDS for kind in several)


def is_device(made: object) -> TypeIs[IDevice]:
    """Return whether an object is a device rather than an engine: it prepares models."""
    return callable(getattr(made, "prepare_model", None))


@asynccontextmanager
async def entered(device: IDevice) -> AsyncIterator[IDevice]:
    """Enter a device for the body, if it can be entered."""
    if isinstance(device, AbstractAsyncContextManager):
        async with device:
            yield device
    else:
        yield device
