"""A bug in an engine: its traceback in the app's log, its file and line in the error's notes. Other errors of engines make no noise."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.caching import CacheOutcomeKind
from aionn.errors import CompilationError, DeviceUnavailableError, ExecutionError
from aionn.remote.control import error_of, failure_of
from aionn.testing import identity_model
from tests.runtime import buggy_engine
from tests.runtime.buggy_engine import NAME
from tests.runtime.values_models import TEXTS, passing

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: what an engine says does not depend on it."""
    return "asyncio", {"use_uvloop": True}


INPUTS = {"input": np.zeros((1, 16), np.float32)}
FILE = re.escape(str(buggy_engine.__file__))


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


def bugs(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("aionn.driver.") and record.levelno == logging.ERROR]


def expect_traceback(text: str, act: str, kind: str) -> None:
    assert text.startswith(f"device {NAME!r}: a bug in the engine of device 'fake', in {act}:\nTraceback")
    assert re.search(rf'File "{FILE}", line \d+, in act\n', text)
    assert f"{kind}: " in text


def expect_note(error: BaseException) -> None:
    assert "\n" not in str(error)
    (note,) = error.__notes__
    assert re.fullmatch(rf"at {FILE}:\d+ in act", note)


@pytest.mark.parametrize(("act", "where"), [("compile", "prepare"), ("supported", "prepare")])
async def test_a_bug_in_a_preparation_shows_where_it_lies(
    act: str, where: str, model: aionn.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", f"{act} KeyError")
    async with aionn.Runtime() as runtime:
        with pytest.raises(CompilationError, match="KeyError: 'the bug'") as raised:
            await runtime.compile(model, devices=(NAME,))
        (text,) = bugs(caplog)
    expect_traceback(text, where, "KeyError")
    expect_note(raised.value)


async def test_a_bug_in_a_run_is_logged_once_and_noted_each_time(
    model: aionn.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", "run ZeroDivisionError")
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(NAME,))
        for _ in range(2):
            with pytest.raises(ExecutionError, match="ZeroDivisionError: the bug") as raised:
                await compilation.compute(INPUTS)
            expect_note(raised.value)
        async with compilation.burst() as burst:
            for _ in range(3):
                with pytest.raises(ExecutionError, match="ZeroDivisionError: the bug") as raised:
                    await burst.compute(INPUTS)
                expect_note(raised.value)
        (text,) = bugs(caplog)
    expect_traceback(text, "run", "ZeroDivisionError")


async def test_a_bug_in_a_run_with_values_shows_where_it_lies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", "run ZeroDivisionError")
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(NAME,))
        for _ in range(2):
            with pytest.raises(ExecutionError, match="ZeroDivisionError: the bug") as raised:
                await compilation.compute({"x": np.array(["a"], object)})
            expect_note(raised.value)
        (text,) = bugs(caplog)
    expect_traceback(text, "run", "ZeroDivisionError")


@pytest.mark.parametrize("kind", ["Unprintable", "Stray"])
@pytest.mark.parametrize("act", ["start", "supported", "compile", "export", "load", "run"])
async def test_an_error_without_a_text_or_with_stray_bytes_is_as_good_as_another(
    act: str, kind: str, model: aionn.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", f"{act} {kind}")
    words = "no text can be made of it" if kind == "Unprintable" else r"the bug \\udcff"
    async with aionn.Runtime() as runtime:
        if act in ("export", "load"):
            compilations = [await runtime.compile(model, devices=(NAME,), cache_dir=tmp_path / "cache") for _ in range(2)]
            outcome = compilations[act == "load"].outcomes[0]
            assert re.search(words, str(outcome.save_failure) if act == "export" else outcome.detail)
            await compilations[1].compute(INPUTS)
            return
        expected = {"start": DeviceUnavailableError, "run": ExecutionError}.get(act, CompilationError)
        texts = passing(TEXTS)
        with pytest.raises(expected, match=words):
            compilation = await runtime.compile(model, devices=(NAME,))
            with pytest.raises(ExecutionError, match=words):
                await compilation.start(INPUTS)
            values = await runtime.compile(texts, devices=(NAME,))
            with pytest.raises(ExecutionError, match=words):
                await values.compute({"x": np.array(["a"], object)})
            async with compilation.burst() as burst:
                await burst.compute(INPUTS)


@pytest.mark.parametrize("act", ["export", "load"])
async def test_a_bug_that_costs_only_the_cache_is_in_the_log(
    act: str, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", f"{act} TypeError")
    async with aionn.Runtime() as runtime:
        for _ in range(2):
            compilation = await runtime.compile(model, devices=(NAME,), cache_dir=tmp_path / "cache")
            assert compilation.outcomes[0].kind is CacheOutcomeKind.MISS
            await compilation.compute(INPUTS)
        (text,) = bugs(caplog)
    expect_traceback(text, act, "TypeError")


async def test_a_bug_in_the_start_of_an_engine_is_noted(model: aionn.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", "start AttributeError")
    async with aionn.Runtime() as runtime:
        with pytest.raises(DeviceUnavailableError, match="cannot start: AttributeError: the bug") as raised:
            await runtime.compile(model, devices=(NAME,))
    expect_note(raised.value)


@pytest.mark.parametrize("act", ["compile", "run", "supported"])
async def test_what_a_library_raises_is_no_bug(
    act: str, model: aionn.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIONN_TEST_BUG", f"{act} RuntimeError")
    async with aionn.Runtime() as runtime:
        with pytest.raises((CompilationError, ExecutionError), match="the bug") as raised:
            compilation = await runtime.compile(model, devices=(NAME,))
            await compilation.compute(INPUTS)
    assert not hasattr(raised.value, "__notes__")
    assert bugs(caplog) == []


async def test_onnxruntimes_complaints_are_no_bugs(caplog: pytest.LogCaptureFixture) -> None:
    model = aionn.Model.from_onnx(identity_model({"input": (1, "N")}))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        with pytest.raises(aionn.CallerError):
            await compilation.compute({"input": np.zeros((2, 3), np.float32)})
    assert bugs(caplog) == []


def test_a_failure_keeps_its_notes() -> None:
    error = CompilationError("broken", node="n")
    error.add_note("at a.py:3 in f")
    assert error_of(failure_of(error)).__notes__ == ["at a.py:3 in f"]
    assert not hasattr(error_of(failure_of(CompilationError("broken"))), "__notes__")
