"""OpenTelemetry: metrics and spans of a runtime. It needs the extra `aionn[otel]`, which is opentelemetry-api, and an SDK of the app.

    with aionn.otel.instrument(runtime):
        ...

Metrics are observable counters and gauges. Their callbacks read the statistics page when the SDK exports, and nothing is done for a
frame. OpenTelemetry has no observable histogram, so latencies are not among them. `aionn.metrics` gives those to Prometheus.

Spans are of compiles, preparations, looks into the cache, starts of drivers, stages, swaps and single calls of `Compilation.compute`.
A span is the child of the span that is current in the caller's task. Spans are of all runtimes of the process. While spans are made,
`Compilation.compute` and bursts take the slower path that every listener of `aionn.trace` brings.

Without an SDK there are no spans, and nothing listens.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from aionn import trace
from aionn.caching.outcomes import MissReason
from aionn.errors import CallerError
from aionn.loopless import ClosedByWith, checked_count
from aionn.pages.app_layout import shown_text
from aionn.pages.totals import MEASURES, Labels, Measure, OwnPage, Sums, Totals

try:
    from opentelemetry import context, metrics
    from opentelemetry import trace as spans
except ImportError as error:
    raise ImportError("aionn.otel needs opentelemetry-api; install it with: pip install 'aionn[otel]'") from error

if TYPE_CHECKING:
    from aionn.runtime.runtime import Runtime

__all__ = ["SPANS", "Instrumentation", "instrument"]

logger = logging.getLogger("aionn.otel")

FRESH_S = 0.1
"""The callbacks of one export share one look at the page."""

# Names in `aionn.trace` of what becomes a span, and its name here. Those of the first kind begin and end in the caller's task.
_WORK = {
    "compile": "aionn.compile",
    "compilation.prepare": "aionn.prepare",
    "compilation.prepare_again": "aionn.prepare",
    "prepare": "aionn.prepare.compile",
    "prepare.from_cache": "aionn.prepare.load",
    "cache.lookup": "aionn.cache.lookup",
    "stage.load": "aionn.stage.load",
    "stage.compile": "aionn.stage.compile",
    "stage.swap": "aionn.stage.swap",
    "swap": "aionn.swap",
    "compute": "aionn.compute",
}
_PAST = {"driver.start": "aionn.driver.start"} | {
    f"stage.{state}": f"aionn.stage.{state}" for state in ("waiting", "compiling", "loading", "comparing")
}
SPANS = frozenset((*_WORK.values(), *_PAST.values(), "aionn.frame"))
"""Names of all spans."""

_ATTRIBUTES = {"model": "aionn.model", "device": "aionn.device", "stage": "aionn.stage", "error": "error.type"}
_ERRORS = {
    "ok": "",
    "execution": "ExecutionError",
    "deadline": "DeadlineError",
    "caller": "CallerError",
    "driver_died": "DriverDiedError",
    "driver_hung": "DriverHungError",
}

_model: ContextVar[str] = ContextVar("aionn.otel model", default="")
_computing: ContextVar[bool] = ContextVar("aionn.otel computing", default=False)


def instrument(
    runtime: Runtime,
    *,
    trace_frames: int = 0,
    tracer_provider: spans.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> Instrumentation:
    """Give OpenTelemetry the metrics of a runtime, and the spans of this process. Call it when the SDK's providers have been set.

    The first call that is not closed makes the spans, for all runtimes of the process. Further calls, for other runtimes, add metrics.

    Args:
        runtime: an `aionn.Runtime`, open or not. It is not kept alive.
        trace_frames: at most so many frames of bursts a second get a span, each in its caller's task.
        tracer_provider: of the SDK. None: the global one.
        meter_provider: of the SDK. None: the global one.

    Returns:
        What ends it: use it in `with`, or call its `close`. Until then the statistics page of this process stays open.

    Raises:
        CallerError: `trace_frames` is not a whole number from 0 on; or another call, which was not closed, makes the spans already.
        MemoryAllocationError: this process has no statistics page.
    """
    frames = checked_count("instrument: trace_frames", trace_frames, 0)
    return Instrumentation(
        shown_text(runtime.name),
        frames,
        spans.get_tracer_provider() if tracer_provider is None else tracer_provider,
        metrics.get_meter_provider() if meter_provider is None else meter_provider,
    )


class Instrumentation(ClosedByWith):
    """What `instrument` has begun. `close` ends it."""

    def __init__(
        self, runtime: str, trace_frames: int, tracer_provider: spans.TracerProvider, meter_provider: metrics.MeterProvider
    ) -> None:
        with ExitStack() as ending:
            if _has_sdk(tracer_provider):
                if _tracing.acquire(blocking=False):
                    ending.callback(_tracing.release)
                    ending.enter_context(_spans_of(tracer_provider.get_tracer("aionn"), trace_frames))
                elif trace_frames:
                    raise CallerError("aionn.otel makes spans of this process already; give trace_frames to the first call of instrument")
            else:
                logger.info("no tracer provider is set, so there are no spans; set the SDK's before aionn.otel.instrument")
            page = OwnPage()
            ending.callback(page.close)
            readings = _Readings(page, Totals([reason.value for reason in MissReason], runtime))
            ending.callback(readings.close)
            _observe(meter_provider, readings)
            self._ending = ending.pop_all()

    def close(self) -> None:
        """End it: no more spans, and the metrics show nothing. Idempotent."""
        self._ending.close()


# ---- metrics ------------------------------------------------------------------------------------------------------------------------


class _Readings:
    """Sums of the page, read once for all callbacks of an export, in whichever thread that runs."""

    def __init__(self, page: OwnPage, totals: Totals) -> None:
        self._page, self._totals = page, totals
        self._reading = threading.Lock()
        self._last = Sums()
        self._read_at = float("-inf")
        self.closed = False

    def values(self, measure: str) -> dict[Labels, float]:
        with self._reading:
            if not self.closed and time.monotonic() - self._read_at > FRESH_S:
                view = self._page.read()
                self._last, self._read_at = self._totals.now([(view.pid, view)]), time.monotonic()
            return self._last.values[measure]

    def close(self) -> None:
        with self._reading:
            self.closed, self._last = True, Sums()


_observed: weakref.WeakKeyDictionary[metrics.MeterProvider, list[_Readings]] = weakref.WeakKeyDictionary()
"""What the instruments of each provider show. An SDK ignores the callbacks of an instrument that is made a second time."""


def _observe(provider: metrics.MeterProvider, readings: _Readings) -> None:
    observed = _observed.get(provider)
    if observed is not None:
        observed[:] = [*(other for other in observed if not other.closed), readings]
        return
    _observed[provider] = observed = [readings]
    meter = provider.get_meter("aionn")
    for name, measure in MEASURES.items():
        if measure.kind not in ("counter", "gauge"):
            continue
        make = meter.create_observable_counter if measure.kind == "counter" else meter.create_observable_gauge
        unit = "By" if name.endswith("_bytes") else "s" if name.endswith("_seconds") else "1"
        short = name.removesuffix("_bytes").removesuffix("_seconds")
        make(f"aionn.{short}", callbacks=[partial(_observations, observed, name, measure)], unit=unit, description=measure.text)


def _observations(
    observed: list[_Readings], name: str, measure: Measure, _options: metrics.CallbackOptions
) -> Iterable[metrics.Observation]:
    for readings in list(observed):
        for labels, value in readings.values(name).items():
            attributes = {f"aionn.{label}": text for label, text in zip(measure.labels, labels, strict=True) if text}
            status = attributes.pop("aionn.status", "")
            if _ERRORS.get(status):
                attributes["error.type"] = _ERRORS[status]
            yield metrics.Observation(value, attributes)


# ---- spans --------------------------------------------------------------------------------------------------------------------------


def _has_sdk(provider: spans.TracerProvider) -> bool:
    """Return whether the provider makes spans. Those of the API itself make none."""
    return not isinstance(provider, spans.NoOpTracerProvider | spans.ProxyTracerProvider)


_tracing = threading.Lock()
"""Is held while spans are made."""


@contextmanager
def _spans_of(tracer: spans.Tracer, frames: int) -> Iterator[None]:
    """Make spans during the body, and of up to so many frames a second."""
    with trace.listen(partial(_past, tracer), partial(_begin, tracer)), _frames_of(tracer, frames) if frames else nullcontext():
        yield


def _shown(attributes: dict[str, Any]) -> dict[str, str]:
    return {_ATTRIBUTES[name]: str(value) for name, value in attributes.items() if name in _ATTRIBUTES and value}


def _begin(tracer: spans.Tracer, name: str, attributes: dict[str, Any]) -> Callable[[dict[str, Any]], None] | None:
    """Begin a span in the caller's task, as a child of the one that is current there. Returns its end."""
    if name not in _WORK:
        return None
    model = str(attributes.get("model") or _model.get())
    span = tracer.start_span(_WORK[name], attributes=_shown({**attributes, "model": model}))
    before = _model.set(model), _computing.set(name == "compute")
    current = context.attach(spans.set_span_in_context(span))

    def end(attributes: dict[str, Any]) -> None:
        with suppress(ValueError):  # a coroutine that was dropped ends in the context of its collector, where nothing was set
            _model.reset(before[0])
            _computing.reset(before[1])
            context.detach(current)
        _end_span(span, attributes.get("error"))

    return end


