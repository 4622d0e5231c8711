"""Row F4: nothing but what a trusted builder has signed for this entry reaches the engine. The faults are enumerated, not drawn."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aionn.caching import MissReason, adopting
from aionn.caching.artifact_files import read_private
from aionn.caching.integrity import IntegrityStore
from aionn.caching.statement import DOMAIN, sign_statement
from aionn.caching.token import decode_parts, device_token, encoded_keys
from aionn.driver.device import EngineDevice
from aionn.driver.sharing import identity_of_stored
from aionn.errors import CallerError, CompilationError
from aionn.fleet import BuilderKey, Keyring
from aionn.hal import CacheFiles, CompileOptions, ExecutionPreference, Model, PrepareOptions
from aionn.hal.trust import decode_keyring, encode_keyring
from aionn.hal.types import KEYRING_NEEDED
from tests.fleet.signed import DEVICE, Driver, Made, RecordingEngine, keyring, limited, make, opened, small_model

_HEAD = 32 + 64


@pytest.fixture(autouse=True)
def no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIONN_FAKE_DEVICE", raising=False)


@pytest.fixture(scope="module")
def key() -> BuilderKey:
    return BuilderKey.generate("ci")


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.fixture
def made(tmp_path: Path, model: Model, key: BuilderKey) -> Made:
    return make(tmp_path / "builder", model, key)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with Driver(tmp_path / "state") as driver:
        yield driver


def refusal(error: CompilationError) -> MissReason:
    return MissReason(error.reason.partition(":")[0])


@dataclass
class Case:
    """One mutation: what is offered, and why it must be refused."""

    what: str
    reason: MissReason | set[MissReason]
    signed: bytes
    paths: tuple[Path, ...]
    keys: bytes


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes((content[at] ^ (1 << bit),)) + content[at + 1 :]


def _spread(length: int, count: int) -> list[int]:
    return sorted({index * (length - 1) // (count - 1) for index in range(count)})


def _cases(folder: Path, made: Made, other: Made, key: BuilderKey, stranger: BuilderKey, elsewhere: Made) -> Iterator[Case]:
    good, keys = made.signed(key), keyring(key.public)
    numbers = iter(range(10_000))

    def file(content: bytes) -> Path:
        path = folder / f"file{next(numbers)}"
        path.write_bytes(content)
        return path

    def case(what: str, reason: MissReason | set[MissReason], *, signed: bytes = good, paths: tuple[Path, ...] = made.paths) -> Case:
        return Case(what, reason, signed, paths, keys)

    # flips: in the key id, the signature, the body, and in either file
    for at in _spread(32, 12):
        yield case(f"key id, byte {at}", MissReason.UNTRUSTED_BUILDER, signed=flipped(good, at, at % 8))
    for at in _spread(64, 32):
        yield case(f"signature, byte {at}", MissReason.BAD_SIGNATURE, signed=flipped(good, 32 + at, at % 8))
    for at in _spread(len(good) - _HEAD, 70):
        yield case(f"statement, byte {at}", MissReason.BAD_SIGNATURE, signed=flipped(good, _HEAD + at, at % 8))
    contents = [path.read_bytes() for path in made.paths]
    for number, content in enumerate(contents):
        for at in _spread(len(content), 25):
            changed = list(made.paths)
            changed[number] = file(flipped(content, at, at % 8))
            yield case(f"file {number}, byte {at}", MissReason.WRONG_BYTES, paths=tuple(changed))
    # truncated and appended
    for length in (0, 1, 31, 32, 95, _HEAD, _HEAD + 1, len(good) // 2, len(good) - 1):
        yield case(f"statement cut to {length}", {MissReason.BAD_SIGNATURE, MissReason.UNTRUSTED_BUILDER}, signed=good[:length])
    yield case("statement with a tail", MissReason.BAD_SIGNATURE, signed=good + b"\0")
    yield case("a huge statement", MissReason.BAD_SIGNATURE, signed=good + bytes(1 << 20))
    for number, content in enumerate(contents):
        for what, changed_content in (
            ("cut", content[:-1]),
            ("empty", b""),
            ("longer", content + b"\0"),
            ("half", content[: len(content) // 2]),
        ):
            if len(changed_content) == len(content):
                continue
            changed = list(made.paths)
            changed[number] = file(changed_content)
            yield case(f"file {number} {what}", MissReason.WRONG_LENGTH, paths=tuple(changed))
    # swapped and replayed
    yield case("files swapped", {MissReason.WRONG_LENGTH, MissReason.WRONG_BYTES}, paths=made.paths[::-1])
    yield case("one file twice", MissReason.BAD_HANDLE, paths=(made.paths[0], made.paths[0]))
    yield case("a folder as a file", MissReason.BAD_HANDLE, paths=(folder, made.paths[1]))
    yield case("files of another artifact", {MissReason.WRONG_BYTES, MissReason.WRONG_LENGTH}, paths=other.paths)
    mixed = (other.paths[0], made.paths[1])
    yield case("one file of another artifact", {MissReason.WRONG_BYTES, MissReason.WRONG_LENGTH}, paths=mixed)
    replayed = other.signed(key)
    yield case("another artifact replayed whole", MissReason.OTHER_MODEL, signed=replayed, paths=other.paths)
    yield case("another statement for these files", MissReason.OTHER_MODEL, signed=replayed)
    yield case("head of one, body of another", MissReason.BAD_SIGNATURE, signed=good[:_HEAD] + replayed[_HEAD:])
    yield case("signature of another", MissReason.BAD_SIGNATURE, signed=good[:32] + replayed[32:_HEAD] + good[_HEAD:])
    # signed by a trusted builder, yet for another device, version, model or entry
    yield case("other version", MissReason.OTHER_FINGERPRINT, signed=elsewhere.signed(key), paths=elsewhere.paths)
    parts = encoded_keys(msgspec.structs.replace(decode_parts(made.statement.parts), device="other:Engine"))
    other_device = {"parts": parts.encoded, "key": parts.entry, "family": parts.family, "device": "other:Engine"}
    yield case("other device", MissReason.OTHER_FINGERPRINT, signed=made.signed(key, **other_device))
    lies = {"model_digest": bytes(32), "model": made.statement.model * 2, "data": (), "model ": made.statement.model[:0]}
    for field, value in lies.items():
        reason = MissReason.OTHER_MODEL if field == "model_digest" else MissReason.WRONG_FILES
        yield case(f"signed with another {field}", reason, signed=made.signed(key, **{field.strip(): value}))
    other_entry = encoded_keys(msgspec.structs.replace(decode_parts(made.statement.parts), preference=ExecutionPreference.LOW_POWER))
    fields = {"parts": other_entry.encoded, "key": other_entry.entry, "family": other_entry.family}
    yield case("signed for another entry", MissReason.WRONG_TOKEN, signed=made.signed(key, **fields))
    # builders
    yield case("a stranger's signature", MissReason.UNTRUSTED_BUILDER, signed=made.signed(stranger))
    yield case("a stranger under the builder's id", MissReason.BAD_SIGNATURE, signed=key.public.id + made.signed(stranger)[32:])
    rings = {
        "an empty keyring": keyring(),
        "a keyring without its folder": encode_keyring(Keyring(missing="/keys")),
        "only a stranger's key": keyring(stranger.public),
        "for another device": limited(key, devices=("onnxruntime",)),
        "expired": limited(key, not_after_s=1.0),
    }
    unsound = {
        "no keyring": b"",
        "not a keyring": b"\xff" * 20,
        "a keyring cut off": keyring(key.public)[:-3],
        "a keyring with a fault": encode_keyring(Keyring(fault="unsafe")),
    }
    for what, ring in (rings | unsound).items():
        yield Case(what, MissReason.UNTRUSTED_BUILDER if what in rings else MissReason.UNSAFE, good, made.paths, ring)


def test_two_hundred_mutations_are_refused_and_the_engine_loads_none(
    tmp_path: Path, made: Made, model: Model, key: BuilderKey, driver: Driver
) -> None:
    other = make(tmp_path / "other", small_model(3.0), key)
    elsewhere = make(tmp_path / "elsewhere", model, key, version="2")
    (tmp_path / "cases").mkdir()
    stranger = BuilderKey.generate("mallory")
    count = 0
    for case in _cases(tmp_path / "cases", made, other, key, stranger, elsewhere):
        count += 1
        with pytest.raises(CompilationError) as caught:
            driver.adopt(made.statement, case.signed, case.paths, case.keys)
        allowed = case.reason if isinstance(case.reason, set) else {case.reason}
        assert refusal(caught.value) in allowed, (case.what, caught.value.reason)
        with pytest.raises(CompilationError, match="no_integrity_record"):  # nothing of it is believed
            driver.load(made.statement, case.paths if case.paths[0] != case.paths[1] and case.paths[0].is_file() else made.paths, case.keys)
    assert count >= 200, count
    assert driver.engine.loads == []
    # The same driver takes the artifact as it was signed.
    driver.adopt(made.statement, made.signed(key), made.paths, keyring(key.public))
    assert len(driver.engine.loads) == 1


@pytest.mark.parametrize("at", ["key", "family", "device", "device_version", "parts", "format"])
def test_a_signed_statement_that_contradicts_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, made: Made, key: BuilderKey, driver: Driver, at: str
) -> None:
    """A builder's own fault, or its key in other hands. `sign_statement` refuses to sign such a one."""
    wrong = {"key": bytes(32), "family": bytes(32), "device": "x", "device_version": "y", "parts": b"", "format": 2}[at]
    with pytest.raises(CallerError, match="cannot be signed"):
        made.signed(key, **{at: wrong})
    with monkeypatch.context() as patch:
        patch.setattr("aionn.caching.statement._fault", lambda statement: "")
        signed = made.signed(key, **{at: wrong})
    with pytest.raises(CompilationError, match="unreadable"):
        driver.adopt(made.statement, signed, made.paths, keyring(key.public))
    assert driver.engine.loads == []


