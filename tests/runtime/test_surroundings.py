"""The environment of drivers: what a confined one gets, what an app adds, and what never passes. And the surroundings of apps."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.errors import CallerError
from aionn.runtime.processes.environment import APP_PID, driver_environment
from aionn.runtime.processes.spawning import checked_driver_env
from aionn.testing import identity_model
from tests.leaks import leak_check
from tests.runtime.odd_surroundings import SURROUNDINGS
from tests.runtime.printing_engine import NAME, Act

SECRETS = {
    name: f"secret-{name}"
    for name in (
        *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN", "DATABASE_URL", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"),
        *("NVIDIA_API_KEY", "NGC_API_KEY", "PYTHON_KEYRING_BACKEND", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "PYTHONINSPECT"),
        *("LC_GIT_TOKEN", "LC_ANYTHING", "ORT_HTTP_PASSWORD", "ORT_HTTP_USERNAME", "OV_API_KEY", "CUDA_REGISTRY_TOKEN", "MKL_LICENSE_KEY"),
        *("AIONN_CACHE_TOKEN", "AIONN_ANYTHING", "AIONN_TEST_TOKEN", "CONDA_TOKEN", "ANACONDA_API_TOKEN", "COVERAGE_PROCESS_START"),
        *("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "USER", "LOGNAME", "MAIL", "PWD", "OLDPWD", "HOSTNAME", "KUBECONFIG", "VAULT_ADDR"),
        *("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "TMPDIR", "OPENVINO_TOKEN", "PIP_INDEX_URL", "UV_INDEX_URL"),
    )
}
KEPT = {
    name: f"kept-{name}"
    for name in (
        *("LANG", "LC_ALL", "LC_CTYPE", "TZ", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONWARNINGS"),
        *("OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "MKL_NUM_THREADS"),
        *("ORT_DISABLE_TELEMETRY", "ORT_INTRA_OP_NUM_THREADS", "OV_CPU_MAX_ISA", "OPENVINO_LOG_LEVEL", "TBB_MALLOC_USE_HUGE_PAGES"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "ROCR_VISIBLE_DEVICES"),
        *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS", "MALLOC_ARENA_MAX", "ONEDNN_VERBOSE", "TF_CPP_MIN_LOG_LEVEL"),
        *("AIONN_LANES", "AIONN_FAKE_DEVICE", "AIONN_TEST_ENGINE", "EBPYTHONPREFIXES", "GUIX_PYTHONPATH", "NIX_PYTHONPATH"),
    )
}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | KEPT).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("level", ["auto", "require", "strict"])
def test_a_confined_driver_gets_what_libraries_read_and_no_secret(level: str) -> None:
    found = driver_environment(level, 0, {})
    assert [name for name in SECRETS if name in found] == []
    assert {name: found.get(name) for name in KEPT} == KEPT
    assert found["HOME"] == "/nonexistent"
    assert (found["PYTHONUNBUFFERED"], found[APP_PID]) == ("1", str(os.getpid()))


@pytest.mark.parametrize("in_use", [True, False])
def test_a_confined_driver_imports_what_pip_has_installed_for_the_user(
    in_use: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUSERBASE", raising=False)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", in_use)
    monkeypatch.setattr(site, "USER_BASE", str(tmp_path))
    (tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages").mkdir(parents=True)
    environment = driver_environment("auto", 0, {})
    code = f"import sys; print(any(path.startswith({str(tmp_path)!r}) for path in sys.path))"
    outside_of_venv = os.path.realpath(sys.executable)
    ran = subprocess.run([outside_of_venv, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{in_use}\n"


@pytest.mark.usefixtures("full")
def test_a_driver_that_is_not_confined_gets_everything() -> None:
    found = driver_environment("off", 0, {})
    assert {name: found.get(name) for name in os.environ} == {**os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("level", ["auto", "off"])
def test_what_the_app_adds_beats_what_it_has_and_what_aionn_chooses(level: str) -> None:
    more = {"HF_TOKEN": "for drivers", "HOME": "/srv", "OMP_NUM_THREADS": "7", "PATH": "", "GLIBC_TUNABLES": "glibc.malloc.check=1"}
    found = driver_environment(level, 3, more)
    assert {name: found[name] for name in more} == more
    assert found["OPENBLAS_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("driver_env", "sentence"),
    [
        (["A=b"], "driver_env: expected a mapping from names of variables to texts, or None, got list"),
        ("hunter2", "driver_env: expected a mapping from names of variables to texts, or None, got str"),
        ({"": "hunter2"}, "driver_env: '' cannot name a variable; give a text without '=' and without a zero byte"),
        ({"A=B": "hunter2"}, "driver_env: 'A=B' cannot name a variable; give a text without '=' and without a zero byte"),
        ({b"A": "hunter2"}, "driver_env: b'A' cannot name a variable; give a text without '=' and without a zero byte"),
        ({"\ud800": "hunter2"}, r"driver_env: '\ud800' cannot name a variable; give a text without '=' and without a zero byte"),
        ({"A": 5}, "driver_env: 'A' is int; give a text without a zero byte"),
        ({"A": None}, "driver_env: 'A' is NoneType; give a text without a zero byte"),
        ({"A": "hunter2\0"}, "driver_env: 'A' is a text that cannot be a value; give a text without a zero byte"),
        ({"A": "hunter2\ud800"}, "driver_env: 'A' is a text that cannot be a value; give a text without a zero byte"),
        ({APP_PID: "1"}, "driver_env: aionn sets AIONN_APP_PID for its drivers; leave it out"),
        ({"PYTHONUNBUFFERED": "0"}, "driver_env: aionn sets PYTHONUNBUFFERED for its drivers; leave it out"),
        ({"UV_USE_IO_URING": "1"}, "driver_env: aionn sets UV_USE_IO_URING for its drivers; leave it out"),
    ],
)
def test_a_bad_variable_is_refused_in_one_sentence_without_its_value(driver_env: object, sentence: str) -> None:
    with pytest.raises(CallerError) as caught:
        aionn.Runtime(driver_env=driver_env)  # type: ignore[arg-type]
    assert str(caught.value) == sentence
    assert "hunter2" not in sentence


def test_variables_are_copied_when_they_are_checked() -> None:
    mine = {"A": "b", "EMPTY": "", "BYTES": "\udcff"}
    checked = checked_driver_env(mine)
    mine["A"] = "c"
    assert checked == {"A": "b", "EMPTY": "", "BYTES": "\udcff"}
    assert checked_driver_env(None) == {}


@pytest.mark.anyio
@pytest.mark.usefixtures("surroundings")
async def test_a_real_driver_sees_no_secret_of_its_app(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in SECRETS.items():
        if not name.startswith(("PYTHON", "XDG_STATE")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("LANG", "C.UTF-8")
    async with leak_check(), aionn.Runtime(driver_env={"MY_ENGINE": "on"}) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(NAME,))
        await compilation.compute({"input": np.full((1, 16), Act.ENVIRONMENT, np.float32)})
    found = json.loads(capfd.readouterr().err)
    assert [name for name, value in found.items() if name in SECRETS or "secret" in value] == []
    assert (found["MY_ENGINE"], found["LANG"], found["HOME"], found[APP_PID]) == ("on", "C.UTF-8", "/nonexistent", str(os.getpid()))
    own = {APP_PID, "PYTHONUNBUFFERED", "UV_USE_IO_URING", "OPENBLAS_THREAD_TIMEOUT", "HOME", "MY_ENGINE", "LC_CTYPE"}
    assert set(found) - own <= set(os.environ)


ROOT = Path(__file__).parents[2]
UNKEPT = {
    "a_home_that_does_not_exist": ("io_error", "there is no home directory {}/no/home; set XDG_STATE_HOME, or give Runtime(state_dir=)"),
    "a_home_that_is_a_file": ("io_error", "there is no home directory {}/home; set XDG_STATE_HOME, or give Runtime(state_dir=)"),
    "a_cache_of_another_account": ("unsafe", "belongs to user 12345, not to this one"),
    "a_cache_that_others_may_write_to": ("unsafe", "others may write to it; chmod go-w"),
    "a_cache_that_is_a_file": ("unsafe", "is a symlink, or not a directory"),
    "a_read_only_cache": ("no_permission", "Read-only file system"),
    "a_full_cache": ("no_space", "No space left on device"),
    "a_full_state_directory": ("no_space", "is full"),
    "no_proc": ("io_error", "opening cache file 0 again for the driver: it needs /proc; mount a proc file system there"),
}
"""The model runs, and the cache cannot keep it: the reason, and what the outcome and `health()` say."""

REFUSED = {
    "twenty_four_descriptors": "MemoryAllocationError: {} (RLIMIT_NOFILE is 24); close files or raise the limit",
    "twenty_four_descriptors_and_never_more": "DeviceUnavailableError: device 'onnxruntime' cannot start: {} (RLIMIT_NOFILE is 24); {}",
    "files_of_1_mib": "MemoryAllocationError: device 'onnxruntime' cannot start: 2097152 bytes of shared memory could not be reserved: "
    "File too large; RLIMIT_FSIZE of the process leaves 1048576; ask for less or raise the limit",
}
"""Nothing runs. The sentence names the limit."""


ALIKE = {
    *("a_home_that_does_not_exist", "a_home_that_is_a_file", "a_cache_below_a_long_path", "a_cache_that_others_may_write_to"),
    *("a_cache_that_is_a_file", "a_full_state_directory", "umask_0", "closed_stdin", "twenty_four_descriptors_and_never_more"),
    *("files_of_4_mib", "no_core_files_and_no_locked_memory", "no_queued_signals", "a_proc_that_hides_processes", "usual_sigpipe"),
    *("sched_idle", "sched_batch_and_nice", "a_session_without_terminal", "a_subreaper_without_new_privileges"),
    *("a_process_without_dumps", "the_same_addresses_each_time", "root_that_obeys_modes", "an_unknown_locale_and_time_zone"),
}
"""Surroundings that lead through the same code as others do, so only soaks enter them."""

TOGETHER = (
    ("no_home", "a_cache_of_a_strange_name", "one_cpu", "every_signal_blocked", "ten_thousand_variables"),
    ("a_removed_working_directory", "umask_777", "ignored_sigchld", "closed_stdin_stdout_and_stderr", "small_stacks"),
    ("full_stdout_and_stderr", "an_empty_environment", "a_loop_in_another_thread"),
    ("no_sys", "no_network", "full_shared_memory_and_temporary_folders"),
    ("pid_1", "a_removed_cache"),
)
"""Surroundings in which an app works and which do not touch each other. One app enters those of a row. In soaks, each has its own."""

ROWS = [
    *(pytest.param(row, id=" ".join(row)) for row in TOGETHER),
    *(pytest.param((name,), id=name, marks=[pytest.mark.soak] if name in {*ALIKE, *sum(TOGETHER, ())} else []) for name in SURROUNDINGS),
]


@pytest.mark.parametrize("names", ROWS)
def test_an_app_works_in_odd_surroundings_or_says_what_to_do(names: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.odd_surroundings", str(tmp_path), *names]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # one thread may enter a user namespace
    ran = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    if ran.returncode == 77:
        pytest.skip(f"the system does not allow it: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "result.json").read_bytes())
    assert found["entered"] == dict.fromkeys(names, True)
    assert not (tmp_path / "no").exists(), "a home is never made"
    name, *_ = names  # the others of a row are in neither table
    if name in REFUSED:
        expected = ".+".join(map(re.escape, REFUSED[name].split("{}")))
        assert re.fullmatch(expected, found["error"]), found
        return
    assert "error" not in found, found
    reason, words = UNKEPT.get(name, (None, "None"))
    assert (found["reason"], words.format(tmp_path) in found["words"]) == (reason, True), found
    assert (words.format(tmp_path) in found["health"]) == (reason is not None), found
    assert found["outcomes"] == ["miss", "miss" if reason or found["removed"] else "hit"]
