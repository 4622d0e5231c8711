"""`check_engine`: an engine against the driver contract, as pytest cases. It needs pytest, and onnx for the standard models.

Each case is a function of an `EngineCheck`. Its docstring says what must hold. The last ones need a driver process: it serves the engine,
and its sandbox allows what the engine states.

A case raises AssertionError with one sentence, or `Inapplicable`. Whatever else an engine raises is a failure of the case, too.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aionn.driver.registry import declared_needs
from aionn.engines.installed import Homes
from aionn.engines.needs import FILE, needs_of
from aionn.errors import AionnError, CompilationError
from aionn.hal.engine import Artifact, CancelFlag, CompileOptions, Executable
from aionn.hal.types import CacheFiles, DeviceType, Operand, OperandType
from aionn.needs import NAMES, Needs
from aionn.testing.damaged import FORMAT, LOADER, packed
from aionn.testing.engine_check import (
    EngineCheck,
    Inapplicable,
    expect,
    expect_right,
    given,
    held_descriptors,
    in_a_loop,
    outputs_of,
    resident_bytes,
    room,
    same_bits,
    switching_often,
)
from aionn.testing.models import CheckedModel, unknown_operator

if TYPE_CHECKING:
    from aionn.hal.engine import Engine
    from aionn.testing.models import CheckedModel


_GROWTH_RUNS = 400
_GROWTH_BYTES = 32 << 20
_LOAD_S = 60


def facts(check: EngineCheck) -> None:
    """The engine says who it is, and says the same each time."""
    first, second = check.make(), check.make()
    expect(isinstance(first.name, str) and first.name, f"name is {first.name!r}, expected a text")
    expect(isinstance(first.version, str) and first.version, f"version is {first.version!r}, expected a text")
    expect(isinstance(first.cache_files, CacheFiles), f"cache_files is {first.cache_files!r}, expected an aionn.hal.CacheFiles")
    for fact in ("name", "version", "cache_files"):
        was, now = getattr(first, fact), getattr(second, fact)
        expect(was == now, f"{fact} differs between two engines of one process: {was!r} and {now!r}; a cache would never hit")
    expect(first.cache_files == CacheFiles() or first.cache_files.supported, f"cache_files is {first.cache_files}, which no cache takes")
    expect(isinstance(getattr(first, "device_type", DeviceType.CPU), DeviceType), "device_type is not an aionn.hal.DeviceType")
    expect(isinstance(getattr(first, "priority_matters", False), bool), "priority_matters is not a bool")


def supported_operations_are_honest(check: EngineCheck) -> None:
    """The engine answers per operation, compiles what it says it can run, and knows neither every operator nor every format."""
    import aionn

    engine = check.make()
    for checked in check.models:
        answer = list(engine.supported_operations(checked.model))
        wanted = len(checked.model.operations)
        expect(len(answer) == wanted, f"supported_operations gives {len(answer)} answers for {checked.name}, expected {wanted}")
        if all(answer):
            engine.compile(checked.model, CompileOptions())
    check.supported(engine)
    strange = unknown_operator()
    answer = list(engine.supported_operations(strange))
    expect(len(answer) == 2, f"supported_operations gives {len(answer)} answers for a model of 2 operations with an unknown operator")
    expect(not answer[1], "supported_operations says True to an operator that does not exist; say False to what the engine does not know")
    border = {"y": Operand(OperandType.FLOAT32, (1,))}
    foreign = aionn.Model.from_bytes(b"?", inputs=border, outputs=border, format="aionn.testing.nowhere")
    answer = list(engine.supported_operations(foreign))
    expect(answer == [False], f"supported_operations gives {answer} for a model of an unknown format, expected [False]")


def outputs_are_right(check: EngineCheck) -> None:
    """Each model gives the right outputs, with arrays for the outputs and without, for each set of inputs."""
    for checked, executable in check.compiled():
        for run in range(len(checked.runs)):
            into = room(checked, run)
            report = executable.run(given(checked.runs[run]), {}, False)
            expect_right(report.outputs, checked, run, "a run without given arrays")
            report = executable.run(given(checked.runs[run]), into, False)
            expect_right({**into, **report.outputs}, checked, run, "a run into given arrays")


def given_arrays_are_filled(check: EngineCheck) -> None:
    """An output whose given array has the right shape is written into it, and is not reported."""
    for checked, executable in check.compiled():
        into = room(checked, 0)
        report = executable.run(given(checked.runs[0]), into, False)
        expect(not report.outputs, f"{checked.name}: outputs {sorted(report.outputs)} fit their arrays, but were reported; fill the arrays")
        expect_right(into, checked, 0, "the given arrays")
        some = dict(list(room(checked, 1).items())[:1])
        report = executable.run(given(checked.runs[1]), some, False)
        expect_right({**some, **report.outputs}, checked, 1, "a run into one given array")


def outputs_of_another_shape_are_reported(check: EngineCheck) -> None:
    """An output with another shape than the array given for it goes back in the report, since some files declare wrong shapes."""
    for checked, executable in check.compiled():
        right = checked.right(0)
        wrong = {name: np.full((*array.shape, 2), 77, array.dtype) for name, array in right.items()}
        report = executable.run(given(checked.runs[0]), wrong, False)
        missing = sorted(set(right) - set(report.outputs))
        expect(not missing, f"{checked.name}: outputs {missing} have another shape than their arrays, but were not reported")
        expect_right(report.outputs, checked, 0, "a run into arrays of another shape")


def inputs_are_not_written_to(check: EngineCheck) -> None:
    """A run changes no input. Inputs may be read-only, as they lie in memory that the app shares."""
    for checked, executable in check.compiled():
        inputs = {name: np.array(array, order="C") for name, array in checked.runs[0].items()}
        report = executable.run(inputs, room(checked, 0), False)
        for name, array in checked.runs[0].items():
            expect(inputs[name].tobytes() == array.tobytes(), f"{checked.name}: the run has changed input {name!r}")
            for output, made in report.outputs.items():
                expect(
                    not np.may_share_memory(made, inputs[name]), f"{checked.name}: output {output!r} lies in the memory of input {name!r}"
                )
        executable.run(given(checked.runs[0]), room(checked, 0), False)


def runs_do_not_mix(check: EngineCheck) -> None:
    """The same inputs give the same bits after other inputs, and a later run does not change what an earlier one has returned."""
    for checked, executable in check.compiled():
        first = executable.run(given(checked.runs[0]), {}, False).outputs
        kept = {name: np.array(array) for name, array in first.items()}
        second, _ = outputs_of(executable, checked, 1)
        expect_right(second, checked, 1, "a run after other inputs")
        executable.run(given(checked.runs[1]), {}, False)
        expect(same_bits(first, kept), f"{checked.name}: a later run has changed the outputs that an earlier one returned; return copies")
        again = executable.run(given(checked.runs[0]), {}, False).outputs
        expect(same_bits(again, kept), f"{checked.name}: the same inputs give other bits after a run with other inputs")


def arrays_are_read_anew(check: EngineCheck) -> None:
    """A run reads what its arrays hold now. A driver gives the same arrays again, with other contents."""
    for checked, executable in check.compiled():
        arrays = {name: np.array(array, order="C") for name, array in checked.runs[0].items()}
        into = room(checked, 0)
        executable.run(arrays, into, False)
        for array in arrays.values():
            array.reshape(-1)[-1:] = array.reshape(-1)[:1]
        report = executable.run(arrays, into, False)
        again = {name: np.array(report.outputs.get(name, array)) for name, array in into.items()}
        fresh = executable.run(given(arrays), {}, False).outputs
        expect(same_bits(again, fresh), f"{checked.name}: a run does not see that its input arrays hold other values than before")


def a_stored_model_gives_the_same_bits(check: EngineCheck) -> None:
    """What is exported and loaded by another engine gives the bits of what was compiled, also under another number of threads."""
    engine = check.make()
    for checked, executable, artifact in check.exported(engine):
        files = CacheFiles(len(artifact.model), len(artifact.data))
        expect(files == engine.cache_files, f"export fills {files} for {checked.name}, but cache_files says {engine.cache_files}")
        loaded = check.make().load(_copied(artifact), CompileOptions())
        for run in range(len(checked.runs)):
            compiled, _ = outputs_of(executable, checked, run)
            stored, _ = outputs_of(loaded, checked, run)
            expect_right(stored, checked, run, "a loaded model")
            expect(same_bits(stored, compiled), f"{checked.name}: the loaded model gives other bits than the compiled one")


def damaged_artifacts_are_refused(check: EngineCheck) -> None:
    """`load` raises for an artifact that is cut off, empty, zeroed or of too few files, and does not end the process."""
    if not check.name:
        raise Inapplicable("damaged artifacts are loaded in another process, which finds an engine by its name only")
    _, _, artifact = check.exported(check.make())[0]
    damages: dict[str, Callable[[bytes], bytes]] = {
        "cut off": lambda content: content[: len(content) // 2],
        "emptied": lambda content: b"",
        "zeroed": lambda content: bytes(len(content)),
    }
    damaged = {what: _with(artifact, damage) for what, damage in damages.items()}
    damaged["without files"] = Artifact((), ())
    loaded = in_a_loop(lambda: _loaded(check.name, damaged))
    expect(not loaded, f"load takes artifacts that are {', '.join(loaded)}; raise CompilationError, so that the model is compiled again")


def _with(artifact: Artifact, damage: Callable[[bytes], bytes]) -> Artifact:
    """Return an artifact whose model files are damaged, or whose data files are if it has no others."""
    if artifact.model:
        return Artifact(tuple(damage(bytes(file)) for file in artifact.model), artifact.data)
    return Artifact((), tuple(damage(bytes(file)) for file in artifact.data))


async def _loaded(name: str, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return which artifacts an engine loads, in a driver process."""
    import aionn

    border = {"y": Operand(OperandType.FLOAT32, (1,))}
    loaded = []
    home = Homes().home(name) or name  # a confined driver does not look for installed engines
    async with aionn.Runtime(start=(), engine_needs={LOADER: needs_of(home, "")}) as runtime:
        for what, artifact in artifacts.items():
            model = aionn.Model.from_bytes(packed(home, artifact), inputs=border, outputs=border, format=FORMAT)
            try:
                await runtime.compile(model, devices=(LOADER,))
                loaded.append(what)
            except aionn.CompilationError as error:
                if error.reason != "refused":
                    raise
            except aionn.DriverDiedError as error:
                raise AssertionError(f"loading an artifact that was {what} ended the process: {error}") from error
    return loaded


