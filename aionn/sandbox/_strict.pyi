def watch(names: bytes, /) -> None:
    """Handle SIGSYS from now on: name the denied call on stderr, call the handler that was there before, die by the signal.

    Args:
        names: the name of each system call from number 0 on, each filled up with zeros to 32 bytes.

    Raises:
        RuntimeError: it was called before.
        ValueError: a name has more than 31 bytes.
    """
