"""The app's side of the compilation cache, and the only package that touches the cache directory.

    CacheStore.open(wanted) -> Hit       whole entry, files open, held shared        -> prepare_model_from_cache
                               Miss      with a Publisher: the right to compile it   -> prepare_model, then publish
                               Declined  the device does not cache this model        -> prepare_model without handles

    cache         CacheStore, the face; opens an entry, and waits for another compiler of it
    opening       what opening returns (Hit, Miss, Declined, Publisher), and its blocking part (Look)
    housekeeping  finds or makes the directory, tidies it, keeps it within its budget; lists, verifies and prunes it
    index         the index's file: which entry is evicted first; plans of models that were cut, stage measurements, use counts
    directory     where everything lies, how entries are found, how files are opened and checked, also for a driver
    writing       how entries are made, switched and removed
    locks         who may read, publish and compile an entry

A reader never sees half an entry, for these reasons. Files lie in the directory of one generation. They are written before a manifest names
them, and never after. One rename replaces the manifest, when its files are on disk. A process may die between any two acts. Before the
rename the entry is the old one, and after the rename it is the new one. The next process that compiles or tidies up removes files that no
manifest names.
"""

from aionn.caching.store.cache import DEFAULT_MAX_BYTES, CacheStore
from aionn.caching.store.housekeeping import BadEntry, EntryInfo, PruneReport
from aionn.caching.store.opening import Declined, Hit, Miss, Publisher

__all__ = ["DEFAULT_MAX_BYTES", "BadEntry", "CacheStore", "Declined", "EntryInfo", "Hit", "Miss", "PruneReport", "Publisher"]
