"""The slow path: HAL calls and descriptors between an app's process and a driver's, over one Unix socket.

    control      the messages as bytes, and back (sans-IO)
    parts        what several messages have in common (sans-IO)
    failures     exceptions as messages, and back: class and attributes are kept (sans-IO)
    channel      the socket: whole frames and owned descriptors, driven by the loop's callbacks without a task
    connection   calls both ways: each call ends with its answer or with the connection; the answer alone gives back what a call lent
    fences       eventfds that say that an execution is over, and how one waits for them
    fenced       the app's end of a fenced execution
    messages     what the app sends, as messages
    device       an `IDevice` as the app sees it
    handles      buffers and bursts in the driver, by number
    callback     the driver's questions about the memories of a burst
    service      the same device as a driver process offers it; everything that its client made is freed with the client
    values       strings, sequences, maps and optionals as bytes, and back (sans-IO); `value_calls` carries them
    option_files files that options name, opened by the app for a driver
    received     the memories and files that came with a call

Neither end trusts the other to be correct. Lengths and descriptors are bounded before anything grows, and every field is decoded
against its type. A peer that breaks the protocol loses the connection. `runtime.processes` starts, watches and ends the processes.
"""
