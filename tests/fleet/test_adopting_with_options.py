"""`fleet.adopt` loads an artifact with the engine options that it was compiled with, and opens no file because a statement names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import aionn
from aionn import fleet
from aionn.caching.token import decode_parts, encoded_keys
from aionn.errors import CallerError
from aionn.fleet import BuilderKey
from aionn.hal.options import EngineOptions, OptionValue, decode_options
from aionn.testing import identity_model
from tests.fleet.builders import Pushed, build, trust
from tests.fleet.choosy_engine import LEVEL, ChoosyEngine

pytestmark = pytest.mark.usefixtures("surroundings")
DEVICE = f"{ChoosyEngine.__module__}:{ChoosyEngine.__name__}"
OPTIONS = {"level": LEVEL, "rate": 0.5, "fast": True, "mode": "quick"}
Kind, Reason = aionn.CacheOutcomeKind, aionn.MissReason


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def key(folder: Path) -> BuilderKey:
    key = BuilderKey.generate("ci")
    trust(folder, key)
    return key


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


@pytest.fixture
async def pushed(tmp_path: Path, model: aionn.Model, key: BuilderKey) -> Pushed:
    (tmp_path / "builder").mkdir()
    return await build(tmp_path / "builder", model, key, DEVICE, OPTIONS)


@pytest.mark.anyio
async def test_an_artifact_with_options_is_loaded_with_them(tmp_path: Path, model: aionn.Model, pushed: Pushed) -> None:
    async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
        for _ in range(2):  # the second one finds the entry of the first, and loads that
            adopted = await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=DEVICE)
            assert (adopted.kind, adopted.save_failure) == (Kind.HIT, None), adopted
        compilation = await runtime.compile(model, devices=(DEVICE,), cache_dir=tmp_path / "cache", options={DEVICE: OPTIONS})
        assert [outcome.kind for outcome in compilation.outcomes] == [Kind.HIT]


def with_options(pushed: Pushed, key: BuilderKey, *options: tuple[str, bytes]) -> Pushed:
    """The same artifact, signed by a builder that gives it other options."""
    parts = decode_parts(pushed.manifest.parts)
    encoded, entry, family = encoded_keys(msgspec.structs.replace(parts, options=options))
    manifest = msgspec.structs.replace(pushed.manifest, parts=encoded, key=entry, family=family)
    return Pushed(key.sign(manifest), manifest, pushed.folder)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("custom_ops", b"p" + bytes(32)), "option 'custom_ops' names a file, of which only the digest is known"),
        (("custom_ops", b"s/tmp/evil.so"), "option 'custom_ops' with the value '/tmp/evil.so' may name a file"),
        (("custom_ops", b"sevil.so"), "option 'custom_ops' with the value 'evil.so' may name a file"),
        (("cache_dir", b"shere"), "option 'cache_dir' with the value 'here' may name a file"),
        (("mode", b"s../up"), "option 'mode' with the value '../up' may name a file"),
        (("mode", b"?"), "option 'mode' has a value that cannot be read"),
    ],
)
async def test_no_file_is_opened_because_a_statement_names_it(
    tmp_path: Path, pushed: Pushed, key: BuilderKey, option: tuple[str, bytes], sentence: str
) -> None:
    async with aionn.Runtime(state_dir=tmp_path / "state", start=()) as runtime:
        offered = with_options(pushed, key, option).offer()
        refused = await fleet.adopt(runtime, tmp_path / "cache", offered, device=DEVICE)
        assert (refused.kind, refused.reason) == (Kind.MISS, Reason.REFUSED_BY_DEVICE)
        assert refused.detail.startswith(sentence)
        assert "use_backend" in refused.detail
        assert [device.pid for device in runtime.devices if device.pid is not None] == []


@pytest.mark.anyio
async def test_an_option_that_the_engine_does_not_have_is_a_refusal(tmp_path: Path, pushed: Pushed, key: BuilderKey) -> None:
    async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
        offered = with_options(pushed, key, ("colour", b"sred")).offer()
        refused = await fleet.adopt(runtime, tmp_path / "cache", offered, device=DEVICE)
        assert refused.kind is Kind.MISS
        assert "has no option 'colour'" in refused.detail


# --- options as bytes ----------------------------------------------------------------------------------------------------


def test_options_are_decoded_as_they_were_encoded() -> None:
    values: dict[str, OptionValue] = {
        "a": True,
        "b": False,
        "c": 1,
        "d": 1.0,
        "e": -(2**63),
        "f": 2**63 - 1,
        "g": "",
        "h": "b\x01",
        "i": -0.0,
    }
    options = EngineOptions(values, {})
    decoded = decode_options(options.encoded)
    assert decoded == options
    assert [type(value) for value in decoded.values()] == [type(value) for value in options.values()]


@pytest.mark.parametrize(
    "encoded",
    [
        b"", b"b", b"b\x02", b"b\x00\x00", b"i", b"i 1", b"i+1", b"i1_0", b"i01", b"i9223372036854775808", b"i" + b"9" * 5000, b"f",
        b"f" + bytes(7), b"s\xff", b"s\xed\xb2\x80", b"p" + bytes(32), b"x1",
    ],
)  # fmt: skip
def test_a_value_that_no_release_encodes_is_refused(encoded: bytes) -> None:
    with pytest.raises(CallerError, match="option"):
        decode_options([("level", encoded)])


def test_names_that_no_message_carries_and_that_come_twice_are_refused() -> None:
    for pairs in ([("\udc80", b"i1")], [("a", b"i1"), ("a", b"i1")], [("b", b"i1"), ("a", b"i1")]):
        with pytest.raises(CallerError):
            decode_options(pairs)
