"""Compilation caching that can be trusted: artifacts are stored whole or not at all, and used only if the driver that made them says so.

    app's process                                        driver's process
    token      the key: 32 bytes for one compilation     integrity   which bytes this driver stored under a key
    store      entries, locks, budget; files' only room  blob_cache  bytes by bytes, for a driver's own small things
               manifest  what was stored, reason to miss state       a private directory for both
    outcomes   what happened, as a value (both sides)
    measurements  what a comparison of stages measured

Who guards what. The store guards the *entry*: one generation of all its files or none, across crashes, full disks and many
processes; one compiles, the others wait. It believes in no byte of a file. The driver guards the *bytes*: it remembers in its own private
place the digest of every buffer it ever stored, copies a file before it checks it, and uses what it checked. So a directory that
somebody else wrote to can cost a compilation, and nothing more. A cache that fails is a `Refusal`, and on `compilation.outcomes` a
`CacheOutcome`; never an exception.

A hit:    store.glance -> Hit -> prepare_model_from_cache(hit.handles) -> integrity.load -> engine.load(verified bytes)
A miss:   store.open -> Miss -> prepare_model(model, publisher.handles) -> integrity.save -> publisher.publish()
Refused:  hit.refuse(why) -> Miss, as above.

This module is the face for `runtime`; drivers import `integrity` and `blob_cache` themselves, so that an app never loads them.
"""

from aionn.caching.manifest import Wanted
from aionn.caching.measurements import OutputDifference, StageMeasurement
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.token import KeyParts, changed_parts, encode_parts, encoded_keys, entry_key, family_key

__all__ = [
    "CacheOutcome",
    "CacheOutcomeKind",
    "KeyParts",
    "MissReason",
    "OutputDifference",
    "Refusal",
    "StageMeasurement",
    "Wanted",
    "changed_parts",
    "encode_parts",
    "encoded_keys",
    "entry_key",
    "family_key",
]
