"""How much code there is: code lines, files by room, lines of C, class names defined twice, and verbs for an end.

    python -m tests.bench size [--json] [CHECKOUT]

A code line holds something else than a blank, a comment or a docstring. A folder within a folder is a room of its own.
"""

from __future__ import annotations

import ast
import collections
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]

VERBS_FOR_AN_END = frozenset(
    (
        "abandon",
        "abort",
        "aclose",
        "close",
        "destroy",
        "discard",
        "dispose",
        "drop",
        "end",
        "finish",
        "forget",
        "free",
        "give_back",
        "give_up",
        "kill",
        "leave",
        "over",
        "quit",
        "refuse",
        "release",
        "retire",
        "settle",
        "settled",
        "shut",
        "stop",
        "teardown",
        "terminate",
        "unlink",
        "withdraw",
    )
)


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code."""
    docstrings: set[int] = set()
    code = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # blank lines of a text count
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code - docstrings)


def measured(checkout: Path = HERE) -> dict[str, Any]:
    """Return the sizes of `aionn/` in a checkout, by name."""
    house = checkout / "aionn"
    rooms: collections.Counter[str] = collections.Counter()
    classes: dict[str, list[str]] = collections.defaultdict(list)
    verbs: collections.Counter[str] = collections.Counter()
    code, lengths = 0, []
    for path in sorted(house.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        code += code_lines(text)
        lengths.append(text.count("\n"))
        rooms[str(path.parent.relative_to(house))] += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path.relative_to(house)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") in VERBS_FOR_AN_END:
                verbs[node.name.lstrip("_")] += 1
    return {
        "code lines": code,
        "files": len(lengths),
        "median file": int(statistics.median_high(lengths)),
        "lines of C": sum(path.read_text(encoding="utf-8").count("\n") for path in house.rglob("*.[ch]")),
        "rooms": dict(rooms.most_common()),
        "verbs for an end": dict(verbs.most_common()),
        "class names defined twice": {name: places for name, places in sorted(classes.items()) if len(places) > 1},
    }


def main(argv: Sequence[str]) -> None:
    """Print the sizes of this checkout, or of another one."""
    checkouts = [Path(argument) for argument in argv if not argument.startswith("-")]
    found = measured(*checkouts[:1])
    if "--json" in argv:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}: {len(value)}")
            for key, detail in value.items():
                print(f"    {key}: {', '.join(detail) if isinstance(detail, list) else detail}")
        else:
            print(f"{name}: {value}")
