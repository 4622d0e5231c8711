"""The keyring is read from the user's configuration only, and is used only if no other account could have written it (row F5)."""

from __future__ import annotations

import logging
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from aionn.caching.keyring import encoded_keyring
from aionn.errors import CallerError
from aionn.fleet import BuilderKey, Keyring, TrustedKey, decode_public_key, encode_public_key, keyring_folder, read_keyring
from aionn.hal.trust import MAX_KEYS, decode_keyring, encode_keyring

_OF_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")


@pytest.fixture
def key(folder: Path) -> TrustedKey:
    """A key in the keyring."""
    return add(folder, "ci")


def add(folder: Path, name: str) -> TrustedKey:
    key = BuilderKey.generate(name).public
    path = folder / f"{name}.pub"
    path.write_bytes(encode_public_key(key))
    path.chmod(0o644)
    return key


def test_keys_are_read_with_their_limits(folder: Path, key: TrustedKey) -> None:
    limited = TrustedKey(
        BuilderKey.generate("farm").public.public_key, "farm", ("onnxruntime",), datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    )
    (folder / "farm.pub").write_bytes(encode_public_key(limited))
    (folder / "farm.pub").chmod(0o644)
    (folder / "README").write_text("not a key")
    found = read_keyring()
    assert found == Keyring((key, limited))
    assert found.find(limited.id) == limited
    assert decode_keyring(encode_keyring(found)) == found
    assert decode_keyring(encoded_keyring()) == found


