"""What is particular to ONNX Runtime: constants in place, cancelling, artifacts, threads, denormals."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from aionn.engines import onnxruntime as engine_module
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.onnxruntime_artifact import without_notes
from aionn.errors import CompilationError
from aionn.graph.support import gather_tables
from aionn.hal import Artifact, CancelFlag, CompileOptions, ExecutionPreference
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import identity, matmul, model_of, value
from tests.leaks import leak_check
from tests.real_models import carried, some_input
from tests.scaled_model import scaled_model

IN_PLACE = """if True:
    import sys
    import numpy as np
    from aionn.engines.onnxruntime import OnnxRuntimeEngine
    from aionn.hal import CompileOptions
    from aionn.runtime.model import Model

    def private_bytes():
        with open("/proc/self/smaps_rollup") as lines:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB\\n")}
        return sizes["Anonymous"]

    engine = OnnxRuntimeEngine()
    small = Model.from_onnx(sys.argv[1])
    engine.compile(small, CompileOptions(may_export=False)).run({"rows": np.array([0])}, {}, False)
    model = Model.from_onnx(sys.argv[2])
    before = private_bytes()
    executable = engine.compile(model, CompileOptions(may_export=False))
    row = executable.run({"rows": np.array([7])}, {}, False).outputs["y"]
    assert (row == 7).all()
    print(private_bytes() - before)
"""


def table(rows: int) -> onnx.ModelProto:
    """y = row of a table whose row r is full of r: a constant that ORT has no reason to lay out otherwise."""
    content = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 256, axis=1)
    node = helper.make_node("Gather", ["table", "rows"], ["y"])
    return model_of([node], [value("rows", [1], TensorProto.INT64)], [value("y", [1, 256])], {"table": content})


WITHOUT_ONNX = """if True:
    import sys
    import numpy as np
    from aionn.engines.onnxruntime import OnnxRuntimeEngine
    from aionn.hal import Artifact, CompileOptions

    content = [open(path, "rb").read() for path in sys.argv[1:]]
    executable = OnnxRuntimeEngine().load(Artifact((content[0],), (content[1],)), CompileOptions())
    assert executable.run({"x": np.zeros((3, 8), np.float32)}, {}, False).outputs["y"].shape == (3, 8)
    print([name for name in sys.modules if name.partition(".")[0] in ("onnx", "google")])
"""


def test_a_driver_that_only_loads_never_imports_onnx(tmp_path: Path) -> None:
    engine = OnnxRuntimeEngine()
    artifact = engine.export(engine.compile(Model.from_onnx(matmul().SerializeToString()), CompileOptions()))
    assert artifact is not None
    paths = [tmp_path / "model", tmp_path / "data"]
    for path, content in zip(paths, (*artifact.model, *artifact.data), strict=True):
        path.write_bytes(content)
    ran = subprocess.run([sys.executable, "-c", WITHOUT_ONNX, *paths], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_constants_are_used_where_they_lie(tmp_path: Path) -> None:
    """64 MB of constants and hardly any private memory for them."""
    paths = [tmp_path / "small.onnx", tmp_path / "large.onnx"]
    for path, rows in zip(paths, (8, 65536), strict=True):
        path.write_bytes(table(rows).SerializeToString())
    grown = int(subprocess.run([sys.executable, "-c", IN_PLACE, *paths], capture_output=True, text=True, check=True).stdout)
    assert grown < 8 * 1024 * 1024


LOADED_IN_PLACE = """if True:
    import sys
    import numpy as np
    from aionn.engines.onnxruntime import OnnxRuntimeEngine
    from aionn.hal import Artifact, CompileOptions

    def private_bytes():
        with open("/proc/self/smaps_rollup") as lines:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB\\n")}
        return sizes["Anonymous"]

    engine, loaded = OnnxRuntimeEngine(), []
    small, large = ([open(f"{path}.{part}", "rb").read() for part in ("model", "data")] for path in sys.argv[1:])
    for model, data in (small, large):
        before = private_bytes()
        loaded.append(engine.load(Artifact((model,), (data,)), CompileOptions()))
        y = loaded[-1].run({"x": np.float32([1])}, {}, False).outputs["y"]
        assert (y == np.arange(y.size) + 1).all()
    print(private_bytes() - before - y.nbytes)
