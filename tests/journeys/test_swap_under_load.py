"""A camera at 30 fps goes through PP-OCRv6's text detection while its better stage is made, compared and swapped in.

The short run is part of the suite; the minute at 30 fps (`pytest -m soak`) also holds the frame times around the swap to the
steady ones, for which the machine must be quiet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from tests.leaks import leak_check
from tests.real_models import carried

pytestmark = pytest.mark.anyio

FPS = 30
TOLERANCE = 1e-3
SIDE = 96  # small enough that two busy cores keep up with the camera
REAL_SIDE = 384  # a camera's frame for text detection; a run takes half of the time between two frames, or more


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


async def camera(pictures: list[np.ndarray[Any, Any]], going_on: Callable[[int], bool]) -> AsyncIterator[dict[str, Any]]:
    """Frames for as long as `going_on` says so of the number already sent."""
    began, number = time.monotonic(), 0
    while going_on(number):
        yield {"x": pictures[number % len(pictures)]}
        number += 1
        await anyio.sleep(max(0.0, began + number / FPS - time.monotonic()))


@dataclasses.dataclass
class Seen:
    seqs: list[int] = dataclasses.field(default_factory=list)
    stages: list[str] = dataclasses.field(default_factory=list)
    ages_s: list[float] = dataclasses.field(default_factory=list)
    arrived_s: list[float] = dataclasses.field(default_factory=list)
    decided_s: float = 0.0
    after_decision: int = 0
    sent: int = 0
    worst: float = 0.0


async def stream(side: int, min_gain: float | None, seconds: float | None = None) -> tuple[Seen, aionn.Compilation]:
    """For that long; or, since a busy machine compiles slowly, until the better stage has been decided on and a second more."""
    model = aionn.Model.from_onnx(carried("detector"))
    random = np.random.default_rng(0)
    pictures = [random.random((1, 3, side, side)).astype(np.float32) for _ in range(4)]
    seen = Seen()
    async with leak_check(grace_s=10), aionn.Runtime() as runtime:
        alone = await runtime.compile(model, devices=("onnxruntime",))
        expected = [next(iter((await alone.compute({"x": picture})).values())) for picture in pictures]
        await alone.aclose()
        policy = aionn.StagePolicy(min_gain=min_gain)
        compilation = await runtime.compile(model, mode="staged", stages=("onnxruntime", "openvino"), stage_policy=policy)
        async with compilation.burst() as burst:

            def going_on(sent: int) -> bool:
                seen.sent = sent
                return sent < seconds * FPS if seconds is not None else seen.after_decision < FPS

            async for result in burst.map(camera(pictures, going_on), depth=4):
                seen.seqs.append(result.seq)
                seen.stages.append(result.stage)
                seen.ages_s.append(result.age_s)
                seen.arrived_s.append(time.monotonic())
                if not seen.decided_s and compilation.stages[1].state in ("serving", "rejected"):
                    seen.decided_s = time.monotonic()
                seen.after_decision += seen.decided_s > 0
                output = next(iter(result.outputs.values()))
                seen.worst = max(seen.worst, float(np.abs(output - expected[result.seq % len(expected)]).max()))
                del result, output
            assert burst.statistics()["dropped"] == 0
    return seen, compilation


async def test_every_frame_is_answered_once_and_in_order_while_the_stage_changes_once() -> None:
    # Outputs alone decide here: which engine is faster on a machine that does other work is not this test's business.
    seen, compilation = await stream(SIDE, None)
    assert seen.seqs == list(range(seen.sent))
    assert [stage.state for stage in compilation.stages] == ["replaced", "serving"], compilation.stages
    changed = seen.stages.index("openvino")
    assert set(seen.stages[:changed]) == {"onnxruntime"}
    assert set(seen.stages[changed:]) == {"openvino"}
    assert seen.worst <= TOLERANCE


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("workers_in_the_background")
@pytest.mark.parametrize("min_gain", [aionn.StagePolicy().min_gain, None])
async def test_a_minute_at_30_fps_keeps_its_frame_times_around_the_verdict(min_gain: float | None) -> None:
    # The policy as it is: whether OpenVINO is faster by a tenth is the machine's to say. That no caller notices is ours. Without a
    # wanted gain it is swapped in on any machine.
    seen, compilation = await stream(REAL_SIDE, min_gain, 60)
    assert seen.seqs == list(range(60 * FPS))
    assert seen.worst <= TOLERANCE
    quick, best = compilation.stages
    if best.state == "serving":
        changed = seen.stages.index("openvino")
        assert set(seen.stages[changed:]) == {"openvino"}
        assert quick.state == "replaced"
        decided_s = seen.arrived_s[changed]
    else:
        assert min_gain is not None
        assert best.reason.startswith("it is not faster by 10%")
        assert set(seen.stages) == {"onnxruntime"}
        decided_s = seen.decided_s
    aged = list(zip(seen.ages_s, seen.arrived_s, strict=True))
    around = [age for age, when in aged if abs(when - decided_s) <= 1]
    steady = [age for age, when in aged if abs(when - decided_s) > 1]
    p50_s, p99_s = (float(share) for share in np.percentile(steady, [50, 99]))
    print(f"{best.state} {best.reason}: {best.comparison}, {best.times_s}")
    print(f"around the verdict at most {max(around) * 1e3:.1f} ms, steady p50 {p50_s * 1e3:.1f} and p99 {p99_s * 1e3:.1f} ms")
    assert max(around) <= 2 * p99_s
