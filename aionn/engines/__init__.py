"""Inference engines: ONNX Runtime (the default), OpenVINO (optional), NumPy (the oracle of the others).

An engine is what `hal.Engine` says and nothing else. It gets a `Model` or verified artifact bytes, and arrays. It never
sees a queue, a socket or a cache file, so every engine runs, is tested and is measured alone. `driver.device` gives it
bursts, integrity, memory domains and a process. An engine's library is imported when the engine is made,
never when its module is: a missing package is a `DeviceUnavailableError` that names the extra to install. `aionn.graph`
is imported when a model is there to be read: it brings `onnx`, which a driver that is just starting can do without.

    reference     NumPy through onnx.reference: right before fast; small models; caches nothing
    onnxruntime   runs every model found; large tables used in place, other constants copied by the library;
                  compiles in milliseconds, loads in fewer
    openvino      slower to compile, 1.3 to 4.7 times quicker on convolutions (x86): the second stage
    processor     what this machine's CPU gives and is: usable cores, instruction set, flushing of denormals
    installed     which engines there are, by their entry points

What all engines keep to
    Arrays given to `run` are used in place and never kept alive by an engine that can help it: the driver unmaps
    memory that an app has freed. Each engine says what it keeps.
    An output that comes out in another shape than the array given for it goes back in the report (`outputs.deliver`).
    Accuracy is float32 as the model says it; an engine that would save bits by itself is set not to.
    The number of threads is always explicit, and from the CPUs this process may use, not from those of the machine.
"""
