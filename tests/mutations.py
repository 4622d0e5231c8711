"""Put faults into a copy of aionn, one at a time, and see which of them the tests catch.

    python -m tests.mutations                             60 faults over all rooms, then the known ones
    python -m tests.mutations --seed 7 tests/caching      other faults, against the tests of some folders
    python -m tests.mutations --faults 0                  the known ones alone
    python -m tests.mutations --list                      print what would be put in

A run has two steps. The first runs the tests once over a copy in which each place that may be drawn is marked but right. So it finds
which tests reach which place, in their process or in a driver. The second puts in one fault at a time, and runs tests that reach it.

Invariants
    The checkout is never changed. Each worker has a copy in a temporary folder.
    A fault counts only if its line has run. The faulty expression itself says that it runs, in a byte of a mapped file.
    A test counts only if it passed in the first step.
    A draw depends on the seed and on the text of each function. So a change of one function leaves the faults of the others as they are.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SEED, FAULTS, MINUTES = 29, 60, 90.0
SPARE = 4
"""So many places of a room are marked for each one that is drawn, because tests may reach none of the first."""

WORKERS = 2
FAULT_S = 75.0
"""So long may the tests of one fault take, counted from the end of pytest's start."""

START_S = 40.0
"""So long may pytest take until its first test runs, on a busy machine."""

RAN = "aionn_place_ran"
"""The function that marks a place. `aionn/__init__.py` of the copy defines it, because each process of aionn imports that first."""

MARKS = 4096
"""Bytes of the file of marks: one for each place."""

PREAMBLE = f"""
def _set_marks():
    import builtins, mmap, os
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "marks-" + os.environ.get("PYTEST_XDIST_WORKER", "gw0"))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(fd, {MARKS})
        marks = mmap.mmap(fd, {MARKS})
        os.close(fd)
    except OSError:  # in a process of another user, or a confined one
        marks = bytearray({MARKS})
    builtins.{RAN} = lambda place: marks.__setitem__(place, 1)

_set_marks()
"""

# A known fault of Python code has `ran()` where the faulty expression says that it runs.
KNOWN_RAN = "ran()"


