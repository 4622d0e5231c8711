from typing import final

@final
class Mapping:
    """A mapped descriptor, which this object does not keep open. The caller has checked that it has all these bytes."""

    def __new__(cls, fd: int, size_bytes: int, writable: bool, private: bool = False, offset: int = 0, /) -> Mapping:
        """Map `size_bytes` from `offset` on, copy-on-write if `private`.

        Raises:
            OSError: the system refuses.
        """

    def close(self) -> None:
        """Unmap it. Idempotent. The end of the object does it too. Raises `BufferError` while a view is held."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def give_back(buffer: memoryview, /) -> None:
    """Give the whole pages within a writable buffer of private memory back to the system. Their bytes are zero afterwards."""
