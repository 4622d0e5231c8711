"""Compiled artifacts that travel between machines with a signature. Optional: `pip install aionn[fleet]`. No package below imports it.

A *builder* compiles, and signs a *statement* about each artifact. An *artifact store* keeps both. The driver of another machine *adopts*
the artifact: it checks the statement with the public keys of its user (the *keyring*), and then loads the files like its own.

    adopting            `adopt` and `use_backend`: an open runtime takes one artifact, or asks a backend at each miss
    asking              `StoreBackend`: an artifact store as the backend of a runtime
    keys                `BuilderKey`: a private key in a file, which signs the entries of a cache

    pulling             `aionn fleet push` and `pull`: from a local cache to a store, and back, by the drivers' records
    sweeping            `aionn fleet gc` and `verify`

    folders             files of a local store, without symlinks and without waiting
    artifact_store      files and statements in a store, and which statements are accepted
    models              models in a store, for machines that compile them (`aionn.ray.Farm`)
    places              the paths of objects in a store
    requests            object stores (obstore): opened by their address, and asked with a time limit; their errors as one class

What drivers need lies in `aionn.caching`: `statement` (the signed statement), `keyring` (the keys that a user trusts).
"""

from aionn.caching.keyring import decode_public_key, encode_public_key, keyring_folder, read_keyring
from aionn.caching.offers import ArtifactRequest, CompileBackend, Offered
from aionn.caching.statement import Statement, claimed_statement, sign_statement, statement_of, verified_statement
from aionn.fleet.adopting import adopt, use_backend
from aionn.fleet.asking import StoreBackend
from aionn.fleet.keys import BuilderKey
from aionn.fleet.requests import StoreError
from aionn.graph.digest import ModelFile
from aionn.hal.trust import Keyring, TrustedKey
from aionn.runtime.model import content_of

__all__ = [
    "ArtifactRequest",
    "BuilderKey",
    "CompileBackend",
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