def a_cancelled_compilation_stops(check: EngineCheck) -> None:
    """With `options.cancelled` set, `compile` and `load` raise `CompilationError` instead of beginning their work."""
    flag = CancelFlag()
    flag.set()
    engine = check.make()
    options = CompileOptions(cancelled=flag)
    checked = check.supported(engine)[0]
    _expect_cancelled("compile", lambda: engine.compile(checked.model, options))
    executable = engine.compile(checked.model, CompileOptions())
    artifact = engine.export(executable) if engine.cache_files.supported else None
    if artifact is not None:
        _expect_cancelled("load", lambda: engine.load(artifact, options))


def _expect_cancelled(verb: str, work: Callable[[], object]) -> None:
    try:
        work()
    except CompilationError:
        return
    raise AssertionError(f"{verb} ignores options.cancelled; look at it before long work, and raise aionn.CompilationError")


def threads_are_free(check: EngineCheck) -> None:
    """Any thread may run an executable, several compile at once, and the number of threads does not decide about the outputs."""
    engine = check.make()
    supported = check.supported(engine)[:2]  # to compile many models several times would take long
    with ThreadPoolExecutor(4) as pool:
        options = [CompileOptions(threads=threads) for threads in (1, 2, 1, 0)]
        for checked in supported:
            compiling = [pool.submit(engine.compile, checked.model, each) for each in options]
            for executable in [future.result() for future in compiling]:
                outputs, _ = pool.submit(outputs_of, executable, checked, 0).result()
                expect_right(outputs, checked, 0, "a run in another thread")


