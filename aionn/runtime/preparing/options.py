"""Check `Runtime.compile(options=)`, and digest the files that options name. Names and types of options are checked by the device.

The option "custom_ops" and every `os.PathLike` value name a file. The file's content is in the key of the cache, and its path is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3

from aionn.errors import CallerError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.options import EngineOptions, OptionValue, is_unicode
from aionn.remote.device import open_option
from aionn.runtime.processes.devices import Devices

CUSTOM_OPS = "custom_ops"
"""The option whose text is the path of a library of operators."""

_EXAMPLE = "{'openvino': {'INFERENCE_PRECISION_HINT': 'bf16'}}"
_CHUNK_BYTES = 1 << 20


async def with_options(devices: Devices, options: PrepareOptions, asked: object, allowed: Sequence[str] | None) -> PrepareOptions:
    """Return the options of a compile with those that an app asks of engines.

    Args:
        asked: options of engines by the name of the device, or None.
        allowed: the names of the devices that the compile may use, or None for every installed one.

    Raises:
        CallerError: `asked` is not of that form, or names a device that the compile may not use; or a file cannot be read.
    """
    if asked is None:
        return options
    may_use = {devices.homes.key(name): devices.find(name).name for name in (devices.installed if allowed is None else allowed)}
    found: dict[str, EngineOptions] = {}
    for device, values in _mapping("options", asked).items():
        if not isinstance(device, str) or not device:
            raise CallerError(f"options for {device!r}: give the name of a device, as in {_EXAMPLE}")
        name = may_use.get(devices.homes.key(device))
        if name is None:
            known = ", ".join(map(repr, sorted(may_use.values())))
            raise CallerError(f"options for device {device!r}, but this compile may use {known}; name the device in devices= or stages=")
        if name in found:
            raise CallerError(f"options for device {device!r} are given twice; give them under one name")
        given = _mapping(f"options for device {device!r}", values)
        plain = dict(_checked(device, option, value) for option, value in given.items())
        files = {option: str(value) for option, value in plain.items() if _is_path(option, given[option])}
        found[name] = EngineOptions(plain, await _digests(devices, files))
    return msgspec.structs.replace(options, options=tuple(sorted(found.items())))


def _mapping(what: str, value: object) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise CallerError(f"{what}: found {value!r}; give a mapping, as in {_EXAMPLE}")
    return value


def may_name_file(option: str, value: OptionValue) -> bool:
    """Return whether a plain value may be a path for the engine. For options that another machine has named, so a doubt is a yes."""
    if option == CUSTOM_OPS:
        return True
    named = any(word in option.upper() for word in ("FILE", "PATH", "DIR", "LIBRARY"))
    return isinstance(value, str) and (named or any(sign in value for sign in "/\\~\0"))


def _is_path(option: object, value: object) -> bool:
    return isinstance(value, os.PathLike) or (option == CUSTOM_OPS and isinstance(value, str))


def _checked(device: str, option: object, value: object) -> tuple[str, OptionValue]:
    """Return an option's name and value. The path of a file becomes absolute."""
    where = f"option {option!r} of device {device!r}"
    if not isinstance(option, str) or not option or "\0" in option:
        raise CallerError(f"{where}: the name of an option is a text")
    if not is_unicode(option):
        raise CallerError(f"{where} is not Unicode; give text without surrogates")
    if isinstance(value, os.PathLike) or _is_path(option, value):
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
        if not isinstance(path, str) or not path or "\0" in path:
            raise CallerError(f"{where} is {value!r}; give the path of a file")
        if not is_unicode(path):
            raise CallerError(f"{where}: {path!r} is not Unicode; give text without surrogates")
        return option, os.path.abspath(path)
    if type(value) not in (str, int, float, bool) or not isinstance(value, str | int | float):
        raise CallerError(f"{where} is {value!r} ({type(value).__name__}); give a str, int, float, bool or path")
    if isinstance(value, str) and not is_unicode(value):
        raise CallerError(f"{where}: {value!r} is not Unicode; give text without surrogates")
    if isinstance(value, float) and not math.isfinite(value):
        raise CallerError(f"{where} is {value!r}; give a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise CallerError(f"{where} is {value!r}; give an integer of at most 64 bits")
    return option, value


async def _digests(devices: Devices, files: Mapping[str, str]) -> dict[str, bytes]:
    """Digest files in threads. A runtime that closes does not wait for their disk."""
    found: dict[str, bytes] = {}
    for option, path in files.items():
        found[option] = await devices.disk.ask(_digest, option, path)
    return found


def _digest(option: str, path: str) -> bytes:
    hasher = blake3()
    way_out = "give the path of a file"
    try:
        with open(open_option(option, path, way_out), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise CallerError(f"option {option!r}: the file {path!r} cannot be read ({error.strerror}); {way_out}") from error
    return hasher.digest()