def test_an_artifact_of_another_model_under_a_true_statement_is_refused(
    tmp_path: Path, made: Made, key: BuilderKey, driver: Driver
) -> None:
    """The builder signs files of one model as those of another: the files say themselves which model they are."""
    other = make(tmp_path / "other", small_model(3.0), key)
    signed = made.signed(key, model=other.statement.model, data=other.statement.data)
    with pytest.raises(CompilationError, match="other_model"):
        driver.adopt(made.statement, signed, other.paths, keyring(key.public))
    assert driver.engine.loads == []


def test_a_statement_in_another_form_is_refused(made: Made, key: BuilderKey, driver: Driver) -> None:
    """The same fields, written with longer integers: two statements must never say the same."""
    body = made.signed(key)[_HEAD:]
    assert b"\xce\x00\x4c\x4b\x40" in body  # compile_ns as u32
    longer = body.replace(b"\xce\x00\x4c\x4b\x40", b"\xcf\x00\x00\x00\x00\x00\x4c\x4b\x40")
    signature = Ed25519PrivateKey.from_private_bytes(key.private_key).sign(DOMAIN + longer)
    with pytest.raises(CompilationError, match="unreadable: statement: not in the one form"):
        driver.adopt(made.statement, key.public.id + signature + longer, made.paths, keyring(key.public))


