"""The Open Inference Protocol (KServe v2) over HTTP, for clients in any language that send inputs to models and get outputs.

    app.routes.extend(aionn.asgi.oip())

The protocol has metadata, health and inference with tensors as JSON or as raw bytes. NVIDIA's `tritonclient` speaks it.

    inference   `oip`: the routes, and what each of them answers; a request for inference is read, computed, answered
    targets     the models by name: a compilation, its burst, its counts, and calls that survive the death of a driver
    incoming    the body of a request, in chunks, up to a limit of size and time, and of memory for all bodies together
    tensors     tensors as JSON and as raw bytes; what the JSON of a request asks of a model; no I/O
    refusals    the status and the sentence of each error

Invariants
    A body is never larger in memory than `max_body_bytes`. It lies in one piece, or in one frame. All bodies together have a bound.
    A frame is leased only while a body arrives or the driver computes. A client that reads slowly holds no frame.
    At most `STREAMED` requests for one model have a frame while their body arrives, so clients that stall cannot take all frames.
    No request reads what another has left in a frame, because every input is checked to be there before one is leased.
"""

from aionn.asgi.open_inference.inference import oip

__all__ = ["oip"]
