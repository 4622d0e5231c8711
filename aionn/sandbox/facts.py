"""What an engine says that its driver needs beyond the usual. It is read before the engine's module is imported.

The facts are attributes of the engine's class. They must be literals, because code that computes them would run before the confinement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from pathlib import Path

__all__ = ["NAMES", "Facts", "FactsError", "declared", "source_of"]

NAMES = ("reads", "writes_by_path", "makes_code", "devices")


class FactsError(ValueError):
    """The facts of an engine cannot be read."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine needs. A class that has none of these attributes declares nothing, and its driver is hardly confined.

    Attributes:
        reads: absolute paths of files and folders that it reads, beyond Python's own and the system's libraries. "*" matches any part.
        writes_by_path: whether it writes temporary files by path. It then finds a private folder in `TMPDIR`.
        makes_code: whether it makes machine code at run time. Otherwise no memory is writable and executable.
        devices: device files that it opens for reading and writing, as in "/dev/nvidia*".
    """

    reads: tuple[str, ...] = ()
    writes_by_path: bool = False
    makes_code: bool = False
    devices: tuple[str, ...] = ()


def declared(place: str) -> Facts | None:
    """Return the facts of the class "package.module:Class", or None if it declares none. Imports no module.

    The class's bases count where they stand in the same module.

    Raises:
        FactsError: a fact is not a literal of its type.
    """
    import ast

    module, _, attribute = place.partition(":")
    path = source_of(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError):
        return None  # the import says what is wrong
    found = dict(_facts_in(tree, attribute.split("."), place))
    return Facts(**found) if found else None


def source_of(module: str) -> Path | None:
    """Return the source file of a module, or None if it has no source. Imports neither the module nor the packages that it is in."""
    from pathlib import Path

    where: Any = None
    spec = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        for finder in sys.meta_path:
            spec = finder.find_spec(name, where) if hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        if spec is None:
            return None
        where = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _facts_in(tree: ast.Module, attributes: list[str], place: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each fact of a class, those of its bases first."""
    import ast

    body: list[ast.stmt] = tree.body
    for attribute in attributes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == attribute]
        if not found:
            return
        body = found[-1].body
    for base in found[-1].bases:
        if isinstance(base, ast.Name) and base.id != attributes[-1]:
            yield from _facts_in(tree, [base.id], place)
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in NAMES and node.value is not None:  # type: ignore[attr-defined]
                yield target.id, _literal(target.id, node.value, place)  # type: ignore[attr-defined]


def _literal(name: str, value: ast.expr, place: str) -> Any:
    import ast

    kind = "True or False" if name in ("writes_by_path", "makes_code") else "a tuple of absolute paths"
    try:
        found = ast.literal_eval(value)
    except ValueError:
        found = value
    if kind == "True or False":
        if isinstance(found, bool):
            return found
    elif isinstance(found, tuple | list) and all(isinstance(one, str) and one.startswith("/") for one in found):
        return tuple(found)
    raise FactsError(f"{place}.{name} must be {kind}, written as a literal, because it is read before the engine is imported")
