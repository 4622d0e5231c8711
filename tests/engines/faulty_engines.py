"""Engines with one fault each, for `aionn.testing.check_engine`. Apart from it each is right: the reference engine, with a cache."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, Executable, ExecutionReport, Model
from tests.conformance.storing_reference import StoringReference

Arrays = Mapping[str, NDArray[Any]]


class Executing:
    """Runs as the reference does. Each fault below overrides a part."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.stored = inner.stored

    def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
        report: ExecutionReport = self.inner.run(inputs, outputs, timing)
        return report


class Right(StoringReference):
    """No fault, to show that the others differ in their fault alone."""

    name = "right"
    executing: type[Executing] = Executing

    def compile(self, model: Model, options: CompileOptions) -> Any:
        return self.executing(super().compile(model, options))


class AnotherVersionEachTime(Right):
    def __init__(self) -> None:
        super().__init__()
        self.version = uuid.uuid4().hex


class SaysYesToEverything(Right):
    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.operations)


class WrongValues(Right):
    class executing(Executing):  # noqa: N801 - an attribute
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            made = super().run(inputs, {}, timing).outputs
            wrong = {name: array + np.asarray(1, array.dtype) for name, array in made.items()}
            return ExecutionReport(wrong)


class FillsNothing(Right):
    class executing(Executing):  # noqa: N801
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            return super().run(inputs, {}, timing)


class SqueezesOutputs(Right):
    class executing(Executing):  # noqa: N801
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            made = dict(super().run(inputs, {}, timing).outputs)
            for name, array in outputs.items():
                np.copyto(array, np.resize(made.pop(name), array.shape))
            return ExecutionReport(made)


class WritesToInputs(Right):
    class executing(Executing):  # noqa: N801
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            report = super().run(inputs, outputs, timing)
            for array in inputs.values():
                if array.flags.writeable:
                    array[...] = 0
            return report


class ReturnsOneBuffer(Right):
    class executing(Executing):  # noqa: N801
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.kept: dict[tuple[str, tuple[int, ...]], NDArray[Any]] = {}

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            report = super().run(inputs, outputs, timing)
            made = {}
            for name, array in report.outputs.items():
                made[name] = self.kept.setdefault((name, array.shape), np.empty_like(array))
                np.copyto(made[name], array)
            return ExecutionReport(made, report.on_device_ns)