"""


def test_the_weights_of_an_artifact_are_used_where_they_lie(tmp_path: Path) -> None:
    """48 MB in the buffer that was verified, and hardly any memory beside it."""
    engine = OnnxRuntimeEngine()
    paths = [tmp_path / "small", tmp_path / "large"]
    for path, elements in zip(paths, (100_000, 12_000_000), strict=True):
        nodes = [helper.make_node("Add", ["x", "constant"], ["y"])]
        constants = {"constant": np.arange(elements, dtype=np.float32)}
        model = Model.from_onnx(model_of(nodes, [value("x", [1])], [value("y", [elements])], constants).SerializeToString())
        artifact = engine.export(engine.compile(model, CompileOptions()))
        assert artifact is not None
        path.with_suffix(".model").write_bytes(artifact.model[0])
        path.with_suffix(".data").write_bytes(artifact.data[0])
    ran = subprocess.run([sys.executable, "-c", LOADED_IN_PLACE, *paths], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 8 * 1024 * 1024


def test_weights_of_an_element_type_that_has_no_name_here_are_loaded_too() -> None:
    """bfloat16 beside float32, both large: one is found in the file by its name, the other handed over."""
    rare = helper.make_tensor("rare", TensorProto.BFLOAT16, [50_000], np.arange(50_000).astype(np.uint16).tobytes(), raw=True)
    nodes = [
        helper.make_node("Gather", ["rare", "rows"], ["some"]),
        helper.make_node("Cast", ["some"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Gather", ["usual", "rows"], ["others"]),
        helper.make_node("Concat", ["wide", "others"], ["y"], axis=0),
    ]
    usual = np.arange(50_000, dtype=np.float32)
    model = model_of(nodes, [value("rows", [2], TensorProto.INT64)], [value("y", [4])], {"usual": usual})
    model.graph.initializer.append(rare)
    engine = OnnxRuntimeEngine()
    artifact = engine.export(engine.compile(Model.from_onnx(model.SerializeToString()), CompileOptions()))
    assert artifact is not None
    _, notes = without_notes(memoryview(artifact.model[0]))
    assert ([constant.name for constant in notes.weights], notes.by_name) == (["usual"], False)
    found = engine.load(artifact, CompileOptions()).run({"rows": np.array([0x3F80, 0x4000])}, {}, False).outputs["y"]
    np.testing.assert_array_equal(found, np.array([1, 2, 0x3F80, 0x4000], np.float32))


def test_an_artifact_whose_notes_are_not_of_its_weights_is_refused() -> None:
    """What a driver stored it believes; an artifact of another make must still not make it read beside the weights."""
    engine = OnnxRuntimeEngine()
    artifact = engine.export(engine.compile(Model.from_onnx(matmul(256, 256).SerializeToString()), CompileOptions()))
    assert artifact is not None
    model, data = artifact.model[0], artifact.data[0]
    assert len(data) == 256 * 256 * 4
    for changed in (
        Artifact((model,), (data[:-4],)),  # shorter than the notes say
        Artifact((model[:-1],), (data,)),
        Artifact((model[:-8] + b"\xff" * 8,), (data,)),  # notes longer than the file
        Artifact((model[:-8] + bytes(8),), (data,)),  # no notes
        Artifact((model[:-9] + b"\xc1" + model[-8:],), (data,)),  # never used in MessagePack
        Artifact((b"",), (data,)),
    ):
        with pytest.raises(CompilationError, match="not of this release's onnxruntime engine"):
            engine.load(changed, CompileOptions())
    engine.load(artifact, CompileOptions())


def test_a_large_constant_that_onnx_runtime_transposes_is_used_transposed() -> None:
    """ORT pushes the transposes through the Add and transposes the constant, under its old name: in place it would be wrong."""
    constant = np.random.default_rng(0).standard_normal((1, 64, 64, 64)).astype(np.float32)
    assert constant.nbytes >= engine_module.TABLE_BYTES
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], perm=[0, 2, 3, 1]),
        helper.make_node("Add", ["a", "constant"], ["b"]),
        helper.make_node("Transpose", ["b"], ["y"], perm=[0, 3, 1, 2]),
    ]
    shape = [1, 64, 64, 64]
    model = Model.from_onnx(model_of(nodes, [value("x", shape)], [value("y", shape)], {"constant": constant}).SerializeToString())
    engine = OnnxRuntimeEngine()
    compiled = engine.compile(model, CompileOptions())
    artifact = engine.export(compiled)
    assert artifact is not None
    x = np.ones(shape, np.float32)
    for executable in (compiled, engine.load(artifact, CompileOptions())):
        np.testing.assert_array_equal(executable.run({"x": x}, {}, False).outputs["y"], constant.transpose(0, 3, 1, 2) + 1)


def test_a_table_is_a_constant_that_gather_alone_reads_as_its_table() -> None:
    def tables(*others: onnx.NodeProto) -> list[str]:
        model = table(8)
        model.graph.node.extend(others)
        return gather_tables(Model.from_onnx(model.SerializeToString()), 1024)

    assert tables() == ["table"]
    assert tables(helper.make_node("Gather", ["table", "rows"], ["again"])) == ["table"]
    assert tables(helper.make_node("Add", ["table", "table"], ["sum"])) == []
    assert tables(helper.make_node("GatherND", ["table", "rows"], ["other"])) == []


def test_a_model_is_judged_rightly_while_another_thread_still_collects_the_kernels() -> None:
    """The first judgement stops after the first kernel that it reads. The second one must not see that half table."""
    engine = OnnxRuntimeEngine()
    kernels = engine._native.get_all_opkernel_def()
    read_one, go_on = threading.Event(), threading.Event()

    class SlowKernels:
        asked = 0

        def get_all_opkernel_def(self) -> Iterator[Any]:
            SlowKernels.asked += 1
            first = SlowKernels.asked == 1
            for kernel in kernels:
                yield kernel
                if first:
                    read_one.set()
                    assert go_on.wait(30)

    engine._native = SlowKernels()
    model = Model.from_onnx(carried("orientation"))
    found: list[Sequence[bool]] = []
    threads = [threading.Thread(target=lambda: found.append(engine.supported_operations(model))) for _ in range(2)]
    threads[0].start()
    assert read_one.wait(30)
    threads[1].start()
    threads[1].join(30)
    judged_meanwhile = len(found)
    go_on.set()
    threads[0].join(30)
    assert (judged_meanwhile, len(found)) == (1, 2)
    assert all(all(supported) for supported in found)


def test_nothing_of_an_artifact_stays_open_and_it_is_handed_out_once() -> None:
    engine = OnnxRuntimeEngine()
    model = Model.from_onnx(table(256).SerializeToString())
    with leak_check():
        artifact = engine.export(executable := engine.compile(model, CompileOptions()))
        assert artifact is not None
        assert len(artifact.data[0]) >= 256 * 1024
        assert engine.export(executable) is None
        del artifact, executable
    with leak_check():
        engine.compile(model, CompileOptions())


def test_the_artifact_of_a_model_names_no_descriptor_of_the_driver_that_wrote_it() -> None:
    """Compiled twice, with other descriptors open in between: the bytes are the same."""
    engine, artifacts = OnnxRuntimeEngine(), []
    model = Model.from_onnx(table(256).SerializeToString())
    with ExitStack() as held:
        for _ in range(2):
            artifacts.append(engine.export(engine.compile(model, CompileOptions())))
            for _ in range(100):
                held.enter_context(open("/dev/null"))
    first, second = artifacts
    assert first is not None
    assert second is not None
    assert len(first.data[0]) >= 256 * 1024
    assert (first.model, first.data) == (second.model, second.data)


def test_an_export_that_was_ruled_out_is_declined() -> None:
    engine = OnnxRuntimeEngine()
    model = Model.from_onnx(matmul().SerializeToString())
    assert engine.export(engine.compile(model, CompileOptions(may_export=False))) is None


def test_a_flag_that_is_set_after_the_engine_looked_still_stops_onnx_runtime() -> None:
    """Set at the moment the engine hands it on: only ORT's own flag can end the compilation then."""
    engine = OnnxRuntimeEngine()
    handed_on = threading.Event()

    class SetWhenHandedOn(CancelFlag):
        def when_set(self, callback: Callable[[], None]) -> None:
            super().when_set(callback)
            handed_on.set()
            self.set()

    with pytest.raises(CompilationError) as caught:
        engine.compile(Model.from_onnx(carried("orientation")), CompileOptions(cancelled=SetWhenHandedOn()))
    assert handed_on.is_set()
    assert caught.value.reason == "cancelled"


