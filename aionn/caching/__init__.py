"""Compilation caching that can be trusted. Artifacts are stored whole or not at all.

A driver accepts only artifacts that it has made itself, and those that a trusted builder has signed.

    app's process                                        driver's process
    token      the key: 32 bytes for one compilation     integrity   which bytes this driver stored under a key
    store      entries, locks, budget, all file access   artifact_files  reads and writes the files that the app gave
               manifest  what was stored, reason to miss blob_cache  a small map from bytes to bytes, for engines
    keyring    the builders' keys that a user trusts     adopting    the checks before an artifact of another machine is believed
    offers     what another machine has compiled         statement  what a builder signs of an artifact, and the check of it
    outcomes   what happened, as a value (both sides)    state       databases in a private folder, for both
    measurements  what a comparison of stages measured   private_folder  that folder, and that of temporary files of an engine

The store guards the *entry*: one generation of all its files or none, across crashes, full disks and many processes. One process compiles
and the others wait. The store trusts no byte of a file. The driver guards the *bytes*. It remembers the digest of every buffer it ever
stored, in a private place. It copies a file before it checks the copy, and then uses the copy. So a process that writes to the cache
directory can cost a compilation, and nothing more. A cache that fails gives a `Refusal`,
and a `CacheOutcome` on `compilation.outcomes`. It never raises an exception.

A hit:    store.open_now -> Hit -> prepare_model_from_cache(hit.handles) -> integrity.verify -> engine.load(verified bytes)
A miss:   store.open -> Miss -> prepare_model(model, publisher.handles) -> integrity.save -> publisher.publish()
Refused:  hit.reopen_as_miss(why) -> Miss, as above.
Adopted:  store.open -> Miss -> adopt(offer) -> adopting.verify_offer -> engine.load -> adopted record -> publisher.publish()

This module is the face for `runtime`. A name is imported when it is first asked for, because a driver needs few of them. Drivers import
`integrity` and `blob_cache` themselves, so an app never loads them.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.caching.manifest import Wanted
    from aionn.caching.measurements import OutputDifference, StageMeasurement
    from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
    from aionn.caching.token import KeyParts, encoded_keys

__all__ = [
    "CacheOutcome",
    "CacheOutcomeKind",
    "KeyParts",
    "MissReason",
    "OutputDifference",
    "Refusal",
    "StageMeasurement",
    "Wanted",
    "encoded_keys",
]

if not _typing.TYPE_CHECKING:
    _NAMES = {
        "manifest": "Wanted",
        "measurements": "OutputDifference StageMeasurement",
        "outcomes": "CacheOutcome CacheOutcomeKind MissReason Refusal",
        "token": "KeyParts encoded_keys",
    }
    __getattr__ = _imported_when_asked(
        __name__, {name: f"aionn.caching.{module}" for module, names in _NAMES.items() for name in names.split()}
    )
