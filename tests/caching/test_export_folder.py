"""Folders for temporary files of drivers: where they lie, who removes them, and what a hostile driver may leave in them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from aionn.caching import private_folder
from aionn.caching.private_folder import clean_up, left_folders, make_folder, name_folder, remove_folder
from tests.apps import App


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where such folders may lie."""
    monkeypatch.setattr(private_folder, "_places", lambda: (str(tmp_path),))
    return tmp_path


def test_a_folder_lies_in_memory_if_there_is_room_and_is_made_by_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    real = os.statvfs
    space = namedtuple("space", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: space(1 << 18, 4096) if path == "/dev/shm" else real(path))
    assert name_folder().startswith(f"/dev/shm/aionn-exports-{os.getpid()}-")
    monkeypatch.setattr(os, "statvfs", lambda path: space(1 << 14, 4096) if path == "/dev/shm" else real(path))
    path = name_folder()
    assert path.startswith(f"{tmp_path}/aionn-exports-{os.getpid()}-")
    assert not Path(path).exists()
    assert name_folder() != path


def test_a_descriptor_may_have_the_number_0_where_the_app_has_no_stdin(places: Path) -> None:
    path = name_folder()
    os.close(make_folder(path))
    kept = os.dup(0)
    try:
        os.close(0)
        assert left_folders() == [path]
        assert clean_up() == [path]
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_no_place_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(private_folder, "_places", lambda: (str(tmp_path / "absent"),))
    assert name_folder() == ""
    remove_folder("")


def test_a_held_folder_stays_until_its_holder_is_killed(places: Path) -> None:
    """The lock decides, and no number of a process, which another container may have given to another process."""
    code = "import sys\nfrom aionn.caching.private_folder import hold\nfd = hold(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"
    path = name_folder()
    holder = App([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert (left_folders(), clean_up()) == ([], [])
    holder.kill()
    holder.communicate()
    assert left_folders() == [path]
    os.close(make_folder(name_folder()))
    assert not Path(path).exists()


def test_a_folder_of_any_depth_with_any_modes_is_removed_and_nothing_outside_of_it(places: Path) -> None:
    path = Path(name_folder())
    fd = make_folder(os.fspath(path))
    (outside := places / "outside").mkdir()
    (outside / "kept").write_text("mine")
    (path / "link").symlink_to(outside)
    os.close(fd)
    at = os.open(path, os.O_RDONLY)
    for number in range(1500):  # deeper than the stack and than PATH_MAX
        os.mkdir("a" * 10, dir_fd=at)
        inner = os.open("a" * 10, os.O_RDONLY, dir_fd=at)
        os.close(os.open(f"file {number}", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.close(at)
        at = inner
    os.close(at)
    (path / "closed").mkdir(mode=0)
    remove_folder(os.fspath(path))
    assert not path.exists()
    assert (outside / "kept").read_text() == "mine"


def test_more_entries_than_can_be_removed_at_once_are_removed_later(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "_MOST_ENTRIES", 10)
    path = Path(name_folder())
    os.close(make_folder(os.fspath(path)))
    for number in range(25):
        (path / str(number)).touch()
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("lists any number of names at once"))
    remove_folder(os.fspath(path))
    monkeypatch.undo()
    monkeypatch.setattr(private_folder, "_MOST_ENTRIES", 10)
    monkeypatch.setattr(private_folder, "_places", lambda: (str(places),))
    assert len(list(path.iterdir())) == 15
    assert clean_up() == []
    assert clean_up() == [os.fspath(path)]


def test_a_symlink_and_a_folder_of_another_account_are_left_alone(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places / "outside").mkdir()
    (places / "aionn-exports-1-00").symlink_to(places / "outside")
    (places / "aionn-exports-2-00").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert (left_folders(), clean_up()) == ([], [])
    remove_folder(str(places / "aionn-exports-2-00"))
    assert len(list(places.iterdir())) == 3
