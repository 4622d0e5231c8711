"""Sources of frames for streams, made with other packages. Each module needs the extra of its name.

av   pictures and sound from files, cameras, microphones and the network, by PyAV: `pip install 'aionn[av]'`
"""

from __future__ import annotations

from aionn.errors import AionnError

__all__ = ["SourceError"]


class SourceError(AionnError):
    """A source cannot be opened, or cannot be read any further.

    Attributes:
        source: the path, device or URL.
    """

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(message)
        self.source = source
