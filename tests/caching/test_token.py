from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aionn.caching import KeyParts, encoded_keys
from aionn.caching.token import changed_parts, decode_parts, encode_parts
from aionn.errors import CallerError
from aionn.hal.types import ExecutionPreference, Priority

SIMPLE = KeyParts(app_token=bytes(32), device="deviceA", device_version="1.0")
COMPOUND = KeyParts(app_token=bytes(32), device="deviceA", device_version="1.0", operations=((0, 0), (0, 1)))

u32 = st.integers(0, 2**32 - 1)
options = st.dictionaries(st.text(max_size=4), st.binary(max_size=4), max_size=3).map(lambda d: tuple(sorted(d.items())))
parts = st.builds(
    KeyParts,
    app_token=st.binary(min_size=32, max_size=32),
    device=st.text(max_size=5),
    device_version=st.text(max_size=5),
    preference=st.sampled_from(ExecutionPreference),
    priority=st.none() | st.sampled_from(Priority),
    operations=st.none() | st.lists(st.tuples(u32, u32), max_size=4).map(tuple),
    options=options,
)


def eleven_times(*several: KeyParts) -> list[bytes]:
    """TokenHasher's tests compute each token eleven times and want the same each time."""
    first = [encoded_keys(one).entry for one in several]
    for _ in range(10):
        assert [encoded_keys(one).entry for one in several] == first
    return first


def distinct(*several: KeyParts) -> bool:
    return len(set(eleven_times(*several))) == len(several)


def changed(base: KeyParts, **fields: object) -> KeyParts:
    values = {name: getattr(base, name) for name in KeyParts.__struct_fields__} | fields
    return KeyParts(**values)


@given(parts)
def test_the_encoding_has_an_inverse(one: KeyParts) -> None:
    """A function with an inverse is injective: no two compilations share an encoding."""
    assert decode_parts(encode_parts(one)) == one


@given(parts, parts)
def test_two_compilations_share_a_key_only_if_they_are_equal(one: KeyParts, other: KeyParts) -> None:
    assert (encoded_keys(one).entry == encoded_keys(other).entry) is (one == other)
    assert (changed_parts(one, other) == ()) is (one == other)


@given(parts, st.data())
def test_a_cut_or_altered_encoding_is_another_compilation_or_refused(one: KeyParts, data: st.DataObject) -> None:
    encoded = encode_parts(one)
    at = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:at], encoded[:at] + bytes([encoded[at] ^ 1]) + encoded[at + 1 :]):
        try:
            assert decode_parts(wrong) != one
        except CallerError:
            continue


def test_name_and_version_do_not_run_into_each_other() -> None:
    """NNAPI: "npu1" + ".0" and "npu" + "1.0" are one entry."""
    assert distinct(changed(SIMPLE, device="npu1", device_version=".0"), changed(SIMPLE, device="npu", device_version="1.0"))


def test_the_key_is_the_same_on_every_machine_and_run() -> None:
    """The encoding is written out here; a change of it is a change of the format and needs a new magic."""
    assert encode_parts(COMPOUND).hex() == (
        "61696f6e6e2e6b657901"
        "01"
        "2000000000000000" + "00" * 32 + "02"
        "1000000000000000"
        "0000000000000000"
        "0000000001000000"
        "03"
        "0700000000000000"
        "64657669636541"
        "04"
        "0300000000000000"
        "312e30"
        "05"
        "0400000000000000"
        "01000000"
    )
    program = (
        "from aionn.caching import KeyParts, encoded_keys; "
        "print(encoded_keys(KeyParts(app_token=bytes(32), device='deviceA', device_version='1.0')).entry.hex())"
    )
    other = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    key = encoded_keys(SIMPLE).entry
    assert other == {key.hex()}
    assert len(key) == 32


# --- TestPartitioning's CacheTest, row by row; each key is computed eleven times ---------------------------------------------------


def test_cache_token_none_simple_body_and_none_compound_body() -> None:
    for operations in (None, COMPOUND.operations):
        with pytest.raises(CallerError, match="a token has 32"):
            changed(SIMPLE, app_token=b"", operations=operations)


@pytest.mark.parametrize("base", [SIMPLE, COMPOUND], ids=["simple", "compound"])
def test_cache_token_different_device_names(base: KeyParts) -> None:
    assert distinct(base, changed(base, device="deviceB"))


@pytest.mark.parametrize("base", [SIMPLE, COMPOUND], ids=["simple", "compound"])
def test_cache_token_different_device_version_strings(base: KeyParts) -> None:
    assert distinct(base, changed(base, device_version="1.1"))


@pytest.mark.parametrize("base", [SIMPLE, COMPOUND], ids=["simple", "compound"])
def test_cache_token_different_preferences(base: KeyParts) -> None:
    assert distinct(*(changed(base, preference=preference) for preference in ExecutionPreference))


@pytest.mark.parametrize("base", [SIMPLE, COMPOUND], ids=["simple", "compound"])
def test_cache_token_different_priorities(base: KeyParts) -> None:
    """For a device that says that priority matters; for the others there is one entry."""
    assert distinct(base, *(changed(base, priority=priority) for priority in Priority))


@pytest.mark.parametrize("base", [SIMPLE, COMPOUND], ids=["simple", "compound"])
def test_cache_token_different_tokens(base: KeyParts) -> None:
    assert distinct(base, changed(base, app_token=b"\x01" * 32))


def test_cache_token_different_partitions_compound_body() -> None:
    assert distinct(COMPOUND, changed(COMPOUND, operations=((0, 0),)), changed(COMPOUND, operations=((0, 1),)))


def test_cache_token_different_reference_model_partitions() -> None:
    """An IF with two identical branches on one device: same operation indices, other sub-graphs."""
    assert distinct(changed(COMPOUND, operations=((1, 0), (1, 1))), changed(COMPOUND, operations=((2, 0), (2, 1))))


def test_a_whole_model_is_not_an_empty_partition() -> None:
    assert distinct(SIMPLE, changed(SIMPLE, operations=()))


def test_extension_attributes_are_in_the_key() -> None:
    """NNAPI has no test for this one (b/207721221)."""
    assert distinct(SIMPLE, changed(SIMPLE, options=(("a", b"bc"),)), changed(SIMPLE, options=(("ab", b"c"),)))


def test_a_family_has_all_versions_of_a_device_and_nothing_else() -> None:
    assert encoded_keys(SIMPLE).family == encoded_keys(changed(SIMPLE, device_version="9")).family
    others = [changed(SIMPLE, device="b"), changed(SIMPLE, app_token=b"\x01" * 32), COMPOUND]
    assert len({encoded_keys(one).family for one in (SIMPLE, *others)}) == 4
    assert encoded_keys(SIMPLE).family != encoded_keys(SIMPLE).entry


def test_parts_that_can_never_be_right_are_refused() -> None:
    for wrong in ({"app_token": b"short"}, {"operations": ((0, 2**32),)}, {"options": (("b", b""), ("a", b""))}):
        with pytest.raises(CallerError):
            changed(SIMPLE, **wrong)


def test_changed_parts_names_what_made_the_key_another() -> None:
    assert changed_parts(SIMPLE, changed(SIMPLE, device_version="2", priority=Priority.LOW)) == ("device_version", "priority")
