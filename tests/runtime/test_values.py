"""Strings, sequences, maps and optionals at a model's border, through the public face."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn import hal
from aionn.caching import CacheOutcomeKind
from aionn.errors import CallerError, CompilationError, DeadlineError, DriverDiedError, ExecutionError
from aionn.hal import Artifact, CacheFiles, CompileOptions, Engine, Executable, ExecutionReport, ValueKind, ValueType
from aionn.pages.app_layout import COMPUTED, COPIED_BYTES
from aionn.remote import values
from aionn.runtime.streaming.kept_burst import DEPTH
from aionn.testing import FakeDevice
from tests.leaks import driver_pids, leak_check
from tests.runtime.values_models import FLOATS, INTEGERS, TEXTS, linear_classifier, ml, model_of, passing, rows_of, tree_classifier

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: `test_started` and `test_kept_burst` try the ways to cancel on both."""
    return "asyncio", {"use_uvloop": True}


X = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, -1.0]], np.float32)
ORT = ("onnxruntime",)


def directly(model: aionn.Model, inputs: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model.graph, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, inputs)
    return found


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same([*one.values()], [*other.values()])
    else:
        assert one == other


def texts(*words: str) -> np.ndarray[Any, Any]:
    return np.array(words, object)


STRINGS = {"x": (TensorProto.STRING, [None])}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ZipMap with string labels": (lambda: linear_classifier(["cat", "dog"]), {"x": X}),
    "ZipMap with int labels": (lambda: linear_classifier([3, 7]), {"x": X}),
    "a tree with ZipMap": (tree_classifier, {"x": np.array([[0.0], [1.0]], np.float32)}),
    "LabelEncoder": (
        lambda: model_of(
            [ml("LabelEncoder", ["x"], ["y"], keys_strings=["a", "é"], values_int64s=[1, 2], default_int64=-1)], STRINGS, {"y": INTEGERS}
        ),
        {"x": texts("é", "a", "unknown", "")},
    ),
    "TfIdfVectorizer": (
        lambda: model_of(
            [
                helper.make_node(
                    "TfIdfVectorizer",
                    ["x"],
                    ["y"],
                    mode="TF",
                    min_gram_length=1,
                    max_gram_length=1,
                    max_skip_count=0,
                    ngram_counts=[0],
                    ngram_indexes=[0, 1],
                    pool_strings=["a", "b"],
                )
            ],
            STRINGS,
            {"y": FLOATS},
        ),
        {"x": texts("a", "b", "a", "c")},
    ),
    "StringNormalizer": (
        lambda: model_of(
            [
                helper.make_node(
                    "StringNormalizer", ["x"], ["y"], case_change_action="UPPER", locale="C", is_case_sensitive=0, stopwords=["the"]
                )
            ],
            STRINGS,
            {"y": TEXTS},
        ),
        {"x": texts("the", "cat", "sat")},
    ),
    "StringConcat of fixed-width texts": (
        lambda: model_of([helper.make_node("StringConcat", ["x", "x"], ["y"])], STRINGS, {"y": TEXTS}),
        {"x": np.array(["a", "bcd", ""])},
    ),
    "no strings at all": (
        lambda: model_of([helper.make_node("StringConcat", ["x", "x"], ["y"])], STRINGS, {"y": TEXTS}),
        {"x": texts()},
    ),
    "SequenceConstruct": (
        lambda: model_of(
            [helper.make_node("SequenceConstruct", ["x", "x"], ["y"])],
            {"x": (TensorProto.FLOAT, [None, 2])},
            {"y": helper.make_sequence_type_proto(FLOATS)},
        ),
        {"x": X},
    ),
    "SequenceAt": (
        lambda: model_of(
            [helper.make_node("SequenceAt", ["x", "i"], ["y"])],
            {"x": helper.make_sequence_type_proto(TEXTS), "i": (TensorProto.INT64, [])},
            {"y": TEXTS},
        ),
        {"x": [texts("a"), texts("b", "c")], "i": np.array(1)},
    ),
    "SplitToSequence": (
        lambda: model_of(
            [helper.make_node("SplitToSequence", ["x"], ["y"], axis=0)],
            {"x": (TensorProto.INT64, [None])},
            {"y": helper.make_sequence_type_proto(INTEGERS)},
        ),
        {"x": np.arange(5)},
    ),
    "an empty sequence": (lambda: passing(helper.make_sequence_type_proto(FLOATS)), {"x": []}),
    "a sequence of one empty tensor": (lambda: passing(helper.make_sequence_type_proto(FLOATS)), {"x": [np.zeros((0, 3), np.float32)]}),
    "an absent optional": (lambda: passing(helper.make_optional_type_proto(FLOATS)), {"x": None}),
    "a present optional": (lambda: passing(helper.make_optional_type_proto(FLOATS)), {"x": X}),
    "an optional sequence": (lambda: passing(helper.make_optional_type_proto(helper.make_sequence_type_proto(FLOATS))), {"x": [X, X[:1]]}),
    "OptionalHasElement": (
        lambda: model_of(
            [helper.make_node("OptionalHasElement", ["x"], ["y"])],
            {"x": helper.make_optional_type_proto(FLOATS)},
            {"y": (TensorProto.BOOL, [])},
        ),
        {"x": None},
    ),
    "a map as an input": (
        lambda: model_of(
            [ml("DictVectorizer", ["x"], ["y"], string_vocabulary=["a", "b"])],
            {"x": helper.make_map_type_proto(TensorProto.STRING, FLOATS)},
            {"y": FLOATS},
        ),
        {"x": {"b": 2.5}},
    ),
}


