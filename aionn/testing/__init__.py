"""A fake device for the tests of an app. It hangs, crashes and is slow on demand, and needs no inference engine.

    fake_engine  an engine like any other, which runs in a real driver process
    fake_device  steers the engine from the test through a small file, and hears from it through a FIFO
    models       makes tiny ONNX models
    plugin       the pytest plugin with the fixture `fake_device`

A test waits for events of the engine, never for time.
"""

from aionn.testing.fake_device import FakeDevice
from aionn.testing.models import identity_model

__all__ = ["FakeDevice", "identity_model"]
