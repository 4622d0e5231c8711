"""The ONNX backend node tests (`onnx.backend.test`), on an engine in this process and through aionn on the same engine."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

import aionn

WAYS = ("compute", "hit", "burst")
"""A compilation that misses the cache computes. One that hits it does so too. It then streams, and computes in memory of the device."""


@cache
def cases() -> Mapping[str, TestCase]:
    """Every node test that the onnx package carries, by name.

    The package computes them as they are loaded. It would also read its own source for its documentation, which takes long.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # the cases are computed here, on purpose with infinities
        patch.setattr("onnx.backend.test.case.base.process_snippet", lambda _, name, __: (name, ""))
        return {case.name: case for case in load_model_tests(kind="node")}


def sample(every: int) -> list[str]:
    """Return every n-th test, and every test whose model has an input or output that is not a tensor of numbers."""
    names = sorted(cases())
    strange = [name for name in names if any(map(_is_strange, _border(model_of(cases()[name]).graph)))]
    return sorted({*names[::every], *strange})


def model_of(case: TestCase) -> onnx.ModelProto:
    assert case.model is not None
    return case.model


def _border(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.output]


def _is_strange(value: onnx.ValueInfoProto) -> bool:
    return not value.type.HasField("tensor_type") or value.type.tensor_type.elem_type == onnx.TensorProto.STRING


def _plain(item: Any) -> Any:
    """Return a value of a case as arrays."""
    if isinstance(item, onnx.TensorProto):
        return onnx.numpy_helper.to_array(item)
    return [_plain(each) for each in item] if isinstance(item, list | tuple) else item


@dataclass
class Report:
    """What became of the tests.

    Attributes:
        direct: how many the engine passes in this process.
        passed: how many pass through aionn, by way.
        failed: why the others do not, by name; the last way that passed stands before the reason.
    """

    direct: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)


def data_of(case: TestCase) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return inputs by name and expected outputs. An input without data has an initializer."""
    names = [value.name for value in model_of(case).graph.input]
    return [(dict(zip(names, map(_plain, inputs), strict=False)), [*map(_plain, outputs)]) for inputs, outputs in case.data_sets or ()]


def check(case: TestCase, expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Compare as onnx's own runner does, and None with None."""
    if any(each is None for each in (*expected, *found)):
        assert [each is None for each in expected] == [each is None for each in found]
    else:
        Runner.assert_similar_outputs(expected, found, case.rtol, case.atol)


def passes_directly(case: TestCase, device: str) -> bool:
    """Return whether an engine itself passes a test, in this process."""
    try:
        run = _ENGINES[device](model_of(case))
        for inputs, expected in data_of(case):
            check(case, expected, run(None, inputs))
    except Exception:  # whatever the engine raises, aionn has no part in it
        return False
    return True


def _onnxruntime(model: onnx.ModelProto) -> Callable[..., list[Any]]:
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    run: Callable[..., list[Any]] = session.run
    return run


def _reference(model: onnx.ModelProto) -> Callable[..., list[Any]]:
    evaluator: Any = ReferenceEvaluator(model)
    run: Callable[..., list[Any]] = evaluator.run
    return run


_ENGINES = {"onnxruntime": _onnxruntime, "reference": _reference}


async def run_all(names: Sequence[str], device: str, cache_dir: Path | None) -> Report:
    """Run through aionn the tests that the engine passes in this process. Without `cache_dir` nothing is kept, and no hit is tried."""
    report = Report()
    async with aionn.Runtime(start=()) as runtime:
        for name in names:
            case = cases()[name]
            if not passes_directly(case, device):
                continue
            report.direct += 1
            way = "compile"
            try:
                async for way in _passed(runtime, case, device, cache_dir):
                    report.passed[way] += 1
            except Exception as error:  # every failure stands in the report
                report.failed[name] = f"after {way}: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return report


async def _passed(runtime: aionn.Runtime, case: TestCase, device: str, cache_dir: Path | None) -> AsyncIterator[str]:
    """Run a test in each way that exists for it. Yields the ways as they pass."""
    model = aionn.Model.from_onnx(model_of(case).SerializeToString())
    plain = all(operand.in_frames for operand in (*model.inputs.values(), *model.outputs.values()))
    async with await runtime.compile(model, devices=[device], cache_dir=cache_dir) as compilation:
        await _computes(compilation, case)
        yield "compute"
        if cache_dir is None and plain:
            await _streams(compilation, case, model)
            yield "burst"
    if cache_dir is None:
        return
    async with await runtime.compile(model, devices=[device], cache_dir=cache_dir) as compilation:
        kind = compilation.outcomes[0].kind.value
        assert kind == "hit", f"the second compilation is a {kind}: {compilation.outcomes[0].detail}"
        await _computes(compilation, case)
        yield "hit"
        if plain:
            await _streams(compilation, case, model)
            yield "burst"


async def _computes(compilation: aionn.Compilation, case: TestCase) -> None:
    for inputs, expected in data_of(case):
        check(case, expected, [*(await compilation.compute(inputs)).values()])


async def _streams(compilation: aionn.Compilation, case: TestCase, model: aionn.Model) -> None:
    """Compute over a burst, and with arguments in memory of the device."""
    for inputs, expected in data_of(case):
        async with compilation.burst() as burst:
            check(case, expected, [np.array(each) for each in (await burst.compute(inputs)).values()])
        check(case, expected, await _in_device_memory(compilation, model, inputs, expected))


async def _in_device_memory(
    compilation: aionn.Compilation, model: aionn.Model, inputs: Mapping[str, Any], expected: Sequence[Any]
) -> list[Any]:
    """Compute with each input and output in memory of the device, except empty ones, which it does not hold (NNAPI: MEMORY_DOMAIN)."""
    given, made = dict(inputs), {}
    for name, value in inputs.items():
        if np.size(value):
            given[name] = await compilation.allocate(inputs=(name,))
            await given[name].copy_from(np.asarray(value))
    for name, value in zip(model.outputs, expected, strict=True):
        if np.size(value):
            made[name] = await compilation.allocate(outputs=(name,))
    left = await compilation.compute(given, outputs=made)
    return [await made[name].snapshot() if name in made else left[name] for name in model.outputs]
