"""The cases of `check_engine` that need a driver process: it serves the engine, and its sandbox allows what the engine states."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aionn.driver.registry import declared_needs
from aionn.engines.installed import Homes
from aionn.engines.needs import FILE, needs_of
from aionn.errors import AionnError
from aionn.needs import NAMES, Needs
from aionn.testing.damaged import LOADER
from aionn.testing.engine_check import EngineCheck, Inapplicable, expect, expect_right, in_a_loop

_STRICT = {"AIONN_SANDBOX": "strict"}
_OFF = {"AIONN_SANDBOX": "off"}
_DENIED = "the sandbox denied"
"""Stands in the line that a driver process of the strict level prints before it ends."""

_DECLARABLE = ("ioctl", "mmap", "mprotect", "pkey_mprotect")
"""Calls that `devices` and `makes_code` allow. The latter matters on kernels without MDWE, where the filter judges these calls."""

_TRIES = (Needs(makes_code=True), Needs(writes_by_path=True), Needs(makes_code=True, writes_by_path=True))
"""What is tried for an engine that does not work confined, beyond what it states."""


def a_driver_serves_it(check: EngineCheck) -> None:
    """In a driver process the engine compiles, computes and answers in a burst, and the next process loads what was stored."""
    _expect_a_name(check)
    with tempfile.TemporaryDirectory() as folder:
        in_a_loop(lambda: _serve(check, folder))


def needs_are_declared(check: EngineCheck) -> None:
    """What the engine's sandbox must allow can be read before the engine is imported. Its class has no attributes that say it."""
    engine = check.make()
    found = declared_needs(engine)
    expect(not found, found)
    if check.name:
        _stated(check)


def works_in_its_sandbox(check: EngineCheck) -> None:
    """With what it states, the engine works in a driver whose sandbox is strict: a denied call ends the driver and is named."""
    _expect_a_name(check)
    if lacking := _reason_against_strict():
        raise Inapplicable(f"this system cannot confine a driver: {lacking}")
    if failure := _failure(check, _STRICT):
        raise AssertionError(f"confined to the needs that it states, it does not work: {failure}; {_advice(check, failure)}")


def _expect_a_name(check: EngineCheck) -> None:
    if not check.name:
        raise Inapplicable("a driver process finds an engine by its name only")


def _stated(check: EngineCheck) -> Needs:
    """Return what a driver reads beside the engine's code.

    Raises:
        CallerError: the file states no needs.
    """
    return needs_of(Homes().home(check.name) or check.name, "")


async def _serve(check: EngineCheck, folder: str, needs: Needs | None = None) -> None:
    """Let two driver processes serve the engine, one after the other, over one cache. `needs` take the place of those that it states."""
    import aionn

    engine, given = check.make(), None if needs is None else {check.name: needs}
    checked = next(each for each in check.supported(engine) if each.model.inputs)
    outcomes: list[Any] = []
    for _ in range(2):
        async with aionn.Runtime(start=(), state_dir=Path(folder, "state"), engine_needs=given) as runtime:
            compilation = await runtime.compile(checked.model, devices=(check.name,), cache_dir=Path(folder, "cache"))
            outcomes += compilation.outcomes
            computed = await compilation.compute(dict(checked.runs[0]))
            expect_right(computed, checked, 0, "an execution in a driver")
            async with compilation.burst() as burst:
                for run in (0, 1, 0):
                    expect_right(await burst.compute(dict(checked.runs[run])), checked, run, "a frame of a burst")
    if engine.cache_files.supported:
        listed = ", then ".join(map(str, outcomes))
        expect(outcomes[-1].kind.name in ("HIT", "DECLINED"), f"another process was not served from the cache: {listed}")


def _failure(check: EngineCheck, variables: dict[str, str], needs: Needs | None = None) -> str:
    """Return why the engine does not work in drivers with these variables and needs, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            in_a_loop(lambda: _serve(check, folder, needs), variables)
        except (AssertionError, AionnError) as error:
            notes = "\n".join(getattr(error, "__notes__", ())).splitlines()
            return "; ".join((str(error), *[line for line in notes if _DENIED in line][:1]))
    return ""


@functools.cache  # the machine does not change
def _reason_against_strict() -> str:
    """Return why no driver can be confined here, or an empty text. The driver that is tried has an engine that does nothing."""
    import aionn

    async def start() -> None:
        async with aionn.Runtime(start=()) as runtime:
            await runtime.compile(aionn.Model.from_bytes(b"?", inputs={}, outputs={}, format="none"), devices=(LOADER,))

    try:
        in_a_loop(start, _STRICT)
    except aionn.DeviceUnavailableError as error:
        return str(error)
    except aionn.AionnError:
        pass  # it started, and refused the model
    return ""


def _advice(check: EngineCheck, failure: str) -> str:
    """Return which needs the engine should state, found by trying them. `failure`: why it does not work with those that it states."""
    read_on = "docs/how-to/own-driver.md says what a sandbox can allow"
    stated = _stated(check)
    for more in _TRIES:
        if _DENIED in failure and not any(f"({call})" in failure for call in _DECLARABLE):
            return f"no need allows that call; {read_on}"
        refusal = _failure(check, _STRICT, stated + more)
        if not refusal:
            return f"it works with {' and '.join(f'{name} = true' for name in NAMES if getattr(more, name))} in {FILE}"
    if _failure(check, _OFF):
        return "it does not work without a sandbox either"
    return f"state files in reads and device files in devices; {read_on}"


DRIVER_CASES: tuple[Callable[[EngineCheck], None], ...] = (a_driver_serves_it, needs_are_declared, works_in_its_sandbox)
