"""Inference engines: ONNX Runtime (the default), OpenVINO and LiteRT (optional), NumPy (the oracle of the others).

An engine is a `hal.Engine` and nothing else. It gets a `Model` or verified artifact bytes, and arrays. It never sees a queue, a
socket or a cache file, so each engine runs, is tested and is measured alone. `driver.device` gives it bursts, integrity, memory
domains and a process. Making an engine imports its library; importing the engine's module does not. A missing package raises
`DeviceUnavailableError`, which names the extra to install. `aionn.graph` is imported when a model must be read, because it brings
`onnx`, which a driver that is just starting does not need.

    reference             NumPy through onnx.reference: right before fast; small models; caches nothing
    onnxruntime           runs every model found; large tables used in place, other constants copied by the library;
                          compiles in milliseconds, loads in fewer; a session as an executable, with the bindings of its arrays
    onnxruntime_providers  its providers: which ones work here, what a session really runs on, and the versions of GPUs and their libraries
    onnxruntime_artifact  the files that ONNX Runtime writes while it compiles, and constants that it uses where they lie
    openvino              slower to compile, 1.3 to 4.7 times quicker on convolutions (x86): the second stage
                          its devices, and the properties that a compile sets
    litert                .tflite files, and no ONNX; `border` reads their inputs and outputs
    reference_quantized   operators of quantised models that onnx.reference lacks or computes in another way
    elements              arrays of types that NumPy lacks, as engines take them, and outputs moved into the arrays given for them
    complaints            what a library says of a run or a model that failed, as one sentence
    processor             what this machine's CPU offers: usable cores, threads for a run, instruction set, flushing of denormals
    installed             which engines there are, by their entry points
    needs                 what an engine needs of its driver's sandbox

What all engines keep to
    Arrays given to `run` are used in place. An engine that can avoid it keeps none of them alive, because the driver unmaps memory
    that an app has freed. Each engine says what it keeps.
    An output with another shape than the array given for it goes back in the report (`elements.deliver`).
    Accuracy is float32 as the model says it. An engine that would lower the precision by itself is set not to, unless the app's options
    ask for it.
    The number of threads is always explicit. It comes from the app, or from the CPUs that this process may use. It never comes from the
    CPUs of the machine. No artifact depends on it, or on the number of instances. Engines do not look at the priority.
"""
