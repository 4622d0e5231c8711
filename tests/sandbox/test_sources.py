"""The facts of an engine's class, read in its source: bases, imports, nested classes, finders, and one sentence for what cannot be read."""

from __future__ import annotations

import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aionn.engines.installed import BUILT_IN
from aionn.engines.needs import facts_of
from aionn.sandbox.facts import NAMES, Facts, FactsError
from aionn.sandbox.sources import declared, source_of

Write = Callable[[dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write modules by name into a folder that is on Python's path. They must never be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(modules: dict[str, str]) -> None:
        for name, text in modules.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text) + "\nraise SystemExit('imported')\n", encoding="utf-8")

    return write


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_table_of_built_in_engines_says_what_their_classes_say(name: str) -> None:
    assert facts_of(BUILT_IN[name], "") == declared(BUILT_IN[name])


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("reads = ('/opt/weights', '/sys/class/x*')", Facts(reads=("/opt/weights", "/sys/class/x*"))),
        ("makes_code: bool = True", Facts(makes_code=True)),
        ("makes_code: ClassVar[bool]", None),
        ("devices = ['/dev/npu0']", Facts(devices=("/dev/npu0",))),
        ("reads = devices = ()", Facts()),
        ("reads = ()\n    reads = ('/a',)", Facts(reads=("/a",))),
        ("writes_by_path = False", Facts()),
        ("def compile(self): ...", None),
    ],
)
def test_facts_are_literals_of_the_class(write: Write, body: str, facts: Facts | None) -> None:
    write({"engine1": f"class Mine:\n    {body}\n"})
    assert declared("engine1:Mine") == facts


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("reads = '/opt'", "a tuple of absolute paths"),
        ("reads = ('weights',)", "a tuple of absolute paths"),
        ("reads = ('~/weights',)", "a tuple of absolute paths"),
        ("reads = ('/a' + '/b',)", "a tuple of absolute paths"),
        ("reads = tuple(find())", "a tuple of absolute paths"),
        ("reads += ('/a',)", "a tuple of absolute paths"),
        ("devices = {'/dev/npu0'}", "a tuple of absolute paths"),
        ("devices = (b'/dev/npu0',)", "a tuple of absolute paths"),
        ("makes_code = 1", "True or False"),
        ("makes_code = JIT", "True or False"),
        ("if JIT:\n        makes_code = True", "True or False"),
        ("@property\n    def writes_by_path(self): return True", "True or False"),
        ("writes_by_path, x = True, 1", "True or False"),
    ],
)
def test_what_is_no_literal_is_refused_with_one_sentence(write: Write, body: str, kind: str) -> None:
    write({"engine2": f"class Mine:\n    {body}\n"})
    with pytest.raises(FactsError) as caught:
        declared("engine2:Mine")
    name = next(name for name in NAMES if name in body)
    because = "as a literal in the class's body, because it is read before the engine is imported"
    assert str(caught.value) == f"engine2:Mine.{name} must be {kind}, {because}"


def test_facts_of_bases_count_and_the_first_base_wins(write: Write) -> None:
    write(
        {
            "engine3": """
        import abc
        class Reads: reads = ("/a",); makes_code = True
        class Makes(abc.ABC): makes_code = False; devices = ("/dev/x",)
        class Generic(Reads): pass
        class Mine(Generic[int], Makes, Unknown, make_base()): devices = ("/dev/y",)
        """
        }
    )
    assert declared("engine3:Mine") == Facts(reads=("/a",), makes_code=True, devices=("/dev/y",))


def test_bases_that_refer_to_each_other_end(write: Write) -> None:
    write({"engine4": "class A(B): pass\nclass B(A): reads = ()\nclass C(C): pass\nD = E\nE = D\n"})
    assert declared("engine4:A") == Facts()
    assert declared("engine4:C") is None
    assert declared("engine4:D") is None


def test_names_are_followed_through_imports_and_assignments(write: Write) -> None:
    write(
        {
            "pack/__init__": "from ._impl import Impl as Engine\nfrom .star import *\n",
            "pack/_impl": """
                from . import base
                import pack.base as other
                class Impl(base.Base): pass
                class Second(other.Base): pass
                Third = Second
                """,
            "pack/base": "class Base:\n    reads = ('/b',)\n",
            "pack/star": "class Starred:\n    devices = ('/dev/s',)\n",
            "elsewhere": "import pack._impl\nimport pack\nclass Derived(pack.Engine): pass\nFourth = pack._impl.Third\n",
        }
    )
    for place in ("pack:Engine", "pack._impl:Impl", "pack._impl:Second", "pack._impl:Third", "elsewhere:Fourth"):
        assert declared(place) == Facts(reads=("/b",)), place
    assert declared("pack:Starred") == Facts(devices=("/dev/s",))
    # The author of another package does not know what a derived class does.
    assert declared("elsewhere:Derived") is None


def test_nested_and_conditional_classes_are_found(write: Write) -> None:
    write(
        {
            "engine5": """
        class Outer:
            class Base: makes_code = True
            class Inner(Base): reads = ("/i",)
        try:
            import fast
        except ImportError:
            class Engine: reads = ("/slow",)
        else:
            class Engine: reads = ("/fast",)
        class Twice: reads = ("/1",)
        class Twice: reads = ("/2",)
        """
        }
    )
    assert declared("engine5:Outer.Inner") == Facts(reads=("/i",), makes_code=True)
    assert declared("engine5:Twice") == Facts(reads=("/2",))
    assert declared("engine5:Engine") in (Facts(reads=("/slow",)), Facts(reads=("/fast",)))


def test_a_module_that_is_not_there_or_broken_declares_nothing(write: Write) -> None:
    write({"engine6": "class Mine:\n    reads = (\n"})
    for place in (
        "engine6:Mine",
        "not_there:Mine",
        "not_there.at_all:Mine",
        "engine6.inner:Mine",
        "sys:Mine",
        "engine6:",
        "asyncio:Runner",
    ):
        assert declared(place) is None, place


def test_an_engine_in_a_zip_file_and_in_a_namespace_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped_engine.py", "class Mine:\n    reads = ('/z',)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "zipped.zip"))
    write({"space/part/engine": "class Mine:\n    reads = ('/n',)\n"})
    assert declared("zipped_engine:Mine") == Facts(reads=("/z",))
    assert declared("space.part.engine:Mine") == Facts(reads=("/n",))
    assert not [name for name in sys.modules if name.startswith("space")]


def test_an_engine_that_only_a_finder_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import spec_from_file_location

    path = tmp_path / "src" / "redirected.py"
    path.parent.mkdir()
    path.write_text("class Mine:\n    reads = ('/r',)\n", encoding="utf-8")

    class Finder:
        @classmethod
        def find_spec(cls, name: str, where: Any = None, target: ModuleType | None = None) -> Any:
            return spec_from_file_location(name, path) if name == "redirected" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder, object()])
    assert source_of("redirected") == (path.read_bytes(), False)
    assert declared("redirected:Mine") == Facts(reads=("/r",))
