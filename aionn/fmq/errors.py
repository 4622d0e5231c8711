"""What a queue refuses with, beside `CallerError` and `DeadlineError`."""

from __future__ import annotations

from aionn.errors import AionnError


class QueueClosedError(AionnError):
    """The queue was closed: by the peer, once what was in it has been read, or here, while a task waited."""


class QueueCorruptedError(AionnError):
    """A shared counter is not what a queue's can be: the peer has gone wrong, or is hostile. Nothing was read or written.

    There is no repair: end the peer, and make a new queue.
    """
