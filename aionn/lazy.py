"""Names of a package, imported when they are first asked for (PEP 562). For faces of which some importers need little.

A driver process imports `aionn` and `aionn.driver` on its way to its main module, whatever they hold.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def imported_when_asked(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a module.

    Args:
        package: the module's `__name__`.
        homes: by name the module that defines it. The name of a submodule stands for the submodule itself.
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
