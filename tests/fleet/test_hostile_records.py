"""What a driver that a model has taken over can do to the commands that read its records. They have all rights of the user."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from aionn.caching.integrity import IntegrityStore
from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import device_folder
from aionn.caching.state import device_database
from aionn.fleet import BuilderKey, pulling
from aionn.fleet.pulling import Vouched, vouched_files
from aionn.hal import CacheFiles
from tests.fleet.signed import DEVICE, Driver, Made, keyring, limited, make, opened, small_model

ENGINE = "fake"
_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # begins and ends a rollback journal of SQLite
_PENDING_BYTE, _PAGE_BYTES = 0x40000000, 4096


@pytest.fixture(autouse=True)
def no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIONN_FAKE_DEVICE", raising=False)


def journal_that_removes(path: Path) -> bytes:
    """A rollback journal that belongs to a transaction over several databases. To end it, SQLite removes the file that lists these."""
    name = str(path).encode()
    head = (_JOURNAL + struct.pack(">5I", 0, 0, 1, 512, _PAGE_BYTES)).ljust(512, b"\0")
    checksum = sum(name) & 0xFFFFFFFF
    return head + struct.pack(">I", _PENDING_BYTE // _PAGE_BYTES + 1) + name + struct.pack(">2I", len(name), checksum) + _JOURNAL


def manifest_of(made: Made) -> Manifest:
    shared = {field: getattr(made.statement, field) for field in Manifest.__struct_fields__ if hasattr(made.statement, field)}
    return Manifest(**shared | {"format": 1, "directory": "0" * 16, "generation": 1})


def looked_at(made: Made, state: Path, keys: bytes) -> Vouched | Refusal:
    with opened(made.paths, made.statement.key) as handles:
        return vouched_files(manifest_of(made), handles, state, keys)


@pytest.mark.parametrize("log", [False, True])
def test_a_hostile_journal_beside_the_records_removes_no_file_of_the_user(tmp_path: Path, log: bool) -> None:
    key = BuilderKey.generate("ci")
    made = make(tmp_path / "builder", small_model(), key, device=ENGINE)
    folder = Path(device_folder(tmp_path / "state", ENGINE))
    folder.mkdir(parents=True, mode=0o700)
    driver = Driver(folder)
    driver.artifacts = type(driver.artifacts)(driver.engine, folder, ENGINE)
    driver.adopt(made.statement, made.signed(key), made.paths, keyring(key.public))
    driver.artifacts.close()
    database = device_database(folder, "integrity", ENGINE, "1")
    precious = tmp_path / "precious"
    precious.write_text("of the user")
    Path(f"{database}-journal").write_bytes(journal_that_removes(precious))
    if log:
        Path(f"{database}-wal").write_bytes(b"")
    looked_at(made, tmp_path / "state", keyring(key.public))
    assert precious.read_text() == "of the user"
    # The journal is a working one: a store that may write follows it.
    IntegrityStore(ENGINE, "1", CacheFiles(1, 1), state_directory=folder).close()
    assert not precious.exists()


def test_looking_at_records_removes_none_and_knows_the_device_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's name of a device is what a key is limited to, and not the name of its engine."""
    key = BuilderKey.generate("ci")
    made = make(tmp_path / "builder", small_model(), key)
    folder = Path(device_folder(tmp_path / "state", DEVICE))
    folder.mkdir(parents=True, mode=0o700)
    keys = limited(key, devices=(DEVICE,))
    with Driver(folder) as driver:
        driver.adopt(made.statement, made.signed(key), made.paths, keys)
    monkeypatch.setattr(pulling, "installed_engines", lambda: {ENGINE: ENGINE})
    found = looked_at(made, tmp_path / "state", keys)
    assert isinstance(found, Vouched)
    assert found.key_id == key.public.id
    refused = looked_at(made, tmp_path / "state", limited(key, devices=(ENGINE,)))
    assert isinstance(refused, Refusal)
    assert refused.reason is MissReason.REVOKED
    with Driver(folder) as driver:
        driver.load(made.statement, made.paths, keys)  # only the driver itself removes a record
