"""The house tests its rooms: no circle of files, private names stay private, and sizes that a reader can hold in mind.

`tests/test_house.py` holds the floors between packages. These tests look inside them, at Python and at the native code.
Where a limit would make the code worse, the exception stands in a list here, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

from tests.test_house import HOUSE, imports_of, modules
from tests.test_house import modules_are_forgotten as modules_are_forgotten

pytestmark = pytest.mark.no_cover  # it reads code, and runs no line of aionn


def dotted(path: Path) -> str:
    parts = ["aionn", *path.relative_to(HOUSE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MOST_LINES = 700
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
MOST_FILES_OF_A_ROOM = 20
MOST_ATTRIBUTES = 15
MOST_METHODS = 20

# place: reason. A place is a module, or "module: name" for a class or a function.
LONGER_MODULES: Mapping[str, str] = {}
LONGER_FUNCTIONS: Mapping[str, str] = {}
MORE_PARAMETERS: Mapping[str, str] = {}
LARGER_CLASSES: Mapping[str, str] = {
    "fmq/message_queue.py: MessageQueue": "making, transfer and waiting are one public class; to be rebuilt together with its waiting",
}
PRIVATE_READS: Mapping[str, str] = {}


def graph() -> dict[str, set[str]]:
    """Which module imports which, `TYPE_CHECKING` imports and imports inside functions included."""
    trees = {dotted(path): (path, tree) for path, tree in modules()}
    found: dict[str, set[str]] = {}
    for name, (path, tree) in trees.items():
        imported = {other for other in imports_of(path, tree) if other in trees}
        # `from package import module` names both; the package is meant only where one of its own names is.
        found[name] = imported - {name}
    return found


def circles(arrows: Mapping[str, Set[str]]) -> list[frozenset[str]]:
    """The groups of two or more files that reach each other (strongly connected components, Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = {stack.pop()}
            while node not in group:
                group.add(stack.pop())
            if len(group) > 1:
                found.append(frozenset(group))

    for node in arrows:
        if node not in number:
            visit(node)
    return found


def without_packages(arrows: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """An `__init__` that lists its rooms is a face, and imports from it are imports of the rooms: only files count here."""
    faces = {dotted(path) for path, _ in modules() if path.name == "__init__.py"}
    return {name: set(others) - faces for name, others in arrows.items() if name not in faces}


def native_graph() -> dict[str, set[str]]:
    """Native files by what they call: a file needs the one that defines a function it names."""
    files = sorted(HOUSE.rglob("*.c"))
    texts = {path.name: re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL) for path in files}
    defines = {
        name: set(re.findall(r"^(?!static)[A-Za-z][\w \*]*?\b(\w+)\([^;{]*\)\s*\{", text, re.MULTILINE)) for name, text in texts.items()
    }
    return {
        name: {other for other, names in defines.items() if other != name and any(re.search(rf"\b{word}\b", text) for word in names)}
        for name, text in texts.items()
    }


def test_no_files_stand_in_a_circle() -> None:
    assert [sorted(group) for group in circles(without_packages(graph()))] == []


RUNTIME_FLOORS = (
    {"health", "tracing"},
    {"record"},
    {"loop", "model", "processes", "serving"},
    {"session"},
    {"preparing"},
    {"executing"},
    {"staging", "streaming"},
    {"compilation"},
    {"health_watch"},
    {"open_runtime"},
    {"asked"},
    {"runtime"},
)


def test_arrows_inside_runtime_run_downward() -> None:
    floor_of = {f"aionn.runtime.{room}": number for number, rooms in enumerate(RUNTIME_FLOORS) for room in rooms}

    def room_of(name: str) -> str:
        return ".".join(name.split(".")[:3])

    arrows = {
        (room_of(name), room_of(other))
        for name, others in without_packages(graph()).items()
        for other in others
        if name.startswith("aionn.runtime.") and other.startswith("aionn.runtime.")
    }
    assert {room for arrow in arrows for room in arrow} == floor_of.keys() - {"aionn.runtime.loop"}
    assert [arrow for arrow in arrows if arrow[0] != arrow[1] and floor_of[arrow[0]] <= floor_of[arrow[1]]] == []


def test_no_native_files_stand_in_a_circle() -> None:
    assert [sorted(group) for group in circles(native_graph())] == []


def test_the_search_for_circles_finds_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [frozenset("abc")]


def test_native_files_define_each_function_once() -> None:
    """A compiler does not see a second definition that stands under an `#if` for another processor."""
    definition = re.compile(r"^\w[^;{}()#]*?(\w+)\([^;{}]*?\)\s*\{", re.MULTILINE)
    files = {path: definition.findall(path.read_text(encoding="utf-8")) for ending in ("*.c", "*.h") for path in HOUSE.rglob(ending)}
    assert sum(map(len, files.values())) > 200, "the pattern finds the definitions"
    twice = {str(path.relative_to(HOUSE)): [name for name in set(found) if found.count(name) > 1] for path, found in files.items()}
    assert {place: names for place, names in twice.items() if names} == {}


def private_reads(path: Path, tree: ast.Module) -> Iterator[str]:
    """Private names of another file's classes or modules: `other._name`, and `from module import _name`."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")):
                yield f"{path.relative_to(HOUSE)}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("aionn"):
            for alias in node.names:
                if re.match(r"_[^_]", alias.name) and f"{node.module}.{alias.name}" != "aionn.fmq._ring":
                    yield f"{path.relative_to(HOUSE)}:{node.lineno} {alias.name}"


def test_private_means_private() -> None:
    found = [read for path, tree in modules() for read in private_reads(path, tree) if read.split(":")[0] not in PRIVATE_READS]
    assert found == []


def test_no_room_has_more_files_than_a_reader_can_hold() -> None:
    files = Counter(path.parent.relative_to(HOUSE).as_posix() for path, _ in modules())
    assert {room: count for room, count in files.items() if count > MOST_FILES_OF_A_ROOM} == {}


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    sizes = {str(path.relative_to(HOUSE)): len(path.read_text(encoding="utf-8").splitlines()) for path, _ in modules()}
    native = {
        str(path.relative_to(HOUSE)): len(path.read_text(encoding="utf-8").splitlines())
        for ending in ("*.c", "*.h")
        for path in HOUSE.rglob(ending)
    }
    long = {place: lines for place, lines in sizes.items() if lines > MOST_LINES} | {
        place: lines for place, lines in native.items() if lines > 500
    }
    assert {place: lines for place, lines in long.items() if place not in LONGER_MODULES} == {}
    assert LONGER_MODULES.keys() <= long.keys(), "an exception that is no longer needed"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(HOUSE)}: {node.name}", node


def test_no_function_is_longer_than_a_page() -> None:
    long = {}
    for place, node in functions():
        docstring = ast.get_docstring(node, clean=False)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
        if lines > MOST_FUNCTION_LINES:
            long[place] = lines
    assert {place: lines for place, lines in long.items() if place not in LONGER_FUNCTIONS} == {}
    assert LONGER_FUNCTIONS.keys() <= long.keys(), "an exception that is no longer needed"


def test_no_function_takes_more_than_a_reader_can_remember() -> None:
    """Keyword-only parameters of public functions do not count: a caller names them."""
    many = {}
    for place, node in functions():
        arguments = node.args
        named = [] if not node.name.startswith("_") or node.name == "__init__" else arguments.kwonlyargs
        count = len([argument for argument in (*arguments.posonlyargs, *arguments.args, *named) if argument.arg not in ("self", "cls")])
        if count > MOST_PARAMETERS:
            many[place] = count
    assert {place: count for place, count in many.items() if place not in MORE_PARAMETERS} == {}
    assert MORE_PARAMETERS.keys() <= many.keys(), "an exception that is no longer needed"


def test_no_class_holds_more_than_a_reader_can_remember() -> None:
    large = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            attributes: dict[str, None] = defaultdict(None)
            for method in methods:
                for inner in ast.walk(method):
                    match inner:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            attributes[name] = None
            if len(attributes) > MOST_ATTRIBUTES or len(methods) > MOST_METHODS:
                large[f"{path.relative_to(HOUSE)}: {node.name}"] = (len(attributes), len(methods))
    assert {place: counts for place, counts in large.items() if place not in LARGER_CLASSES} == {}
    assert LARGER_CLASSES.keys() <= large.keys(), "an exception that is no longer needed"
