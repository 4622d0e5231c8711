"""Read the facts of an engine's class in its source, before the module is imported.

The facts are attributes of the class or of its bases. They must be literals, because code that computes them would run before the
confinement. Names are followed through imports and simple assignments, also into other modules. Python's own modules are not followed.

This module parses files. So it is imported only for engines whose facts `engines.needs` does not know.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from aionn.sandbox.facts import NAMES, Facts, FactsError

__all__ = ["declared", "source_of"]

_NOT_FOLLOWED = {*sys.stdlib_module_names, "aionn.hal", "typing_extensions", "numpy"}
_ANSWERS = ("writes_by_path", "makes_code")

Source = tuple[bytes, bool]
"""The source of a module, and whether it is a package."""


def declared(place: str) -> Facts | None:
    """Return the facts of the class "package.module:Class", or None if neither it nor its bases declare any. Imports no module.

    Raises:
        FactsError: a fact is not a literal of its type.
    """
    module, _, attribute = place.partition(":")
    found = _Reader(place).facts_of(module, tuple(attribute.split(".")))
    return Facts(**found) if found else None


def source_of(module: str) -> Source | None:
    """Return the source of a module, or None if it has none. Imports neither the module nor the packages that it is in."""
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
        if where is None and end < len(parts):
            return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py") or not hasattr(spec.loader, "get_data"):
        return None
    try:
        return spec.loader.get_data(spec.origin), where is not None
    except OSError:
        return None


class _Reader:
    """Follows names from one engine's class.

    Invariant: no class is read twice, so classes that refer to each other end.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._read: set[tuple[str, tuple[str, ...]]] = set()

    def facts_of(self, module: str, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the facts of what a module calls `names[0].names[1]...`."""
        parts = module.split(".")
        followed = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if (module, names) in self._read or followed & _NOT_FOLLOWED or module == "aionn":
            return {}
        self._read.add((module, names))
        source = source_of(module)
        if source is None:
            return {}
        try:
            tree = ast.parse(source[0], module)
        except (SyntaxError, ValueError, RecursionError):
            return {}  # the import says what is wrong
        package = parts if source[1] else parts[:-1]
        return self._named(_Scope(module, package, (tree.body,)), names)

    def _named(self, scope: _Scope, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the facts of `names` in the innermost body that has the first of them."""
        for depth, body in enumerate(scope.bodies):
            outer = _Scope(scope.module, scope.package, scope.bodies[depth:])
            for node in reversed(list(_statements(body))):
                if isinstance(node, ast.ClassDef) and node.name == names[0]:
                    inner = _Scope(scope.module, scope.package, (node.body, *outer.bodies))
                    return self._named(inner, names[1:]) if names[1:] else self._of_class(node, outer)
                if isinstance(node, ast.Assign | ast.AnnAssign) and names[0] in _targets(node):
                    value = _dotted(node.value)
                    return self._named(outer, (*value, *names[1:])) if value and value[0] != names[0] else {}
                if isinstance(node, ast.ImportFrom | ast.Import):
                    for module, rest in _imported(node, scope.package, names):
                        if found := self.facts_of(module, rest):
                            return found
        return {}

    def _of_class(self, node: ast.ClassDef, scope: _Scope) -> dict[str, Any]:
        found: dict[str, Any] = {}
        key = (scope.module, (str(node.lineno), node.name))
        if key in self._read:
            return found
        self._read.add(key)
        for base in reversed(node.bases):  # the first base wins, as in Python
            if names := _dotted(base):
                found |= self._named(scope, names)
        for statement in _statements(node.body):
            for name in set(_targets(statement)) & set(NAMES):
                literal = isinstance(statement, ast.Assign | ast.AnnAssign) and statement in node.body
                if literal and statement.value is None:  # type: ignore[attr-defined]
                    continue  # only an annotation
                found[name] = self._literal(name, statement.value if literal else None)  # type: ignore[attr-defined]
        return found

    def _literal(self, name: str, value: ast.expr | None) -> Any:
        try:
            found = ast.literal_eval(value) if value is not None else None
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found = None
        if name in _ANSWERS:
            if isinstance(found, bool):
                return found
        elif isinstance(found, tuple | list) and all(isinstance(one, str) and one.startswith("/") and "\0" not in one for one in found):
            return tuple(found)
        kind = "True or False" if name in _ANSWERS else "a tuple of absolute paths"
        raise FactsError(
            f"{self._place}.{name} must be {kind}, as a literal in the class's body, because it is read before the engine is imported"
        )


class _Scope:
    """Where a name is looked up.

    Attributes:
        module: the name of the module.
        package: the parts of its package's name.
        bodies: the statements of the class that is being read, of the classes around it, and of the module.
    """

    __slots__ = ("bodies", "module", "package")

    def __init__(self, module: str, package: list[str], bodies: tuple[list[ast.stmt], ...]) -> None:
        self.module, self.package, self.bodies = module, package, bodies


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body in their order, with those in its `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                for inner in getattr(statement, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds, but those that it imports."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _dotted(expression: ast.expr | None) -> tuple[str, ...]:
    """Return the names of an expression like `a.b.C` or `C[T]`, or nothing."""
    if isinstance(expression, ast.Subscript):
        return _dotted(expression.value)
    if isinstance(expression, ast.Attribute):
        before = _dotted(expression.value)
        return (*before, expression.attr) if before else ()
    return (expression.id,) if isinstance(expression, ast.Name) else ()


def _imported(node: ast.ImportFrom | ast.Import, package: list[str], names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules in which `names` may be found if this statement imports the first of them, with their names there."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if alias.name == "*":
                yield module, names
            elif (alias.asname or alias.name) == names[0]:
                yield module, (alias.name, *names[1:])
                if names[1:]:
                    yield f"{module}.{alias.name}", names[1:]
        elif alias.asname:
            if alias.asname == names[0] and names[1:]:
                yield alias.name, names[1:]
        else:
            parts = tuple(alias.name.split("."))
            for end in range(min(len(parts), len(names) - 1), 0, -1):
                if parts[:end] == names[:end]:
                    yield ".".join(parts[:end]), names[end:]
