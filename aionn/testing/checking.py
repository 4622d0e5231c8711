"""`check_engine`: an engine against the driver contract, as pytest cases. It needs pytest, and onnx for the standard models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from aionn.testing.engine_cases import CASES
from aionn.testing.engine_check import EngineCheck, Inapplicable

if TYPE_CHECKING:
    from aionn.hal.engine import Engine
    from aionn.testing.checked_models import CheckedModel


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