def test_a_kernel_that_is_missing_for_a_type_names_the_node() -> None:
    model = identity(TensorProto.INT16)
    model.graph.node[0].op_type = "Relu"
    model.graph.node[0].ClearField("name")
    with pytest.raises(CompilationError) as caught:
        OnnxRuntimeEngine().compile(Model.from_onnx(model.SerializeToString()), CompileOptions())
    assert caught.value.node == "Relu_0"
    assert caught.value.reason.startswith("Could not find an implementation for Relu")


def test_a_reason_is_words_and_not_a_place_in_onnx_runtimes_sources() -> None:
    model = matmul()
    model.ir_version = 1000
    with pytest.raises(CompilationError) as caught:
        OnnxRuntimeEngine().compile(Model.from_onnx(model.SerializeToString()), CompileOptions())
    assert caught.value.reason.startswith("Unsupported model IR version: 1000")


@pytest.mark.parametrize(
    ("options", "shapes", "weights", "threads"),
    [
        (CompileOptions(threads=3), [(1, 576)], 300_000, 3),
        (CompileOptions(preference=ExecutionPreference.LOW_POWER), [(0, 3, 224, 224)], 2_000_000, 1),
        (CompileOptions(), [(1, 576), (2, 1, 128)], 300_000, 1),
        (CompileOptions(), [(0, 576)], 300_000, 1),
        (CompileOptions(), [(0, 3, 0, 0)], 10, 8),
        (CompileOptions(), [None], 10, 8),
        (CompileOptions(), [(0, 3, 224, 224)], 1_700_000, 8),
    ],
)
def test_tiny_models_get_one_thread_and_others_what_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, options: CompileOptions, shapes: list[tuple[int, ...] | None], weights: int, threads: int
) -> None:
    monkeypatch.setattr("aionn.engines.processor.usable_cpus", lambda: 8)
    assert engine_module._threads(options, engine_module._most_work(shapes, weights)) == threads


