"""`aionn fleet`: make a key, push a cache, pull into a cache, verify a store, sweep a store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

import aionn
from aionn.caching.outcomes import Refusal
from aionn.cli.printing import NotDoneError, UsageError, counted, digest, entries, print_json, print_table, say, size

try:
    import cryptography  # noqa: F401 -- signatures need it, and nothing imports it before the first one

    from aionn.fleet.requests import open_address
except ImportError as error:
    raise UsageError("aionn fleet needs obstore and cryptography; install them with: pip install 'aionn[fleet]'") from error

from aionn.fleet import BuilderKey, encode_public_key, keyring_folder, read_keyring
from aionn.fleet.artifact_store import ArtifactStore, claimed_files, trusted_files
from aionn.fleet.asking import PATIENCE_S
from aionn.fleet.pulling import EntryPushed, Pulled, pull_cache, push_cache
from aionn.fleet.sweeping import Checked, SweepReport, check_store, sweep

_WORK_PATIENCE_S = 30.0
"""Seconds without an answer after which a command that only works on a store gives up. A start of an app does not wait for these."""


def make_key(path: str, name: str, devices: Sequence[str], days: int | None, as_json: bool) -> None:
    """Make a key, and write both of its files.

    Raises:
        CallerError: a file exists, or cannot be written.
    """
    key = BuilderKey.generate(name)
    not_after_s = None if days is None else time.time() + days * 86400.0
    public = msgspec.structs.replace(key.public, devices=tuple(devices), not_after_s=not_after_s)
    try:
        content = encode_public_key(public)  # before a file is made
    except (OverflowError, ValueError) as error:
        raise UsageError(f"--days {days}: such a date cannot be written") from error
    public_path = f"{path}.pub"
    if os.path.lexists(public_path):
        raise UsageError(f"{public_path!r} exists already; give another path, or remove the old key first")
    key.save(path)
    # With a umask of 002 the group could write to it otherwise, and no keyring takes such a file.
    with open(os.open(public_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(content)
    if as_json:
        print_json({"key": path, "public": public_path, "id": public.id.hex(), "name": name})
        return
    print(f"private key {path}: keep it where only the builder can read it")
    print(f"public key {public_path}: copy it to {keyring_folder() or '~/.config/aionn/trusted_builders'} of each machine that pulls")


def push_entries(cache_dir: str, url: str, key_path: str, state_dir: str | None, as_json: bool) -> None:
    """Push a cache, and print what became of each entry.

    Raises:
        NotDoneError: an entry was not signed.
        StoreError: the store cannot be used.
    """
    if not Path(cache_dir, "entries").is_dir():
        raise UsageError(f"there is no cache directory {cache_dir!r}; give the cache_dir of an app or of aionn compile")
    key = BuilderKey.load(key_path)
    store = ArtifactStore(open_address(url, patience_s=_WORK_PATIENCE_S, make=True))

    async def push() -> list[EntryPushed]:
        return await push_cache(cache_dir, store, key, state_dir=state_dir)

    done = aionn.run(push)
    if as_json:
        print_json([_entry(one.key, one.device, one.size_bytes, one.refusal) | {"state": _push_state(one)} for one in done])
    else:
        rows = [(digest(one.key), one.device or "?", size(one.size_bytes), _push_state(one), _detail(one.refusal)) for one in done]
        print_table(f"{entries(len(done))} of {cache_dir}", ["entry", "device", "size>", "state", "detail"], rows)
    refused = sum(one.refusal is not None for one in done)
    if refused:
        raise NotDoneError(f"{entries(refused)} of {len(done)} not signed; compile these models again on this machine, then push")


def _push_state(one: EntryPushed) -> str:
    if one.pushed is not None:
        return one.pushed.value
    return "adopted from another builder" if one.refusal is None else "not signed"


def pull_entries(url: str, cache_dir: str, devices: Sequence[str] | None, state_dir: str | None, as_json: bool) -> None:
    """Pull into a cache, and print what became of each artifact.

    Raises:
        NotDoneError: an artifact was refused.
        StoreError: the store cannot be used.
    """
    store = ArtifactStore(open_address(url, patience_s=PATIENCE_S))

    async def pull() -> Pulled:
        return await pull_cache(store, cache_dir, devices=devices, state_dir=state_dir)

    pulled = aionn.run(pull)
    done = pulled.entries
    states = ["refused" if one.refusal is not None else "present" if one.present else "adopted" for one in done]
    if as_json:
        rows = [
            _entry(one.key, one.device, one.size_bytes, one.refusal) | {"builder": one.builder, "state": state}
            for one, state in zip(done, states, strict=True)
        ]
        print_json({"artifacts": rows, "others": pulled.others, "fingerprints": pulled.fingerprints})
    else:
        print_table(
            f"{len(done)} for this machine, {pulled.others} for others",
            ["entry", "device", "builder", "size>", "state", "detail"],
            [
                (digest(one.key), one.device, one.builder, size(one.size_bytes), state, _detail(one.refusal))
                for one, state in zip(done, states, strict=True)
            ],
        )
    refused = states.count("refused")
    if refused:
        raise NotDoneError(f"{refused} of {len(done)} artifacts refused; an app compiles these models itself")


def _entry(key: bytes, device: str, size_bytes: int, refusal: Refusal | None) -> dict[str, Any]:
    why = None if refusal is None else {"reason": refusal.reason.value, "detail": refusal.detail}
    return {"key": key.hex(), "device": device, "size_bytes": size_bytes, "refusal": why}


def _detail(refusal: Refusal | None) -> str:
    return "" if refusal is None else str(refusal)


def verify_store(url: str, remove: bool, as_json: bool) -> None:
    """Check a store, and print the objects that no machine could use.

    Raises:
        NotDoneError: there is such an object.
        StoreError: the store cannot be used.
    """
    keyring = read_keyring()
    if keyring.fault:
        raise UsageError(f"{keyring.fault}; verify needs a keyring that is safe, or none")
    store = ArtifactStore(open_address(url, patience_s=_WORK_PATIENCE_S))

    async def check() -> Checked:
        return await check_store(store, trusted_files(keyring) if keyring.keys else claimed_files, remove=remove)

    found = aionn.run(check)
    if as_json:
        bad = [{"path": one.path, "reason": one.reason.value, "detail": one.detail} for one in found.bad]
        print_json(asdict(found) | {"bad": bad, "signatures": bool(keyring.keys)})
    else:
        if not keyring.keys:
            say("signatures were not checked, because no builder is trusted here")
        if found.bad:
            print_table("", ["object", "reason", "detail"], [(one.path, one.reason.value, one.detail) for one in found.bad])
        unnamed = f", {found.unnamed} of them named by no statement" if found.unnamed else ""
        files = f"{counted(found.files, 'file')}{unnamed}, {counted(found.models, 'model')}, {size(found.size_bytes)}"
        print(f"{counted(found.statements, 'statement')}, {files}")
    if found.bad:
        count = len({one.path for one in found.bad})
        ending = "--remove removes them, and the next push or compile writes them again"
        if remove:
            others = f", and {count - found.removed} not, because another process has replaced, repaired or removed them meanwhile"
            ending = f"{found.removed} removed{others if count > found.removed else ''}"
        raise NotDoneError(f"artifact store {url}: {count} objects could not serve; {ending}")


def sweep_store(url: str, keep_s: float, max_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Sweep a store, and print what was removed.

    Raises:
        StoreError: the store cannot be used.
    """
    store = ArtifactStore(open_address(url, patience_s=_WORK_PATIENCE_S))

    async def sweep_it() -> SweepReport:
        return await sweep(store, claimed_files, keep_s=keep_s, max_bytes=max_bytes, dry_run=dry_run)

    report = aionn.run(sweep_it)
    if as_json:
        print_json(asdict(report) | {"dry_run": dry_run})
        return
    would = "would be " if dry_run else ""
    over = f"; {size(report.over_bytes)} beyond the budget are younger than a day" if report.over_bytes else ""
    files = counted(report.files + report.models + report.staging, "file")
    removed = f"{counted(report.statements, 'statement')} and {files} {would}removed, {size(report.freed_bytes)} {would}freed"
    print(f"{removed}; {counted(report.kept, 'statement')} kept, {size(report.kept_bytes)}{over}")
