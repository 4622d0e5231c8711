"""Read what an engine needs of its driver's sandbox, before the engine is imported. The needs stand in a small TOML file beside the code.

For an engine in "package.module" the file is `package/module.aionn-engine.toml`, else `aionn-engine.toml` in the package, or in a package
around it. The nearest file counts. Without one, the engine needs nothing. No package is imported to find the file, and no source is read.

    reads = ["/etc/engine.conf"]     the needs of each of its devices (`aionn.needs.Needs`)
    [gpu]                            what the provider "gpu" needs beyond that
    ["*"]                            the same for each provider that has no section
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from aionn.errors import CallerError
from aionn.needs import NAMES, Needs

FILE = "aionn-engine.toml"

_NOT_THERE = (0, errno.ENOENT, errno.ENOTDIR)  # zipimport raises errors with the number 0


def needs_of(place: str, provider: str) -> Needs:
    """Return what an engine needs of its driver's sandbox. Imports no engine.

    Args:
        place: "package.module:Class".
        provider: what follows the engine's name in the device's name, or an empty text. Its case does not matter.

    Raises:
        CallerError: the file cannot be read, or does not state needs. The text says where and why.
    """
    for path, loader in _files(place.partition(":")[0]):
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise CallerError(f"{path} is not a file; put a TOML file in its place")  # to open a pipe might wait without end
        try:
            content = loader.get_data(path) if hasattr(loader, "get_data") else _content(path)
        except OSError as error:
            if error.errno in _NOT_THERE:
                continue
            raise CallerError(f"{path} cannot be read ({error.strerror}); make it readable") from error
        return _stated(path, content, provider.lower())
    return Needs()


def is_test_double(place: str) -> bool:
    """Return whether a test steers this engine as its `aionn.testing.FakeDevice`, by files and a socket that no sandbox allows.

    The test's process says so in the environment. The file with the orders has the engine's name.
    """
    orders = (path for name, path in os.environ.items() if name.startswith("AIONN_FAKE_DEVICE"))
    return any(os.path.basename(path) == f"{place}.json" for path in orders)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _files(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the paths at which the file may be, the nearest first, each with the loader that reads it."""
    parts = module.split(".")
    stood_in: list[str] = []
    found: list[tuple[str, Any]] = []
    try:
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            spec = _spec(name)
            if spec is None:
                return  # the import says what is wrong
            if spec.submodule_search_locations is None:
                if spec.origin and os.path.isabs(spec.origin):
                    found.append((os.path.join(os.path.dirname(spec.origin), f"{parts[end - 1]}.{FILE}"), spec.loader))
                break
            # The folders of a namespace package are looked up in the package around it, so they are listed here.
            folders = list(spec.submodule_search_locations)
            found.extend((os.path.join(folder, FILE), spec.loader) for folder in reversed(folders))
            if name not in sys.modules:
                package: Any = ModuleType(name)
                package.__path__ = folders
                sys.modules[name] = package
                stood_in.append(name)
    finally:
        for name in stood_in:
            del sys.modules[name]
    yield from reversed(found)


def _spec(module: str) -> Any:
    """Return where a module is, or None. The packages around it are in `sys.modules`."""
    around = sys.modules.get(module.rpartition(".")[0])
    where = getattr(around, "__path__", None)
    found = (finder.find_spec(module, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


def _stated(path: str, content: bytes, provider: str) -> Needs:
    import tomllib  # 3 ms, and many engines have no file

    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:
        raise CallerError(f"{path} is not a TOML file: {error}") from error
    sections = {name.lower(): _needs(f"section [{name}] of {path}", value) for name, value in table.items() if isinstance(value, dict)}
    needs = _needs(path, {name: value for name, value in table.items() if not isinstance(value, dict)})
    more = (sections.get(provider) or sections.get("*")) if provider else None
    return needs if more is None else needs + more


def _needs(where: str, stated: Mapping[str, Any]) -> Needs:
    if unknown := sorted(stated.keys() - set(NAMES)):
        raise CallerError(f"{where} has {unknown[0]!r}, which is not a need; the needs are {', '.join(NAMES)}")
    try:
        return Needs(**stated)
    except CallerError as error:
        raise CallerError(f"{where}: {error}") from None
