"""An engine that an author writes after docs/how-to/own-driver.md: scikit-learn's logistic regression, from bytes of its own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CompilationError
from aionn.hal import Artifact, CacheFiles, CompileOptions, Executable, ExecutionReport, Model, model_bytes

FORMAT = "logistic-regression"


class LogisticExecutable:
    """A classifier that is ready to run."""

    def __init__(self, content: bytes) -> None:
        from sklearn.linear_model import LogisticRegression

        told = json.loads(content)
        self.content = content
        self._classifier = LogisticRegression()
        self._classifier.coef_ = np.array(told["coef"], np.float64)
        self._classifier.intercept_ = np.array(told["intercept"], np.float64)
        self._classifier.classes_ = np.arange(len(told["intercept"]))

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        """Compute the probabilities of all classes."""
        scores = self._classifier.predict_proba(inputs["features"]).astype(np.float32)
        place = outputs.get("scores")
        if place is not None and place.shape == scores.shape:
            place[...] = scores
            return ExecutionReport()
        return ExecutionReport({"scores": scores})


class SklearnEngine:
    """Satisfies `aionn.hal.Engine`."""

    name = "sklearn"
    version = "1"
    cache_files = CacheFiles(model=1)

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return [model.format == FORMAT] * len(model.operations)

    def compile(self, model: Model, options: CompileOptions) -> LogisticExecutable:
        return self._made(bytes(model_bytes(model, FORMAT)), options)

    def export(self, executable: Executable) -> Artifact | None:
        assert isinstance(executable, LogisticExecutable)
        return Artifact((executable.content,), ())

    def load(self, artifact: Artifact, options: CompileOptions) -> LogisticExecutable:
        return self._made(bytes(artifact.model[0]), options)

    def _made(self, content: bytes, options: CompileOptions) -> LogisticExecutable:
        if options.cancelled.is_set():
            raise CompilationError("the compilation was cancelled, because its caller has stopped waiting")
        try:
            return LogisticExecutable(content)
        except (ValueError, KeyError, TypeError) as error:
            raise CompilationError(f"this is not a classifier in JSON: {error!r}") from error