def test_a_statement_that_names_another_key_than_the_one_that_signs_is_refused(made: Made, key: BuilderKey, driver: Driver) -> None:
    second = BuilderKey.generate("second")
    body = made.signed(second)[_HEAD:]
    signature = Ed25519PrivateKey.from_private_bytes(key.private_key).sign(DOMAIN + body)
    with pytest.raises(CompilationError, match="bad_signature"):
        driver.adopt(made.statement, key.public.id + signature + body, made.paths, keyring(key.public, second.public))
    assert driver.engine.loads == []


def test_a_signature_without_the_domain_is_refused(made: Made, key: BuilderKey, driver: Driver) -> None:
    body = made.signed(key)[_HEAD:]
    signature = Ed25519PrivateKey.from_private_bytes(key.private_key).sign(body)
    with pytest.raises(CompilationError, match="bad_signature"):
        driver.adopt(made.statement, key.public.id + signature + body, made.paths, keyring(key.public))


def test_a_key_never_signs_a_statement_of_another_key(made: Made, key: BuilderKey) -> None:
    with pytest.raises(CallerError, match="not the key that signs it"):
        sign_statement(made.statement, BuilderKey.generate("other").private_key)


# --- what is adopted -------------------------------------------------------------------------------------------------


def test_what_is_adopted_is_a_plain_hit_as_long_as_its_key_is_trusted(made: Made, key: BuilderKey, driver: Driver) -> None:
    keys = keyring(key.public)
    assert driver.adopt(made.statement, made.signed(key), made.paths, keys).outcome == "saved"
    assert driver.load(made.statement, made.paths, keys).key_id == key.public.id
    driver.artifacts.close()
    with Driver(driver.state) as again:
        again.load(made.statement, made.paths, keys)
        again.load(made.statement, made.paths, limited(key, not_after_s=1.0))  # expiry ends adopting, not what was adopted


