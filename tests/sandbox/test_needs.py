"""What an engine needs, as its TOML file or its app says. No module is imported to find the file, and what it says is checked."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aionn
from aionn.engines.installed import BUILT_IN
from aionn.engines.needs import needs_of
from aionn.hal import Needs

Write = Callable[[dict[str, str]], None]
IMPORTED = "raise SystemExit('it was imported')"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files by name into a folder that is on Python's path. Python files end the test if they are imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text or IMPORTED, encoding="utf-8")

    return write


def test_engines_of_aionn_state_their_needs_in_files() -> None:
    assert needs_of(BUILT_IN["onnxruntime"], "") == needs_of(BUILT_IN["onnxruntime"], "CPU") == Needs()
    assert needs_of(BUILT_IN["openvino"], "") == needs_of(BUILT_IN["openvino"], "cpu") == Needs(makes_code=True)
    assert needs_of(BUILT_IN["reference"], "") == needs_of(BUILT_IN["reference"], "none") == Needs()
    for engine in ("onnxruntime", "openvino"):
        gpu = needs_of(BUILT_IN[engine], "CUDA")
        assert gpu.makes_code
        assert "/dev/nvidia*" in gpu.devices
        assert "/usr/local/cuda*" in gpu.reads


def test_the_file_of_a_module_lies_beside_it(write: Write) -> None:
    write({"single.py": "", "single.aionn-engine.toml": "makes_code = true", "aionn-engine.toml": 'reads = ["/beside"]'})
    assert needs_of("single:Mine", "") == Needs(makes_code=True)
    write({"other.py": ""})
    assert needs_of("other:Mine", "") == Needs(), "the file of no package belongs to no engine"


def test_the_nearest_file_counts_and_no_package_is_imported(write: Write) -> None:
    write({"pack/__init__.py": "", "pack/sub/__init__.py": "", "pack/sub/engine.py": "", "pack/aionn-engine.toml": 'reads = ["/a"]'})
    for place in ("pack:Mine", "pack.sub:Mine", "pack.sub.engine:Mine", "pack.sub.engine:Outer.Inner"):
        assert needs_of(place, "") == Needs(reads=("/a",)), place
    write({"pack/sub/aionn-engine.toml": 'reads = ["/b"]'})
    assert needs_of("pack.sub.engine:Mine", "") == Needs(reads=("/b",))
    assert needs_of("pack:Mine", "") == Needs(reads=("/a",))
    write({"pack/sub/engine.aionn-engine.toml": "# nothing"})
    assert needs_of("pack.sub.engine:Mine", "") == Needs()


def test_a_section_adds_to_what_stands_above_it(write: Write) -> None:
    write(
        {
            "parted.py": "",
            "parted.aionn-engine.toml": 'reads = ["/a"]\n[NPU]\ndevices = ["/dev/npu*"]\n[cpu]\n["*"]\nmakes_code = true\nreads = ["/b"]',
        }
    )
    assert needs_of("parted:Mine", "") == needs_of("parted:Mine", "cpu") == Needs(reads=("/a",))
    assert needs_of("parted:Mine", "npu") == Needs(reads=("/a",), devices=("/dev/npu*",))
    assert needs_of("parted:Mine", "gpu") == Needs(reads=("/a", "/b"), makes_code=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reads = [", "is not a TOML file: "),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "\0", "is not a TOML file: "),
        ('read = ["/a"]', "has 'read', which is not a need; the needs are reads, writes_by_path, makes_code, devices"),
        ('reads = "/a"', "reads is '/a'; it must be a list of absolute paths"),
        ('reads = ["models"]', "reads is ['models']; it must be a list of absolute paths"),
        ('devices = ["/dev/\\u0000"]', "it must be a list of absolute paths"),
        ("devices = [1]", "devices is [1]; it must be a list of absolute paths"),
        ("makes_code = 1", "makes_code is 1; it must be true or false"),
        ('writes_by_path = "yes"', "writes_by_path is 'yes'; it must be true or false"),
        ("[npu]\nmakes_code = 1", "section [npu] of "),
        ("[npu.more]\nmakes_code = true", "has 'more', which is not a need"),
    ],
)
def test_a_file_that_states_no_needs_is_refused_with_its_path(write: Write, tmp_path: Path, text: str, words: str) -> None:
    write({"wrong.py": "", "wrong.aionn-engine.toml": text})
    with pytest.raises(aionn.CallerError) as caught:
        needs_of("wrong:Mine", "")
    assert words in str(caught.value)
    assert f"{tmp_path}/wrong.aionn-engine.toml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(write: Write, tmp_path: Path) -> None:
    write({"folder.py": ""})
    (tmp_path / "folder.aionn-engine.toml").mkdir()
    with pytest.raises(aionn.CallerError, match=r"folder\.aionn-engine\.toml cannot be read \(Is a directory\)"):
        needs_of("folder:Mine", "")


def test_an_engine_that_is_not_there_needs_nothing(write: Write) -> None:
    write({"broken.py": "class Mine:\n    reads = (\n"})
    for place in ("broken:Mine", "not_there:Mine", "not_there.at_all:Mine", "broken.inner:Mine", "sys:Mine", "broken:"):
        assert needs_of(place, "") == Needs(), place


def test_an_engine_in_a_zip_file_and_in_a_namespace_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped_engine.py", IMPORTED)
        archive.writestr("zipped_engine.aionn-engine.toml", 'reads = ["/z"]')
        archive.writestr("zipped_package/__init__.py", IMPORTED)
        archive.writestr("zipped_package/aionn-engine.toml", 'reads = ["/p"]')
        archive.writestr("zipped_bare.py", IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path / "zipped.zip"))
    write({"space/part/deep/engine.py": "", "space/part/aionn-engine.toml": 'reads = ["/n"]'})
    assert needs_of("zipped_engine:Mine", "") == Needs(reads=("/z",))
    assert needs_of("zipped_package:Mine", "") == Needs(reads=("/p",))
    assert needs_of("zipped_bare:Mine", "") == Needs()
    assert needs_of("space.part.deep.engine:Mine", "") == Needs(reads=("/n",))
    assert not [name for name in sys.modules if name.startswith("space")]


def test_an_engine_that_only_a_finder_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As editable installs have it."""
    path = tmp_path / "src" / "redirected.py"
    path.parent.mkdir()
    path.write_text(IMPORTED, encoding="utf-8")
    path.with_name("redirected.aionn-engine.toml").write_text('reads = ["/r"]', encoding="utf-8")

    class Finder:
        @classmethod
        def find_spec(cls, name: str, where: Any = None, target: ModuleType | None = None) -> Any:
            return spec_from_file_location(name, path) if name == "redirected" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder, object()])
    assert needs_of("redirected:Mine", "") == Needs(reads=("/r",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("reference", Needs())], r"engine_needs is list; give a mapping from names of devices to aionn\.hal\.Needs"),
        ({"reference": {"makes_code": True}}, r"engine_needs has 'reference': dict; give a mapping"),
        ({3: Needs()}, r"engine_needs has 3: Needs; give a mapping"),
        ({"refrence": Needs()}, r"engine_needs names 'refrence', which is not installed; the installed devices are .*reference"),
    ],
)
def test_an_app_that_gives_something_else_is_told(given: Any, words: str) -> None:
    with pytest.raises(aionn.CallerError, match=words):
        aionn.Runtime(engine_needs=given)


def test_needs_are_checked_where_they_are_made() -> None:
    with pytest.raises(aionn.CallerError, match=r"reads is '/a'; it must be a list of absolute paths"):
        Needs(reads="/a")
    assert Needs(reads=["/a"]) == Needs(reads=("/a",))


def test_a_pipe_in_place_of_the_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "piped_engine.py").write_text("", encoding="utf-8")
    os.mkfifo(tmp_path / "piped_engine.aionn-engine.toml")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(aionn.CallerError, match=r"piped_engine\.aionn-engine\.toml is not a file; put a TOML file in its place"):
        needs_of("piped_engine:Engine", "")
