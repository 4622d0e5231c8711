"""Every error that aionn raises arrives whole: through pickle, through a process pool, as a copy, and as `again` for one more caller."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import aionn
from aionn import errors
from aionn.errors import AionnError, again
from aionn.fleet.requests import StoreError
from aionn.hal.types import ErrorStatus
from aionn.sources import SourceError

TEXT = "what was found; what was expected"
SAMPLES: dict[str, Callable[[], BaseException]] = {
    "CompilationError": lambda: errors.CompilationError(TEXT, node="Conv_3", reason="no kernel"),
    "UnsupportedOperationError": lambda: _kind("UnsupportedOperationError")(TEXT, node="Conv_3", reason="no kernel"),
    "ExecutionError": lambda: errors.ExecutionError(TEXT, status=ErrorStatus.INVALID_ARGUMENT),
    "ModelGoneError": lambda: _kind("ModelGoneError")(TEXT, status=ErrorStatus.DEVICE_UNAVAILABLE),
    "OutputInsufficientSizeError": lambda: errors.OutputInsufficientSizeError(
        TEXT, status=ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes={"y": (2, 3)}
    ),
    "ModelQuarantinedError": lambda: errors.ModelQuarantinedError(TEXT, until_s=600.0),
    "QuotaError": lambda: errors.QuotaError(TEXT, status=ErrorStatus.GENERAL_FAILURE, what="bursts", limit=64, used=64),
    "DriverDiedError": lambda: errors.DriverDiedError("onnxruntime", -9, "while it compiled"),
    "DeviceMemoryLostError": lambda: errors.DeviceMemoryLostError("onnxruntime", None),
    "ServiceDiedError": lambda: errors.ServiceDiedError(TEXT),
    "DriverHungError": lambda: errors.DriverHungError("onnxruntime", 1.5),
    "DeadlineError": lambda: errors.DeadlineError(TEXT, transient=False),
    "DeviceBusyError": lambda: errors.DeviceBusyError(TEXT, waited_s=0.5, queue=256),
    "DeviceUnavailableError": lambda: errors.DeviceUnavailableError("npu", TEXT),
    "MemoryAllocationError": lambda: errors.MemoryAllocationError(TEXT, needed_bytes=7, available_bytes=None),
    "RequestRefusal": lambda: _kind("RequestRefusal")(503, TEXT, {"Retry-After": "1"}),
    "SourceError": lambda: SourceError(TEXT, source="/dev/video0"),
    "StageRejected": lambda: errors.StageRejected("openvino", "it is slower"),
    "_FarmError": lambda: _kind("_FarmError")("key: OSError", TEXT),
    "StoreError": lambda: StoreError("s3://models", "reading", "it does not answer"),
}
"""Those with parameters of their own; the others are made of their text."""


def _package() -> Iterator[type[BaseException]]:
    """Every exception class of the package."""
    for found in pkgutil.walk_packages(aionn.__path__, "aionn."):
        if not found.name.endswith("__main__"):
            for value in vars(importlib.import_module(found.name)).values():
                if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == found.name:
                    yield value


KINDS = {kind.__name__: kind for kind in _package()}


def _kind(name: str) -> Any:
    return KINDS[name]


def sample(name: str) -> BaseException:
    error: BaseException = SAMPLES[name]() if name in SAMPLES else KINDS[name](TEXT)
    error.add_note("a note")
    return error


def raise_sample(name: str) -> None:
    raise sample(name)


def assert_same(one: BaseException, other: BaseException) -> None:
    assert type(one) is type(other)
    assert one is not other
    assert str(one) == str(other)
    assert str(one)
    assert repr(one) == repr(other)
    assert one.args == other.args
    assert vars(one) == vars(other)


def test_the_samples_are_all_of_the_packages_errors() -> None:
    assert {"CallerError", "DeadlineError", "QueueClosedError", "PacketError", "ControlError", "MappingError", "WireError"} <= KINDS.keys()
    assert set(errors.__all__) <= KINDS.keys()
    assert SAMPLES.keys() <= KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_an_error_survives_pickle_and_copy_with_class_text_and_attributes(name: str) -> None:
    error = sample(name)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(error, protocol)), error)
    assert_same(copy.copy(error), error)
    assert_same(copy.deepcopy(error), error)
    assert_same(pickle.loads(pickle.dumps(copy.copy(error))), error)


def test_an_error_survives_a_process_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name, future in {name: pool.submit(raise_sample, name) for name in KINDS}.items():
            with pytest.raises(KINDS[name]) as caught:
                future.result(60)
            assert_same(caught.value, sample(name))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, AionnError)])
def test_again_keeps_text_attributes_and_cause_but_shares_no_notes(name: str) -> None:
    error = sample(name)
    error.__cause__ = OSError("why")
    other = again(error)
    assert_same(other, error)
    assert other.__cause__ is error.__cause__
    assert other.__traceback__ is None
    other.add_note("for this caller")
    assert error.__notes__ == ["a note"]
    twin = copy.copy(other)
    twin.add_note("for that caller")
    assert other.__notes__ == ["a note", "for this caller"]


def test_an_error_without_a_cause_shows_what_was_handled_when_it_was_raised_again() -> None:
    other = again(errors.DeadlineError(TEXT))
    assert other.__cause__ is None
    assert not other.__suppress_context__


def test_a_subclass_of_an_app_survives_with_parameters_of_its_own() -> None:
    error = _OfAnApp("door", seconds=3)
    assert_same(pickle.loads(pickle.dumps(error)), error)
    assert_same(again(error), error)


class _OfAnApp(errors.DeadlineError):
    def __init__(self, camera: str, *, seconds: int) -> None:
        super().__init__(f"camera {camera!r} was {seconds} s late")
        self.camera = camera
        self.seconds = seconds
