"""For tests: a fake device for those of an app, and `check_engine` for those of a driver author.

The fake device hangs, crashes and is slow on demand, and needs no inference engine.

    fake_engine  an engine like any other, which runs in a real driver process
    fake_device  steers the engine from the test through a small file, and hears from it through a FIFO
    answers      outputs that the test gives: the engine asks for them through a socket
    models       makes tiny ONNX models
    plugin       the pytest plugin with the fixture `fake_device`

`check_engine` makes pytest cases of the driver contract.

    engine_cases    the cases; engine_check has what they share
    damaged         loads damaged artifacts in a driver process

A test waits for events of the engine, never for time.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.testing.engine_cases import check_engine
    from aionn.testing.fake_device import FakeDevice
    from aionn.testing.models import CheckedModel, fake_model, identity_model

__all__ = ["CheckedModel", "FakeDevice", "check_engine", "fake_model", "identity_model"]

if not _typing.TYPE_CHECKING:
    # Lazily, because every run of pytest loads the plugin in this package.
    _NAMES = {
        "engine_cases": "check_engine",
        "fake_device": "FakeDevice",
        "models": "CheckedModel fake_model identity_model",
    }
    _HOMES = {name: f"aionn.testing.{module}" for module, names in _NAMES.items() for name in names.split()}
    __getattr__ = _imported_when_asked(__name__, _HOMES)
