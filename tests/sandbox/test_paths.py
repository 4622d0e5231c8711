"""What a driver may read: all of Python's path, the loader's folders, and a word about folders that are too wide."""

from __future__ import annotations

import os
import sys
import types
import zipfile
from pathlib import Path

import pytest

import aionn
from aionn.needs import Needs
from aionn.sandbox import paths
from aionn.sandbox.landlock import DEVICE, READ, READ_AND_RUN, WRITE
from aionn.testing import identity_model
from tests.sandbox.test_confining import ROOT, printed, python

ENGINE = """
from aionn.engines.reference import ReferenceEngine
import helper_of_engine
class Mine(ReferenceEngine):
    pass
"""
DESCRIBE = """
    import json, os, sys
    from aionn.sandbox.confining import SandboxError, confine
    from aionn.needs import Needs
    try:
        print(json.dumps(confine(sys.argv[1], Needs(reads=tuple(sys.argv[2:]))).lacks))
    except SandboxError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def of(needs: Needs = Needs(), writable: tuple[str, ...] = ()) -> dict[str, int]:  # noqa: B008 (frozen)
    return dict(paths.rules(needs, writable))


def test_each_kind_of_place_has_its_rights(tmp_path: Path) -> None:
    (tmp_path / "a1").touch()
    (tmp_path / "a2").touch()
    found = of(Needs(reads=(f"{tmp_path}/a*", "/opt/w"), devices=("/dev/zer*",)), (str(tmp_path / "state"),))
    assert {found[str(tmp_path / name)] for name in ("a1", "a2")} == {READ}
    assert (found["/opt/w"], found["/dev/zero"], found[str(tmp_path / "state")]) == (READ, DEVICE, WRITE)
    assert found["/dev/null"] == WRITE
    assert found["/proc/self"] == READ
    prefixes = {sys.prefix, sys.base_prefix} - {"/usr", "/usr/local"}
    for path in (*prefixes, str(ROOT / "aionn"), *(path for path in sys.path if path)):
        assert found[os.path.abspath(path)] == READ_AND_RUN
    assert "/" not in found
    assert not {"/proc", "/etc", "/tmp", "/root", "/home", "/dev", "/sys"} & set(found)


def test_the_loaders_folders_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "x.conf"
    settings.write_text("# CUDA\n/opt/cuda/lib64\ninclude other\n\n", encoding="ascii")
    monkeypatch.setattr(paths, "_LOADER_SETTINGS", f"{tmp_path}/*.conf")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine/lib::relative")
    found = of()
    assert found["/opt/cuda/lib64"] == found["/opt/mine/lib"] == READ_AND_RUN
    assert not {"", "relative", "include other"} & set(found)


def test_editable_packages_of_any_builder_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    ours = types.ModuleType("__editable___ours_finder")
    ours.MAPPING = {"ours": str(tmp_path / "package"), "single": str(tmp_path / "src" / "single")}  # type: ignore[attr-defined]
    ours.NAMESPACES = {"space": [str(tmp_path / "space" / "part")]}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    by_class = type("Finder", (), {"__module__": ours.__name__})
    by_instance = type("Redirecting", (), {})()
    by_instance.known_source_files = {"built.core": str(tmp_path / "built" / "core.py")}
    by_instance.places = {"built": {str(tmp_path / "build")}}
    by_instance.rebuild, by_instance.name = False, "relative/name"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, by_class, by_instance])
    found = of()
    for part in ("package", "src", "space", "built"):
        assert found[str(tmp_path / part)] == READ_AND_RUN, part


def test_a_python_in_a_home_folder_does_not_open_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    found = of()
    assert str(tmp_path) not in found
    assert found[str(tmp_path / "lib")] == found[os.path.dirname(os.__file__)] == READ_AND_RUN
    assert paths.too_wide(Needs()) == {}


@pytest.mark.parametrize("prefix", ["/usr", "/usr/local"])
def test_a_python_of_the_system_does_not_open_what_lies_beside_it(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, prefix)
    found = of()
    assert not {prefix, "/usr/src", "/usr/local/etc"} & set(found)
    assert {found[f"{prefix}/{part}"] for part in ("bin", "lib", "share")} == {READ_AND_RUN}


def test_packages_whose_files_are_links_can_be_imported_and_nothing_beside_them(tmp_path: Path) -> None:
    """As `uv --link-mode symlink` and Bazel install them: each file is a link to where its package was unpacked."""
    archive, installed = tmp_path / "archive" / "x1", tmp_path / "installed"
    for name in ("linked/__init__.py", "linked-1.0.dist-info/METADATA"):
        (archive / name).parent.mkdir(parents=True)
        (archive / name).touch()
        (installed / name).parent.mkdir(parents=True)
        (installed / name).symlink_to(archive / name)
    (tmp_path / "archive" / "beside").touch()
    for source in [*(ROOT / "aionn").glob("*.py"), *(ROOT / "aionn" / "sandbox").glob("*.py")]:
        link = installed / source.relative_to(ROOT)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source)
    code = f"""
        from aionn.sandbox.confining import confine
        from aionn.needs import Needs
        confine("auto", Needs())
        import linked
        try:
            open({str(tmp_path / "archive" / "beside")!r})
        except PermissionError:
            print("denied")
    """
    ran = python(code, path=str(installed))
    assert ran.stdout == "denied\n", ran.stderr


def test_a_home_folder_or_the_root_on_pythons_path_is_reported(tmp_path: Path) -> None:
    home = tmp_path / "me"
    (home / ".ssh").mkdir(parents=True)
    why = "because Python or the system's loader looks for packages or libraries there"
    for place in (str(home), "/"):
        ran = python(DESCRIBE, "auto", path=f"{ROOT}:{place}")
        assert ran.stdout.strip() == f'["the driver may read all of {place}, {why}"]', ran.stderr
    refused = python(DESCRIBE, "require", path=f"{ROOT}:{home}").stdout.strip()
    assert refused == f"\"sandbox='require' cannot be had: the driver may read all of {home}, {why}\""
    asked = printed(DESCRIBE, "auto", str(home), str(home / "models"))
    assert asked == [f"the driver may read all of {home}, because its engine asks for it"]
    assert printed(DESCRIBE, "auto", str(home / "models")) == []


@pytest.mark.anyio
async def test_a_confined_driver_imports_from_zip_files_and_folders_of_the_path(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(ENGINE, encoding="ascii")
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("helper_of_engine.py", "")
    async with aionn.Runtime(sandbox="require", driver_env={"PYTHONPATH": f"{tmp_path}:{tmp_path / 'zipped.zip'}"}) as runtime:
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("my_engine:Mine",))
        (found,) = (device.sandbox for device in runtime.devices if device.name == "my_engine:Mine")
    assert found is not None
    assert "files" in found.holds


@pytest.mark.anyio
async def test_a_driver_whose_state_folder_cannot_be_made_is_confined_all_the_same() -> None:
    async with aionn.Runtime(sandbox="require", state_dir="/proc/aionn") as runtime:
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",))
