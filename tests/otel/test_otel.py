"""OpenTelemetry: whose children spans are, what errors are called, and that nothing is done without an SDK. Row O8."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span

import aionn
import aionn.otel
from aionn import trace
from aionn.pages.finding import find_page
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids
from tests.stopping import kill_under

INPUTS = {"input": np.zeros((1, 16), np.float32)}

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


class Sdk:
    """An SDK that keeps what it gets."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer = self.traces.get_tracer("app")

    def instrument(self, runtime: aionn.Runtime, trace_frames: int = 0) -> aionn.otel.Instrumentation:
        return aionn.otel.instrument(runtime, trace_frames=trace_frames, tracer_provider=self.traces, meter_provider=self.meters)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    @staticmethod
    def attributes(span: ReadableSpan) -> dict[str, Any]:
        return dict(span.attributes or {})

    @staticmethod
    def times(span: ReadableSpan) -> tuple[int, int]:
        assert span.start_time is not None
        assert span.end_time is not None
        return span.start_time, span.end_time

    def parent(self, span: ReadableSpan) -> str | None:
        """The name of a span's parent."""
        if span.parent is None:
            return None
        return next(other.name for other in self.exporter.get_finished_spans() if other.context.span_id == span.parent.span_id)

    def values(self, name: str, **attributes: str) -> list[float]:
        """The values of a metric's series that have these attributes; `_` stands for a dot."""
        data: Any = self.reader.get_metrics_data()
        wanted = {key.replace("_", ".", 1): value for key, value in attributes.items()}
        return [
            point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
            if wanted.items() <= dict(point.attributes).items()
        ]


@pytest.fixture
def sdk() -> Iterator[Sdk]:
    sdk = Sdk()
    yield sdk
    sdk.meters.shutdown()
    sdk.traces.shutdown()
    gc.collect()
    assert find_page(os.getpid()) is None
    assert not trace.active


async def test_spans_of_a_runtimes_life(sdk: Sdk, fake: FakeDevice, tmp_path: Path, surroundings: None) -> None:
    """Row O8: a compile, ten calls, a swap, and the death of a driver, each under a span of the app."""
    async with aionn.Runtime(name="shop") as runtime:
        with sdk.instrument(runtime):
            model = aionn.Model.from_onnx(identity_model())
            with sdk.tracer.start_as_current_span("starting"):
                compilation = await runtime.compile(model, devices=(fake.name,), name="detector", cache_dir=tmp_path / "cache")

            async def request(number: int) -> None:
                with sdk.tracer.start_as_current_span(f"request {number}"):
                    await compilation.compute(INPUTS)

            await asyncio.gather(*map(request, range(10)))
            with sdk.tracer.start_as_current_span("release"):
                await runtime.swap(compilation, aionn.Model.from_onnx(identity_model()))
            with sdk.tracer.start_as_current_span("death"):
                await kill_under(driver_pids()[0], lambda: compilation.compute(INPUTS))
            with sdk.tracer.start_as_current_span("recovery"):
                await compilation.compute(INPUTS)

    (compiled,) = sdk.spans("aionn.compile")
    assert (sdk.parent(compiled), sdk.attributes(compiled)) == ("starting", {"aionn.model": "detector"})
    for name in ("aionn.driver.start", "aionn.prepare.compile", "aionn.cache.lookup"):
        child = sdk.spans(name)[0]
        assert sdk.parent(child) == "aionn.compile"
        assert sdk.attributes(child) == {"aionn.model": "detector", "aionn.device": fake.name}
        (began, ended), (outer_began, outer_ended) = sdk.times(child), sdk.times(compiled)
        assert outer_began - 1_000_000 <= began <= ended <= outer_ended + 1_000_000
    computed = {sdk.parent(span): span for span in sdk.spans("aionn.compute")}
    assert {f"request {number}" for number in range(10)} < computed.keys()
    for number in range(10):
        assert sdk.attributes(computed[f"request {number}"]) == {"aionn.model": "detector", "aionn.device": fake.name}
    (swap,) = sdk.spans("aionn.swap")
    assert (sdk.parent(swap), [sdk.parent(span) for span in sdk.spans("aionn.stage.swap")]) == ("release", ["aionn.swap"])
    assert sdk.attributes(computed["death"])["error.type"] == "DriverDiedError"
    assert not computed["death"].status.is_ok
    assert [span for span in sdk.exporter.get_finished_spans() if "error.type" in sdk.attributes(span)] == [computed["death"]]
    (again,) = sdk.spans("aionn.prepare")
    assert sdk.parent(again) == "aionn.compute"
    assert [sdk.parent(span) for span in sdk.spans("aionn.driver.start")] == ["aionn.compile", "aionn.prepare"]


