"""`aionn.testing.check_engine` on our engines, on the example's, and on engines with one fault each, which one named case finds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn.testing
from aionn.testing import CheckedModel
from aionn.testing.engine_cases import CASES, needs_are_declared, works_in_its_sandbox
from aionn.testing.engine_check import EngineCheck, Inapplicable
from tests.conformance.storing_reference import NAME as STORING
from tests.engines import faulty_engines
from tests.engines.faulty_engines import FAULTS, Right
from tests.engines.needy_engines import NEEDS, STATED

EXAMPLES = Path(__file__).parents[2] / "examples"

test_onnxruntime = aionn.testing.check_engine("onnxruntime")
test_openvino = aionn.testing.check_engine("openvino")
test_the_reference = aionn.testing.check_engine("reference")
test_the_reference_that_stores = aionn.testing.check_engine(STORING)
test_an_engine_without_a_fault = aionn.testing.check_engine(Right)


def classifier() -> Sequence[CheckedModel]:
    if importlib.util.find_spec("ai_edge_litert") is None:
        pytest.skip("this case needs the package ai-edge-litert; run pip install -e '.[litert]'")
    import litert_driver

    random = np.random.default_rng(2)
    asked = [random.normal(size=(1, litert_driver.FEATURES)).astype(np.float32) for _ in range(2)]
    right = [{"scores": litert_driver.expected(features)} for features in asked]
    return [CheckedModel("the classifier", litert_driver.load_model(), [{"features": features} for features in asked], right)]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


test_litert = aionn.testing.check_engine("litert", models=classifier)
test_litert_without_its_delegate = aionn.testing.check_engine("litert_driver:LiteRTPlainEngine", models=classifier)


@pytest.mark.parametrize("engine", FAULTS, ids=lambda engine: engine.__name__)
def test_a_fault_is_found_by_a_named_case(engine: type[Right]) -> None:
    (case,) = [case for case in CASES if case.__name__ == FAULTS[engine]]
    with pytest.raises((AssertionError, RuntimeError, aionn.AionnError)) as found:
        case(EngineCheck(engine))
    assert not isinstance(found.value, Inapplicable)
    assert str(found.value)


@pytest.mark.parametrize("engine", NEEDS, ids=lambda engine: engine.__name__)
def test_a_need_that_is_not_stated_is_found_and_named(engine: type[Any]) -> None:
    name, words = NEEDS[engine]
    (case,) = [case for case in CASES if case.__name__ == name]
    with pytest.raises(AssertionError) as found:
        case(EngineCheck(engine))
    assert words in str(found.value)


@pytest.mark.parametrize("engine", STATED, ids=lambda engine: engine.__name__)
def test_a_stated_need_is_met(engine: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"stating_{engine.__name__.lower()}"
    (tmp_path / f"{module}.py").write_text(f"from {engine.__module__} import {engine.__name__} as Stating", encoding="ascii")
    (tmp_path / f"{module}.aionn-engine.toml").write_text(STATED[engine], encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = EngineCheck(f"{module}:Stating")
    needs_are_declared(check)
    works_in_its_sandbox(check)


def test_a_file_that_states_no_needs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "misstating.py").write_text(f"from {Right.__module__} import Right", encoding="ascii")
    (tmp_path / "misstating.aionn-engine.toml").write_text("make_code = true", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        aionn.CallerError, match="'make_code', which is not a need; the needs are reads, writes_by_path, makes_code, devices"
    ):
        needs_are_declared(EngineCheck("misstating:Right"))


@pytest.mark.parametrize(
    "engine", [Right, Right(), lambda: Right(), f"{Right.__module__}:Right"], ids=["class", "engine", "function", "name"]
)
def test_an_engine_is_given_in_any_form(engine: Any) -> None:
    check = EngineCheck(engine)
    assert check.make().name == "right"
    assert check.name == ("" if getattr(engine, "__name__", "") == "<lambda>" else f"{Right.__module__}:Right")
    CASES[0](check)


def test_an_engine_that_can_run_none_of_the_models_is_told_to_bring_its_own() -> None:
    with pytest.raises(AssertionError, match="give models that the engine can run"):
        CASES[2](EngineCheck(Refusing))


class Refusing(Right):
    def supported_operations(self, model: aionn.hal.Model) -> Sequence[bool]:
        return [False] * len(model.operations)


def test_every_case_finds_a_fault() -> None:
    assert {*FAULTS.values(), *(name for name, _ in NEEDS.values())} == {case.__name__ for case in CASES}
    assert all(engine.__module__ == faulty_engines.__name__ for engine in FAULTS)


def test_every_case_says_in_a_sentence_what_must_hold() -> None:
    assert all((case.__doc__ or "").endswith(".") for case in CASES)


def test_two_lines_of_an_author_give_named_cases(tmp_path: Path) -> None:
    lines = 'import aionn.testing\ntest_my_engine = aionn.testing.check_engine("reference")\n'
    (tmp_path / "test_mine.py").write_text(lines, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]
    assert found == [f"test_my_engine[{case.__name__}]" for case in CASES]