async def test_models_with_values_compute_what_the_engine_computes_also_from_the_cache(tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        for name, (make, inputs) in CASES.items():
            model = make()
            expected = directly(model, inputs)
            for kind in (CacheOutcomeKind.MISS, CacheOutcomeKind.HIT):
                async with await runtime.compile(model, devices=ORT, cache_dir=tmp_path / name) as compilation:
                    assert compilation.outcomes[0].kind is kind, name
                    for _ in range(2):
                        found = await compilation.compute(inputs)
                        assert list(found) == list(model.outputs), name
                        for each, its in zip(found.values(), expected, strict=True):
                            assert_same(each, its)
                    assert found.device == "onnxruntime"


REFERENCE = [
    "StringNormalizer",
    "StringConcat of fixed-width texts",
    "SequenceConstruct",
    "SequenceAt",
    "SplitToSequence",
    "an optional sequence",
]


async def test_the_reference_device_computes_the_same() -> None:
    async with aionn.Runtime(start=()) as runtime:
        for name in REFERENCE:
            make, inputs = CASES[name]
            model = make()
            async with await runtime.compile(model, devices=("reference",)) as compilation:
                found = await compilation.compute(inputs)
                for each, its in zip(found.values(), directly(model, inputs), strict=True):
                    assert_same(each, its)


async def test_a_cache_hit_of_a_loaded_model_knows_the_types_without_its_graph(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(linear_classifier(["cat", "dog"]).graph)
    async with aionn.Runtime(start=()) as runtime:
        for kind in (CacheOutcomeKind.MISS, CacheOutcomeKind.HIT):
            model = await runtime.load(path)
            async with await runtime.compile(model, devices=ORT, cache_dir=tmp_path / "cache") as compilation:
                assert compilation.outcomes[0].kind is kind
                assert ("graph" in model.__dict__) is (kind is CacheOutcomeKind.MISS)
                rows = model.outputs["probabilities"]
                assert isinstance(rows, ValueType)
                assert (rows.kind, str(rows)) == (ValueKind.SEQUENCE, "sequence(map(string, float32))")
                assert model.outputs["label"].type is hal.OperandType.STRING
                found = await compilation.compute({"x": X})
                assert found["label"].tolist() == ["cat", "dog", "cat"]


async def test_jit_compiles_such_a_model_at_its_first_execution() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(linear_classifier([0, 1]), devices=ORT, mode="jit")
        assert compilation.outcomes == ()
        found = await compilation.compute({"x": X}, measure_timing=True)
        assert [sorted(row) for row in found["probabilities"]] == [[0, 1]] * 3
        assert found.timing is not None
        assert found.timing.in_driver_us < 10**7


async def test_large_values_go_through_one_shared_memory_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[bool] = []

    async def spy(encoded: Any) -> Any:
        found = await real(encoded)
        laid.append(found[1] is not None)
        return found

    real = values.laid_out
    monkeypatch.setattr(values, "laid_out", spy)
    many = [np.full((256, 1024), number, np.float32) for number in range(8)]
    words = np.array([f"word {number}" for number in range(100_000)], object)
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        numbers = await runtime.compile(passing(helper.make_sequence_type_proto(FLOATS)), devices=ORT)
        found = (await numbers.compute({"x": many}))["y"]
        assert_same(found, many)
        assert all(array.flags.owndata and array.flags.writeable for array in found)
        strings = await runtime.compile(passing(TEXTS), devices=ORT)
        assert_same((await strings.compute({"x": words}))["y"], words)
        assert_same((await strings.compute({"x": words[:3]}))["y"], words[:3])
    assert laid == [True, True, False]


# --- what such a model cannot do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["onnxruntime", "reference"])
async def test_start_refuses_values_and_the_driver_lives_on(device: str) -> None:
    """Without the refusal, a driver takes the bytes of a frame for Python's objects and dies of SIGSEGV."""
    model = passing(TEXTS)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(device,))
        pid = runtime.devices[[known.name for known in runtime.devices].index(device)].pid
        with pytest.raises(CallerError, match=r"^start takes tensors of numbers only, but input 'x' is of type string; use"):
            compilation.start({"x": texts("a")})
        assert_same((await compilation.compute({"x": texts("a")}))["y"], texts("a"))
        assert runtime.devices[[known.name for known in runtime.devices].index(device)].pid == pid


class Offering:
    """A tensor of another library."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def scaled_beside_texts() -> aionn.Model:
    """y = x * k, where k is an initializer and an input; t = s, a text."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "k"], ["y"]), helper.make_node("Identity", ["s"], ["t"])],
        "scaled",
        [value("x", TensorProto.FLOAT, [3]), value("s", TensorProto.STRING, [None]), value("k", TensorProto.FLOAT, [3])],
        [value("y", TensorProto.FLOAT, [3]), value("t", TensorProto.STRING, [None])],
        [numpy_helper.from_array(np.array([2, 3, 4], np.float32), "k")],
    )
    imports = [helper.make_opsetid("", 20)]
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())