def _past(tracer: spans.Tracer, event: trace.Span | trace.Counter) -> None:
    """Make a span of something that is over, and was timed elsewhere."""
    if isinstance(event, trace.Span) and event.name in _PAST:
        wall_ns = time.time_ns() - time.monotonic_ns()
        attributes = _shown({"model": _model.get(), **event.attributes})
        span = tracer.start_span(_PAST[event.name], attributes=attributes, start_time=event.started_ns + wall_ns)
        span.end(event.ended_ns + wall_ns)


def _end_span(span: spans.Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(spans.StatusCode.ERROR)
    span.end()


@contextmanager
def _frames_of(tracer: spans.Tracer, most: int) -> Iterator[None]:
    """Make spans of up to so many frames a second during the body.

    `Burst.compute` is replaced meanwhile. So a frame costs nothing more when none is traced.
    """
    from aionn.runtime.streaming.burst import Burst

    plain = Burst.compute
    bucket = _Bucket(most)

    @wraps(plain)
    async def compute(self: Burst, *args: Any, **options: Any) -> Any:
        if _computing.get() or not bucket.take():
            return await plain(self, *args, **options)
        return await _traced(tracer, plain(self, *args, **options))

    setattr(Burst, "compute", compute)  # noqa: B010 -- mypy refuses to assign to a method
    try:
        yield
    finally:
        setattr(Burst, "compute", plain)  # noqa: B010


async def _traced(tracer: spans.Tracer, call: Awaitable[Any]) -> Any:
    with tracer.start_as_current_span("aionn.frame", record_exception=False, set_status_on_exception=False) as span:
        try:
            outputs = await call
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(spans.StatusCode.ERROR)
            raise
        span.set_attribute("aionn.device", outputs.device)
        return outputs


class _Bucket:
    """Lets through up to `most` a second, and as many at once."""

    def __init__(self, most: int) -> None:
        self._most = self._left = float(most)
        self._since = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._since) * self._most)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
