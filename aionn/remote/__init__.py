"""The slow path: HAL calls and descriptors between an app's process and a driver's, over one Unix socket.

    control      the messages as bytes, and back (sans-IO); failures keep their class and attributes
    channel      the socket: whole frames, descriptors with owners, driven by the loop's callbacks without a task of its own
    connection   calls both ways: each is answered, or ends with the connection; what a call lent is given back by the answer alone
    device       an `IDevice` as the app sees it
    service      the same device as a driver process offers it; all that its client made goes with the client

Neither end trusts the other to be sane: lengths and descriptors are bounded before anything grows, every field is decoded against
its type, and whoever breaks the protocol loses the connection. Who starts, watches and ends the process is `runtime.devices`.
"""
