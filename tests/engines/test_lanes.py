"""Lanes: executables over one copy of the weights, which threads run beside each other, and the threads of a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper

from aionn.driver import find_engine
from aionn.driver.sharing import instances_of, own_instances
from aionn.engines.processor import run_threads
from aionn.errors import CompilationError
from aionn.hal import CompileOptions, Executable, ExecutionPreference
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import NO_LANES
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import matmul, model_of, value
from tests.real_models import carried, some_input
from tests.scaled_model import scaled_model


def side_by_side(lanes: list[Executable], feeds: list[dict[str, NDArray[Any]]], rounds: int) -> list[list[dict[str, NDArray[Any]]]]:
    """Run each lane in a thread of its own, all at once; return what each made in its last round, with given and with made outputs."""
    begin, found = threading.Barrier(len(lanes)), [[] for _ in lanes]  # type: ignore[var-annotated]

    def work(index: int) -> None:
        given: dict[str, NDArray[Any]] = {}
        begin.wait(30)
        for _ in range(rounds):
            made = dict(lanes[index].run(feeds[index], given, False).outputs)
            found[index].append({name: np.array(array) for name, array in {**given, **made}.items()})
            given = given or {name: np.zeros_like(array) for name, array in made.items()}

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize(
    ("name", "loaded"),
    [("reference", False), ("onnxruntime", False), ("onnxruntime", True), ("openvino", False), ("openvino", True)],
)
def test_lanes_side_by_side_answer_as_one_executable_does(name: str, loaded: bool) -> None:
    engine = find_engine(name)
    count, rounds = 3, 50
    model = Model.from_onnx(scaled_model(np.arange(64, dtype=np.float32).reshape(8, 8)))
    options = CompileOptions(threads=1, instances=count)
    executable = engine.compile(model, options)
    if loaded:
        artifact = engine.export(executable)
        assert artifact is not None
        executable = engine.load(artifact, options)
    lanes = list(instances_of(engine.name, executable, count))
    assert len(lanes) == count
    feeds = [{"x": np.full((8, 8), number + 1, np.float32)} for number in range(count)]
    for number, answers in enumerate(side_by_side(lanes, feeds, rounds)):
        assert len(answers) == rounds
        for answer in answers:
            np.testing.assert_array_equal(answer["y"], np.arange(64, dtype=np.float32).reshape(8, 8) * (number + 1))


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_lanes_of_a_real_model_with_state_do_not_mix_their_streams(name: str) -> None:
    engine, model = find_engine(name), Model.from_onnx(carried("silero"))
    feeds = [{key: some_input(operand, seed=seed) for key, operand in model.inputs.items()} for seed in range(2)]
    alone = engine.compile(model, CompileOptions(threads=1, may_export=False))
    expected = [{key: np.array(array) for key, array in alone.run(feed, {}, False).outputs.items()} for feed in feeds]
    lanes = list(instances_of(name, engine.compile(model, CompileOptions(threads=1, instances=2, may_export=False)), 2))
    for wanted, answers in zip(expected, side_by_side(lanes, feeds, 100), strict=True):
        for answer in answers:
            for key, array in wanted.items():
                np.testing.assert_allclose(answer[key], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("best", "has_lanes", "options", "instances"),
    [
        (3, True, PrepareOptions(instances=0), 3),
        (3, False, PrepareOptions(instances=0), 1),
        (None, True, PrepareOptions(instances=0), 1),
        (3, True, PrepareOptions(instances=0, threads=2, at_most=True), 2),
        (3, True, PrepareOptions(instances=0, threads=2), 3),
    ],
)
def test_an_engine_chooses_the_instances_within_the_bound_of_the_app(
    best: int | None, has_lanes: bool, options: PrepareOptions, instances: int
) -> None:
    executable: Any = SimpleNamespace()
    if best is not None:
        executable.best_instances = best
    if has_lanes:
        executable.lanes = list
    assert own_instances(executable, options) == instances


def test_an_engine_without_lanes_is_refused_in_one_sentence() -> None:
    class Old:
        def run(self, inputs: Any, outputs: Any, timing: bool) -> Any: ...

    with pytest.raises(CompilationError, match="device 'old' cannot run 2 instances of a model, because its engine runs one") as caught:
        instances_of("old", Old(), 2)
    assert caught.value.reason == NO_LANES


def test_an_engine_that_makes_too_few_lanes_is_named() -> None:
    class Wrong:
        def run(self, inputs: Any, outputs: Any, timing: bool) -> Any: ...

        def lanes(self, count: int) -> list[Executable]:
            return [self]

    with pytest.raises(CompilationError, match="made 1 lanes, but 3 were asked for; the fault lies in its engine"):
        instances_of("wrong", Wrong(), 3)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        (CompileOptions(), 8),
        (CompileOptions(instances=2), 4),
        (CompileOptions(instances=16), 1),
        (CompileOptions(threads=3), 3),
        (CompileOptions(threads=16, instances=4), 16),  # chosen by the app
        (CompileOptions(threads=3, at_most=True), 3),
        (CompileOptions(threads=16, at_most=True), 8),
        (CompileOptions(threads=3, at_most=True, instances=4), 2),
        (CompileOptions(preference=ExecutionPreference.LOW_POWER), 1),
        (CompileOptions(preference=ExecutionPreference.LOW_POWER, threads=5, at_most=True), 1),
        (CompileOptions(preference=ExecutionPreference.LOW_POWER, threads=5), 5),
    ],
)
def test_a_run_has_the_app_s_threads_or_its_share_of_the_cpus(
    monkeypatch: pytest.MonkeyPatch, options: CompileOptions, threads: int
) -> None:
    monkeypatch.setattr("aionn.engines.processor.usable_cpus", lambda: 8)
    assert run_threads(options) == threads


@pytest.mark.parametrize("instances", [1, 2])
def test_openvino_has_a_stream_per_lane_and_threads_for_all_of_them(instances: int) -> None:
    engine = find_engine("openvino")
    model = Model.from_onnx(matmul().SerializeToString())
    for threads in (1, 2):  # an artifact is loaded under other numbers than it was compiled with
        compiled = engine.compile(model, CompileOptions(threads=threads, instances=3 - instances))
        artifact = engine.export(compiled)
        assert artifact is not None
        loaded: Any = engine.load(artifact, CompileOptions(threads=1, instances=instances))
        assert loaded._compiled.get_property("NUM_STREAMS") == instances
        assert loaded._compiled.get_property("INFERENCE_NUM_THREADS") <= instances


A_SECOND = """if True:
    import sys
    import numpy as np
    from aionn.driver import find_engine
    from aionn.driver.sharing import instances_of
    from aionn.hal import CompileOptions
    from aionn.runtime.model import Model

    def private_bytes():
        with open("/proc/self/smaps_rollup") as lines:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB\\n")}
        return sizes["Anonymous"]

    engine, model = find_engine(sys.argv[1]), Model.from_onnx(sys.argv[2])
    made, sizes = [], []
    def two():
        lanes = instances_of(engine.name, engine.compile(model, CompileOptions(threads=1, instances=2, may_export=False)), 2)
        return lambda: lanes[0], lambda: lanes[1]
    def one():
        return engine.compile(model, CompileOptions(threads=1, may_export=False))
    for make in (*two(), one):
        made.append(make())
        made[-1].run({"x": np.zeros((1, 2048), np.float32)}, {}, False)
        sizes.append(private_bytes())
    print(sizes[1] - sizes[0], sizes[2] - sizes[1])
"""


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_second_lane_costs_a_small_part_of_a_second_session(name: str, tmp_path: Path) -> None:
    """Row P16: the weights, 16 MB that both libraries lay out anew, are there once."""
    weights = np.random.default_rng(0).random((2048, 2048)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    model = model_of([node], [value("x", [1, 2048])], [value("y", [1, 2048])], {"weights": weights})
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    ran = subprocess.run([sys.executable, "-c", A_SECOND, name, path], capture_output=True, text=True, check=True)
    lane, session = map(int, ran.stdout.split())
    assert session >= weights.nbytes
    assert lane < session / 8
