"""What is imported when: an app's first lines, an opened runtime, and a driver that greets. Each import delays the first result."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import aionn
from tests.leaks import driver_pids
from tests.real_models import carried
from tests.runtime.test_blocking_client import serving

FIRST_LINES = """
    import sys
    before = set(sys.modules)
    import aionn
    aionn.Runtime
    aionn.run
    runtime = aionn.Runtime(start=())
"""
OPENED = """
    async def main():
        async with runtime:
            print(*(set(sys.modules) - before))
    aionn.run(main)
"""

HEAVY = {
    "email",
    "filelock",
    "numpy",
    "onnx",
    "google",
    "sqlite3",
    "aiofiles",
    "platformdirs",
    "onnxruntime",
    "openvino",
    "rich",
    "cyclopts",
    "ml_dtypes",
}


def imported(script: str, *arguments: str) -> set[str]:
    """The modules that a script imports, as it prints them."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())


def packages(modules: set[str]) -> set[str]:
    """The packages that are not part of Python."""
    names = {module.partition(".")[0] for module in modules}
    return {name for name in names - sys.stdlib_module_names - {"cython_runtime"} if not name.startswith("_")}


def aionns(modules: set[str]) -> set[str]:
    """Return aionn's modules among these. What `AIONN_SANDBOX=strict` brings serves tests only."""
    of_tests = {"aionn.sandbox.strict", "aionn.sandbox._strict"}
    return {module for module in modules if module.partition(".")[0] == "aionn"} - of_tests


def test_an_apps_first_lines_import_nothing_but_aionn() -> None:
    modules = imported(FIRST_LINES + "    print(*(set(sys.modules) - before))")
    assert packages(modules) == {"aionn"}
    assert len(aionns(modules)) <= 19, sorted(aionns(modules))


def test_a_runtime_spawns_its_driver_before_it_imports_numpy() -> None:
    script = (
        FIRST_LINES
        + """
    from aionn.runtime.processes import spawning
    class Spawned(spawning.Spawned):
        def __init__(self, *arguments):
            print(*(set(sys.modules) - before), flush=True)
            super().__init__(*arguments)
    spawning.Spawned = Spawned
    runtime = aionn.Runtime()
    async def main():
        async with runtime:
            pass
    aionn.run(main)
    """
    )
    modules = imported(script)
    assert packages(modules) == {"aionn", "uvloop"}
    assert len(aionns(modules)) <= 19, sorted(aionns(modules))


def test_a_runtime_that_starts_no_driver_has_imported_nothing_that_compiles_or_computes() -> None:
    modules = imported(FIRST_LINES + OPENED)
    found = packages(modules) - {"sniffio"}  # anyio takes it if it is installed
    assert found == {"aionn", "anyio", "msgspec", "typing_extensions", "uvloop"}
    unneeded = ("aionn.graph", "aionn.runtime.executing", "aionn.runtime.preparing", "aionn.driver", "aionn.cli", "aionn.caching.store")
    assert not [module for module in modules if module.startswith(unneeded)]
    assert len(aionns(modules)) <= 73, len(aionns(modules))


DRIVEN = """
    import sys
    import aionn

    async def main():
        async with aionn.Runtime(start=()) as runtime:
            await runtime.devices[0].restart()

    aionn.run(main)
"""


def test_a_driver_that_greets_has_imported_its_engine_and_what_serves(tmp_path: Path) -> None:
    """Python itself writes what a driver imports, and the app writes it to its own stderr."""
    environment = dict(os.environ, PYTHONPROFILEIMPORTTIME="1", PYTHONPYCACHEPREFIX=str(tmp_path))
    script = textwrap.dedent(DRIVEN)
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environment)
    lines = [line.rpartition("|")[2].strip() for line in out.stderr.splitlines() if line.startswith("import time:")]
    start = max(at for at, module in enumerate(lines) if module == "encodings")  # the driver begins anew; the app waits meanwhile
    modules = set(lines[start:])
    assert "aionn.driver.process" in modules
    assert packages(modules) >= {"aionn", "onnxruntime"}
    assert not packages(modules) & (HEAVY - {"numpy", "onnxruntime"})
    assert "sqlite3" not in modules
    of_apps = ("aionn.runtime", "aionn.cli", "aionn.caching.store", "aionn.burst.controller", "aionn.memory.hardware_buffer")
    assert not [module for module in modules if module.startswith((*of_apps, "aionn.pages.finding"))]
    assert len(aionns(modules)) <= 93, len(aionns(modules))
    assert driver_pids() == []


HIT = """
    import sys
    import aionn

    async def main():
        async with aionn.Runtime(start=("onnxruntime",), state_dir=sys.argv[2]) as runtime:
            model = await runtime.load(sys.argv[1])
            compilation = await runtime.compile(model, cache_dir=sys.argv[3])
            import numpy
            await compilation.compute({"input": numpy.zeros((1, 576), "f"), "state": numpy.zeros((2, 1, 128), "f")})
            print(compilation.outcomes[0].kind.name, *sys.modules)

    aionn.run(main)
"""

