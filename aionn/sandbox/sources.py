"""Read the facts of an engine's class in its source, before the module is imported.

The facts are attributes of the class or of its bases. They must be literals, because code that computes them would run before the
confinement. Names are followed through imports and simple assignments, also into other modules. Python's own modules are not followed.

A base counts if it is in the same top-level package. The author of another package's engine does not know what derived classes do.

This module parses files. So it is imported only for engines whose facts `engines.needs` does not know.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
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
    parts = module.split(".")
    stood_in: list[str] = []
    try:
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            spec = _spec(name)
            if spec is None or spec.submodule_search_locations is None:
                return None
            if name not in sys.modules:  # finders of namespace packages look there for the package around it
                package: Any = ModuleType(name)
                package.__path__ = spec.submodule_search_locations
                sys.modules[name] = package
                stood_in.append(name)
        spec = _spec(module)
    finally:
        for name in stood_in:
            del sys.modules[name]
    if spec is None or not spec.origin or not spec.origin.endswith(".py") or not hasattr(spec.loader, "get_data"):
        return None
    try:
        return spec.loader.get_data(spec.origin), spec.submodule_search_locations is not None
    except OSError:
        return None


def _spec(module: str) -> Any:
    """Return where a module is, or None. The packages around it are in `sys.modules`."""
    around = sys.modules.get(module.rpartition(".")[0])
    where = getattr(around, "__path__", None)
    found = (finder.find_spec(module, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


class _Reader:
    """Follows names from one engine's class.

    Invariant: no class and no assignment is read twice, so names that refer to each other end.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._read: set[tuple[str, tuple[str, ...]]] = set()

    def facts_of(self, module: str, names: tuple[str, ...], within: str = "") -> dict[str, Any]:
        """Return the facts of what a module calls `names[0].names[1]...`. Only modules of the package `within` count, if it is given."""
        parts = module.split(".")
        if within and parts[0] != within:
            return {}
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
        return self._named(_Scope(module, package, (tree.body,)), names, within)

    def _named(self, scope: _Scope, names: tuple[str, ...], within: str) -> dict[str, Any]:
        """Return the facts of `names` in the innermost body that has the first of them."""
        for depth, body in enumerate(scope.bodies):
            outer = _Scope(scope.module, scope.package, scope.bodies[depth:])
            for node in reversed(list(_statements(body))):
                if isinstance(node, ast.ClassDef) and node.name == names[0]:
                    inner = _Scope(scope.module, scope.package, (node.body, *outer.bodies))
                    return self._named(inner, names[1:], within) if names[1:] else self._of_class(node, outer)
                if isinstance(node, ast.Assign | ast.AnnAssign) and names[0] in _targets(node):
                    value = _dotted(node.value) if self._is_new(scope, node) else ()
                    return self._named(outer, (*value, *names[1:]), within) if value else {}
                if isinstance(node, ast.ImportFrom | ast.Import):
                    for module, rest in _imported(node, scope.package, names):
                        if found := self.facts_of(module, rest, within):
                            return found
        return {}

    def _of_class(self, node: ast.ClassDef, scope: _Scope) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not self._is_new(scope, node):
            return found
        for base in reversed(node.bases):  # the first base wins, as in Python
            if names := _dotted(base):
                found |= self._named(scope, names, scope.module.partition(".")[0])
        for statement in _statements(node.body):
            for name in set(_targets(statement)) & set(NAMES):
                literal = isinstance(statement, ast.Assign | ast.AnnAssign) and statement in node.body
                if literal and statement.value is None:  # type: ignore[attr-defined]
                    continue  # only an annotation
                found[name] = self._literal(name, statement.value if literal else None)  # type: ignore[attr-defined]
        return found

    def _is_new(self, scope: _Scope, node: ast.stmt) -> bool:
        key = (scope.module, (str(node.lineno), str(node.col_offset)))
        known = key in self._read
        self._read.add(key)
        return not known

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
