"""The app's side of the compilation cache; the only room that touches the cache directory.

    CacheStore.open(wanted) -> Hit       whole entry, files open, held shared        -> prepare_model_from_cache
                               Miss      with a Publisher: the right to compile it   -> prepare_model, then publish
                               Declined  the device does not cache this model        -> prepare_model without handles

`cache` holds the three workflows, `entries` what they hand out, `directory` every file operation, `locks` who may do what, `index`
what goes first, `housekeeping` budget, listing, verification and pruning, `hop` the way off the event loop.

Why a reader never sees half an entry: files lie in a directory of their own generation, written before any manifest names them and never
after; the manifest is replaced by one rename, on disk after its files are. A process may die between any two acts: before the rename the
entry is the old one, after it the new one, and what nobody names is swept by the next who compiles or tidies up.
"""

from aionn.caching.store.cache import DEFAULT_MAX_BYTES, CacheStore
from aionn.caching.store.entries import Declined, Hit, Miss, Publisher
from aionn.caching.store.housekeeping import BadEntry, EntryInfo, PruneReport

__all__ = ["DEFAULT_MAX_BYTES", "BadEntry", "CacheStore", "Declined", "EntryInfo", "Hit", "Miss", "PruneReport", "Publisher"]
