"""The command line, as people and scripts meet it: the real command in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from aionn.cli import main
from aionn.cli.printing import ago, duration, size
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.leaks import driver_pids, wait_for_end
from tests.runtime.values_models import linear_classifier, passing
from tests.scaled_model import scaled_model

FAKE = FakeDevice.name
SINGLE = "tests.runtime.asked_engine:SingleEngine"


class Terminal:
    """Runs the command in a directory of its own, with state of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "COLUMNS": "200"}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return App([sys.executable, "-m", "aionn", *arguments], cwd=self.directory, env=self.environment, text=True, **options)

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """What it said on stdout and stderr."""
        command = self.start(*arguments)
        out, err = command.communicate(timeout=60)
        assert command.returncode == code, (out, err)
        assert "Traceback" not in out + err
        return out, err

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code)[0])

    def fails(self, *arguments: str, code: int) -> str:
        """The one sentence it failed with."""
        out, err = self.run(*arguments, code=code)
        assert out == ""
        sentence = err.splitlines()[-1]
        assert sentence.startswith("aionn: ")
        return sentence


@pytest.fixture(autouse=True)
def aionn_logger() -> Iterator[None]:
    """`main` in this process shows aionn's warnings itself; later tests want them where pytest looks."""
    logger = logging.getLogger("aionn")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    (tmp_path / "model.onnx").write_bytes(scaled_model(np.full(64, 3, np.float32)))
    return Terminal(tmp_path)


def test_compile_stores_what_later_starts_load_and_shows_its_steps(terminal: Terminal) -> None:
    out, err = terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", "onnxruntime", "--device", "openvino")
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [["onnxruntime", "miss", "absent"], ["openvino", "miss", "absent"]]
    assert "model.onnx for onnxruntime: compiling" in err
    assert "model.onnx for openvino: compiling" in err
    told = terminal.json("compile", "model.onnx", "--cache-dir", "cache", "--device", "openvino", "--device", "onnxruntime")
    assert [(one["device"], one["outcome"], one["stored"]) for one in told["compilations"]] == [
        ("openvino", "hit", True),
        ("onnxruntime", "hit", True),
    ]
    assert all(one["stored_bytes"] > 0 and one["took_s"] > 0 and one["differs"] == [] for one in told["compilations"])


def test_compile_names_what_a_miss_differs_in_from_what_is_stored(fake: FakeDevice, terminal: Terminal) -> None:
    fake.tell(version="A")
    terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)
    fake.tell(version="B")
    (told,) = terminal.json("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)["compilations"]
    assert (told["outcome"], told["reason"], told["differs"]) == ("miss", "other_driver_version", ["device_version"])
    fake.tell(version="C")
    out, _ = terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)
    assert "other_driver_version, other device_version" in out


def test_the_cache_is_listed_verified_and_pruned(terminal: Terminal) -> None:
    terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)
    terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", "onnxruntime")
    out, _ = terminal.run("cache", "ls", "cache")
    assert out.splitlines()[0].startswith("2 entries")
    assert [line.split()[2:4] for line in out.splitlines()[2:]] == [["model.onnx", FAKE], ["model.onnx", "onnxruntime"]]
    assert ";" not in out
    entries = terminal.json("cache", "ls", "cache")
    assert [entry["device"] for entry in entries] == [FAKE, "onnxruntime"]
    assert all(len(entry["key"]) == 64 and entry["size_bytes"] > 0 and not entry["superseded"] for entry in entries)
    assert ";" in entries[1]["device_version"]
    assert terminal.run("cache", "verify", "cache")[0] == "2 entries, all as stored\n"
    assert terminal.json("cache", "verify", "cache") == {"entries": 2, "bad": []}
    assert terminal.run("cache", "prune", "cache")[0].startswith("0 entries removed")
    report = terminal.json("cache", "prune", "cache", "--max-bytes", "0")
    assert (report["removed"], report["left_bytes"]) == (2, 0)
    assert terminal.json("cache", "ls", "cache") == []


def test_verify_names_each_bad_entry_and_exits_1(terminal: Terminal) -> None:
    for device in (FAKE, "onnxruntime"):
        terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", device)
    flip, cut = sorted(
        (path for path in terminal.directory.glob("cache/entries/*/*/data0")), key=lambda path: path.stat().st_size, reverse=True
    )
    content = bytearray(flip.read_bytes())
    content[7] ^= 1
    flip.write_bytes(content)
    os.truncate(cut, 1)
    out, err = terminal.run("cache", "verify", "cache", code=1)
    told = {line.split()[0]: line.split()[2] for line in out.splitlines()[1:]}
    assert told == {flip.parts[-3][:16]: "wrong_bytes", cut.parts[-3][:16]: "wrong_length"}
    assert err == "aionn: cache 'cache': 2 entries not as stored; the next compilation replaces what is bad\n"
    bad = terminal.json("cache", "verify", "cache", code=1)["bad"]
    assert {one["key"]: one["reason"] for one in bad} == {flip.parts[-3]: "wrong_bytes", cut.parts[-3]: "wrong_length"}


