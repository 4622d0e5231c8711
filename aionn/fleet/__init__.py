"""Compiled artifacts that travel between machines with a signature. Optional (`pip install aionn[fleet]`); nothing below imports it.

    keys      a builder's private key: made, kept in a file, and used to sign the entries of a cache
    adopting  has an open runtime take artifacts of other machines: one that the app has, or what a backend offers at each miss
    asking    an artifact store as the backend of a runtime
    pushing, pulling    the entries of a local cache, to a store and from it
    records   what the drivers' records say about the entries of a local cache
    artifact_store      files and statements in a store
    sweeping, checking  what `aionn fleet gc` and `aionn fleet verify` do
    models    models in a store, for machines that compile them
    judging   which statements of a store count
    places    the paths of objects in a store
    requests, addresses, errors    the object store below (obstore): requests with a time limit, its address, its errors as one class

What a driver checks lies below: `caching.statement` (the signed statement), `caching.keyring` (the keys that a user trusts).
"""

from aionn.caching.keyring import decode_public_key, encode_public_key, keyring_folder, read_keyring
from aionn.caching.offers import CompileBackend, CompileRequest, Offered
from aionn.caching.statement import Statement, claimed_statement, sign_statement, statement_of, verified_statement
from aionn.fleet.adopting import adopt, use_backend
from aionn.fleet.asking import StoreBackend
from aionn.fleet.errors import StoreError
from aionn.fleet.keys import BuilderKey
from aionn.graph.carrying import ModelFile
from aionn.hal.trust import Keyring, TrustedKey
from aionn.runtime.model import content_of

__all__ = [
    "BuilderKey",
    "CompileBackend",
    "CompileRequest",
    "Keyring",
    "ModelFile",
    "Offered",
    "Statement",
    "StoreBackend",
    "StoreError",
    "TrustedKey",
    "adopt",
    "claimed_statement",
    "content_of",
    "decode_public_key",
    "encode_public_key",
    "keyring_folder",
    "read_keyring",
    "sign_statement",
    "statement_of",
    "use_backend",
    "verified_statement",
]
