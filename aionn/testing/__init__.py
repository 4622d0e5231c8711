"""For tests of an app: a fake device that hangs, crashes and is slow on demand. No inference engine needed.

`fake_engine` is an engine like any other and runs in a real driver process. `fake_device` steers it from the test through
a small file and hears from it through a FIFO. So a test waits for events, never for time. `models` makes tiny ONNX
models. The pytest plugin (`plugin`) offers the fixture `fake_device`.
"""

from aionn.testing.fake_device import FakeDevice
from aionn.testing.models import identity_model

__all__ = ["FakeDevice", "identity_model"]
