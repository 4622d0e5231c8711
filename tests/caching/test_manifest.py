from __future__ import annotations

import errno

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aionn.caching import CacheOutcome, CacheOutcomeKind, MissReason, Refusal, Wanted
from aionn.caching.manifest import Manifest, StoredFile, decode_manifest, encode_manifest, file_names, reason_to_miss
from aionn.caching.outcomes import refusal_of_os_error
from aionn.errors import CallerError
from aionn.hal.types import CacheFiles

digests = st.binary(min_size=32, max_size=32)
files = st.lists(st.builds(StoredFile, length=st.integers(0, 2**40), digest=digests), min_size=1, max_size=4).map(tuple)
manifests = st.builds(
    Manifest,
    key=digests,
    family=digests,
    device=st.text(max_size=8),
    device_version=st.text(max_size=8),
    model_digest=digests,
    model=files,
    data=files,
    directory=st.from_regex("[0-9a-f]{16}", fullmatch=True),
    generation=st.integers(0, 2**63 - 1),
    compile_ns=st.integers(0, 2**63 - 1),
    created_ns=st.integers(0, 2**63 - 1),
)


def wanted_by(manifest: Manifest, **changed: object) -> Wanted:
    fields = {
        "key": manifest.key,
        "family": manifest.family,
        "device": manifest.device,
        "device_version": manifest.device_version,
        "model_digest": manifest.model_digest,
        "files": CacheFiles(len(manifest.model), len(manifest.data)),
    }
    return Wanted(**(fields | changed))  # type: ignore[arg-type]


def sealed(text: bytes) -> bytes:
    return blake3(text).hexdigest().encode() + b"\n" + text


@given(manifests)
def test_a_manifest_survives_the_trip(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert reason_to_miss(manifest, wanted_by(manifest), [file.length for file in manifest.files]) is None


@given(manifests, st.data())
def test_a_cut_flipped_or_extended_manifest_is_unreadable(manifest: Manifest, data: st.DataObject) -> None:
    encoded = encode_manifest(manifest)
    at = data.draw(st.integers(0, len(encoded) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = encoded[:at] + bytes([encoded[at] ^ 1 << bit]) + encoded[at + 1 :]
    for wrong in (encoded[:at], flipped, encoded + b"\0"):
        refusal = decode_manifest(wrong)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is MissReason.UNREADABLE


@given(manifests, st.sampled_from(["directory", "model", "format", "declined"]))
def test_a_well_sealed_manifest_of_nonsense_is_unreadable(manifest: Manifest, field: str) -> None:
    text = msgspec.json.decode(msgspec.json.encode(manifest))
    text[field] = {"directory": "../../etc", "model": [{"length": -1, "digest": ""}], "format": 2, "declined": True}[field]
    assert isinstance(decode_manifest(sealed(msgspec.json.encode(text))), Refusal)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_without_a_crash(noise: bytes) -> None:
    assert isinstance(decode_manifest(noise), Refusal)
    assert isinstance(decode_manifest(sealed(noise)), Refusal)


@given(manifests)
def test_each_way_to_differ_has_its_reason(manifest: Manifest) -> None:
    def reason(lengths: list[int | None] | None = None, **changed: object) -> MissReason | None:
        refusal = reason_to_miss(manifest, wanted_by(manifest, **changed), lengths)
        return None if refusal is None else refusal.reason

    lengths: list[int | None] = [file.length for file in manifest.files]
    assert reason(key=bytes([manifest.key[0] ^ 1]) + manifest.key[1:]) is MissReason.WRONG_TOKEN
    assert reason(device=manifest.device + "x") is MissReason.WRONG_TOKEN
    assert reason(device_version=manifest.device_version + "x") is MissReason.OTHER_DRIVER_VERSION
    assert reason(model_digest=bytes([manifest.model_digest[0] ^ 1]) + manifest.model_digest[1:]) is MissReason.OTHER_MODEL
    assert reason(files=CacheFiles(len(manifest.model) + 1, len(manifest.data))) is MissReason.WRONG_FILES
    for index in range(len(lengths)):
        assert reason([*lengths[:index], None, *lengths[index + 1 :]]) is MissReason.PARTIAL
        assert reason([*lengths[:index], manifest.files[index].length + 1, *lengths[index + 1 :]]) is MissReason.WRONG_LENGTH


def test_files_are_named_by_kind_and_index() -> None:
    """AOSP once wrote the kind at a fixed offset, so that model and data files could be one (b/160002373)."""
    names = file_names(CacheFiles(32, 32))
    assert len(set(names)) == 64
    assert names[0] == "model0"
    assert names[-1] == "data31"


def test_a_miss_has_a_reason_and_nothing_else_has() -> None:
    for kind in CacheOutcomeKind:
        for reason in (None, MissReason.ABSENT):
            if (kind is CacheOutcomeKind.MISS) is (reason is not None):
                assert CacheOutcome(kind, reason, "fake").reason is reason
            else:
                with pytest.raises(CallerError):
                    CacheOutcome(kind, reason, "fake")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, MissReason.NO_SPACE),
        (errno.EFBIG, MissReason.NO_SPACE),
        (errno.EACCES, MissReason.NO_PERMISSION),
        (errno.EROFS, MissReason.NO_PERMISSION),
        (errno.ELOOP, MissReason.UNSAFE),
        (errno.EIO, MissReason.IO_ERROR),
    ],
)
def test_what_the_system_says_becomes_a_reason(number: int, reason: MissReason) -> None:
    refusal = refusal_of_os_error(OSError(number, "text"), "writing")
    assert (refusal.reason, str(refusal)) == (reason, f"{reason.value}: writing: text")
