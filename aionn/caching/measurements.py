"""What a comparison of two stages measured, as a cache's index keeps it.

A measurement is a fact about one moment. It does not say whether a stage may serve: the reader asks its present policy that.
A measurement is forgotten after `KEPT_S`, because speed depends on what else the machine does.
"""

from __future__ import annotations

import msgspec

KEPT_S = 7 * 86400.0
"""A measurement is kept for a week."""


class OutputDifference(msgspec.Struct, frozen=True):
    """How far one output of the better stage was from the stage before.

    Attributes:
        type: the element type of the output.
        absolute, relative: the tolerance it was compared with.
        largest: the largest absolute difference; None if the output was missing, had another shape, or was not finite on one side only.
        within: every element was within the tolerance.
    """

    type: str
    absolute: float
    relative: float
    largest: float | None
    within: bool


class StageMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of a better stage with the stage before it.

    Attributes:
        model_digest: digest of the model.
        stage, version: the better stage's device and the version of that device.
        base, base_version: the same of the stage before.
        threads: CPUs or engine threads that each stage could use.
        made_up: the inputs were made up, because the app had not executed anything yet.
        outputs: the differences by output name; only those up to the first output that differed too much.
        gain: the better stage is faster by this share in the median pair of runs; -1 stands for "half as fast or slower".
            None if the speed was not measured, or could not be decided.
        before_s, after_s: median seconds of one run on each stage.
        detail: what the comparison said against the better stage, in words; empty if nothing.
        failed: the better stage served and failed again and again; `detail` has the reason. No policy lets such a stage serve.
        measured_s: wall-clock seconds since the epoch.
    """

    model_digest: bytes
    stage: str
    version: str
    base: str
    base_version: str
    threads: int
    made_up: bool = False
    outputs: dict[str, OutputDifference] = {}
    gain: float | None = None
    before_s: float = 0.0
    after_s: float = 0.0
    detail: str = ""
    failed: bool = False
    measured_s: float = 0.0
