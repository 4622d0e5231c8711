"""The errors of a queue, beside `CallerError` and `DeadlineError`."""

from __future__ import annotations

from aionn.errors import AionnError


class QueueClosedError(AionnError):
    """The queue was closed: by the peer, and all its elements have been read, or here, while a task waited."""


class QueueCorruptedError(AionnError):
    """A shared counter has an impossible value, because the peer is broken or hostile. Nothing was read or written.

    The queue cannot be repaired. End the peer, and make a new queue.
    """
