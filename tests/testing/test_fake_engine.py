"""`FakeEngine`: what its orders say happens."""

import time

from aionn.testing import FakeDevice
from aionn.testing.fake_engine import FakeEngine


def test_a_delay_lasts_as_long_as_ordered() -> None:
    with FakeDevice() as device:
        engine = FakeEngine()
        device.delay(0.05)
        began_s = time.monotonic()
        engine.act("run")
        assert time.monotonic() - began_s >= 0.05
