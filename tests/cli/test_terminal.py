"""What people meet at a terminal that is narrow, dumb, closed, or that they point at the wrong thing."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aionn.cli import main
from aionn.cli.printing import counted, print_table, show_warnings
from aionn.testing import FakeDevice, identity_model
from tests.apps import run_app
from tests.leaks import leak_check

KEY = "cd83648c1df2dde2"
WHY = "device 'openvino' needs the package openvino, which cannot be imported (No module named 'openvino'); " * 3


class NarrowTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_in_a_pipe_is_never_cut_or_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("2 devices", ["device", "size>", "state"], [("onnxruntime", "9 B", "available"), ("openvino", "10.0 MB", WHY.strip())])
    assert capsys.readouterr().out.splitlines() == [
        "2 devices",
        "device          size  state",
        "onnxruntime      9 B  available",
        f"openvino     10.0 MB  {WHY.strip()}",
    ]


def test_a_title_that_is_longer_than_its_table_stays_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("service 15744 (aionn 0.1.0), apps: 0, connections: 0, for 2.24 s", ["app", "device"], [])
    assert capsys.readouterr().out.splitlines() == ["service 15744 (aionn 0.1.0), apps: 0, connections: 0, for 2.24 s", "app  device"]


def test_one_thing_is_counted_in_the_singular() -> None:
    assert [counted(count, "entry") for count in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert [counted(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]


def test_a_narrow_terminal_wraps_prose_and_leaves_whole_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = NarrowTerminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    version = "1.31.1;x86_64-9f6c438e187d301d;all,denormals=0;artifact=1"
    print_table(
        "", ["entry", "device", "version", "size>", "stored>", "state"], [(KEY, "onnxruntime", version, "10.0 MB", "1 min ago", "current")]
    )
    lines = shown.getvalue().splitlines()
    assert max(len(line) for line in lines if "\x1b" not in line) <= 80
    assert all(any(whole in line for line in lines) for whole in (KEY, "onnxruntime", "10.0 MB", "1 min ago"))
    assert len(lines) > 2  # the version is what gave way
    shown.truncate(0)
    monkeypatch.setenv("COLUMNS", "20")
    print_table("", ["entry", "device", "version"], [(KEY, "onnxruntime", version)])
    assert f"{KEY}  onnxruntime  " in shown.getvalue()  # nothing is cut


def test_names_that_would_steer_the_terminal_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m\x1b[2J\x1b]0;x\x07.onnx"
    path.write_bytes(identity_model())
    assert main(["run", str(path), "--device", "reference"]) == 0
    shown = "".join(capsys.readouterr())
    assert r"m\x1b[2J\x1b]0;x\x07.onnx on reference" in shown
    assert r"m\x1b[2J\x1b]0;x\x07.onnx for" in shown
    show_warnings()
    logging.getLogger("aionn.driver").warning("node %s\nis odd", "\x1b[2J")
    assert main(["run", "\x1b[2J"]) == 2
    shown += "".join(capsys.readouterr())
    assert "node \\x1b[2J\nis odd" in shown
    print_table("", ["node"], [("one\nnode\t2",)])
    shown += (table := capsys.readouterr().out)
    assert table.splitlines() == ["node", r"one\nnode\t2"]
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_command_whose_output_is_closed_does_its_work(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (2,)}))
    command = [sys.executable, "-m", "aionn", "run", "model.onnx", "--device", "reference", "--trace", "t.json"]
    ran = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr
    assert (tmp_path / "t.json").exists()


def test_no_command_of_the_cache_touches_a_directory_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letter = tmp_path / "mail" / "trash" / "letter.txt"
    letter.parent.mkdir(parents=True)
    letter.write_text("precious", encoding="utf-8")
    for command in (["ls"], ["verify"], ["prune", "--max-bytes", "0"]):
        assert main(["cache", *command, str(tmp_path / "mail")]) == 2
        assert "is not a cache, because it holds other files; give the cache_dir" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mail").rglob("*")] == ["trash", "letter.txt"]
    (tmp_path / "new").mkdir(mode=0o700)
    assert main(["cache", "ls", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_file_that_is_no_array_of_numbers_is_told_without_advice_to_unpickle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (2,)}))
    for content in (b"no array", b"\x80\x04N.", b"", b"PK\x03\x04"):
        (tmp_path / "x.npy").write_bytes(content)
        assert main(["run", str(tmp_path / "model.onnx"), "--input", f"x={tmp_path / 'x.npy'}"]) == 2
        told = capsys.readouterr().err
        assert "cannot be read as a .npy file" in told
        assert "pickle" not in told
    assert main(["run", str(tmp_path / "model.onnx"), "--input", "x=no.npy"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("write one with numpy.save")


def test_a_trace_that_cannot_be_written_is_told_before_the_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "no model.onnx"), "--trace", str(tmp_path / "nowhere" / "t.json")]) == 2
    assert "--trace" in capsys.readouterr().err
    for command in (["run", str(tmp_path / "no model.onnx"), "--trace"], ["trace", "--pid", "1", "-o"]):
        assert main([*command, str(tmp_path)]) == 2
        assert f"{str(tmp_path)!r} is a directory, or cannot be written to; name another file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["aionn.cli.top_reading.snapshot", "aionn.cli.commands.run_command"])
def test_an_interrupt_at_any_time_is_one_line(place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    assert main(["top", "--json"] if "top" in place else ["devices"]) == 130
    assert capsys.readouterr().err == "aionn: interrupted\n"


def test_a_model_that_refuses_made_up_inputs_is_told_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (0, 2)}))
    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.float32))
    with FakeDevice() as fake:
        fake.fail("GENERAL_FAILURE")
        command = ["run", str(tmp_path / "model.onnx"), "--device", FakeDevice.name]
        assert main(command) == 1
        assert "made up: x; the model may want other numbers or shapes, give --input x=FILE.npy" in capsys.readouterr().err
        assert main([*command, "--input", f"x={tmp_path / 'x.npy'}"]) == 1
        assert "made up" not in capsys.readouterr().err


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_descriptors_do_not_end_an_app(closed: tuple[int, ...], tmp_path: Path) -> None:
    """A file of the loop's own that got the number 0, 1 or 2 would abort the process when it is closed."""
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (2,)}))
    app = (
        "import os, sys\n"
        f"for number in {closed}: os.close(number)\n"
        "import aionn, numpy as np\n"
        "async def main():\n"
        "    async with aionn.Runtime() as runtime:\n"
        "        compilation = await runtime.compile(aionn.Model.from_onnx('model.onnx'), devices=('onnxruntime',))\n"
        "        async with compilation.burst() as burst:\n"
        "            outputs = await burst.compute({'x': np.ones(2, np.float32)})\n"
        "            open('answer', 'w').write(str(sum(outputs['x_out'])))\n"
        "aionn.run(main)\n"
    )
    with leak_check():
        ran = run_app([sys.executable, "-c", app], cwd=tmp_path, timeout=60, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert ran.returncode == 0
    assert (tmp_path / "answer").read_text(encoding="utf-8") == "2.0"
