"""A package's names, imported when they are first asked for (PEP 562). For faces that some of their importers need little of.

A driver process imports `aionn` and `aionn.driver` on its way to its own main module, whatever is in them.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def imported_when_asked(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__`.

    Args:
        package: the module's `__name__`.
        homes: by name the module that defines it; a module's own name stands for the module.
    """

    def get(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home)
        value: object = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # asked once per name
        return value

    return get