def test_devices_lists_what_is_installed_and_whether_it_works(terminal: Terminal) -> None:
    found = {one["name"]: one for one in terminal.json("devices")}
    assert {"onnxruntime", "openvino", "reference"} <= found.keys()
    assert found["onnxruntime"]["available"]
    assert found["onnxruntime"]["cache_files"] == {"model": 1, "data": 1}
    assert found["reference"]["type"] == "cpu"
    assert "cpu" in found["onnxruntime"]["providers"]
    assert found["onnxruntime"]["runs_on"] == "CPUExecutionProvider"
    assert {"CPU", "AUTO"} <= set(found["openvino"]["providers"])
    assert (found["reference"]["providers"], found["reference"]["runs_on"]) == ([], None)


def test_devices_show_what_confines_each_driver(terminal: Terminal) -> None:
    found = {one["name"]: one["sandbox"] for one in terminal.json("devices")}
    both = {"files", "network", "processes", "signals", "system calls", "environment"}
    assert both | {"no made code"} <= set(found["onnxruntime"]["holds"])
    assert both <= set(found["openvino"]["holds"])
    assert "makes code" in found["openvino"]["lacks"][0]
    out, _ = terminal.run("devices")
    (line,) = [line for line in out.splitlines() if line.startswith("onnxruntime") and "network" in line]
    assert "no made code" in line
    terminal.environment["AIONN_SANDBOX"] = "off"
    assert {one["name"]: one["sandbox"]["level"] for one in terminal.json("devices")} == dict.fromkeys(found, "off")
    assert "all of it, because the sandbox is off" in terminal.run("devices")[0]
    terminal.environment["AIONN_SANDBOX"] = "maybe"
    assert "AIONN_SANDBOX='maybe': expected" in terminal.fails("devices", code=2)


def test_run_computes_what_it_is_given(terminal: Terminal) -> None:
    np.save(terminal.directory / "x.npy", np.arange(64, dtype=np.float32))
    told = terminal.json("run", "model.onnx", "--input", "x=x.npy", "--device", "onnxruntime")
    assert (told["outputs"]["y"]["min"], told["outputs"]["y"]["max"]) == (0, 189)
    assert told["cache"][0]["outcome"] == "no_cache"
    for burst in ([], ["--burst"]):
        told = terminal.json("run", "model.onnx", "--input", "x=x.npy", "--repeat", "5", "--cache-dir", "cache", *burst)
        assert told["runs"] == 5
        assert told["outputs"]["y"]["mean"] == pytest.approx(94.5)
        assert told["cache"][0]["outcome"] == ("hit" if burst else "miss")
    out, err = terminal.run("run", "model.onnx", "--device", "onnxruntime", "--repeat", "3")
    assert "input 'x': random float32 of shape (64,)" in err
    assert "3 runs (single executions)" in out


def test_run_prints_texts_and_lists_and_takes_texts_from_a_file(terminal: Terminal) -> None:
    (terminal.directory / "classifier.onnx").write_bytes(linear_classifier(["cat", "dog"]).graph)
    np.save(terminal.directory / "two.npy", np.array([[1, 0], [0, 1]], np.float32))
    given = ("run", "classifier.onnx", "--device", "onnxruntime", "--input", "x=two.npy")
    outputs = terminal.json(*given)["outputs"]
    assert (outputs["label"]["dtype"], outputs["label"]["values"]) == ("string", ["cat", "dog"])
    assert (outputs["probabilities"]["dtype"], outputs["probabilities"]["shape"]) == ("sequence", [2])
    assert [sorted(row) for row in outputs["probabilities"]["values"]] == [["cat", "dog"]] * 2
    out, _ = terminal.run(*given)
    assert "string" in out

    texts = helper.make_tensor_type_proto(TensorProto.STRING, [None])
    (terminal.directory / "texts.onnx").write_bytes(passing(texts).graph)
    np.save(terminal.directory / "words.npy", np.array(["a", "é"]))
    outputs = terminal.json("run", "texts.onnx", "--device", "onnxruntime", "--input", "x=words.npy")["outputs"]
    assert outputs["y"]["values"] == ["a", "é"]
    _, err = terminal.run("run", "texts.onnx", "--device", "onnxruntime", code=2)
    assert "input 'x' is of type string, and only numbers are made up; give --input x=FILE.npy with an array of texts" in err


