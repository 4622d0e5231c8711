"""The cases of `check_engine` that need a driver process: it serves the engine, and its sandbox allows what the engine declares."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aionn.engines.installed import home_of
from aionn.engines.needs import facts_of
from aionn.errors import AionnError
from aionn.hal.engine import Engine
from aionn.sandbox.facts import NAMES, Facts
from aionn.testing.engine_check import EngineCheck, Inapplicable, expect, expect_right, in_a_loop, python_path

__all__ = ["DRIVER_CASES"]

_STRICT = {"AIONN_SANDBOX": "strict"}
_OFF = {"AIONN_SANDBOX": "off"}
_DENIED = "the sandbox denied"
"""Stands in the line that a driver process of the strict level prints before it ends."""

_DECLARABLE = ("ioctl", "mmap", "mprotect", "pkey_mprotect")
"""Calls that `devices` and `makes_code` allow. The latter matters on kernels without MDWE, where the filter judges these calls."""

_TRIES: tuple[dict[str, Any], ...] = (
    {"reads": ()},
    {"makes_code": True},
    {"writes_by_path": True},
    {"makes_code": True, "writes_by_path": True},
)
"""What is tried for an engine that does not work confined. The first is for one that declares nothing."""

_STAND_IN = "aionn_engine_under_check"
_SOURCE = """from aionn.driver.registry import find_engine


class Declaring:
    reads = {reads!r}
    writes_by_path = {writes_by_path!r}
    makes_code = {makes_code!r}
    devices = {devices!r}

    def __new__(cls):
        return find_engine({name!r})
"""
"""A module whose class declares other facts than the engine that it makes. A driver reads the facts of the class that it is asked for."""


def a_driver_serves_it(check: EngineCheck) -> None:
    """In a driver process the engine compiles, computes and answers in a burst, and the next process loads what was stored."""
    _expect_a_name(check)
    with tempfile.TemporaryDirectory() as folder:
        in_a_loop(lambda: _serve(check, check.name, folder))


def needs_are_declared(check: EngineCheck) -> None:
    """The class declares in literals what its driver's sandbox must allow: `reads`, `writes_by_path`, `makes_code`, `devices`."""
    _expect_a_name(check)
    engine, declared = check.make(), _declared(check)
    if declared is None:
        unseen = [name for name in NAMES if hasattr(engine, name)]
        why = f" (a driver does not see {' and '.join(unseen)}, because the class's source has no literal)" if unseen else ""
        words = f"the class declares none of {', '.join(NAMES)}{why}, so its driver is hardly confined"
        raise AssertionError(f"{words}; {_advice(check, Facts(), '')}")
    for name in NAMES:
        had, wanted = _of_engine(engine, name), getattr(declared, name)
        expect(had == wanted, f"{name} is {had!r}, but a driver reads {wanted!r} in the class's source; write one literal for both")


def works_in_its_sandbox(check: EngineCheck) -> None:
    """With what the class declares, the engine works in a driver whose sandbox is strict: a denied call ends the driver and is named."""
    _expect_a_name(check)
    declared = _declared(check)
    if declared is None:
        raise Inapplicable("the class declares nothing, so its driver is hardly confined")
    if lacking := _reason_against_strict():
        raise Inapplicable(f"this system cannot confine a driver: {lacking}")
    failure = _failure(check, check.name, _STRICT)
    if failure:
        raise AssertionError(f"confined as its class declares, it does not work: {failure}; {_advice(check, declared, failure)}")


def _expect_a_name(check: EngineCheck) -> None:
    if not check.name:
        raise Inapplicable("a driver process finds an engine by its name only")


def _declared(check: EngineCheck) -> Facts | None:
    """Return what a driver reads in the source of the engine's class.

    Raises:
        FactsError: a fact is not a literal of its type.
    """
    return facts_of(home_of(check.name) or check.name, "")


def _of_engine(engine: Engine, name: str) -> Any:
    found = getattr(engine, name, getattr(Facts(), name))
    return tuple(found) if isinstance(found, list) else found