def test_no_folder_no_variable_and_the_switch_trust_no_builder(
    folder: Path, key: TrustedKey, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for word in ("off", "0", "no", "anything"):
        monkeypatch.setenv("AIONN_ADOPT", word)
        assert keyring_folder() is None
        assert read_keyring() == Keyring()
    for word in ("", "on"):
        monkeypatch.setenv("AIONN_ADOPT", word)
        assert read_keyring() == Keyring((key,))
    for missing in (tmp_path / "missing", tmp_path / "not mounted" / "deeper", Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))):
        monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(missing))
        found = read_keyring()
        assert found == Keyring(missing=str(missing).replace("\udce9", "\\udce9"))
        assert decode_keyring(encode_keyring(found)) == found
    monkeypatch.delenv("AIONN_TRUSTED_BUILDERS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert keyring_folder() == str(tmp_path / "config/aionn/trusted_builders")
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", ".", "config"):  # to be ignored, says the XDG Base Directory Specification
        monkeypatch.setenv("XDG_CONFIG_HOME", relative)
        assert keyring_folder() == str(tmp_path / ".config/aionn/trusted_builders")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert keyring_folder() == str(tmp_path / ".config/aionn/trusted_builders")


def test_a_key_that_is_removed_while_the_keyring_is_read_leaves_the_others(
    folder: Path, key: TrustedKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: ["removed.pub", *there(fd)])
    assert read_keyring() == Keyring((key,))


def _open_folder(folder: Path) -> None:
    folder.chmod(0o777)


def _group_folder(folder: Path) -> None:
    folder.chmod(0o775)


def _sticky_folder(folder: Path) -> None:
    folder.chmod(0o1777)


def _open_parent(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _open_file(folder: Path) -> None:
    (folder / "ci.pub").chmod(0o646)


def _linked_file(folder: Path) -> None:
    (folder / "ci.pub").rename(folder.parent / "elsewhere.pub")
    (folder / "ci.pub").symlink_to(folder.parent / "elsewhere.pub")


def _linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def _file_in_place(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.write_bytes(b"")


def _folder_as_key(folder: Path) -> None:
    (folder / "other.pub").mkdir()


def _fifo_as_key(folder: Path) -> None:
    os.mkfifo(folder / "other.pub", 0o600)


def _huge(folder: Path) -> None:
    (folder / "other.pub").write_bytes(b" " * 5000)
    (folder / "other.pub").chmod(0o644)


def _not_a_key(folder: Path) -> None:
    (folder / "other.pub").write_bytes(b'{"name": "x", "ed25519": "00"}')
    (folder / "other.pub").chmod(0o644)


def _twice(folder: Path) -> None:
    (folder / "other.pub").write_bytes((folder / "ci.pub").read_bytes())
    (folder / "other.pub").chmod(0o644)


def _too_many(folder: Path) -> None:
    for number in range(MAX_KEYS):
        (folder / f"{number}.pub").write_bytes(b"")


FAULTS = {
    _open_folder: "other accounts may write to the folder (mode 777); take that away with chmod go-w",
    _group_folder: "other accounts may write to the folder (mode 775)",
    _sticky_folder: "other accounts may write to the folder",
    _open_parent: "above it (mode 777)",
    _open_file: "other accounts may write to ci.pub",
    _linked_file: "ci.pub is a symlink; copy the file itself",
    _linked_folder: "it is a symlink; give the folder itself",
    _file_in_place: "Not a directory",
    _folder_as_key: "other.pub is not a regular file",
    _fifo_as_key: "other.pub is not a regular file",
    _huge: "other.pub has more than 4096 bytes",
    _not_a_key: "other.pub: a public key file cannot be read",
    _twice: "one key is in several files",
    _too_many: f"it has {MAX_KEYS + 1} keys, at most {MAX_KEYS} are read",
}


@pytest.mark.parametrize("harm", FAULTS, ids=lambda harm: harm.__name__)
def test_a_keyring_with_one_fault_trusts_no_builder_and_warns_once(
    folder: Path, key: TrustedKey, harm: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_keyring().keys == (key,)
    assert callable(harm)
    harm(folder)
    with caplog.at_level(logging.WARNING, "aionn.caching"):
        for _ in range(3):
            found = decode_keyring(encoded_keyring())
            assert found.keys == ()
            assert FAULTS[harm] in found.fault
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("no compiled artifact of another machine is adopted: keyring ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["folder", "file", "parent"])
def test_a_keyring_of_another_account_trusts_no_builder(folder: Path, key: TrustedKey, what: str) -> None:
    os.chown({"folder": folder, "file": folder / "ci.pub", "parent": folder.parent}[what], 1, -1)
    assert "belongs to user 1; it must belong to this account or to root" in read_keyring().fault


def _linked(folder: Path, relative: bool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the environment name the keyring by a symlink in /tmp of this machine, which stands for a folder of all accounts."""
    everyone = folder.parent / "everyone"
    everyone.mkdir()
    everyone.chmod(0o1777)
    link = everyone / "configuration"
    link.symlink_to(Path("..") if relative else folder.parent)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(link / folder.name))
    return link


@pytest.mark.parametrize("relative", [False, True])
def test_a_symlink_above_the_keyring_is_followed_if_no_other_account_can_change_it(
    folder: Path, key: TrustedKey, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = _linked(folder, relative, monkeypatch)
    assert read_keyring().keys == (key,)
    link.parent.chmod(0o777)
    assert f"other accounts may write to the folder {link.parent} above it (mode 777)" in read_keyring().fault


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a symlink away")
@pytest.mark.parametrize("relative", [False, True])
def test_a_symlink_of_another_account_does_not_choose_the_keyring(
    folder: Path, key: TrustedKey, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder such as /tmp. It may lead to any folder of this account, such as one with downloads."""
    link = _linked(folder, relative, monkeypatch)
    os.chown(link, 1, -1, follow_symlinks=False)
    assert f"the symlink {link} above it belongs to user 1" in read_keyring().fault


def test_a_circle_of_symlinks_is_a_fault(folder: Path, key: TrustedKey, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "circle").symlink_to("circle")
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(folder.parent / "circle/trusted"))
    assert "Too many levels of symbolic links" in read_keyring().fault


def test_a_path_that_is_not_utf8_can_be_sent_to_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(folder))
    assert "caf\\udce9: other accounts may write to the folder" in decode_keyring(encoded_keyring()).fault


# --- key files -------------------------------------------------------------------------------------------------------


def test_a_private_key_is_kept_in_a_file_of_this_account_alone(tmp_path: Path) -> None:
    key = BuilderKey.generate("ci")
    key.save(tmp_path / "ci.key")
    assert stat.S_IMODE((tmp_path / "ci.key").stat().st_mode) == 0o600
    assert BuilderKey.load(tmp_path / "ci.key") == key
    assert key.private_key.hex() not in repr(key)
    with pytest.raises(CallerError, match="File exists"):
        key.save(tmp_path / "ci.key")
    (tmp_path / "ci.key").chmod(0o640)
    with pytest.raises(CallerError, match="chmod 600"):
        BuilderKey.load(tmp_path / "ci.key")
    (tmp_path / "other").write_bytes(encode_public_key(key.public))
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(CallerError, match="is not a private key file"):
        BuilderKey.load(tmp_path / "other")
    with pytest.raises(CallerError, match="cannot be read: No such file"):
        BuilderKey.load(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"name":"a","ed25519":"zz"}', b'{"name":"","ed25519":"' + b"0" * 64 + b'"}'])
def test_what_is_not_a_public_key_file_is_refused(content: bytes) -> None:
    with pytest.raises(CallerError, match="a public key file cannot be read"):
        decode_public_key(content)


@pytest.mark.parametrize("y", [0, 1, -1, 2**255 - 19, 2**255 - 18, _OF_ORDER_8, -_OF_ORDER_8], ids=hex)
@pytest.mark.parametrize("sign", [0, 1])
def test_a_key_that_anyone_can_sign_for_is_refused(folder: Path, key: TrustedKey, y: int, sign: int) -> None:
    """A point of small order. OpenSSL takes signatures for it that were made without a private key."""
    public = ((y if y >= 0 else y + 2**255 - 19) | sign << 255).to_bytes(32, "little")
    nothing = [point + bytes(32) for point in (public, (1).to_bytes(32, "little"), bytes(32))]
    assert any(_accepts(public, signature, str(number).encode()) for number in range(200) for signature in nothing)
    with pytest.raises(CallerError, match="anyone can sign"):
        TrustedKey(public, "x")
    (folder / "weak.pub").write_bytes(b'{"name": "weak", "ed25519": "%s"}' % public.hex().encode())
    (folder / "weak.pub").chmod(0o644)
    assert "weak.pub: the key of builder 'weak' is a weak one, for which anyone can sign" in read_keyring().fault
    encoded = msgspec.msgpack.encode({"keys": [{"public_key": public, "name": "weak", "devices": [], "not_after_s": None}], "fault": ""})
    assert decode_keyring(encoded).fault  # in a driver, too


def _accepts(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def test_a_key_of_another_length_and_a_keyring_with_a_key_twice_are_refused() -> None:
    key = BuilderKey.generate("ci").public
    with pytest.raises(CallerError, match="31 bytes"):
        TrustedKey(bytes(31), "x")
    for wrong in ({"keys": (key, key)}, {"keys": (key,), "fault": "x"}):
        with pytest.raises(CallerError, match="a keyring of"):
            Keyring(**wrong)
    with pytest.raises(CallerError, match="1 to 200 characters"):
        BuilderKey.generate("")
