"""What must follow a compilation to another prepared model: open bursts and device memories.

A swap is a two-phase commit over the members. First each member prepares a `Change`: everything that may fail or take time, while
nothing that serves is touched. Then all changes are committed, without an await in between. If anything fails before that, all
changes are aborted, and nothing has changed.

    prepare   make what the member needs on the new model        may await, may fail
    check     raise if the change is outdated                    right before the commit
    commit    use the new model from now on                      no await, cannot fail
    retire    free what the change replaced                      after the commit, when nothing is in flight there
    abort     free what was prepared                             in place of the commit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from aionn.errors import CallerError
from aionn.runtime.serving.serving import Serving


class NotNowError(CallerError):
    """The swap is possible, but not at this moment."""


class Change(Protocol):
    """What a member has prepared for a swap. Either `commit` or `abort` is called, once."""

    def check(self) -> None:
        """Return if the change may be committed now.

        Raises:
            NotNowError: the member has been used since the change was prepared.
        """
        ...

    def commit(self) -> None:
        """Use the new model from now on. Nothing may fail here."""
        ...

    async def retire(self) -> None:
        """Free what the change has replaced.

        Raises:
            AionnError: the driver is gone, and all that it held with it.
        """
        ...

    def abort(self) -> None:
        """Free what was prepared, without waiting."""
        ...


class Rest(NamedTuple):
    """What a member can give back while the app does not use it.

    Attributes:
        sent: so many requests have gone over it.
        give_back: free its part in the driver, without waiting. The next use makes it anew.
    """

    sent: int
    give_back: Callable[[], None]


class Member(Protocol):
    """An open burst, or a device memory, of a compilation."""

    @property
    def needs_gap(self) -> bool:
        """Whether it can prepare a change only while no execution is in flight."""
        ...

    async def prepare(self, better: Serving) -> Change | None:
        """Prepare a change to `better`. Returns None if there is nothing to change.

        Raises:
            NotNowError: the member is in use.
            AionnError: the other driver cannot serve it.
        """
        ...

    def rest(self) -> Rest | None:
        """Return what it can give back now. Returns None if the app uses it, or if it would lose what the app needs."""
        ...

    async def wait_idle(self) -> None:
        """Return when none of its requests is in flight, apart from those that `Serving.users` counts."""
        ...

    def count_from_now(self) -> None:
        """Count every execution that begins, until `CompiledModel.watched` is 0 again."""
        ...

    def end(self) -> None:
        """Close without waiting: the runtime has closed, and every driver has ended. Calls that wait here end with `CallerError`."""
        ...
