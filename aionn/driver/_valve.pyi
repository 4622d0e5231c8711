def open_valve(reading: int, writing: int, counter: int, patience_ms: int, /) -> None:
    """Start the thread that empties the process's own pipe when nothing reads it. It owns the descriptors from now on.

    Args:
        reading, writing: the ends of the pipe, by descriptions of their own that do not wait.
        counter: an eventfd. The thread adds the number of bytes that it drops.
        patience_ms: how long the pipe must be full, without a read by the app.

    Raises:
        RuntimeError: the process has such a thread.
        OSError: the thread cannot be started.
    """
