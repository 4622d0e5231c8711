"""A user's files, outside the checkout, have no errors with `mypy --strict` and with pyright's strict rules.

python -m tests.test_types_of_a_user PYTHON    check the same for the environment of another Python: that of an installed wheel, in .ci/run
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, programs

WRONG = """import aionn

runtime = aionn.Runtime(hang_s="soon")
"""
"""This one has an error, which a checker finds only if it has read aionn's types."""

EXPECTED = {
    "mypy": 'wrong.py:3: error: Argument "hang_s" to "Runtime" has incompatible type "str"; expected "float | None"  [arg-type]',
    "pyright": 'wrong.py:3: Argument of type "Literal[\'soon\']" cannot be assigned to parameter "hang_s" of type "float | None" '
    'in function "__init__" (reportArgumentType)',
}


def write_files(folder: Path) -> list[str]:
    """Write a user's files: an app, the program of README.md and one with an error. Return their names."""
    (readme,) = (block for block in programs() if block.page.name == "README.md")
    texts = {"app.py": (ROOT / "tests" / "types_of_a_user.py").read_text(), "readme.py": readme.text, "wrong.py": WRONG}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    return list(texts)


def found_by(checker: str, python: str, folder: Path) -> list[str]:
    """Return the errors that a checker finds in the files of a user whose packages are those of `python`."""
    names = write_files(folder)
    arguments = {
        "mypy": ["--strict", "--python-executable", python, "--no-error-summary", "--cache-dir", str(folder / "cache")],
        "pyright": ["--pythonpath", python, "--outputjson"],  # with this option, pyright does not ask PyPI for a newer version
    }
    environment = {name: value for name, value in os.environ.items() if name not in {"MYPYPATH", "PYTHONPATH"}}
    command = [sys.executable, "-m", checker, *arguments[checker], *names]
    ended = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if checker == "mypy":
        return [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    return [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message'].splitlines()[0]} ({one['rule']})"
        for one in json.loads(ended.stdout)["generalDiagnostics"]
    ]


@pytest.mark.no_cover
@pytest.mark.timeout(400)  # a checker also reads NumPy and onnx
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.soak), "pyright"])  # `.ci/run` also asks both about the wheel
def test_a_user_has_the_types(tmp_path: Path, checker: str) -> None:
    assert found_by(checker, sys.executable, tmp_path) == [EXPECTED[checker]]


def main(python: str) -> None:
    for checker, expected in EXPECTED.items():
        with tempfile.TemporaryDirectory() as folder:
            found = found_by(checker, python, Path(folder))
        print(f"{checker} with the packages of {python}:", *found, sep="\n    ")
        if found != [expected]:
            sys.exit(f"{checker} was expected to find {expected!r}, and nothing else")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
