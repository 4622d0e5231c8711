"""The rule for staying awake (spin.h) beside the same rule in Python, and the numbers that C and Python share."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from aionn.burst import spin_policy
from aionn.burst.spin_policy import APP_WINDOW_NS, may_stay_awake
from tests.fmq.test_native import ADDRESS, build, compiled

__all__ = ["build"]  # a fixture


class Rule:
    """What `spin_policy` in spin.h must do."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.average_ns = 0.0
        self.waits = 0
        self.brisk = window_ns > 0

    def budget_ns(self) -> int:
        if self.brisk or not self.window_ns:
            return self.window_ns
        self.waits += 1
        return 2 * self.window_ns if self.waits % 64 == 0 else 0

    def waited(self, nanoseconds: int, *, slept: bool) -> None:
        average = self.average_ns
        if not slept and nanoseconds <= self.window_ns < average:
            average = float(self.window_ns)
        self.average_ns = average + 0.125 * (min(nanoseconds, 4 * self.window_ns) - average)
        self.brisk = self.window_ns > 0 and self.average_ns <= self.window_ns


@pytest.mark.parametrize("window_ns", [APP_WINDOW_NS, 0])
@pytest.mark.parametrize("seed", range(5))
def test_the_native_rule_decides_as_the_one_in_python(build: Path, seed: int, window_ns: int) -> None:
    choose = random.Random(seed)
    rule = Rule(window_ns)
    steps, expected = [], []
    for _ in range(5000):
        if choose.random() < 0.5:
            steps.append("b")
            expected.append(rule.budget_ns())
        else:
            longest = APP_WINDOW_NS * choose.choice((0.1, 1, 1.5, 10))
            nanoseconds, slept = choose.randrange(-1000, int(longest)), choose.random() < 0.5
            steps.append(f"w {nanoseconds} {slept:d}")
            rule.waited(nanoseconds, slept=slept)
            expected.append(int(rule.brisk))
    program = compiled("awake", ADDRESS, build)
    ended = subprocess.run(
        [program, str(APP_WINDOW_NS), str(int(window_ns > 0))], input="\n".join(steps), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert [int(line) for line in ended.stdout.split()] == expected
    assert len(set(expected)) == (4 if window_ns else 1)  # budgets of both kinds and none; brisk and not


@pytest.mark.parametrize(("cpus", "low_power", "may"), [(2, False, True), (1, False, False), (2, True, False)])
def test_an_end_stays_awake_only_with_a_cpu_to_spend_and_never_with_low_power(
    monkeypatch: pytest.MonkeyPatch, cpus: int, low_power: bool, may: bool
) -> None:
    monkeypatch.setattr(spin_policy, "cpus_for_both_ends", lambda: cpus)
    assert may_stay_awake(low_power=low_power) is may
