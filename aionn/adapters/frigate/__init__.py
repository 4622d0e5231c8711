"""A server for Frigate's detector type `zmq`: `aionn serve-frigate`. Frigate itself is not changed.

    messages   requests and answers, read and written without I/O
    decoding   outputs of a model as rows of class, score and corners, for each `model_type`
    detectors  the models: loaded from a file, or received from a client into a private folder; opened again when their driver dies
    endpoint   the ZeroMQ socket, its clients, and the time in which each request is answered

A tensor is answered with the right rows within the client's time, or not at all. Zeros would mean that the picture is empty.

Invariants
    A client has at most one request in work. What it sends before the answer is dropped.
    A tensor goes to the model that its client has asked for on the same connection, or to the one model that the command names.
    A name that a client gives is looked up and printed. It is never a path.

`endpoint` needs pyzmq, and no other module here does.
"""

ENDPOINT = "ipc:///tmp/cache/zmq_detector"
"""Where Frigate's detector asks, unless its configuration names another endpoint."""
