def make_sibling(page: int, at: int, /) -> int:
    """Copy this process, which must have one thread. The copy is a child of this process's parent.

    Args:
        page: the descriptor of a file of at least 4096 bytes that is shared with the parent.
        at: at which byte of it the number of the copy is written, as a C int. It is there before the copy runs.

    Returns:
        The number of the copy. In the copy, 0.

    Raises:
        OSError: the system has no room for another process, or this system cannot do it.
    """
