"""Engines that authors write: that of docs/how-to/own-driver.md, with its own check, and one over scikit-learn. Both keep the contract.

`test_check_engine.py` does the same for the LiteRT example.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import aionn
import aionn.testing
from aionn.hal import Operand, OperandType
from aionn.testing import CheckedModel
from aionn.testing.engine_cases import CASES
from aionn.testing.engine_check import EngineCheck, Inapplicable
from tests.docs.pages import DOCS, blocks_of

PAGE = DOCS / "how-to" / "own-driver.md"


@pytest.fixture(scope="module")
def page_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Sequence[CheckedModel]]]:
    """The models of the page's check. The engine of the page is importable meanwhile."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "python"]
    (engine,) = (block for block in blocks if block.section == "A whole engine")
    (check,) = (block for block in blocks if block.section == "Checking an engine" and "CheckedModel" in block.text)
    folder: Path = tmp_path_factory.mktemp("page")
    (folder / "scale_engine.py").write_text(engine.text, encoding="utf-8")
    (folder / "scale_engine_check.py").write_text(check.text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield import_module("scale_engine_check").models
    for name in ("scale_engine", "scale_engine_check"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_the_engine_of_the_page(case: Callable[[EngineCheck], None], page_models: Callable[[], Sequence[CheckedModel]]) -> None:
    try:
        case(EngineCheck("scale_engine:ScaleEngine", page_models()))
    except Inapplicable as why:
        pytest.skip(str(why))


def classifier() -> list[CheckedModel]:
    random = np.random.default_rng(3)
    coef, intercept = random.normal(size=(3, 8)), random.normal(size=3)
    model = aionn.Model.from_bytes(
        json.dumps({"coef": coef.tolist(), "intercept": intercept.tolist()}).encode(),
        inputs={"features": Operand(OperandType.FLOAT32, (2, 8))},
        outputs={"scores": Operand(OperandType.FLOAT32, (2, 3))},
        format="logistic-regression",
        name="classifier.json",
    )
    runs = [{"features": random.normal(size=(2, 8)).astype(np.float32)} for _ in range(2)]
    powers = [np.exp(run["features"] @ coef.T + intercept) for run in runs]
    right = [{"scores": (power / power.sum(axis=1, keepdims=True)).astype(np.float32)} for power in powers]
    return [CheckedModel("a classifier of scikit-learn", model, runs, right)]


test_the_engine_over_scikit_learn = aionn.testing.check_engine("tests.engines.sklearn_engine:SklearnEngine", models=classifier)