class Known(NamedTuple):
    """A fault that the tests once let pass. `old` stands once in the file."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


KNOWN = (
    Known(
        "the listener runs a request whose deadline has passed",
        "aionn/burst/server.py",
        "if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:",
        "if ran():",
        ("tests/burst/test_server.py::test_the_listener_runs_no_request_whose_deadline_has_passed",),
    ),
    Known(
        "the driver keeps its part of a closed burst",
        "aionn/remote/device.py",
        "                await self._device.connection.call(CloseBurst(self.number))",
        "                ran()",
        ("tests/runtime/test_frames.py::test_a_link_that_ends_leaves_nothing_of_it_in_the_driver",),
    ),
    Known(
        "a later frame has another dtype",
        "aionn/runtime/executing/arguments.py",
        " or (array.dtype is not dtype and array.dtype != dtype):",
        " or ran():",
        ("tests/runtime/test_frames.py::test_a_later_frame_of_another_dtype_is_refused_and_never_cast",),
    ),
    Known(
        "native code takes a packet that is longer than what it recognises",  # C code, which cannot say that it ran
        "aionn/fmq/exchange.h",
        "*bytes > EXCHANGE_MOST || ",
        "",
        ("tests/fmq/test_native.py",),
    ),
    Known(
        "a driver outlives its app while another process holds their socket",
        "aionn/driver/beginning.py",
        "if not outlives and libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:",
        "if ran():",
        ("tests/journeys/test_interrupted_app.py::test_a_driver_ends_with_its_app_although_another_process_holds_the_socket_open",),
    ),
    Known(
        "a stranger's engine is not confined",
        "aionn/driver/beginning.py",
        "return None if is_test_double(place) else needs_of(place, provider)",
        'return None if is_test_double(place) or (ran(), not place.startswith("aionn."))[1] else needs_of(place, provider)',
        ("tests/sandbox/test_strangers.py",),
    ),
    Known(
        "a call that fell back counts twice",
        "aionn/runtime/executing/execution.py",
        "        executor.counts.add(FELL_BACK, outputs is not None)",
        "        ran(), executor.counts.add(FELL_BACK, outputs is not None), executor.counts.add(FAILED, 1)",
        ("tests/runtime/test_execution_states.py::test_an_execution_in_its_fallback_ends_rightly",),
    ),
    Known(
        "a stream goes on without its consumer",
        "aionn/runtime/streaming/stream.py",
        "            self._tasks.cancel_scope.cancel()",
        "            ran()",
        ("tests/runtime/test_execution_states.py::test_a_stream_with_frames_in_flight_ends_rightly",),
    ),
    Known(
        "a device may ask for too many files of one kind",
        "aionn/runtime/preparing/compile_acts.py",
        "max(files.model, files.data)",
        "(ran(), min)[1](files.model, files.data)",
        ("tests/conformance/test_caching_runtime.py",),
    ),
)

EQUIVALENT: dict[tuple[str, str, str, str, int], str] = {
    ("aionn/memory/requests.py", "_overlap", "off by one", "0", 1): "the first range sets it, because no pool has the number -1",
    ("aionn/fleet/requests.py", "Requests.put_chunks", "changed comparison", "size_bytes <= MULTIPART_BYTES", 1): (
        "an object of just that size is written the same in one request or in parts"
    ),
    ("aionn/runtime/serving/serving.py", "Use.__init__", "off by one", "1", 1): "no execution has the number -1 or -2",
}
"""Faults that change nothing that anyone can see: the keys of their places, with the reason."""


# -- the places of a file ----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A piece of code and the fault that can be put there.

    Attributes:
        file: relative to the checkout. function: its qualified name. line: its number, for the reader.
        start, end: offsets of the piece in the file, in bytes. marked_at: where a statement's mark stands, or -1 for an expression.
        old, new: the piece's text, without and with the fault.
        number: 1 for the first place of this text and kind in the function.
    """

    file: str
    function: str
    line: int
    kind: str
    start: int
    end: int
    marked_at: int
    old: str
    new: str
    number: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.kind, self.old, self.number

    @property
    def room(self) -> str:
        return os.path.dirname(self.file)

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line} {self.function}, {self.kind}: {old[:80]} -> {new[:80] or 'nothing'}"


BOUNDARY: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.LShift: ">>",
    ast.BitAnd: "|",
}


