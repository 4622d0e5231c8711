"""The folders that hold the records of devices: their names, and how processes hold them."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from aionn.caching import private_folder
from aionn.caching.private_folder import UnsafeStateError, device_folder, free_folder, hold, user_state_directory


def test_no_two_devices_share_a_folder_and_no_name_leads_out_of_the_state_directory(tmp_path: Path) -> None:
    names = ["a", "A", "a:b", "a/b", "a%2fb", "..", ".", "", "../x", "é", "a b", "a.b", "x" * 300, "x" * 301, "a\nb", "%", "a:B"]
    folders = [Path(device_folder(tmp_path, name)) for name in names]
    assert len(set(folders)) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path}
    assert all(len(folder.name) <= 255 and folder.name not in ("", ".", "..") for folder in folders)


@pytest.mark.parametrize("relative", ["", ".", "state"])
def test_a_relative_state_directory_of_the_environment_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    """As the XDG Base Directory Specification says. The folder in which an app starts may hold what a stranger has made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", relative)
    assert user_state_directory() == str(tmp_path / ".local/state/aionn")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert user_state_directory() == str(tmp_path / "state/aionn")


def test_what_a_process_holds_is_not_free(tmp_path: Path) -> None:
    first, second = hold(tmp_path / "a"), hold(tmp_path / "a")
    for fd in (first, second):
        with free_folder(tmp_path / "a") as free:
            assert free == -1
        os.close(fd)
    with free_folder(tmp_path / "a") as free:
        assert free >= 0
    with free_folder(tmp_path / "absent") as free:
        assert free == -1


def test_a_folder_that_is_removed_just_now_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleaner found the folder free before it is held. So the holder waits, and holds a new one."""
    monkeypatch.setattr(private_folder, "_PAUSE_S", 0.0)
    monkeypatch.setattr(private_folder, "_TRIES", 1_000_000)
    (path := tmp_path / "a").mkdir()
    before, found = path.stat().st_ino, list[int]()
    with free_folder(path) as free:
        assert free >= 0
        keeper = os.open(path, os.O_RDONLY)  # else the file system may give the number again
        holder = threading.Thread(target=lambda: found.append(hold(path)))
        holder.start()
        path.rmdir()
    holder.join(30)
    assert os.fstat(found[0]).st_ino == path.stat().st_ino != before
    os.close(keeper)
    os.close(found[0])


def test_a_process_that_keeps_the_right_to_remove_a_folder_stops_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "_PAUSE_S", 0.0)
    path = tmp_path / "a"
    first = hold(path)
    fcntl.flock(first, fcntl.LOCK_EX)
    second = hold(path)
    os.close(first)
    os.close(second)


def test_a_symlink_is_not_held(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(UnsafeStateError):
        hold(tmp_path / "link")
