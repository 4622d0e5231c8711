"""What a driver remembers of the artifacts that it has adopted: records beside those of `integrity`, in a separate table.

A record holds the id of the builder's key that signed. It is believed only while the caller's keyring has that key and lets it sign for
this device. A key that is gone is revoked: the records of the token that it signed are removed. A keyring that could not be read, whose
folder is missing, or that was not sent, believes nothing and removes nothing.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.state import query, transaction
from aionn.hal.types import KEYRING_NEEDED

if TYPE_CHECKING:
    from aionn.hal.trust import Keyring

_KEPT = 4
"""So many adopted artifacts are remembered per token."""


def prepare_table(database: sqlite3.Connection) -> None:
    """Make the table, unless it is there."""
    database.execute(
        "CREATE TABLE IF NOT EXISTS adopted (number INTEGER PRIMARY KEY AUTOINCREMENT, token BLOB NOT NULL, digests BLOB NOT NULL, "
        "key_id BLOB NOT NULL, UNIQUE (token, digests, key_id))"
    )
    database.execute("SELECT number, token, digests, key_id FROM adopted LIMIT 1")


def note_adopted(database: sqlite3.Connection, token: bytes, digests: bytes, key_id: bytes) -> None:
    """Remember an adopted artifact, in the caller's transaction. A few newest of its token are kept."""
    database.execute("INSERT OR REPLACE INTO adopted (token, digests, key_id) VALUES (?, ?, ?)", (token, digests, key_id))
    database.execute(
        "DELETE FROM adopted WHERE token = ? AND number NOT IN (SELECT number FROM adopted WHERE token = ? ORDER BY number DESC LIMIT ?)",
        (token, token, _KEPT),
    )


def believed(database: sqlite3.Connection, token: bytes, device: str, encoded_keyring: bytes) -> dict[bytes, bytes] | Refusal:
    """Return what was adopted under a token and is believed now: digests, and the id of the key that signed them. Or why none is.

    Records of revoked keys are removed, if the database can be written to. The result is empty if nothing was adopted.
    """
    rows = query(database, "SELECT digests, key_id FROM adopted WHERE token = ? ORDER BY number DESC", (token,))
    records = [(digests, key_id) for digests, key_id in rows if isinstance(digests, bytes) and isinstance(key_id, bytes)]
    if not records:
        return {}
    if not encoded_keyring:
        return Refusal(MissReason.UNTRUSTED_BUILDER, KEYRING_NEEDED)
    from aionn.hal.trust import decode_keyring  # most drivers have adopted nothing

    keyring = decode_keyring(encoded_keyring)
    if keyring.fault:
        return Refusal(MissReason.UNSAFE, f"it was adopted, and no builder is trusted now: {keyring.fault}")
    if keyring.missing:
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"it was adopted, and no builder is trusted now: there is no folder {keyring.missing}")
    trusted = {key_id for _, key_id in records if _may_sign(keyring, key_id, device)}
    revoked = {key_id for _, key_id in records} - trusted
    if revoked:
        try:
            with transaction(database):
                database.executemany("DELETE FROM adopted WHERE token = ? AND key_id = ?", [(token, key_id) for key_id in revoked])
        except sqlite3.OperationalError:
            pass  # the database cannot be written to now, and the records are not believed anyway
    if not trusted:
        keys = ", ".join(sorted(key_id.hex()[:16] for key_id in revoked))
        return Refusal(MissReason.REVOKED, f"it was adopted, and key {keys} is not trusted any more for device {device!r}")
    return {digests: key_id for digests, key_id in reversed(records) if key_id in trusted}


def _may_sign(keyring: Keyring, key_id: bytes, device: str) -> bool:
    key = keyring.find(key_id)
    return key is not None and key.allows(device)