def lanes_run_beside_each_other(check: EngineCheck) -> None:
    """`lanes(2)` gives two executables that two threads run at once, with different inputs."""
    engine = check.make()
    checked = check.supported(engine)[0]
    executable = engine.compile(checked.model, CompileOptions(instances=2))
    if not hasattr(executable, "lanes"):
        raise Inapplicable("the executables have no method lanes")
    lanes = list(executable.lanes(2))
    expect(len(lanes) == 2, f"lanes(2) returned {len(lanes)} executables")
    _run_beside_each_other(lanes, checked, "a lane")


def shared_executables_are_whole(check: EngineCheck) -> None:
    """`share()` gives executables that run beside the first one, and after it has gone."""
    engine = check.make()
    checked = check.supported(engine)[0]
    executable = engine.compile(checked.model, CompileOptions())
    if not hasattr(executable, "share"):
        raise Inapplicable("the executables have no method share")
    with ThreadPoolExecutor(1) as pool:
        shared = pool.submit(executable.share).result()
    _run_beside_each_other([executable, shared], checked, "a shared executable")
    del executable
    gc.collect()
    outputs, _ = outputs_of(shared, checked, 0)
    expect_right(outputs, checked, 0, "a shared executable, alone")


def _run_beside_each_other(executables: Sequence[Executable], checked: CheckedModel, what: str) -> None:
    together = threading.Barrier(len(executables))

    def run_often(lane: int) -> None:
        for turn in range(50):
            together.wait(_LOAD_S)
            run = (lane + turn) % len(checked.runs)
            outputs, _ = outputs_of(executables[lane], checked, run)
            expect_right(outputs, checked, run, f"{what} beside another one")

    def run(lane: int) -> None:
        try:
            run_often(lane)
        except BaseException:
            together.abort()
            raise

    with switching_often(), ThreadPoolExecutor(len(executables)) as pool:
        errors = [future.exception() for future in [pool.submit(run, lane) for lane in range(len(executables))]]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error