@pytest.mark.parametrize("device", ["onnxruntime", "reference"])
async def test_an_initializer_may_be_left_out_or_given_beside_values(device: str) -> None:
    one = np.ones(3, np.float32)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(scaled_beside_texts(), devices=(device,))
        for given, wanted in (({}, [2, 3, 4]), ({"k": one}, [1, 1, 1]), ({"k": Offering(one * 5)}, [5, 5, 5])):
            outputs = await compilation.compute({"x": Offering(one), "s": texts("a"), **given})
            np.testing.assert_array_equal(outputs["y"], wanted)
            assert_same(outputs["t"], texts("a"))


async def test_whatever_needs_frames_names_compute_as_the_way_out(fake: FakeDevice) -> None:
    model = passing(TEXTS)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        sentence = "takes tensors of numbers only, but input 'x' is of type string; use compilation.compute for this model"
        with pytest.raises(CallerError, match=f"^a burst {sentence}$"):
            compilation.burst()
        with pytest.raises(CallerError, match=f"^device memory {sentence}$"):
            await compilation.allocate(inputs=["x"])
        with pytest.raises(CallerError, match="this model's outputs are values that compute returns"):
            await compilation.compute({"x": texts("a")}, outputs={"y": aionn.Memory.allocate(64)})
        with pytest.raises(CallerError, match="input 'x': expected a NumPy array of string, got Memory"):
            await compilation.compute({"x": aionn.Memory.allocate(64)})
        with pytest.raises(CallerError, match="expected inputs as a mapping"):
            await compilation.compute([1])  # type: ignore[arg-type]
        assert (await compilation.compute({"x": texts("a")}))["y"].tolist() == ["a"]