def test_compile_and_run_keep_their_records_in_the_state_folder_they_are_given(terminal: Terminal) -> None:
    cached = ("model.onnx", "--device", FAKE, "--cache-dir", "cache")
    terminal.run("compile", *cached, "--state-dir", "volume/state")
    assert not Path(terminal.environment["XDG_STATE_HOME"]).exists()
    assert terminal.json("run", *cached, "--state-dir", "volume/state")["cache"][0]["outcome"] == "hit"
    out, err = terminal.run("run", *cached)  # the records are elsewhere
    assert "cache miss (no_integrity_record)" in out
    (warning,) = [line for line in err.splitlines() if line.startswith("aionn: warning:")]
    assert terminal.environment["XDG_STATE_HOME"] in warning
    assert "--state-dir" in warning


def test_run_writes_a_trace(terminal: Terminal) -> None:
    terminal.run("run", "model.onnx", "--device", "onnxruntime", "--trace", "t.json")
    events = json.loads((terminal.directory / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"driver.start", "prepare", "compute"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("compile",), 2, "MODEL requires an argument"),
        (("compile", "model.onnx"), 2, "--cache-dir requires an argument"),
        (("compile", "nowhere.onnx", "--cache-dir", "c"), 2, "there is no such file"),
        (("compile", "model.onnx", "--cache-dir", "c", "--device", "warp"), 1, "device 'warp' is not installed"),
        (("compile", "model.onnx", "--cache-dir", "c", "--device", "reference"), 1, "nothing is stored for device 'reference'"),
        (("run", "model.onnx", "--repeat", "0"), 2, "at least once"),
        (("run", "model.onnx", "--threads", "0"), 2, "threads=0; give a whole number, from 1 to 1024"),
        (("compile", "model.onnx", "--cache-dir", "c", "--instances", "1000"), 2, "instances=1000; give a whole number, from 1 to 256"),
        (("run", "model.onnx", "--device", SINGLE, "--instances", "3"), 1, "cannot run 3 instances of a model"),
        (("compile", "model.onnx", "--cache-dir", "c", "--device", SINGLE, "--instances", "3"), 1, "cannot run 3 instances of a model"),
        (("run", "model.onnx", "--state-dir", ""), 2, "give the path of a folder"),
        (("run", "model.onnx", "--repeat", "x"), 2, "unable to convert"),
        (("run", "model.onnx", "--input", "x"), 2, "give NAME=FILE.npy"),
        (("run", "model.onnx", "--input", "x=nowhere.npy"), 2, "cannot be read"),
        (("run", "model.onnx", "--input", "z=x.npy"), 2, "no input 'z'"),
        (("run", "model.onnx", "--input", "x=wrong.npy"), 2, "does not fit"),
        (("cache", "ls", "nowhere"), 2, "no cache directory 'nowhere'"),
        (("cache", "ls", "open"), 1, "chmod go-w"),
        (("cache", "prune", "full", "--max-bytes", "lots"), 2, "500M or 2G"),
        (("cache", "mend", "full"), 2, "mend"),
        (("fly",), 2, 'Unknown command "fly"'),
        (("devices", "onnxruntime"), 2, "aionn devices has no place for 'onnxruntime'"),
        (("completion", "tcsh"), 2, '"bash", "zsh", "fish"'),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    terminal: Terminal,
    arguments: tuple[str, ...],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, for it takes a second to start one; `test_errors_of_the_real_command` has the process."""
    np.save(terminal.directory / "x.npy", np.zeros(64, np.float32))
    np.save(terminal.directory / "wrong.npy", np.zeros(3, np.float32))
    for name, mode in (("full", 0o700), ("open", 0o777)):
        (terminal.directory / name).mkdir()
        (terminal.directory / name).chmod(mode)
    monkeypatch.chdir(terminal.directory)
    monkeypatch.setenv("XDG_STATE_HOME", terminal.environment["XDG_STATE_HOME"])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    sentence = err.splitlines()[-1]
    assert sentence.startswith("aionn: ")
    assert words in sentence
    assert out == "" or "reference" in arguments  # that one's table is shown all the same


def test_devices_are_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert {"onnxruntime", "openvino", "reference"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}


def test_errors_of_the_real_command(terminal: Terminal) -> None:
    assert "MODEL requires an argument" in terminal.fails("compile", code=2)
    assert "device 'warp' is not installed" in terminal.fails("run", "model.onnx", "--device", "warp", code=1)


def test_ctrl_c_ends_a_compilation_at_once_and_leaves_nothing(terminal: Terminal, fake: FakeDevice) -> None:
    terminal.environment["AIONN_FAKE_DEVICE"] = os.environ["AIONN_FAKE_DEVICE"]
    fake.hang("compile")
    before = driver_pids()
    command = terminal.start("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)
    assert command.stderr is not None
    for line in command.stderr:
        if line.rstrip().endswith(": compiling"):
            break
    (driver,) = set(driver_pids()) - set(before)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 130
    assert err.splitlines()[-1] == "aionn: interrupted"
    assert "Traceback" not in out + err
    assert wait_for_end(driver, 30)
    fake.behave()
    assert terminal.json("cache", "ls", "cache") == []
    assert terminal.json("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE)["compilations"][0]["stored"]


def test_at_a_terminal_progress_is_one_line_that_goes_away(terminal: Terminal) -> None:
    ours, theirs = pty.openpty()
    terminal.environment["TERM"] = "xterm"
    command = terminal.start("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert command.stdout is not None
    assert "miss" in command.stdout.read()
    command.stdout.close()
    assert command.wait() == 0
    assert b"model.onnx for " in shown
    assert b"\x1b[" in shown


def test_what_could_not_be_stored_is_told_and_exits_1(terminal: Terminal) -> None:
    (terminal.directory / "cache").mkdir()
    (terminal.directory / "cache").chmod(0o777)
    out, err = terminal.run("compile", "model.onnx", "--cache-dir", "cache", "--device", FAKE, code=1)
    assert "nothing is stored" in err.splitlines()[-1]
    assert "unsafe" in err.splitlines()[-1]
    assert "miss" in out
    assert out.split()[-2:] == ["0", "us"]  # it names no entry
    told = terminal.json("run", "model.onnx", "--cache-dir", "cache", "--device", "onnxruntime")  # running goes on without it
    assert told["cache"][0]["save_failure"].startswith("unsafe")


def test_version_and_help_need_no_device(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.run("--version")[0].strip()
    for command in ([], ["compile"], ["run"], ["cache"], ["cache", "verify"], ["devices"]):
        assert main([*command, "--help"]) == 0
        assert "Usage: aionn" in capsys.readouterr().out


def test_a_model_of_two_inputs_gets_random_numbers_where_none_are_given(terminal: Terminal) -> None:
    (terminal.directory / "two.onnx").write_bytes(identity_model({"a": (1, 4), "b": ("n", 2)}))
    np.save(terminal.directory / "a.npy", np.ones((1, 4), np.float32))
    told = terminal.json("run", "two.onnx", "--input", "a=a.npy", "--device", FAKE)
    assert told["outputs"]["a_out"]["values"] == [1.0] * 4
    assert told["outputs"]["b_out"]["shape"] == [1, 2]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1.0 kB"),
        (size(999_999), "1.0 MB"),
        (size(6_812_345), "6.8 MB"),
        (size(3 * 10**12), "3.0 TB"),
        (duration(0.000_012_34), "12.3 us"),
        (duration(0.0032), "3.2 ms"),
        (duration(0.999_6), "1 s"),
        (duration(1.25), "1.25 s"),
        (ago(None), "?"),
        (ago(0.0).split()[1], "d"),
    ],
)
def test_sizes_and_times_are_said_in_words(found: str, words: str) -> None:
    assert found == words


def test_the_name_of_a_model_file_may_be_any_name(terminal: Terminal) -> None:
    name = b"\xff" + b"\x1b" * 100 + b".onnx"  # not UTF-8, and longer than a manifest has room for, once it can be printed
    (terminal.directory / "model.onnx").rename(os.fsdecode(bytes(terminal.directory) + b"/" + name))
    terminal.run("compile", os.fsdecode(name), "--cache-dir", "cache", "--device", FAKE)
    (entry,) = terminal.json("cache", "ls", "cache")
    assert entry["model_name"] == ("\\udcff" + "\\x1b" * 100)[:255]


@pytest.mark.parametrize("missing", [("cyclopts",), ("cyclopts", "rich")])
def test_without_the_packages_of_the_commands_they_name_the_extra(missing: tuple[str, ...]) -> None:
    gone = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    command = [sys.executable, "-c", f"{gone}; from aionn.cli import main; sys.exit(main(['devices']))"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sentence = f"aionn: the commands need {' and '.join(missing)}, not installed here; run pip install 'aionn[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


COMPLETIONS = {
    "bash": 'source "$0"; COMP_WORDS=(aionn cache ""); COMP_CWORD=2; _aionn; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]; complete -C "aionn cache " | string split --fields 1 \\t',
}


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_shell_completes_the_commands(shell: str, terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    assert main(["completion", shell]) == 0
    script = terminal.directory / f"aionn.{shell}"
    script.write_text(capsys.readouterr().out)
    how = ("-n",) if shell == "zsh" else ("-c", COMPLETIONS[shell])  # zsh completes in a line editor only
    done = subprocess.run([shell, *how, script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert shell == "zsh" or {"ls", "verify", "prune"} <= set(done.stdout.split())
