"""What an engine declares of itself is checked when it is found, and reaches the app."""

from __future__ import annotations

from pathlib import Path

import pytest

from aionn.driver.registry import find_engine
from aionn.errors import DeviceUnavailableError
from aionn.hal import DeviceType, ExecutionPreference, OperandType, Performance, PerformanceInfo
from aionn.hal.types import CacheFiles
from aionn.remote.control import PROTOCOL, Ready, decode, encode
from tests.remote.pair import remote_device

ENGINE = """
from aionn.hal import CacheFiles, OperandType, Performance, PerformanceInfo

class Engine:
    name = "declares"
    version = "1"
    cache_files = CacheFiles()
    {fact}
    def supported_operations(self, model): ...
    def compile(self, model, options): ...
    def export(self, executable): ...
    def load(self, artifact, options): ...
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An engine whose class has the line of the parameter."""
    module = f"engine_that_declares_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(ENGINE.format(fact=request.param))
    monkeypatch.syspath_prepend(tmp_path)
    return f"{module}:Engine"


@pytest.mark.parametrize("declared", ["performance = Performance(PerformanceInfo(2.0))"], indirect=True)
def test_an_engine_may_declare_a_performance(declared: str) -> None:
    assert getattr(find_engine(declared), "performance", None) == Performance(PerformanceInfo(2.0))


@pytest.mark.parametrize("declared", [""], indirect=True)
def test_an_engine_need_not_declare_a_performance(declared: str) -> None:
    assert not hasattr(find_engine(declared), "performance")


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ("performance = Performance(PerformanceInfo(execution_time=-1.0))", r"execution_time=-1\.0"),
        ("performance = Performance(PerformanceInfo(power_usage=float('nan')))", "power_usage=nan"),
        ("performance = Performance(PerformanceInfo(execution_time=float('inf')))", "execution_time=inf"),
        ("performance = Performance(PerformanceInfo(execution_time=0))", "execution_time=0"),
        ("performance = Performance(PerformanceInfo(execution_time='fast'))", "execution_time='fast'"),
        ("performance = Performance(PerformanceInfo(execution_time=True))", "execution_time=True"),
        ("performance = Performance(2.0)", r"default=2\.0"),
        ("performance = Performance(by_type=[])", r"by_type=\[\]"),
        ("performance = Performance(by_type={'float32': PerformanceInfo()})", r"by_type\['float32'\]"),
        ("performance = Performance(by_type={OperandType.INT8: 1.0})", "by_type"),
        ("performance = 2.0", r"Engine\.performance is 2\.0; it must be a Performance"),
        ("performance = None", r"Engine\.performance is None; it must be a Performance"),
        ("def __init__(self): self.performance = Performance(PerformanceInfo(-2.0))", r"execution_time=-2\.0"),
    ],
    indirect=["declared"],
)
def test_a_performance_that_makes_no_sense_is_refused_in_one_sentence(declared: str, why: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=f"cannot be used.*{why}") as caught:
        find_engine(declared)
    assert "\n" not in str(caught.value)


def test_the_reference_declares_that_it_is_slow() -> None:
    performance = find_engine("reference").performance  # type: ignore[attr-defined]  # an optional fact
    assert performance.cost(OperandType.FLOAT32, ExecutionPreference.FAST_SINGLE_ANSWER) > 10
    assert performance.cost(None, ExecutionPreference.LOW_POWER) > 10


def test_a_performance_survives_the_trip_in_the_greeting() -> None:
    performance = Performance(PerformanceInfo(2.0, 0.5), {OperandType.INT8: PerformanceInfo(0.25, 4.0)})
    ready = Ready(PROTOCOL, "name", "1", DeviceType.CPU, CacheFiles(), performance=performance)
    assert decode(encode(ready)[0][8:]) == ready


@pytest.mark.anyio
async def test_the_app_sees_what_a_driver_declares_and_a_cpu_where_it_declares_nothing() -> None:
    async with remote_device(find_engine("reference")) as remote:
        assert remote.performance.default.execution_time == 30.0
    async with remote_device(find_engine("onnxruntime")) as remote:
        assert remote.performance == Performance()
