"""The app's end stays awake by the same rule in C (spin.h) as `SpinPolicy` says in Python."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from aionn.burst.spin_policy import APP_WINDOW_NS, SpinPolicy
from tests.fmq.test_native import ADDRESS, build, compiled

__all__ = ["build"]  # a fixture


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_native_rule_decides_as_the_one_in_python(build: Path, seed: int, allowed: bool) -> None:
    choose = random.Random(seed)
    policy = SpinPolicy(APP_WINDOW_NS, low_power=not allowed, cpus=2)
    steps, expected = [], []
    for _ in range(5000):
        if choose.random() < 0.5:
            steps.append("b")
            expected.append(policy.budget_ns())
        else:
            longest = APP_WINDOW_NS * choose.choice((0.1, 1, 1.5, 10))
            nanoseconds, slept = choose.randrange(-1000, int(longest)), choose.random() < 0.5
            steps.append(f"w {nanoseconds} {slept:d}")
            policy.waited(nanoseconds, slept=slept)
            expected.append(int(policy.brisk))
    program = compiled("awake", ADDRESS, build)
    ended = subprocess.run(
        [program, str(APP_WINDOW_NS), str(int(allowed))], input="\n".join(steps), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert [int(line) for line in ended.stdout.split()] == expected
    assert len(set(expected)) == (4 if allowed else 1)  # budgets of both kinds and none; brisk and not