def test_the_engine_gets_the_very_buffer_that_was_digested(
    monkeypatch: pytest.MonkeyPatch, made: Made, key: BuilderKey, driver: Driver
) -> None:
    """The files change as soon as they have been copied: what is loaded is what was signed."""
    read = read_private

    def read_and_change(fds: tuple[int, ...], lengths: list[int]) -> tuple[list[bytes | memoryview], list[bytes]]:
        found = read(fds, lengths)
        for path in made.paths:
            path.write_bytes(bytes(path.stat().st_size))
        return found

    before = [path.read_bytes() for path in made.paths]
    monkeypatch.setattr(adopting, "read_private", read_and_change)
    driver.adopt(made.statement, made.signed(key), made.paths, keyring(key.public))
    (loaded,) = driver.engine.loads
    assert before[0].startswith(bytes(loaded.model[0]))
    assert bytes(loaded.data[0]) == before[1]


def test_a_load_that_fails_leaves_nothing_believed(monkeypatch: pytest.MonkeyPatch, made: Made, key: BuilderKey, driver: Driver) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    keys = keyring(key.public)
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine, "load", fail)
        with pytest.raises(CompilationError, match="refused_by_device"):
            driver.adopt(made.statement, made.signed(key), made.paths, keys)
    with pytest.raises(CompilationError, match="no_integrity_record"):
        driver.load(made.statement, made.paths, keys)


def records(state: Path) -> int:
    (path,) = state.glob("integrity-*.sqlite")
    with sqlite3.connect(path) as database:
        (count,) = database.execute("SELECT COUNT(*) FROM adopted").fetchone()
    database.close()
    return int(count)


@pytest.mark.parametrize("how", ["removed", "device"])
def test_a_key_that_is_gone_revokes_what_it_signed(made: Made, key: BuilderKey, driver: Driver, how: str) -> None:
    keys = keyring(key.public)
    driver.adopt(made.statement, made.signed(key), made.paths, keys)
    gone = keyring(BuilderKey.generate("other").public) if how == "removed" else limited(key, devices=("onnxruntime",))
    loads = len(driver.engine.loads)
    with pytest.raises(CompilationError) as caught:
        driver.load(made.statement, made.paths, gone)
    assert refusal(caught.value) is MissReason.REVOKED
    assert len(driver.engine.loads) == loads
    assert records(driver.state) == 0
    with pytest.raises(CompilationError, match="no_integrity_record"):  # the record is gone for good, although the key is back
        driver.load(made.statement, made.paths, keys)


@pytest.mark.parametrize("unknown", [b"", b"\xff", encode_keyring(Keyring(fault="unsafe")), encode_keyring(Keyring(missing="/keys"))])
def test_a_keyring_that_is_not_known_believes_and_revokes_nothing(made: Made, key: BuilderKey, driver: Driver, unknown: bytes) -> None:
    keys = keyring(key.public)
    driver.adopt(made.statement, made.signed(key), made.paths, keys)
    with pytest.raises(CompilationError) as caught:
        driver.load(made.statement, made.paths, unknown)
    missing = decode_keyring(unknown).missing
    assert refusal(caught.value) is (MissReason.UNSAFE if unknown and not missing else MissReason.UNTRUSTED_BUILDER)
    assert ("there is no folder /keys" in caught.value.reason) is bool(missing)
    assert caught.value.reason.endswith(KEYRING_NEEDED) is not bool(unknown)
    driver.load(made.statement, made.paths, keys)


def test_what_this_driver_has_stored_itself_needs_no_key(made: Made, model: Model, key: BuilderKey, driver: Driver) -> None:
    """Also where the same bytes were adopted before, and the key is revoked afterwards."""
    keys = keyring(key.public)
    driver.adopt(made.statement, made.signed(key), made.paths, keys)
    token = device_token(made.statement.key, made.statement.model_digest)
    with opened(made.paths, token, flags=os.O_RDWR) as handles:
        compiled = driver.engine.compile(model, CompileOptions(may_export=True))
        assert driver.artifacts.save(compiled, model, handles) == "saved"
    for known in (keys, keyring(), encode_keyring(Keyring(fault="unsafe")), encode_keyring(Keyring(missing="/keys"))):
        assert driver.load(made.statement, made.paths, known).key_id == b""