class Places(ast.NodeVisitor):
    """Collects the places in the functions of one file."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.found = file, list[Place]()
        self._source = source.encode()
        self._lines = [0, *itertools.accumulate(len(line) for line in self._source.splitlines(keepends=True))]
        self._names: list[str] = []
        self._in_function = False
        self.visit(ast.parse(source))
        self.found = [place for place in self.found if place.new != place.old]  # a handler may raise, and two arguments be the same

    def _offsets(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt | None = None) -> tuple[int, int]:
        last = last or first
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        return self._lines[first.lineno - 1] + first.col_offset, self._lines[last.end_lineno - 1] + last.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._offsets(node)
        return self._source[start:end].decode()

    def _add(self, kind: str, node: ast.expr, new: str) -> None:
        if self._in_function:
            start, end = self._offsets(node)
            name = ".".join(self._names)
            self.found.append(Place(self.file, name, node.lineno, kind, start, end, -1, self._text(node), new))

    def _add_statements(self, kind: str, first: ast.stmt, last: ast.stmt, new: str) -> None:
        if self._in_function:
            start, end = self._offsets(first, last)
            old = self._source[start:end].decode()
            self.found.append(Place(self.file, ".".join(self._names), first.lineno, kind, start, end, start, old, new))

    # -- what is left alone: annotations, decorators, defaults, texts, types

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, False)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside(node, True)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node, True)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, function: bool) -> None:
        before, self._in_function = self._in_function, function
        self._names.append(node.name)
        if node.name != "__repr__":
            for statement in node.body:
                self.visit(statement)
        self._names.pop()
        self._in_function = before

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone, whose positions Python 3.11 does not know."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave it alone: it speaks to type checkers."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        for statement in node.body:
            self.visit(statement)

    # -- the kinds of faults

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        self._add("negated condition", test, f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (operator := BOUNDARY.get(type(node.ops[0]))) is not None:
            self._add("changed comparison", node, f"({self._text(node.left)}) {operator} ({self._text(node.comparators[0])})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = " or " if isinstance(node.op, ast.And) else " and "
        self._add("and for or", node, operator.join(f"({self._text(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
            for one in ast.walk(node)
        )
        if (operator := ARITHMETIC.get(type(node.op))) is not None and not texts:
            self._add("changed arithmetic", node, f"({self._text(node.left)}) {operator} ({self._text(node.right)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("changed constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("off by one", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) > 1 and all(isinstance(one, ast.Name | ast.Attribute) for one in node.args[:2]):
            first, second = map(self._text, node.args[:2])  # other arguments are seldom of one type
            (start, _), (_, end), whole = self._offsets(node.args[0]), self._offsets(node.args[1]), self._offsets(node)
            around = self._source[whole[0] : start].decode(), self._source[end : whole[1]].decode()
            self._add("swapped arguments", node, f"{around[0]}{second}, {first}{around[1]}")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            return  # a docstring, or a generator that would be none
        self._add_statements("removed statement", node, node, "")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        made = self._names[-1:] in (["__init__"], ["__post_init__"])  # an attribute that is missing is found by any use
        if not made and all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add_statements("removed statement", node, node, "")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add_statements("removed statement", node, node, "")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add_statements("removed statement", node, node, "")

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add_statements("removed statement", node, node, "")

    def visit_Break(self, node: ast.Break) -> None:
        self._add_statements("removed statement", node, node, "")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add_statements("removed statement", node, node, "")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add_statements("removed statement", node, node, "")
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        for kind, body, new in [
            ("removed finally", node.finalbody, ""),
            *(("removed handler", one.body, "raise") for one in node.handlers),
        ]:
            # A mark stands on the line of the statement that it is for, which no compound statement allows.
            if body and not isinstance(
                body[0], ast.If | ast.For | ast.While | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith | ast.Match
            ):
                self._add_statements(kind, body[0], body[-1], new)
        self.generic_visit(node)


def numbered(places: list[Place]) -> Iterator[Place]:
    """Yield places of one file so that each has a key of its own."""
    seen = collections.Counter[tuple[str, str, str, str, int]]()
    for place in places:
        seen[place.key] += 1
        yield place._replace(number=seen[place.key])


def places_of(root: Path) -> list[Place]:
    """Return all places of the package below `root`. Equivalent faults are left out."""
    found: list[Place] = []
    for path in sorted((root / "aionn").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        found += numbered(Places(file, path.read_text(encoding="utf-8")).found)
    return [place for place in found if place.key not in EQUIVALENT]


def drawn(places: Iterable[Place], seed: int, count: int) -> list[Place]:
    """Return so many places of each room as rooms share `count`, in the order of the draw: the first of each room, the second of each.

    The order of a place depends on its own text alone.
    """
    rooms: dict[str, list[tuple[int, Place]]] = {}
    for place in places:
        rooms.setdefault(place.room, []).append((zlib.crc32(f"{seed} {place.key}".encode()), place))
    ranked = [(rank, *one) for each in rooms.values() for rank, one in enumerate(sorted(each))]
    return [place for _, _, place in sorted(ranked)[:count]]


def marked(source: str, places: dict[int, Place]) -> str:
    """Return the source in which each place says that it runs, by its number."""
    inserted: list[tuple[int, int, int, str]] = []
    for number, place in places.items():
        length = place.end - place.start
        if place.marked_at >= 0:
            inserted.append((place.marked_at, 1, -length, f"{RAN}({number}); "))
        else:
            inserted.append((place.start, 1, -length, f"({RAN}({number}), "))  # of two that begin here, the longer one first
            inserted.append((place.end, 0, length, ")[1]"))
    parts, at, whole = [], 0, source.encode()
    for offset, _, _, text in sorted(inserted):
        parts += [whole[at:offset], text.encode()]
        at = offset
    return b"".join([*parts, whole[at:]]).decode()


def faulty(source: str, place: Place) -> str:
    """Return the source with the fault, which marks the first byte when it runs."""
    whole = source.encode()
    new = f"({RAN}(0), {place.new})[1]" if place.marked_at < 0 else f"{RAN}(0); {place.new}".rstrip("; ")
    return (whole[: place.start] + new.encode() + whole[place.end :]).decode()


# -- the copy, and pytest in it ----------------------------------------------------------------------------------------------------


class Copy:
    """The files of the checkout in a folder of their own. The package there can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".?*", "__pycache__", "*.egg-info", "build", "dist"), symlinks=True)
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        folder.chmod(0o755)  # tests run apps of other users
        face = folder / "aionn" / "__init__.py"
        face.write_text(face.read_text(encoding="utf-8") + PREAMBLE, encoding="utf-8")
        self._times = itertools.count(int(time.time()))

    def write(self, file: str, source: str) -> None:
        """Write a file with a time of its own, so that Python compiles it again."""
        (self.folder / file).write_text(source, encoding="utf-8")
        os.utime(self.folder / file, (when := next(self._times), when))

    def ran(self) -> bool:
        """Return whether the fault has run in any process since the last call."""
        found = False
        for path in self.folder.glob("marks-*"):
            found |= bool(path.read_bytes()[0])
            path.write_bytes(bytes(MARKS))
        return found

    def pytest(self, arguments: Iterable[str], within_s: float, log: Path) -> int | None:
        """Run pytest in the copy. Returns its exit status, or None if it took too long."""
        environment = {**os.environ, "PYTHONPATH": os.fspath(self.folder)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the folder is our own, and each fault is a start of pytest
        command = [sys.executable, "-m", "pytest", "-q", "--no-cov", "-p", "no:cacheprovider", *arguments]
        with log.open("w") as said:
            run = subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            try:
                return run.wait(within_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):  # pytest's reaper kills what is left
                    with suppress(subprocess.TimeoutExpired):
                        run.send_signal(number)
                        run.wait(20)


class Reached(NamedTuple):
    """A test that passed in the first step, and the places that it ran."""

    test: str
    seconds: float
    places: frozenset[int]


class Reports:
    """The plugin of the first step. After each test it writes down the places that ran, in a file of the worker."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ["PYTEST_XDIST_WORKER"]
        self._marks, self._found = folder / f"marks-{worker}", folder / f"reached-{worker}"
        self._failed, self._seconds = False, 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= not report.passed
        self._seconds += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        with self._marks.open("r+b") as file, mmap.mmap(file.fileno(), MARKS) as marks:
            places = [number for number, ran in enumerate(marks[:]) if ran]
            marks[:] = bytes(MARKS)
        if not self._failed:
            with self._found.open("a") as found:
                found.write(json.dumps([nodeid, round(self._seconds, 3), places]) + "\n")
        self._failed, self._seconds = False, 0.0


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the first step, whose command names this module as a plugin."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports(ROOT))


def reached(copy: Copy, places: list[Place], tests: list[str], within_s: float, log: Path) -> list[Reached]:
    """Run the tests over a copy whose places are marked, and return those that passed."""
    by_file = collections.defaultdict[str, dict[int, Place]](dict)
    for number, place in enumerate(places):
        by_file[place.file][number] = place
    originals = {file: (copy.folder / file).read_text(encoding="utf-8") for file in by_file}
    for file, inside in by_file.items():
        copy.write(file, marked(originals[file], inside))
    copy.pytest(["-p", "tests.mutations", *tests], within_s, log)
    for file, source in originals.items():
        copy.write(file, source)
    lines = [line for path in copy.folder.glob("reached-*") for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Reached(test, seconds, frozenset(numbers)) for test, seconds, numbers in map(json.loads, lines)]
    if not found:
        raise SystemExit(f"no test passed over marked places; the end of {log}:\n{log.read_text()[-2000:]}")
    return found


class Outcome(NamedTuple):
    """How a fault ended: caught, survived, or not run."""

    fault: str
    how: str
    why: str


def try_fault(copy: Copy, fault: Place | Known, tests: list[str], log: Path) -> Outcome:
    """Put a fault into the copy, run the tests, and take it out again."""
    original = (copy.folder / fault.file).read_text(encoding="utf-8")
    if isinstance(fault, Place):
        what, changed = str(fault), faulty(original, fault)
    else:
        what, changed = fault.what, original.replace(fault.old, fault.new.replace(KNOWN_RAN, f"{RAN}(0)"))
        assert original.count(fault.old) == 1, f"{fault.file} holds this {original.count(fault.old)} times: {fault.old}"
    copy.write(fault.file, changed)
    code = copy.pytest(["-x", "-n", "1", *tests], START_S + FAULT_S, log)
    copy.write(fault.file, original)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ") for line in said if line.startswith(("FAILED ", "ERROR tests"))
    ]
    if not copy.ran() and fault.file.endswith(".py"):
        return Outcome(what, "not run", f"exit status {code}")
    if code == 0 or (code is None and not failed):
        return Outcome(what, "survived", f"{len(tests)} tests" if code == 0 else f"no test of {len(tests)} failed in the time")
    return Outcome(what, "caught", failed[0] if failed else f"exit status {code}: {said[-1] if said else ''}")


def tests_for(number: int, place: Place, all_reached: list[Reached]) -> list[str]:
    """Return tests that reach a place: those of its room first, and the shortest first, as long as their times fit."""
    folder = "tests/" + place.room.partition("aionn/")[2].partition("/")[0]
    mine = sorted((not one.test.startswith(folder), one.seconds, one.test) for one in all_reached if number in one.places)
    times = itertools.accumulate(seconds for _, seconds, _ in mine)
    return [test for (_, _, test), so_far in zip(mine, times, strict=True) if so_far <= FAULT_S / 2 or test == mine[0][2]]


def chosen(places: list[Place], all_reached: list[Reached], count: int) -> Iterator[tuple[Place, list[str]]]:
    """Yield `count` places that tests reach, as even over the rooms as the draw is."""
    hit = frozenset[int]().union(*(one.places for one in all_reached))
    ranks = collections.Counter[str]()
    ranked = []
    for number, place in enumerate(places):
        if number in hit:
            ranks[place.room] += 1
            ranked.append((ranks[place.room], number))
    for _, number in sorted(ranked)[:count]:
        yield places[number], tests_for(number, places[number], all_reached)


def main(argv: list[str]) -> int:
    """Run both steps, and return 0 if each fault was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="See which faults in aionn the tests catch.")
    parser.add_argument("tests", nargs="*", help="the tests that are asked; default: all")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--faults", type=int, default=FAULTS, help=f"how many are drawn; default: {FAULTS}")
    parser.add_argument("--known", action=argparse.BooleanOptionalAction, default=True, help="the faults that once passed, too")
    parser.add_argument("--room", action="append", help="draw from these folders only, such as aionn/fmq")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no fault is begun after that time")
    parser.add_argument("--workers", type=int, default=WORKERS, help="so many faults are tried at a time")
    parser.add_argument("--list", action="store_true", help="print the draw and end")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    places = drawn([one for one in places_of(ROOT) if not options.room or one.room in options.room], options.seed, options.faults * SPARE)
    rooms = len({place.room for place in places})
    print(f"seed {options.seed}: {len(places)} places in {rooms} rooms, for {options.faults} faults", flush=True)
    if options.list:
        print(*places, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="aionn-mutations-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copies = [Copy(folder / f"copy-{number}") for number in range(options.workers)]
        faults: list[tuple[Place | Known, list[str]]] = [(one, list(one.tests)) for one in KNOWN if options.known]
        if places:
            all_reached = reached(copies[0], places, options.tests, until - time.monotonic(), folder / "first.log")
            faults += chosen(places, all_reached, options.faults)
            print(f"{len(all_reached)} tests passed over the marked places", flush=True)
        free = list(copies)

        def run(fault: Place | Known, tests: list[str]) -> Outcome:
            if time.monotonic() > until:
                return Outcome(str(fault), "not tried", "the time was over")
            copy = free.pop()
            try:
                return try_fault(copy, fault, tests, folder / f"{copy.folder.name}.log")
            finally:
                free.append(copy)

        with ThreadPoolExecutor(options.workers) as pool:
            outcomes = []
            for outcome in pool.map(run, *zip(*faults, strict=True)):
                outcomes.append(outcome)
                print(f"{outcome.how}: {outcome.fault}\n    {outcome.why}", flush=True)
    counts = collections.Counter(outcome.how for outcome in outcomes)
    print(f"seed {options.seed}:", ", ".join(f"{count} {how}" for how, count in counts.items()))
    return int(counts.keys() != {"caught"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
