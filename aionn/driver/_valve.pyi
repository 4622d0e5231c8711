def open_valve(reading: int, writing: int, patience_ms: int, /) -> None:
    """Start the thread that empties the process's own pipe when nothing reads it. It owns both descriptors from now on.

    Args:
        reading, writing: the ends of the pipe, by descriptions of their own that do not wait.
        patience_ms: how long the pipe must be full, without a read by the app.

    Raises:
        RuntimeError: the process has such a thread.
        OSError: the thread cannot be started.
    """
