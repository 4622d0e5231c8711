"""The reference has every name, command, error and variable that the code has."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.cli import main
from tests.docs import command_line
from tests.docs.pages import DOCS, ROOT

API = DOCS / "reference" / "api"
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
FACES = ["aionn", "aionn.adapters.livekit", "aionn.blocking", "aionn.fleet", "aionn.hal", "aionn.ray", "aionn.testing"]


def entries() -> list[str]:
    return [name for page in sorted(API.glob("*.md")) for name in ENTRY.findall(page.read_text(encoding="utf-8"))]


def test_no_name_is_documented_twice() -> None:
    assert len(entries()) == len(set(entries()))


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_has_an_entry_and_a_docstring(face: str) -> None:
    module: Any = importlib.import_module(face)
    names = {f"{face}.{name}" for name in module.__all__}
    assert names - set(entries()) == set(), "add `::: NAME` to a page of docs/reference/api"
    documented = {name for name in entries() if name.rpartition(".")[0] == face and not (hasattr(module, "__path__") and find_spec(name))}
    assert documented - names == set(), "these names are not public"
    bare = [name for name in module.__all__ if callable(getattr(module, name)) and not inspect.getdoc(getattr(module, name))]
    assert bare == []


def test_examples_are_a_section_that_griffe_knows() -> None:
    """griffe reads "Examples:" as a section of code, and "Example:" as plain Markdown, in which `[0]` is a link."""
    modules = sorted((ROOT / "aionn").rglob("*.py"))
    assert [str(path) for path in modules if re.search(r"^ *Example:$", path.read_text(encoding="utf-8"), re.MULTILINE)] == []


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    written = command_line.PAGE.read_text(encoding="utf-8")
    assert written == command_line.page(), "write it with `python -m tests.docs.command_line`"


@pytest.mark.parametrize("command", re.findall(r"^#+ aionn (.+)$", command_line.PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_help_has_every_option_of_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    (part,) = re.findall(rf"^#+ aionn {re.escape(command)}\n(.*?)(?=^#|\Z)", command_line.PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [option for option in re.findall(r"^\* `(--[\w-]+)", part, re.MULTILINE) if option not in printed] == []


def test_each_error_has_its_cause_and_a_way_out() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    errors = [name for name in aionn.__all__ if isinstance(getattr(aionn, name), type) and issubclass(getattr(aionn, name), Exception)]
    assert [name for name in errors if name not in parts] == []
    lacking = [
        name
        for name in errors
        if name != "AionnError" and not ("**Cause**" in parts[name] and "**Way out**" in parts[name].replace("way out", "**Way out**"))
    ]
    assert lacking == []


def test_each_variable_that_the_code_reads_is_listed() -> None:
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    read = set()
    for path in sorted((ROOT / "aionn").rglob("*.py")):
        read |= variables(path)
    assert sorted(read - listed) == [], "add them to docs/reference/environment.md"


def variables(path: Path) -> set[str]:
    """Return the names of variables in a module: those of aionn, and those that it asks the environment for."""
    text = path.read_text(encoding="utf-8")
    own = set(re.findall(r"[\"'](AIONN_[A-Z_]+)[\"']", text))
    return own | set(re.findall(r"environ(?:\.\w+)?[\[(][\"']([A-Z_]+)[\"']", text))