async def test_a_cancelled_call_ends_its_span_and_leaves_the_callers_span_current(sdk: Sdk, fake: FakeDevice) -> None:
    async with aionn.Runtime(name="shop") as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        await compilation.compute(INPUTS)
        fake.delay(60)
        with sdk.instrument(runtime), sdk.tracer.start_as_current_span("request") as request:
            call = asyncio.wait_for(compilation.compute(INPUTS), 0.05)
            with pytest.raises(TimeoutError):
                await call
            assert get_current_span() is request
        (span,) = sdk.spans("aionn.compute")
        assert (sdk.parent(span), sdk.attributes(span)["error.type"]) == ("request", "CancelledError")
        fake.delay(0)
        os.kill(driver_pids()[0], 9)


async def test_frames_have_spans_up_to_so_many_a_second(sdk: Sdk, fake: FakeDevice) -> None:
    plain = aionn.Burst.compute
    async with aionn.Runtime(name="shop") as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        async with compilation.burst() as burst:
            began_s = time.monotonic()
            with sdk.instrument(runtime, trace_frames=5):
                with sdk.tracer.start_as_current_span("camera"):
                    for _ in range(50):
                        await burst.compute(INPUTS)
                took_s = time.monotonic() - began_s
                with sdk.tracer.start_as_current_span("request"):
                    await compilation.compute(INPUTS)
            await burst.compute(INPUTS)
    frames = sdk.spans("aionn.frame")
    assert 5 <= len(frames) <= 5 * (int(took_s) + 2)
    assert len(frames) < 50 or took_s > 8, "fewer than there were, unless the machine stood still"
    assert {(sdk.parent(span), sdk.attributes(span)["aionn.device"]) for span in frames} == {("camera", fake.name)}
    assert [sdk.parent(span) for span in sdk.spans("aionn.compute")] == ["request"]
    assert aionn.Burst.compute is plain


async def test_metrics_are_those_of_the_page(sdk: Sdk, fake: FakeDevice) -> None:
    async with aionn.Runtime(name="shop") as runtime:
        with sdk.instrument(runtime):
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,), name="detector")
            for _ in range(3):
                await compilation.compute(INPUTS)
            found = sdk.values("aionn.executions", aionn_runtime="shop", aionn_model="detector", aionn_device=fake.name)
            assert sum(found) == 3
            assert sum(sdk.values("aionn.in_flight", aionn_runtime="shop")) == 0
            assert sdk.values("aionn.executions", error_type="DriverDiedError", aionn_model="detector")[0] == 0
        assert sdk.values("aionn.executions") == []


async def test_without_an_sdk_there_are_no_spans_and_a_call_costs_nothing(caplog: pytest.LogCaptureFixture, fake: FakeDevice) -> None:
    async with aionn.Runtime(name="shop") as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        with caplog.at_level(logging.INFO, "aionn.otel"), aionn.otel.instrument(runtime, trace_frames=1):
            assert "no tracer provider is set" in caplog.text
            assert not trace.active  # so that is all a call asks
            await compilation.compute(INPUTS)
            each_s = min(timeit.repeat(lambda: trace.active, timer=time.thread_time, number=10_000, repeat=5)) / 10_000
            assert each_s <= 5 * 200e-9
    gc.collect()


async def test_a_second_runtime_adds_metrics_and_no_second_spans(sdk: Sdk, fake: FakeDevice) -> None:
    async with aionn.Runtime(name="one") as one, aionn.Runtime(name="other") as other:
        with sdk.instrument(one), sdk.instrument(other):
            for runtime in (one, other):
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                await compilation.compute(INPUTS)
            assert [sum(sdk.values("aionn.executions", aionn_runtime=name)) for name in ("one", "other")] == [1, 1]
            with pytest.raises(aionn.CallerError, match="give trace_frames to the first call of instrument"):
                sdk.instrument(other, trace_frames=1)
        assert len(sdk.spans("aionn.compute")) == 2
        with sdk.instrument(one):
            await compilation.compute(INPUTS)  # of the other
            assert sum(sdk.values("aionn.executions", aionn_runtime="one")) == 1
        assert len(sdk.spans("aionn.compute")) == 3


def test_the_api_alone_is_enough_and_without_it_the_import_names_the_extra() -> None:
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; import aionn, aionn.otel; aionn.otel.instrument(aionn.Runtime()).close()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = "import sys; sys.modules['opentelemetry'] = None; import aionn.otel"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install it with: pip install 'aionn[otel]'" in refused.stderr.splitlines()[-1]
