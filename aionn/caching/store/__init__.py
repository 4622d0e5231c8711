"""The app's side of the compilation cache, and the only package that touches the cache directory.

    CacheStore.open(wanted) -> Hit       whole entry, files open, held shared        -> prepare_model_from_cache
                               Miss      with a Publisher: the right to compile it   -> prepare_model, then publish
                               Declined  the device does not cache this model        -> prepare_model without handles

    cache         CacheStore, the face; opens an entry, and waits for another compiler of it
    looking       the blocking part of opening: look, take the right to compile, stage files
    background    threads that go on after their caller has left
    entries       what opening returns: Hit, Miss, Declined, Publisher
    housekeeping  finds or makes the directory, tidies it, keeps it within its budget
    listing, verifying, pruning    what `aionn cache` asks for
    index         which entry is evicted first
    remembered    plans of models that were cut, stage measurements and use counts
    history       the same, in the index's file
    index_database    the index's file
    directory     where everything lies, how entries are found
    writing       how entries are made, switched and removed
    files         files and descriptors in the directory: owner, digest, removal
    lending       opens cache files once more, for a driver that writes them
    locks         who may read, publish and compile an entry

A reader never sees half an entry, for these reasons. Files lie in the directory of one generation. They are written before a manifest names
them, and never after. One rename replaces the manifest, when its files are on disk. A process may die between any two acts. Before the
rename the entry is the old one, and after the rename it is the new one. The next process that compiles or tidies up removes files that no
manifest names.
"""

from aionn.caching.store.cache import DEFAULT_MAX_BYTES, CacheStore
from aionn.caching.store.entries import Declined, Hit, Miss, Publisher
from aionn.caching.store.listing import EntryInfo
from aionn.caching.store.pruning import PruneReport
from aionn.caching.store.verifying import BadEntry

__all__ = ["DEFAULT_MAX_BYTES", "BadEntry", "CacheStore", "Declined", "EntryInfo", "Hit", "Miss", "PruneReport", "Publisher"]
