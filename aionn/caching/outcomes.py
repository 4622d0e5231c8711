"""What the cache did for one step of a compilation. It is a value, never an exception.

A `Refusal` says why the cache did not serve, and in words what was found. The store and the driver return it. An app reads `CacheOutcome`
on `compilation.outcomes`. Every way in which a cache can fail to help has a separate `MissReason`. So a cold start and a changed file
are never the same line in a log.
"""

from __future__ import annotations

import enum
import errno

import msgspec

from aionn.errors import CallerError


class CacheOutcomeKind(enum.Enum):
    """How one step of a compilation was prepared.

    HIT: prepared from the cache.
    MISS: compiled, see the reason.
    NO_CACHE: compiled, because the app asked for no caching or the device has none.
    DECLINED: compiled, because the store remembers that the device does not cache this model.
    """

    HIT = "hit"
    MISS = "miss"
    NO_CACHE = "no_cache"
    DECLINED = "declined"


class MissReason(enum.Enum):
    """Why the cache did not serve. Command line, counters and traces print the value."""

    ABSENT = "absent"  # never stored, or evicted
    PARTIAL = "partial"  # some of the entry's files are gone
    OTHER_DRIVER_VERSION = "other_driver_version"
    OTHER_MODEL = "other_model"  # the app used one token for two models
    WRONG_TOKEN = "wrong_token"  # the entry belongs to another key
    WRONG_FILES = "wrong_files"  # not as many files as the device asks for
    WRONG_LENGTH = "wrong_length"
    WRONG_BYTES = "wrong_bytes"
    NO_INTEGRITY_RECORD = "no_integrity_record"  # the driver never stored this token, or its records are new
    BAD_HANDLE = "bad_handle"  # a descriptor that is not a regular file opened read-write
    UNREADABLE = "unreadable"  # the manifest is damaged
    UNSAFE = "unsafe"  # a symlink, a foreign owner, or open to other accounts
    CHANGED_WEIGHTS = "changed_weights"  # only as `save_failure`: the compiled weights are not those that the model's token names
    REFUSED_BY_DEVICE = "refused_by_device"  # verified, yet the engine could not load it
    BUSY = "busy"  # another process still compiles, reads or writes it
    TOO_SLOW = "too_slow"  # the cache did not answer within its part of the deadline
    SUPERSEDED = "superseded"  # a newer generation was published meanwhile
    TOO_LARGE = "too_large"  # more than the whole budget of the cache
    NO_SPACE = "no_space"
    NO_PERMISSION = "no_permission"
    IO_ERROR = "io_error"
    UNTRUSTED_BUILDER = "untrusted_builder"  # no key of the keyring may sign it
    BAD_SIGNATURE = "bad_signature"
    OTHER_FINGERPRINT = "other_fingerprint"  # signed for another device, or another version of the device
    REVOKED = "revoked"  # it was adopted, and the key that signed it is not trusted any more


class Refusal(msgspec.Struct, frozen=True):
    """Why something was not taken from, or not put into, a cache.

    Attributes:
        detail: what was found and what was expected.
        differs: as in `CacheOutcome`.
    """

    reason: MissReason
    detail: str = ""
    differs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


def refusal_of_os_error(error: OSError, doing: str) -> Refusal:
    """Return the refusal that an `OSError` stands for. ENOENT gets no special reason: a caller that expects a file handles ENOENT before.

    Args:
        doing: what failed; it begins the refusal's detail.
    """
    if error.errno in _NO_SPACE:
        reason = MissReason.NO_SPACE
    elif error.errno in _NO_PERMISSION:
        reason = MissReason.NO_PERMISSION
    elif error.errno == errno.ELOOP:
        reason = MissReason.UNSAFE
    else:
        reason = MissReason.IO_ERROR
    return Refusal(reason, f"{doing}: {error.strerror or error}")


class CacheOutcome(msgspec.Struct, frozen=True):
    """What the cache did for one step of a plan.

    Attributes:
        kind, reason: a MISS always has a reason, every other kind has None.
        device: the device of the step.
        detail: what was found and expected, in words.
        key: the entry's key (32 bytes), or empty if nothing was looked up.
        waited_s: seconds spent waiting for another compiler or reader of the same entry.
        saved_s: seconds of compilation that a HIT spared, as measured when it was stored.
        save_failure: why the new artifact was not stored. None if it was stored, or if there was nothing to store.
        differs: which parts of the key (`KeyParts`) differ from now, such as ("preference",). It is for a MISS while the same model is
            stored under another key. The stored key that differs least counts.
    """

    kind: CacheOutcomeKind
    reason: MissReason | None
    device: str
    detail: str = ""
    key: bytes = b""
    waited_s: float = 0.0
    saved_s: float = 0.0
    save_failure: Refusal | None = None
    differs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is CacheOutcomeKind.MISS) is (self.reason is None):
            raise CallerError(f"outcome {self.kind.name} with reason {self.reason}; a MISS needs a reason, any other kind needs None")

    @property
    def not_kept(self) -> Refusal | None:
        """Why the cache does not keep the compilation, so that the next start compiles it again. None if another process was quicker."""
        failure = self.save_failure
        return None if failure is None or failure.reason in (MissReason.BUSY, MissReason.SUPERSEDED) else failure