@pytest.mark.parametrize(
    ("options", "weights", "cpus", "instances"),
    [
        (CompileOptions(), 16, 2, 2),
        (CompileOptions(), 16, 64, engine_module.MOST_OWN_INSTANCES),
        (CompileOptions(), 16, 1, 1),
        (CompileOptions(preference=ExecutionPreference.LOW_POWER), 16, 8, 1),
        (CompileOptions(), 40_000, 8, 1),
    ],
)
def test_tiny_models_are_best_in_several_instances_and_others_in_one(
    monkeypatch: pytest.MonkeyPatch, options: CompileOptions, weights: int, cpus: int, instances: int
) -> None:
    monkeypatch.setattr(engine_module, "usable_cpus", lambda: cpus)
    side = round(weights**0.5)
    model = Model.from_onnx(scaled_model(np.ones((side, side), np.float32)))
    monkeypatch.setattr(engine_module, "TINY_WORK", 100_000)
    engine = OnnxRuntimeEngine()
    executable = engine.compile(model, options)
    assert executable.best_instances == instances
    artifact = engine.export(executable)
    assert artifact is not None
    assert engine.load(artifact, options).best_instances == instances


def test_an_optional_input_that_is_left_out_is_not_taken_from_the_run_before() -> None:
    """`sr` given, then missing: ORT must complain, not go on with what was bound."""
    model = Model.from_onnx(carried("silero_branching"))
    executable = OnnxRuntimeEngine().compile(model, CompileOptions(may_export=False))
    inputs = {
        "input": some_input(model.inputs["input"], 1, 576),
        "state": some_input(model.inputs["state"]),
        "sr": np.array(16000, np.int64),
    }
    first = executable.run(inputs, {}, False).outputs["output"]
    with pytest.raises(Exception, match="sr"):
        executable.run({name: inputs[name] for name in ("input", "state")}, {}, False)
    np.testing.assert_array_equal(executable.run(inputs, {}, False).outputs["output"], first)


def test_only_the_run_itself_flushes_denormals_in_whatever_thread() -> None:
    """1e-39 * 0.5 is a denormal: zero in the model, not zero in the caller's own thread before and after."""
    node = helper.make_node("Mul", ["x", "half"], ["y"])
    model = model_of([node], [value("x", [4])], [value("y", [4])], {"half": np.array(0.5, np.float32)})
    seen: list[bool] = []

    def denormals_live() -> bool:
        return bool((np.array([1e-39], np.float32) * np.float32(0.5))[0] != 0)

    def compute() -> None:
        seen.append(denormals_live())
        executable = OnnxRuntimeEngine().compile(Model.from_onnx(model.SerializeToString()), CompileOptions())
        seen.append(denormals_live())
        y = executable.run({"x": np.full(4, 1e-39, np.float32)}, {}, False).outputs["y"]
        seen.append(bool(y.view(np.uint32).any()))
        seen.append(denormals_live())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    compute()
    assert seen == [True, True, False, True] * 2


