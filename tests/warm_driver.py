"""`python -m tests.warm_driver ARGUMENTS`: `aionn.driver`, whose template has also imported what thousands of the tests' drivers need.

An app's template has imported the library of one engine. The tests' drivers have several: `onnx.reference` alone takes 90 ms of CPU time
in each driver of the reference engine. None of these imports starts a thread, so a template can hold them.
"""

import importlib
import os
import runpy

NEEDED = ("importlib.metadata", "onnx.reference.ops", "aionn.graph.wire", "aionn.engines.reference")

if __name__ == "__main__":
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as in `aionn.driver.template`, until NumPy has been imported
    for name in NEEDED:
        importlib.import_module(name)
    del os.environ["OPENBLAS_NUM_THREADS"]
    if before is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    runpy.run_module("aionn.driver", run_name="__main__", alter_sys=True)
