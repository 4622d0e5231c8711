"""What an engine is checked with, for all cases of `check_engine`: the engine, its models, and runs whose outputs are compared."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aionn.driver.registry import find_engine
from aionn.hal.engine import Artifact, CompileOptions, Engine, Executable, ExecutionReport
from aionn.testing.models import CheckedModel, standard_models

Arrays = Mapping[str, NDArray[Any]]
T = TypeVar("T")


class Inapplicable(Exception):
    """A case does not apply to this engine. The text says why."""


def expect(true: object, otherwise: str) -> None:
    """Raise `AssertionError` with that text unless `true` is."""
    if not true:
        raise AssertionError(otherwise)


class EngineCheck:
    """An engine under check. Each case makes another one.

    Attributes:
        name: "package.module:Class" or an entry point, if another process can find the engine by it; or an empty text.
        models: on which it is checked.
    """

    def __init__(self, engine: str | Callable[[], Engine] | Engine, models: Sequence[CheckedModel] | None = None) -> None:
        self._engine = engine
        self.name = engine if isinstance(engine, str) else _importable(engine)
        self.models = list(models) if models is not None else standard_models()

    def make(self) -> Engine:
        """Make an engine, or return the one that was given."""
        if isinstance(self._engine, str):
            return find_engine(self._engine)
        made: Any = self._engine
        engine: Engine = made() if isinstance(made, type) or not hasattr(made, "compile") else made
        return engine

    def supported(self, engine: Engine) -> list[CheckedModel]:
        """Return the models that the engine says it can run: one at least."""
        found = [checked for checked in self.models if all(engine.supported_operations(checked.model))]
        expect(
            found, "supported_operations refuses each model of the check; give models that the engine can run: check_engine(..., models=)"
        )
        return found

    def compiled(self) -> list[tuple[CheckedModel, Executable]]:
        """Return each model that the engine can run, compiled."""
        engine = self.make()
        return [(checked, engine.compile(checked.model, CompileOptions())) for checked in self.supported(engine)]

    def exported(self, engine: Engine) -> list[tuple[CheckedModel, Executable, Artifact]]:
        """Return each model that the engine can run and store, compiled and exported.

        Raises:
            Inapplicable: the engine does not cache, or declines every model.
        """
        if not engine.cache_files.supported:
            raise Inapplicable("the engine does not cache")
        found = []
        for checked in self.supported(engine):
            executable = engine.compile(checked.model, CompileOptions())
            artifact = engine.export(executable)
            if artifact is not None:
                found.append((checked, executable, artifact))
        if not found:
            raise Inapplicable("the engine declines to store each model")
        return found


def given(inputs: Arrays) -> dict[str, NDArray[Any]]:
    """Return copies of inputs as a driver gives them: C-contiguous and read-only."""
    copies = {name: np.array(array, order="C") for name, array in inputs.items()}
    for array in copies.values():
        array.flags.writeable = False
    return copies


def room(checked: CheckedModel, run: int) -> dict[str, NDArray[Any]]:
    """Return arrays for the outputs of a run, in their true shapes, filled with a value that no model makes."""
    return {name: np.full(array.shape, 77, array.dtype) for name, array in checked.right(run).items()}


def outputs_of(executable: Executable, checked: CheckedModel, run: int) -> tuple[dict[str, NDArray[Any]], ExecutionReport]:
    """Run into given arrays, and return all outputs: those that were filled, and in their place those that were reported."""
    into = room(checked, run)
    report = executable.run(given(checked.runs[run]), into, False)
    return {name: np.asarray(report.outputs.get(name, array)) for name, array in into.items()}, report


def expect_right(outputs: Arrays, checked: CheckedModel, run: int, what: str) -> None:
    """Compare outputs with the right ones."""
    right = checked.right(run)
    expect(set(outputs) == set(right), f"{what} of {checked.name}: the outputs are {sorted(outputs)}, expected {sorted(right)}")
    for name, wanted in right.items():
        found = np.asarray(outputs[name])
        place = f"{what} of {checked.name}: output {name!r}"
        expect(found.shape == wanted.shape, f"{place} has shape {found.shape}, expected {wanted.shape}")
        expect(found.dtype == wanted.dtype, f"{place} has dtype {found.dtype}, expected {wanted.dtype}")
        limit = checked.tolerance * max(float(np.abs(wanted).max(initial=0)), 1e-6) if wanted.dtype.kind == "f" else 0
        off = float(np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max(initial=0))
        expect(off <= limit, f"{place} is off by {off:.3g}; at most {limit:.3g} is allowed")


def same_bits(some: Arrays, others: Arrays) -> bool:
    """Return whether two sets of outputs are equal bit by bit."""
    return all(np.asarray(some[name]).tobytes() == np.asarray(others[name]).tobytes() for name in others)


@contextmanager
def switching_often() -> Iterator[None]:
    """Let Python's threads take turns so often within the block that runs meet each other also where they are short."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def held_descriptors() -> int:
    """Return how many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_a_loop(work: Callable[[], Coroutine[Any, Any, T]], variables: Mapping[str, str] | None = None) -> T:
    """Run a coroutine in another thread, with an event loop. Driver processes find modules where this process does.

    Args:
        work: makes the coroutine.
        variables: of the environment, as long as it runs.
    """
    import aionn

    with environment({"PYTHONPATH": python_path(), **(variables or {})}), ThreadPoolExecutor(1) as pool:  # this thread may have a loop
        return pool.submit(aionn.run, work).result()


def python_path(*first: str) -> str:
    """Return a PYTHONPATH with which another process finds the modules that this process finds, and those in folders before them."""
    return os.pathsep.join([*first, *(path or os.getcwd() for path in sys.path)])


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _importable(engine: object) -> str:
    kind = engine if isinstance(engine, type) else None if callable(engine) else type(engine)
    if kind is None or "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        return ""
    return f"{kind.__module__}:{kind.__qualname__}"