async def _serve(check: EngineCheck, device: str, folder: str) -> None:
    """Let two driver processes serve the engine, one after the other, over one cache."""
    import aionn

    engine = check.make()
    checked = next(each for each in check.supported(engine) if each.model.inputs)
    outcomes: list[Any] = []
    for _ in range(2):
        async with aionn.Runtime(start=(), state_dir=Path(folder, "state")) as runtime:
            compilation = await runtime.compile(checked.model, devices=(device,), cache_dir=Path(folder, "cache"))
            outcomes += compilation.outcomes
            computed = await compilation.compute(dict(checked.runs[0]))
            expect_right(computed, checked, 0, "an execution in a driver")
            async with compilation.burst() as burst:
                for run in (0, 1, 0):
                    expect_right(await burst.compute(dict(checked.runs[run])), checked, run, "a frame of a burst")
    if engine.cache_files.supported:
        listed = ", then ".join(map(str, outcomes))
        expect(outcomes[-1].kind.name in ("HIT", "DECLINED"), f"another process was not served from the cache: {listed}")


def _failure(check: EngineCheck, device: str, variables: dict[str, str]) -> str:
    """Return why the engine does not work under this name in drivers with these variables, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            in_a_loop(lambda: _serve(check, device, folder), variables)
        except (AssertionError, AionnError) as error:
            notes = "\n".join(getattr(error, "__notes__", ())).splitlines()
            return "; ".join((str(error), *[line for line in notes if _DENIED in line][:1]))
    return ""


@functools.cache  # the machine does not change
def _reason_against_strict() -> str:
    """Return why no driver can be confined here, or an empty text. The driver that is tried has an engine that does nothing."""
    import aionn

    async def start(place: str) -> None:
        async with aionn.Runtime(start=()) as runtime:
            await runtime.compile(aionn.Model.from_bytes(b"?", inputs={}, outputs={}, format=_STAND_IN), devices=(place,))

    with _stand_in("aionn.testing.damaged:ArtifactLoader", Facts()) as (place, variables):
        try:
            in_a_loop(lambda: start(place), variables)
        except aionn.DeviceUnavailableError as error:
            return str(error)
        except aionn.AionnError:
            pass  # it started, and refused the model
    return ""


@contextmanager
def _stand_in(engine: str, facts: Facts) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of a class that makes the engine and declares these facts, and the variables with which a driver finds it."""
    with tempfile.TemporaryDirectory() as folder:
        parts = {name: getattr(facts, name) for name in NAMES}
        Path(folder, f"{_STAND_IN}.py").write_text(_SOURCE.format(name=engine, **parts), encoding="utf-8")
        yield f"{_STAND_IN}:Declaring", {**_STRICT, "PYTHONPATH": python_path(folder)}


def _advice(check: EngineCheck, declared: Facts, failure: str) -> str:
    """Return what the class should declare, found by trying it.

    Args:
        check: of the engine.
        declared: what the class declares now.
        failure: why it does not work so, or an empty text if that was not tried.
    """
    read_on = "docs/how-to/own-driver.md says what a sandbox can allow"
    if _reason_against_strict():
        return f"declare reads = () if it needs nothing beyond the usual; {read_on}"
    why = ""
    for more in _TRIES[1:] if failure else _TRIES:
        if _is_never_allowed(failure):
            return f"{why}nothing that a class can declare allows that call; {read_on}"
        with _stand_in(check.name, Facts(**{name: getattr(declared, name) for name in NAMES} | more)) as (place, variables):
            refusal = _failure(check, place, variables)
        if not refusal:
            return f"it works with {' and '.join(f'{name} = {value!r}' for name, value in more.items())} in the body of the class"
        if not failure:
            failure, why = refusal, f"with reads = () it does not work: {refusal}; "
    if _failure(check, check.name, _OFF):
        return "it does not work without a sandbox either"
    return f"{why}declare files in reads and device files in devices; {read_on}"


def _is_never_allowed(failure: str) -> bool:
    """Return whether the sandbox has denied a call that no declaration allows."""
    return _DENIED in failure and not any(f"({call})" in failure for call in _DECLARABLE)


DRIVER_CASES: tuple[Callable[[EngineCheck], None], ...] = (a_driver_serves_it, needs_are_declared, works_in_its_sandbox)
