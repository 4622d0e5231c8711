"""The ONNX backend node tests through aionn: what ONNX Runtime passes in this process passes over compute, burst and cache hit.

The default is every n-th test, and every test with strings, sequences or optionals. `pytest -m soak` runs all of them. In November 2026
onnx 1.23.2 had 1884 tests. ONNX Runtime 1.31.1 passed 1345 of them in this process, and all of those passed through aionn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import aionn
from tests.conformance.backend_nodes import WAYS, cases, run_all, sample

pytestmark = pytest.mark.no_cover  # hundreds of models on the same lines, which other tests cover

EXCEPTIONS: dict[str, str] = {}
"""Tests that ONNX Runtime passes in this process and aionn does not, with the reason. One that passes must be removed."""

REFERENCE_FAILS: dict[str, str] = {}
"""The same for the reference device and onnx's own evaluator."""


def needless(exceptions: dict[str, str], names: list[str], failed: dict[str, str]) -> list[str]:
    """Return exceptions that are not needed any more."""
    return sorted(name for name in exceptions if name in names and name not in failed)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_what_the_engine_passes_directly_passes_through_aionn(every: int, tmp_path: Path) -> None:
    names = sample(every)
    report = aionn.run(lambda: run_all(names, "onnxruntime", tmp_path))
    print(f"{len(names)} of {len(cases())} tests, {report.direct} pass directly, through aionn {dict(report.passed)}")
    assert report.direct > len(names) * 0.6
    assert set(WAYS) == set(report.passed)
    assert {name: why for name, why in report.failed.items() if name not in EXCEPTIONS} == {}
    assert needless(EXCEPTIONS, names, report.failed) == []
    strange = report.direct - report.passed["burst"]
    assert strange >= 30, "tests with strings, sequences and optionals are part of the sample"


def test_a_sample_passes_through_the_reference_device(tmp_path: Path) -> None:
    names = sample(24)
    report = aionn.run(lambda: run_all(names, "reference", None))
    print(f"{report.direct} pass directly, through the reference {dict(report.passed)}")
    assert report.direct > 60
    assert {name: why for name, why in report.failed.items() if name not in REFERENCE_FAILS} == {}
    assert needless(REFERENCE_FAILS, names, report.failed) == []
