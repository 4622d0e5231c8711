"""What a driver checks before it believes an artifact of another machine.

The order of the steps makes it safe. The signature is verified before anything of the statement is parsed. The statement is compared with
what the caller wants and with what this driver is. Then the files are copied into a private buffer, *that buffer* is digested and compared
with the statement, and the engine loads *that buffer*. The record is written last. So an adoption that ends early leaves
nothing that is believed.

Blocking; call it in a thread.
"""

from __future__ import annotations

import hmac
import os

import msgspec

from aionn.caching.artifact_files import check_descriptors, read_private, record_of
from aionn.caching.manifest import file_names
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.statement import Statement, verified_statement
from aionn.file_ranges import ShortFileError
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.trust import decode_keyring
from aionn.hal.types import CacheFiles


class Expected(msgspec.Struct, frozen=True):
    """What a statement must say.

    Attributes:
        key, model_digest: of the entry and the model that the caller wants.
        device, device_version: this driver's.
        files: how many cache files the engine has.
    """

    key: bytes
    model_digest: bytes
    device: str
    device_version: str
    files: CacheFiles


class Offer(msgspec.Struct, frozen=True):
    """An artifact whose bytes are those that a trusted builder has signed.

    Attributes:
        artifact: private copies of the files. Their digests are those of the statement.
    """

    statement: Statement
    artifact: Artifact

    @property
    def digests(self) -> bytes:
        """What is recorded of the artifact, as `integrity.Verified.digests`."""
        files = self.statement.files
        return record_of([file.length for file in files], [file.digest for file in files])


def verify_offer(signed: bytes, handles: CacheHandles, expected: Expected, now_s: float) -> Offer | Refusal:
    """Return the offered artifact if it is what the caller wants, and a trusted builder has signed it, or why not.

    Args:
        handles: descriptors that are open for reading, and the keyring.
        now_s: seconds since the epoch.
    """
    statement = verified_statement(signed, decode_keyring(handles.keyring), now_s)
    if isinstance(statement, Refusal):
        return statement
    if refusal := _unexpected(statement, expected):
        return refusal
    fds = (*handles.model, *handles.data)
    if CacheFiles(len(handles.model), len(handles.data)) != expected.files:
        return Refusal(MissReason.WRONG_FILES, f"{len(handles.model)} + {len(handles.data)} files were offered, expected {expected.files}")
    if refusal := check_descriptors(fds, "read"):
        return refusal
    names, lengths = file_names(expected.files), [file.length for file in statement.files]
    try:
        for name, fd, length in zip(names, fds, lengths, strict=True):
            # Before reading anything: a file that was made huge must not cost its size in memory.
            if (found := os.fstat(fd).st_size) != length:
                return Refusal(MissReason.WRONG_LENGTH, f"file {name} has {found} bytes, {length} were signed")
        copies, digests = read_private(fds, lengths)
    except ShortFileError as error:
        return Refusal(MissReason.WRONG_BYTES, f"a file was cut while it was read ({error})")
    except OSError as error:
        return refusal_of_os_error(error, "reading the offered files")
    except MemoryError:
        return Refusal(MissReason.IO_ERROR, "there is not enough memory for a private copy of the offered files")
    for name, file, digest in zip(names, statement.files, digests, strict=True):
        if not hmac.compare_digest(file.digest, digest):
            return Refusal(MissReason.WRONG_BYTES, f"the content of file {name} is not what was signed")
    models = expected.files.model
    return Offer(statement, Artifact(tuple(copies[:models]), tuple(copies[models:])))


def _unexpected(statement: Statement, expected: Expected) -> Refusal | None:
    if statement.device != expected.device or statement.device_version != expected.device_version:
        signed, here = (statement.device, statement.device_version), (expected.device, expected.device_version)
        return Refusal(MissReason.OTHER_FINGERPRINT, f"signed for {signed[0]!r} {signed[1]!r}, this is {here[0]!r} {here[1]!r}")
    if statement.model_digest != expected.model_digest:
        signed_for, wanted = statement.model_digest.hex()[:16], expected.model_digest.hex()[:16]
        return Refusal(MissReason.OTHER_MODEL, f"signed for model {signed_for}, wanted {wanted}")
    if statement.key != expected.key:
        return Refusal(MissReason.WRONG_TOKEN, f"signed for entry {statement.key.hex()[:16]}, wanted {expected.key.hex()[:16]}")
    signed_files = CacheFiles(len(statement.model), len(statement.data))
    if signed_files != expected.files:
        return Refusal(MissReason.WRONG_FILES, f"{signed_files} were signed, the device has {expected.files}")
    return None