def a_failed_run_does_no_harm(check: EngineCheck) -> None:
    """After a run whose inputs do not fit, the next run is right."""
    for checked, executable in check.compiled():
        wrong = {name: np.zeros((7, 5, 3), array.dtype) for name, array in checked.runs[0].items()}
        for inputs, what in ((wrong, "inputs of a wrong shape"), ({}, "no inputs")):
            with suppress(Exception):
                executable.run(inputs, room(checked, 0), False)
            outputs, _ = outputs_of(executable, checked, 0)
            expect_right(outputs, checked, 0, f"a run after one with {what}")


def runs_keep_nothing(check: EngineCheck) -> None:
    """Runs open no descriptors, and hold no more memory after many runs than after few."""
    checked, executable = max(check.compiled(), key=lambda pair: sum(array.nbytes for array in pair[0].right(0).values()))
    pad = 1 + _GROWTH_BYTES * 4 // _GROWTH_RUNS // max(1, sum(array.nbytes for array in checked.right(0).values()))
    turns = _GROWTH_RUNS

    def run(times: int) -> None:
        for _ in range(times):
            # Each output array is part of a larger one, so an engine that keeps it keeps much.
            into = {name: np.zeros((pad, *array.shape), array.dtype)[0] for name, array in checked.right(0).items()}
            for array in into.values():
                assert array.base is not None
                array.base.fill(1)
            executable.run(given(checked.runs[0]), into, False)

    run(20)
    gc.collect()
    descriptors, resident = held_descriptors(), resident_bytes()
    run(turns)
    gc.collect()
    opened, grown = held_descriptors() - descriptors, resident_bytes() - resident
    expect(opened < turns // 4, f"{turns} runs have left {opened} descriptors open")
    expect(grown < _GROWTH_BYTES, f"{turns} runs have left {grown >> 20} MiB; keep no array of a run")


def timing_is_true(check: EngineCheck) -> None:
    """`on_device_ns` is within the run's own time where timing is wanted, or None. The outputs are right all the same."""
    for checked, executable in check.compiled():
        began_ns = time.monotonic_ns()
        into = room(checked, 0)
        report = executable.run(given(checked.runs[0]), into, True)
        took_ns = time.monotonic_ns() - began_ns
        told = report.on_device_ns
        expect(told is None or 0 <= told <= took_ns, f"{checked.name}: on_device_ns is {told}, but the whole run took {took_ns} ns")
        expect_right({**into, **report.outputs}, checked, 0, "a run with timing")


def _copied(artifact: Artifact) -> Artifact:
    """Return an artifact whose files are read-only views of other memory."""
    return Artifact(*(tuple(memoryview(bytes(content)) for content in files) for files in (artifact.model, artifact.data)))


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


CASES: tuple[Callable[[EngineCheck], None], ...] = (
    facts,
    supported_operations_are_honest,
    outputs_are_right,
    given_arrays_are_filled,
    outputs_of_another_shape_are_reported,
    inputs_are_not_written_to,
    runs_do_not_mix,
    arrays_are_read_anew,
    a_stored_model_gives_the_same_bits,
    damaged_artifacts_are_refused,
    a_cancelled_compilation_stops,
    threads_are_free,
    lanes_run_beside_each_other,
    shared_executables_are_whole,
    a_failed_run_does_no_harm,
    runs_keep_nothing,
    timing_is_true,
    a_driver_serves_it,
    needs_are_declared,
    works_in_its_sandbox,
)
"""In the order in which an author meets them."""


def check_engine(
    engine: str | Callable[[], Engine] | Engine, *, models: Callable[[], Sequence[CheckedModel]] | Sequence[CheckedModel] | None = None
) -> Callable[..., None]:
    """Return a pytest test with a named case for each point of the driver contract.

    Args:
        engine: the name of an installed engine, "package.module:Class", a class, a function that makes an engine, or an engine. Two
            cases need another process, which finds only the first three.
        models: the models to check it on, or a function that makes them: `aionn.testing.CheckedModel`. By default small ONNX graphs.

    Examples:
        >>> import aionn.testing
        >>> test_my_engine = aionn.testing.check_engine("my_package:MyEngine")
    """

    @pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
    def test(case: Callable[[EngineCheck], None]) -> None:
        made = models() if callable(models) else models
        try:
            case(EngineCheck(engine, made))
        except Inapplicable as why:
            pytest.skip(str(why))

    return test
