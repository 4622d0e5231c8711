"""What type checkers say of a user's file, after the README's install: nothing. The file lies outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

USER = Path(__file__).parent / "types_of_a_user.py"
WRONG = "import aionn\n\nnumber: int = aionn.Runtime().name\n"


def mypy(file: Path) -> tuple[int, str]:
    """Check a file as `mypy --strict` does in its folder. Return the exit code and the report."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(file.parent / "cache"), file.name]
    ran = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=_environment())
    return ran.returncode, ran.stdout + ran.stderr


def pyright(file: Path) -> tuple[int, str]:
    """Check a file as pyright does in strict mode. Return the exit code and the report."""
    settings = {"typeCheckingMode": "strict", "include": [file.name]}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", "pyrightconfig.json"]
    ran = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=_environment())
    return ran.returncode, ran.stdout + ran.stderr


def _environment() -> dict[str, str]:
    """Return the environment without what leads into the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


@pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])
@pytest.mark.no_cover
def test_a_users_file_has_types(check: object, tmp_path: Path) -> None:
    assert callable(check)
    shutil.copy(USER, tmp_path / "app.py")
    code, report = check(tmp_path / "app.py")
    assert (code, "app.py" in report and "error:" in report) == (0, False), report


@pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])
@pytest.mark.no_cover
def test_a_wrong_type_in_a_users_file_is_found(check: object, tmp_path: Path) -> None:
    assert callable(check)
    (tmp_path / "app.py").write_text(WRONG, encoding="utf-8")
    code, report = check(tmp_path / "app.py")
    assert code == 1, report
    assert "app.py:3" in report
