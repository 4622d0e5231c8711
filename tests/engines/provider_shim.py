"""A module `onnxruntime` for a driver process, which stands before the real one and has a provider that this machine lacks.

`kind` says what the provider does: "works" runs on the CPU under its name, "unloaded" is listed and gives a session without it,
"raises" is listed and fails, "part" takes a part of the nodes. The provider's options are written beside the module.
"""

from __future__ import annotations

from pathlib import Path

_SHIM = """
import importlib, json, os, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.remove(here)
del sys.modules["onnxruntime"]
real = importlib.import_module("onnxruntime")
sys.path.insert(0, here)
NAME, CPU, KIND = "CUDAExecutionProvider", "CPUExecutionProvider", {kind!r}
available = real.get_available_providers()
real.get_available_providers = lambda: [NAME, *available]

class Part:
    def __init__(self, ep_name, nodes):
        self.ep_name, self._nodes = ep_name, nodes
    def get_nodes(self):
        return self._nodes

class Session(real.InferenceSession):
    def __init__(self, graph, settings=None, providers=None, **more):
        (wanted,) = providers
        name, options = (wanted, {{}}) if isinstance(wanted, str) else wanted
        self.wanted = name
        if name == NAME and KIND == "raises":
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 35: driver version is insufficient")
        if name == NAME and options:
            with open(os.path.join(here, "options.json"), "w") as file:
                json.dump(options, file)
        super().__init__(graph, settings, providers=[CPU], **more)
    def get_providers(self):
        return [NAME, CPU] if self.wanted == NAME and KIND != "unloaded" else [CPU]
    def get_provider_graph_assignment_info(self):
        nodes = [node for part in super().get_provider_graph_assignment_info() for node in part.get_nodes()]
        if KIND != "part":
            return [Part(NAME, nodes)]
        return [Part(NAME, nodes[:1]), Part(CPU, nodes[1:])]

real.InferenceSession = Session
sys.modules["onnxruntime"] = real
"""


def install_shim(folder: Path, kind: str) -> Path:
    """Write the module into a folder, which belongs first on PYTHONPATH. Returns where the provider's options will be."""
    package = folder / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_SHIM.format(kind=kind))
    return folder / "options.json"