def test_records_of_two_builders_are_revoked_one_by_one(made: Made, key: BuilderKey, driver: Driver) -> None:
    second = BuilderKey.generate("second")
    both = keyring(key.public, second.public)
    for builder in (key, second):
        driver.adopt(made.statement, made.signed(builder), made.paths, both)
    assert driver.load(made.statement, made.paths, keyring(key.public)).key_id == key.public.id
    assert records(driver.state) == 1
    driver.load(made.statement, made.paths, keyring(key.public))


def test_adopted_records_stay_few(made: Made, key: BuilderKey, driver: Driver) -> None:
    builders = [BuilderKey.generate(f"builder {number}") for number in range(7)]
    keys = keyring(*(builder.public for builder in builders))
    for builder in builders:
        driver.adopt(made.statement, made.signed(builder), made.paths, keys)
    assert records(driver.state) == 4


def test_records_are_forgotten_with_their_token(tmp_path: Path) -> None:
    store = IntegrityStore("fake", "1", CacheFiles(1, 1), state_directory=tmp_path / "state", max_tokens=2)
    for number in range(5):
        assert store.note_adopted(bytes((number,)) * 32, bytes(80), bytes(32)) is None
    store.close()
    assert records(tmp_path / "state") == 2


def test_read_only_records_are_believed_and_revoked_as_others(
    monkeypatch: pytest.MonkeyPatch, made: Made, key: BuilderKey, driver: Driver
) -> None:
    """Only that a record cannot be removed."""

    def denied(*_: object, **__: object) -> sqlite3.Connection:
        raise PermissionError(errno.EACCES, "read-only")

    keys = keyring(key.public)
    driver.adopt(made.statement, made.signed(key), made.paths, keys)
    driver.artifacts.close()
    monkeypatch.setattr("aionn.caching.integrity.open_database", denied)
    with Driver(driver.state) as again:
        again.load(made.statement, made.paths, keys)
        for _ in range(2):
            with pytest.raises(CompilationError, match="revoked"):
                again.load(made.statement, made.paths, keyring())
        again.load(made.statement, made.paths, keys)
        assert again.adopt(made.statement, made.signed(key), made.paths, keys).outcome.startswith("no_permission: ")
    (path,) = driver.state.glob("integrity-*.sqlite")
    with sqlite3.connect(path) as database:  # as damage has left it
        database.execute("DROP TABLE adopted")
    database.close()
    with Driver(driver.state) as again, pytest.raises(CompilationError, match="no such table: adopted"):
        again.load(made.statement, made.paths, keys)


@pytest.mark.anyio
async def test_what_is_made_of_an_adopted_artifact_does_not_outlive_the_trust(tmp_path: Path, made: Made, key: BuilderKey) -> None:
    """No better artifact is stored as the driver's own, and no preparation that does not trust the key shares the executable."""
    keys, options = keyring(key.public), PrepareOptions()
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(RecordingEngine(), tasks, tmp_path / "state", known_as=DEVICE)
        with opened(made.paths, made.statement.key, keys) as handles:
            prepared = await device.adopt(options, handles, made.statement.model_digest, made.signed(key))
        assert prepared.save_outcome == "saved"
        assert prepared.tuning is None
        with opened(made.paths, device_token(made.statement.key, made.statement.model_digest), keys) as handles:
            loaded = await device.prepare_model_from_cache(options, handles)
        assert loaded.tuning is None
        await prepared.aclose()
        await loaded.aclose()
        device.close()
    with Driver(tmp_path / "state") as driver:
        adopted = driver.load(made.statement, made.paths, keys)
    own = msgspec.structs.replace(adopted, key_id=b"")
    assert identity_of_stored(adopted, options) != identity_of_stored(own, options)


def test_a_state_folder_that_cannot_be_written_to_serves_what_is_signed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Made, key: BuilderKey
) -> None:
    """As in a read-only image: the artifact is verified at each start, and nothing is kept."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with Driver(tmp_path / "link") as driver:
        outcome = driver.adopt(made.statement, made.signed(key), made.paths, keyring(key.public)).outcome
        assert outcome.startswith("unsafe: ")
        assert len(driver.engine.loads) == 1


def test_without_cryptography_nothing_is_adopted(monkeypatch: pytest.MonkeyPatch, made: Made, key: BuilderKey, driver: Driver) -> None:
    signed, keys = made.signed(key), keyring(key.public)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CompilationError, match=r"the package 'cryptography'; install aionn\[fleet\]"):
        driver.adopt(made.statement, signed, made.paths, keys)
    with pytest.raises(CallerError, match=r"install aionn\[fleet\]"):
        made.signed(key)
    assert driver.engine.loads == []
