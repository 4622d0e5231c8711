"""The app's process: models, compilations, bursts, and the driver processes behind them.

Arrows run downward. A package here imports the ones below it.

    runtime      `Runtime`: opens and closes everything
    compilation  `Compilation`: the face of a compiled model
    staging      better stages, made behind the stream and swapped in      streaming    bursts as an app uses them
    executing    one execution: arguments, frames, links, device memory
    preparing    a model gets ready on a device, from the cache or compiled
    serving      what serves now, and the swap                             processes    driver processes
    model        `Model.from_onnx`: an ONNX file becomes a model with its weights in shared memory
"""
