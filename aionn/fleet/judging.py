"""Which statements of a store are accepted: they lie at their own path and, where it matters, a trusted key has signed them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.statement import Statement, claimed_statement, verified_statement
from aionn.fleet.artifact_store import FilesOf
from aionn.fleet.places import StatementPlace, fingerprint
from aionn.hal.trust import Keyring


def place_of(statement: Statement) -> StatementPlace:
    """Return where a statement lies in a store."""
    return StatementPlace(statement.key, fingerprint(statement.device, statement.device_version), statement.key_id)


def statement_at(place: StatementPlace, signed: bytes, keyring: Keyring | None = None) -> Statement | Refusal:
    """Return the statement that lies at a place, or why it does not belong there.

    Args:
        keyring: whose keys may have signed it. None: the signature is not checked, so nothing may be
            adopted because of this statement.
    """
    found = claimed_statement(signed) if keyring is None else verified_statement(signed, keyring, time.time())
    if isinstance(found, Statement) and place_of(found) != place:
        return Refusal(MissReason.WRONG_TOKEN, f"the statement belongs at {place_of(found).path}")
    return found


def claimed_files(place: StatementPlace, signed: bytes) -> Sequence[StoredFile] | Refusal:
    """Return the files that a statement names, and do not check the signature. For sweeping."""
    found = statement_at(place, signed)
    return found if isinstance(found, Refusal) else found.files


def trusted_files(keyring: Keyring) -> FilesOf:
    """Return a judge that accepts only what a key of the keyring has signed."""

    def judge(place: StatementPlace, signed: bytes) -> Sequence[StoredFile] | Refusal:
        found = statement_at(place, signed, keyring)
        return found if isinstance(found, Refusal) else found.files

    return judge