async def test_stages_refuse_such_a_model_in_one_sentence(tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(CompilationError, match="mode 'staged' compares tensors of numbers only, but output 'label' is of type string"):
            await runtime.compile(linear_classifier(["a", "b"]), mode="staged", stages=("onnxruntime", "openvino"), cache_dir=tmp_path)


class NumbersOnly:
    """An engine whose executables have no `run_values`. Satisfies `hal.Engine`."""

    name = "numbers"
    version = "1"
    cache_files = CacheFiles(1, 0)

    def supported_operations(self, model: hal.Model) -> list[bool]:
        return [True] * len(model.operations)

    def compile(self, model: hal.Model, options: CompileOptions) -> Executable:
        return self

    def export(self, executable: Executable) -> Artifact | None:
        raise AssertionError("nothing that cannot run is stored")

    def load(self, artifact: Artifact, options: CompileOptions) -> Executable:
        raise NotImplementedError

    def run(self, inputs: Any, outputs: Any, timing: bool) -> ExecutionReport:
        raise NotImplementedError


_: type[Engine] = NumbersOnly


@pytest.mark.parametrize("device", [f"{__name__}:NumbersOnly", "openvino"])
async def test_an_engine_without_values_refuses_the_model_at_compile_time(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(CompilationError, match="'x' is of type string, but it runs tensors of numbers only; use another device"):
            await runtime.compile(passing(TEXTS), devices=(device,), cache_dir=tmp_path)


async def test_a_plan_goes_on_to_the_next_device_that_runs_values(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aionn.Runtime(start=()) as runtime:
        monkeypatch.setattr(type(runtime._opened.devices), "installed", ["openvino", "onnxruntime"])
        compilation = await runtime.compile(passing(TEXTS))
        assert compilation.device == "onnxruntime"
        assert (await compilation.compute({"x": texts("a")}))["y"].tolist() == ["a"]


# --- executions like all others ----------------------------------------------------------------------------------------


async def test_an_engines_failure_and_an_output_of_another_type_are_execution_errors(fake: FakeDevice) -> None:
    wrong = model_of([helper.make_node("Identity", ["x"], ["y"])], {"x": TEXTS}, {"y": rows_of(TensorProto.STRING)})
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(wrong, devices=(fake.name,))
        with pytest.raises(ExecutionError, match=r"output 'y': expected a list, for sequence.*got ndarray; the fault lies in the engine"):
            await compilation.compute({"x": texts("a")})
        fake.fail("no luck")
        with pytest.raises(ExecutionError, match="no luck"):
            await compilation.compute({"x": texts("a")})


async def test_a_deadline_ends_the_wait_and_the_driver_answers_the_next_call(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(fake.name,))
        fake.hang("run")
        with pytest.raises(DeadlineError):
            await compilation.compute({"x": texts("a")}, timeout_s=0.05)
        fake.behave()
        assert (await compilation.compute({"x": texts("b")}, timeout_s=20))["y"].tolist() == ["b"]


async def test_a_cancelled_call_gives_its_place_back(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(fake.name,))
        fake.hang("run")
        calls = [asyncio.ensure_future(compilation.compute({"x": texts(str(number))})) for number in range(DEPTH + 4)]
        await fake.heard("run")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        fake.behave()
        assert (await compilation.compute({"x": texts("b")}, timeout_s=20))["y"].tolist() == ["b"]
        assert compilation._parts.kept._places == DEPTH


async def test_calls_go_in_order_and_each_gets_its_own_answer() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=ORT)
        ended: list[int] = []

        async def call(number: int) -> None:
            found = await compilation.compute({"x": texts(str(number))})
            assert found["y"].tolist() == [str(number)]
            ended.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5 * DEPTH):
                tasks.start_soon(call, number)
        assert ended == list(range(5 * DEPTH))


async def test_a_dead_driver_is_an_error_at_once_and_the_next_call_starts_another(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(fake.name,))
        fake.hang("run")
        call = asyncio.ensure_future(compilation.compute({"x": texts("a")}))
        await fake.heard("run")
        (pid,) = driver_pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DriverDiedError):
            await call
        fake.behave()
        assert (await compilation.compute({"x": texts("b")}))["y"].tolist() == ["b"]


