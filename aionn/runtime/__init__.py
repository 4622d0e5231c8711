"""The app's process: models, compilations, bursts, and the driver processes behind them.

The lines stand in the order of imports. A package or module here imports the ones on lower lines, never the ones beside it or above.

    runtime      `Runtime`: opens and closes everything
    asked        one call of `Runtime.compile`, and the compilation that is made of it
    open_runtime what an open runtime owns, and its end
    health_watch judges whether the runtime can do the app's work
    compilation  `Compilation`: the face of a compiled model, and the parts below it
    staging      better stages, made behind the stream and swapped in      streaming    bursts as an app uses them
    executing    one execution: arguments, frames, channels, device memory
    preparing    a model gets ready on a device, from the cache or compiled
    session      what the parts need from an open runtime
    serving      what serves now, and the swap                             processes    driver processes
    model        `Model.load` opens an ONNX file, and reads what is needed when it is needed; `Model.from_onnx` reads it whole
    loop         `run`: a main function on uvloop
    record       what happens, published once: as events, on the statistics page, in traces, and as progress of a compilation
    health       what `Runtime.health` returns                             tracing    what connects a runtime to traces
"""