class LosesPrecision(Right):
    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        values = np.frombuffer(bytes(artifact.data[0])[: len(artifact.data[0]) // 4 * 4], np.float32)
        rounded = (values + np.float32(1e-6)).tobytes() if artifact.data[0] != b"none" else b"none"
        return super().load(Artifact(artifact.model, (rounded,)), options)


class CrashesOnDamage(Right):
    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        try:
            return super().load(artifact, options)
        except Exception:
            os.abort()


class TakesAnyArtifact(Right):
    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        try:
            return super().load(artifact, options)
        except Exception:
            return object()


class IgnoresCancellation(Right):
    def compile(self, model: Model, options: CompileOptions) -> Any:
        return super().compile(model, CompileOptions())


class BelongsToOneThread(Right):
    class executing(Executing):  # noqa: N801
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.thread = threading.get_ident()

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            if threading.get_ident() != self.thread:
                raise RuntimeError("another thread")
            return super().run(inputs, outputs, timing)


class SharesScratch(Right):
    """Its lanes keep their inputs in one place."""

    class executing(Executing):  # noqa: N801
        def lanes(self, count: int) -> Sequence[Executable]:
            return [self] * count

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            self.inputs = inputs
            time.sleep(0.002)  # the other lane comes in between, as it does in a longer run
            return super().run(self.inputs, outputs, timing)


class SharesWhatGoes(Right):
    """Its shared executables work only while the first one is there."""

    class executing(Executing):  # noqa: N801
        def share(self) -> Executable:
            return _Borrower(self)


class _Borrower:
    def __init__(self, lender: Any) -> None:
        import weakref

        self._lender = weakref.ref(lender)

    def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
        lender = self._lender()
        if lender is None:
            raise RuntimeError("the weights have gone")
        report: ExecutionReport = lender.run(inputs, outputs, timing)
        return report


class BreaksAfterAnError(Right):
    class executing(Executing):  # noqa: N801
        broken = False

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            if self.broken:
                raise RuntimeError("broken")
            try:
                return super().run(inputs, outputs, timing)
            except Exception:
                self.broken = True
                raise


class OpensDescriptors(Right):
    class executing(Executing):  # noqa: N801
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.opened: list[Any] = []

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            self.opened.append(open(os.devnull, "rb"))  # noqa: SIM115 - the fault
            return super().run(inputs, outputs, timing)

        def __del__(self) -> None:
            for file in self.opened:
                file.close()


class KeepsArrays(Right):
    class executing(Executing):  # noqa: N801
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.kept: list[Arrays] = []

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            self.kept.append(outputs)
            return super().run(inputs, outputs, timing)


class InventsTimes(Right):
    class executing(Executing):  # noqa: N801
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            return ExecutionReport(super().run(inputs, outputs, timing).outputs, 10**15)


class KeepsTheFirstShape(Right):
    class executing(Executing):  # noqa: N801
        shapes: dict[str, tuple[int, ...]] | None = None

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            shapes = {name: array.shape for name, array in inputs.items()}
            self.shapes = self.shapes or shapes
            if shapes != self.shapes:
                raise RuntimeError(f"expected {self.shapes}")
            return super().run(inputs, outputs, timing)


class FailsInADriver(Right):
    def compile(self, model: Model, options: CompileOptions) -> Any:
        if options.blob_cache is not None:
            raise RuntimeError("in a driver")
        return super().compile(model, options)


class RemembersArrays(Right):
    """Copies an input once for each place in memory, and looks only whether its first element is still the same."""

    class executing(Executing):  # noqa: N801
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.seen: dict[tuple[str, int], NDArray[Any]] = {}

        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            given = {}
            for name, array in inputs.items():
                known = self.seen.get((name, array.ctypes.data))
                if known is None or known.shape != array.shape or known.flat[:1] != array.flat[:1]:
                    known = self.seen[name, array.ctypes.data] = array.copy()
                given[name] = known
            return super().run(given, outputs, timing)


class ComputesOrMeasures(Right):
    class executing(Executing):  # noqa: N801
        def run(self, inputs: Arrays, outputs: Arrays, timing: bool) -> ExecutionReport:
            report = super().run(inputs, outputs, timing)
            for array in outputs.values():
                array[...] = 0 if timing else array
            return report


class StoresAName(Right):
    """Its artifact names weights that only the process has which made it."""

    kept: dict[bytes, bytes] = {}  # noqa: RUF012 - of the process

    def export(self, executable: Executable) -> Artifact | None:
        made = super().export(executable)
        assert made is not None
        name = hashlib.sha256(made.data[0]).digest()
        self.kept[name] = bytes(made.data[0])
        return Artifact(made.model, (name,))

    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        return super().load(Artifact(artifact.model, (self.kept[bytes(artifact.data[0])],)), options)


class AnotherVersionInEachProcess(Right):
    version = f"1;{os.getpid()}"

    def __init__(self) -> None:
        super().__init__()
        self.version = type(self).version


FAULTS: dict[type[Right], str] = {
    AnotherVersionEachTime: "facts",
    SaysYesToEverything: "supported_operations_are_honest",
    WrongValues: "outputs_are_right",
    KeepsTheFirstShape: "outputs_are_right",
    FillsNothing: "given_arrays_are_filled",
    SqueezesOutputs: "outputs_of_another_shape_are_reported",
    WritesToInputs: "inputs_are_not_written_to",
    ReturnsOneBuffer: "runs_do_not_mix",
    RemembersArrays: "arrays_are_read_anew",
    LosesPrecision: "a_stored_model_gives_the_same_bits",
    CrashesOnDamage: "damaged_artifacts_are_refused",
    TakesAnyArtifact: "damaged_artifacts_are_refused",
    IgnoresCancellation: "a_cancelled_compilation_stops",
    BelongsToOneThread: "threads_are_free",
    SharesScratch: "lanes_run_beside_each_other",
    SharesWhatGoes: "shared_executables_are_whole",
    BreaksAfterAnError: "a_failed_run_does_no_harm",
    OpensDescriptors: "runs_keep_nothing",
    KeepsArrays: "runs_keep_nothing",
    InventsTimes: "timing_is_true",
    ComputesOrMeasures: "timing_is_true",
    FailsInADriver: "a_driver_serves_it",
    StoresAName: "a_driver_serves_it",
    AnotherVersionInEachProcess: "a_driver_serves_it",
}
"""The case that finds each fault. `facts` and the cases before it in `CASES` pass."""