CLIENT = """
    import sys
    import numpy
    before = set(sys.modules)
    import aionn.blocking
    with aionn.blocking.attach(sys.argv[1], service=sys.argv[2]) as burst:
        burst.compute({name: numpy.zeros(operand.dimensions, operand.type.dtype) for name, operand in burst.inputs.items()})
    print(*(set(sys.modules) - before))
"""

OF_CLIENTS = {
    "aionn",
    "array",
    "atexit",
    "concurrent",
    "copy",
    "dataclasses",
    "errno",
    "fcntl",
    "fnmatch",
    "ipaddress",
    "logging",
    "mmap",
    "ntpath",
    "pathlib",
    "resource",
    "select",
    "selectors",
    "signal",
    "socket",
    "string",
    "traceback",
    "urllib",
}
"""What a blocking client of a service imports beside NumPy, msgspec and what these import. The list may only shrink."""


def test_a_blocking_client_imports_no_event_loop(tmp_path: Path, silero_path: Path) -> None:
    path = tmp_path / "service.sock"
    with serving(path):
        modules = imported(CLIENT, str(silero_path), str(path))
    known = imported("import msgspec, numpy.typing, queue, bisect\nprint(*sys.modules)".replace("import", "import sys,", 1))
    found, needed = ({name.partition(".")[0] for name in names if not name.startswith("_")} for names in (modules, known))
    assert found - needed <= OF_CLIENTS
    assert len(aionns(modules)) <= 75, len(aionns(modules))


OF_BOTH = {
    "aionn",
    "bisect",
    "blake3",
    "copy",
    "dataclasses",
    "hashlib",
    "hmac",
    "mmap",
    "resource",
    "sqlite3",
}
"""What aionn imports in an app and in a driver, beside the libraries and what these import. The lists may only shrink."""

OF_APPS = {"anyio", "sniffio"}
"""What an app imports beyond that. anyio looks for `sniffio`. No driver pays for anyio."""

OF_DRIVERS = {"faulthandler", "glob", "msvcrt", "nt", "org", "runpy", "sitecustomize", "tomllib"}
"""What a driver imports beyond that. Python imports `runpy` for `-m`, and looks for `msvcrt`, `nt`, `org` and `sitecustomize` in vain."""


def test_a_hit_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Up to the first result, in both processes. Python itself writes what a driver imports, after what the app has imported."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(HIT), str(carried("silero")), str(tmp_path / "state"), str(tmp_path / "cache")]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    environment = dict(os.environ, PYTHONPROFILEIMPORTTIME="1")
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    outcome, *of_app = out.stdout.split()
    assert outcome == "HIT"
    lines = [line.rpartition("|")[2].strip() for line in out.stderr.splitlines() if line.startswith("import time:")]
    of_driver = lines[max(at for at, module in enumerate(lines) if module == "encodings") :]
    libraries = "import sys, msgspec, numpy.typing, pathlib, uvloop"  # newer Pythons import more for pathlib
    anyio = ", anyio._backends._asyncio"
    for modules, more, allowed, most in ((of_app, anyio, OF_BOTH | OF_APPS, 134), (of_driver, ", onnxruntime", OF_BOTH | OF_DRIVERS, 97)):
        known = imported(f"{libraries}{more}\nprint(*sys.modules)")
        found, needed = ({name.partition(".")[0] for name in names if not name.startswith("_")} for names in (modules, known))
        assert found - needed <= allowed
        assert len(aionns(set(modules))) <= most, len(aionns(set(modules)))


def test_a_confined_driver_leaves_bytecode_of_every_module_so_that_none_compiles_them_again(tmp_path: Path) -> None:
    """As after an editable install, where `pip` has compiled nothing. The driver may write no file once it is confined."""
    script = textwrap.dedent(DRIVEN).replace("start=()", "start=(), template=False")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "AIONN_SANDBOX")}
    command = [sys.executable, "-P", "-c", script]
    subprocess.run(command, timeout=120, check=True, env=environment | {"PYTHONPYCACHEPREFIX": str(tmp_path)})
    package = Path(aionn.__file__).parent
    kept = {path.name.partition(".")[0] for path in (tmp_path / package.relative_to("/")).rglob("*.pyc")}
    assert {path.stem for path in package.rglob("*.py")} <= kept


def test_run_refuses_a_thread_whose_loop_runs_already() -> None:
    async def inner() -> None:
        async def nothing() -> None: ...

        with pytest.raises(RuntimeError, match="event loop runs in this thread"):
            aionn.run(nothing)

    aionn.run(inner)


@pytest.mark.parametrize("own", [None, "7"])
def test_opening_a_runtime_leaves_the_apps_environment_as_it_was(own: str | None) -> None:
    script = (
        FIRST_LINES
        + """
    import os
    from aionn.runtime import runtime as runtimes
    name, seen = "OPENBLAS_THREAD_TIMEOUT", []
    load = runtimes.import_module
    def watched(module):
        seen.append(os.environ.get(name))
        return load(module)
    runtimes.import_module = watched
    async def main():
        async with runtime:
            print(seen[0], os.environ.get(name))
    aionn.run(main)
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    if own is not None:
        environment["OPENBLAS_THREAD_TIMEOUT"] = own
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert ran.stdout.split() == (["20", "None"] if own is None else [own, own])
