"""The house tests itself: floors, wings and nevers of the plan, read from the imports with `ast`. Runs nothing."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_cover  # it reads code, and runs no line of aionn

HOUSE = Path(__file__).parent.parent / "aionn"

# From the ground up. A room may use the rooms below its own floor, and its own package.
FLOORS = (
    {"_mapping", "cgroups", "errors", "escapes", "events", "file_ranges", "lazy", "loopless", "memo", "needs", "tasks", "trace"},
    {"hal"},
    {"caching", "memory", "graph", "pages", "sandbox"},
    {"fmq", "engines"},
    {"burst"},
    {"remote"},
    {"runtime", "driver"},
    {"__init__", "blocking", "testing"},
    {"metrics", "otel", "sources", "fleet", "service"},
    {"adapters", "asgi", "ray"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Ground rooms may lean on each other, in this order: the first ones know nothing, loopless, tasks and needs know errors.
GROUND_ORDER = ("_mapping", "cgroups", "escapes", "file_ranges", "lazy", "memo", "errors", "events", "needs", "trace", "loopless", "tasks")

IO_MODULES = {"anyio", "os", "socket", "mmap", "asyncio", "fcntl", "subprocess", "select", "selectors", "aiofiles"}
SANS_IO = (
    "pages/layout.py",
    "pages/app_layout.py",
    "hal",
    "burst/packets.py",
    "remote/calls.py",
    "remote/control.py",
    "caching/manifest.py",
    "caching/statement.py",
    "caching/token.py",
    "fmq/layout.py",
)


def test_the_page_of_the_architecture_shows_each_room_on_its_floor() -> None:
    page = (HOUSE.parent / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    diagram = page.partition("```\nfloor\n")[2].partition("```")[0]
    shown = {int(number): line for number, line in re.findall(r"^ +(\d+) (.*)$", diagram, re.MULTILINE)}
    for number, rooms in enumerate(FLOORS, 1):
        assert rooms <= set(re.findall(r"\w+", shown[number])), (number, shown[number])


@functools.cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(HOUSE.rglob("*.py"))]


@pytest.fixture(scope="module", autouse=True)
def modules_are_forgotten() -> Iterator[None]:
    """They take 100 MB."""
    yield
    modules.cache_clear()


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports_of(path: Path, tree: ast.Module) -> Iterator[str]:
    """Full dotted names of everything the module imports, also inside functions; relative imports resolved."""
    package = ["aionn", *path.relative_to(HOUSE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path, tree: ast.Module) -> set[str]:
    rooms = set()
    for name in imports_of(path, tree):
        parts = name.split(".")
        if parts[0] == "aionn" and len(parts) > 1 and parts[1] in FLOOR_OF:
            rooms.add(parts[1])
    return rooms


def test_every_room_is_on_the_plan() -> None:
    assert {room_of(path) for path, _ in modules()} <= FLOOR_OF.keys()


def test_nobody_calls_upstairs() -> None:
    upward = [
        f"{path.relative_to(HOUSE)} imports {room}"
        for path, tree in modules()
        for here in [room_of(path)]
        for room in rooms_imported(path, tree) - {here}
        if FLOOR_OF[room] > FLOOR_OF[here]
        or (FLOOR_OF[room] == FLOOR_OF[here] and not (FLOOR_OF[here] == 0 and GROUND_ORDER.index(room) < GROUND_ORDER.index(here)))
    ]
    assert upward == []


def test_native_code_includes_from_lower_floors_only() -> None:
    includes = [
        (path, room)
        for ending in ("*.c", "*.h")
        for path in sorted(HOUSE.rglob(ending))
        for room in re.findall(r'#include "\.\./(\w+)/', path.read_text(encoding="utf-8"))
    ]
    assert [f"{path.relative_to(HOUSE)} includes {room}" for path, room in includes if FLOOR_OF[room] >= FLOOR_OF[room_of(path)]] == []


def test_a_queue_knows_the_contract_of_a_page_and_not_the_page() -> None:
    queues = ("fmq", "burst")
    python = [str(path.relative_to(HOUSE)) for path, tree in modules() if room_of(path) in queues and "pages" in rooms_imported(path, tree)]
    native = [str(path.relative_to(HOUSE)) for room in queues for path in (HOUSE / room).glob("*.[ch]") if "../pages/" in path.read_text()]
    assert python + native == []


def test_the_two_wings_do_not_know_each_other() -> None:
    across = [
        str(path.relative_to(HOUSE))
        for path, tree in modules()
        if (room_of(path) == "runtime" and "driver" in rooms_imported(path, tree))
        or (room_of(path) == "driver" and "runtime" in rooms_imported(path, tree))
    ]
    assert across == []


def test_engines_never_see_a_queue_a_socket_or_a_cache() -> None:
    allowed = {"cgroups", "errors", "hal", "graph", "engines", "needs", "sandbox", "tasks", "trace"}
    seen = [
        f"{path.relative_to(HOUSE)}: {sorted(rooms_imported(path, tree) - allowed)}"
        for path, tree in modules()
        if room_of(path) == "engines" and rooms_imported(path, tree) - allowed
    ]
    assert seen == []


def test_the_borders_are_sans_io() -> None:
    leaks = [
        f"{path.relative_to(HOUSE)} imports {name}"
        for path, tree in modules()
        if any(path.relative_to(HOUSE).as_posix().startswith(place) for place in SANS_IO)
        for name in imports_of(path, tree)
        if name.split(".")[0] in IO_MODULES
    ]
    assert leaks == []


def test_each_kind_of_act_has_one_place() -> None:
    """Only memory/region and pages map; only fmq imports the ring; only runtime/processes/spawning starts processes."""
    only = {
        "mmap": {"memory/region.py"},
        "aionn._mapping": {"memory/region.py", "pages/page.py"},
        "subprocess": {"runtime/processes/spawning.py"},
        "multiprocessing": set(),
        "pickle": set(),
        "aionn.pages._page": {"pages/page.py", "pages/app_page.py", "pages/finding.py"},
        "aionn.sandbox._strict": {"sandbox/strict.py"},
        "aionn.fmq._ring": {"fmq/event_flag.py", "fmq/message_queue.py", "fmq/thread_waits.py", "fmq/__init__.py"},
    }
    strays = [
        f"{path.relative_to(HOUSE)} imports {name}"
        for path, tree in modules()
        for name in imports_of(path, tree)
        for act, places in only.items()
        if (name == act or name.startswith(act + ".")) and path.relative_to(HOUSE).as_posix() not in places
    ]
    assert strays == []


def test_no_room_is_called_nothing() -> None:
    vague = {"utils", "helpers", "common", "misc", "manager", "util", "helper"}
    assert [path for path, _ in modules() if vague & set(path.relative_to(HOUSE).with_suffix("").parts)] == []


def test_every_package_has_its_one_page_design() -> None:
    bare = [str(path.relative_to(HOUSE)) for path, tree in modules() if not ast.get_docstring(tree)]
    assert bare == []


def test_every_room_is_named_in_the_design_of_its_package() -> None:
    """A module that came later is in the one-page design too. The floors of `aionn` itself are the plan above."""
    missing = []
    for path, tree in modules():
        if path.name == "__init__.py" and path.parent != HOUSE:
            rooms = [room.stem for room in path.parent.glob("*.py")] + [room.parent.name for room in path.parent.glob("*/__init__.py")]
            words = set(re.findall(r"\w+", ast.get_docstring(tree) or ""))
            missing += [f"{path.relative_to(HOUSE)} does not name {room}" for room in sorted({*rooms} - words - {"__init__", "__main__"})]
    assert missing == []


def test_no_module_outgrows_a_reader() -> None:
    assert [
        f"{path.relative_to(HOUSE)}: {n}" for path, _ in modules() if (n := len(path.read_text(encoding="utf-8").splitlines())) > 700
    ] == []


def test_every_all_tells_the_truth() -> None:
    """Names in `__all__` are defined or imported in the module, and sorted sets have no doubles."""
    lies = []
    for path, tree in modules():
        defined: set[str] = set()
        listed: list[str] = []
        for node in [*tree.body, *(inner for branch in tree.body if isinstance(branch, ast.If) for inner in branch.body)]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                defined.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        defined.add(target.id)
                        if target.id == "__all__":
                            listed = [str(value) for value in ast.literal_eval(node.value)]
        if len(listed) != len(set(listed)) or set(listed) - defined:
            lies.append(f"{path.relative_to(HOUSE)}: {sorted(set(listed) - defined)}")
    assert lies == []
