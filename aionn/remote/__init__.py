"""The slow path: HAL calls and descriptors between an app's process and a driver's, over one Unix socket.

    calls        the table of HAL calls: name, arguments with their descriptors, answer (sans-IO)
    control      the frames that carry them, as bytes and back, checked against the table; exceptions as messages (sans-IO)
    connection   the socket: whole frames and owned descriptors, driven by the loop's callbacks without a task
                 calls both ways: each call ends with its answer or with the connection; the answer alone gives back what a call lent
    fences       eventfds that say that an execution is over, and how one waits for them
    device       an `IDevice` as the app sees it, with its models, buffers, bursts and options' files; `driver.service` is the other end
    attaching    the socket of a service: where it lies, and how an app connects
    attached     a driver as one more client of it sees it, in a thread without a loop
    values       strings, sequences, maps and optionals as bytes, and back; the calls that carry them
    orders       what an app asks of its template of drivers (sans-IO)

Neither end trusts the other to be correct. Lengths and descriptors are bounded before anything grows, and every field is decoded
against its type. A peer that breaks the protocol loses the connection. `runtime.processes` starts, watches and ends the processes.
"""