async def test_closing_settles_calls_that_wait(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(fake.name,))
        fake.hang("run")
        calls = [asyncio.ensure_future(compilation.compute({"x": texts("a")})) for _ in range(DEPTH + 2)]
        await fake.heard("run")
        await runtime.aclose()
        await asyncio.wait(calls)
        assert {type(call.exception()) for call in calls} <= {CallerError, DriverDiedError}
        with pytest.raises(CallerError):
            await compilation.compute({"x": texts("a")})


@pytest.mark.parametrize("answered", [True, False])
async def test_closing_a_compilation_gives_calls_time_and_then_settles_them(
    fake: FakeDevice, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.runtime.streaming.kept_burst.CLOSE_S", 20.0 if answered else 0.1)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=(fake.name,))
        fake.hang("run")
        call = asyncio.ensure_future(compilation.compute({"x": texts("a")}))
        await fake.heard("run")
        closing = asyncio.ensure_future(compilation.aclose())
        if answered:
            await anyio.lowlevel.checkpoint()
            fake.behave()
            assert (await call)["y"].tolist() == ["a"]
        else:
            with pytest.raises(CallerError, match="was closed while this call waited"):
                await call
            fake.behave()
        await closing


async def test_a_swap_takes_over_between_two_executions_and_refuses_other_types() -> None:
    def encoder(one: int) -> aionn.Model:
        node = ml("LabelEncoder", ["x"], ["y"], keys_strings=["a"], values_int64s=[one], default_int64=0)
        return model_of([node], {"x": (TensorProto.STRING, [None])}, {"y": (TensorProto.INT64, [None])})

    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(encoder(1), devices=ORT)
        assert (await compilation.compute({"x": texts("a")}))["y"].tolist() == [1]
        await runtime.swap(compilation, encoder(2))
        assert (await compilation.compute({"x": texts("a")}))["y"].tolist() == [2]
        with pytest.raises(CallerError, match="the new model's inputs are"):
            await runtime.swap(compilation, passing(helper.make_sequence_type_proto(TEXTS)))


async def test_the_apps_page_counts_what_was_computed() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(passing(TEXTS), devices=ORT)
        for _ in range(3):
            await compilation.compute({"x": texts("a")})
        executor = compilation._parts.kept._large
        assert executor is not None
        assert executor.counts.get(COMPUTED) == 3
        assert executor.counts.get(COPIED_BYTES) > 0


async def test_an_input_with_a_default_may_be_left_out_beside_texts() -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["text"], ["same"]), helper.make_node("Add", ["x", "weight"], ["y"])],
        "texts",
        [
            helper.make_tensor_value_info("text", TensorProto.STRING, [1]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "weight")),
        ],
        [helper.make_tensor_value_info("same", TensorProto.STRING, [1]), helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        [numpy_helper.from_array(np.ones(3, np.float32), "weight")],
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    given = {"text": np.array(["a"], object), "x": np.zeros(3, np.float32)}
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(content), devices=("reference",))
        np.testing.assert_array_equal((await compilation.compute(given))["y"], np.ones(3))
        five = np.full(3, 5, np.float32)
        np.testing.assert_array_equal((await compilation.compute({**given, "weight": five}))["y"], five)