def test_a_driver_writes_nothing_into_the_users_cache(tmp_path: Path) -> None:
    """ONNX Runtime's import makes a device id and an event database there unless it is told not to."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")}
    code = "from aionn.engines.onnxruntime import OnnxRuntimeEngine; OnnxRuntimeEngine()"
    subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []


def scaling() -> Model:
    """y[2, 3] = 2 * x, z[2, 3] = 3 * x."""
    nodes = [helper.make_node("Mul", ["x", "two"], ["y"]), helper.make_node("Mul", ["x", "three"], ["z"])]
    constants = {"two": np.full(1, 2, np.float32), "three": np.full(1, 3, np.float32)}
    outputs = [value("y", [2, 3]), value("z", [2, 3])]
    return Model.from_onnx(model_of(nodes, [value("x", [2, 3])], outputs, constants).SerializeToString())


def test_sets_of_arrays_that_take_turns_are_bound_once_each() -> None:
    executable = OnnxRuntimeEngine().compile(scaling(), CompileOptions())
    first, second, third = (np.zeros((2, 3), np.float32) for _ in range(3))
    bound = []
    for turn in range(6):
        x, y = (first, second) if turn % 2 else (second, first)
        x[:] = turn
        executable.run({"x": x}, {"y": y, "z": third}, False)
        assert (y == 2 * turn).all()
        assert (third == 3 * turn).all()
        bound.append(set(executable._bindings.values()))
    assert len(bound[-1]) == 2
    assert bound[1] == bound[-1]


def test_hundreds_of_sets_of_arrays_that_take_turns_stay_bound_until_they_are_gone() -> None:
    executable = OnnxRuntimeEngine().compile(scaling(), CompileOptions())
    sets = [[np.full((2, 3), number, np.float32), *(np.empty((2, 3), np.float32) for _ in range(2))] for number in range(300)]
    bound = []
    for _ in range(3):
        for number, (x, y, z) in enumerate(sets):
            executable.run({"x": x}, {"y": y, "z": z}, False)
            assert (y == 2 * number).all()
        bound.append(set(executable._bindings.values()))
    assert len(bound[0]) == 300
    assert bound[0] == bound[1] == bound[2]
    del x, y, z, sets[100:]
    assert len(executable._bindings) == 100
    dropped = threading.Thread(target=sets.clear)  # a burst's memories may end in any thread
    dropped.start()
    dropped.join()
    assert executable._bindings == {}


def test_an_executable_goes_with_its_last_holder_and_not_with_the_next_collection() -> None:
    executable = OnnxRuntimeEngine().compile(scaling(), CompileOptions())
    x, y = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    executable.run({"x": x}, {"y": y}, False)
    gone = weakref.ref(executable)
    gc.disable()
    try:
        del executable
        assert gone() is None
    finally:
        gc.enable()
    del x  # its binding went before it


def test_arrays_that_are_gone_are_never_bound_to_again_whoever_has_their_numbers() -> None:
    """A new array often gets the `id` of one that has just gone, and lies elsewhere."""
    executable = OnnxRuntimeEngine().compile(scaling(), CompileOptions())
    kept = []
    numbers = set()
    for turn in range(300):
        x, y = np.full((2, 3), turn, np.float32), np.empty((2, 3), np.float32)
        kept.append(np.empty((2, 3), np.float32))  # so that the next ones lie elsewhere
        report = executable.run({"x": x}, {"y": y}, False)
        assert (y == 2 * turn).all()
        assert (report.outputs["z"] == 3 * turn).all()
        numbers.add(id(x))
        del x, y, report
        assert executable._bindings == {}
    assert len(numbers) < 300  # it has happened


def test_an_output_of_the_engines_own_is_no_memory_of_the_callers() -> None:
    """What came out of one run stays as it was, whatever the next ones with the same arrays do."""
    executable = OnnxRuntimeEngine().compile(scaling(), CompileOptions())
    x, y = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    before = executable.run({"x": x}, {"y": y}, False).outputs["z"]
    x[:] = 5
    after = executable.run({"x": x}, {"y": y}, False).outputs["z"]
    assert (before == 3).all()
    assert (after == 15).all()


def test_a_run_that_failed_leaves_nothing_bound() -> None:
    model = Model.from_onnx(
        model_of(
            [helper.make_node("Reshape", ["x", "shape"], ["y"])],
            [value("x", [6]), value("shape", [2], TensorProto.INT64)],
            [value("y", ["a", "b"])],
        ).SerializeToString()
    )
    executable = OnnxRuntimeEngine().compile(model, CompileOptions())
    x, shape, y = np.arange(6, dtype=np.float32), np.array([2, 3]), np.empty((2, 3), np.float32)
    executable.run({"x": x, "shape": shape}, {"y": y}, False)
    shape[:] = (4, 4)
    with pytest.raises(Exception, match="Reshape"):
        executable.run({"x": x, "shape": shape}, {"y": y}, False)
    assert executable._bindings == {}
    shape[:] = (2, 3)
    executable.run({"x": x, "shape": shape}, {"y": y}, False)
    np.testing.assert_array_equal(y, x.reshape(2, 3))
