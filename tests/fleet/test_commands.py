"""F3 and the commands: one machine compiles, signs and pushes; another pulls, adopts and starts with a hit.

Two state directories stand for two machines. The commands are the real ones, in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.caching import CacheOutcomeKind
from aionn.cli import main
from aionn.fleet import BuilderKey, StoreBackend, encode_public_key, use_backend
from tests.apps import run_app
from tests.fleet.fake_s3 import FakeS3
from tests.fleet.outputs import digest_of_outputs
from tests.real_models import carried

DEVICE = "onnxruntime"


class Machine:
    """One machine: a cache, the records of its drivers, and a keyring."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.cache, self.state = directory / f"{name} cache", directory / f"{name} state"
        self.keyring = directory / f"{name} keys"
        self.keyring.mkdir(mode=0o700)
        self.environment = {**os.environ, "AIONN_TRUSTED_BUILDERS": os.fspath(self.keyring), "COLUMNS": "200"}

    def run(self, *arguments: object, code: int = 0) -> tuple[str, str]:
        """What a command said on stdout and stderr."""
        command = [sys.executable, "-m", "aionn", *map(os.fspath, map(str, arguments))]
        done = run_app(command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout, done.stderr

    def json(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code)[0])

    def fails(self, *arguments: object, code: int) -> str:
        """The one sentence that a command failed with."""
        lines = self.run(*arguments, code=code)[1].splitlines()
        assert lines
        assert lines[-1].startswith("aionn: ")
        return lines[-1]

    def compile(self, model: Path) -> None:
        self.run("compile", model, "--cache-dir", self.cache, "--state-dir", self.state, "--device", DEVICE)

    def push(self, store: object, key: Path, code: int = 0) -> Any:
        return self.json("fleet", "push", self.cache, store, "--key", key, "--state-dir", self.state, code=code)

    def pull(self, store: object, code: int = 0) -> Any:
        return self.json("fleet", "pull", store, self.cache, "--device", DEVICE, "--state-dir", self.state, code=code)

    def trust(self, key: Path) -> None:
        shutil.copy(f"{key}.pub", self.keyring)
        (self.keyring / f"{key.name}.pub").chmod(0o600)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def key(directory: Path) -> Path:
    """A builder's key. The command that makes keys has its own test."""
    path = directory / "builder"
    made = BuilderKey.generate("ci")
    made.save(path)
    Path(f"{path}.pub").write_bytes(encode_public_key(made.public))
    return path


@pytest.fixture(scope="module")
def builder(directory: Path) -> Machine:
    """A machine that has compiled a real model."""
    machine = Machine(directory, "builder")
    machine.compile(carried("silero"))
    return machine


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "node")


async def started(machine: Machine, monkeypatch: pytest.MonkeyPatch, store: object = None) -> tuple[aionn.CacheOutcome, str]:
    """The outcome of an app's start on a machine, and the digest of what its model computes."""
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", os.fspath(machine.keyring))
    async with aionn.Runtime(state_dir=os.fspath(machine.state), start=()) as runtime:
        if store is not None:
            use_backend(runtime, StoreBackend(str(store)))
        model = await runtime.load(carried("silero"))
        compilation = await runtime.compile(model, devices=[DEVICE], cache_dir=os.fspath(machine.cache))
        (outcome,) = compilation.outcomes
        return outcome, await digest_of_outputs(compilation, model)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_what_one_machine_compiled_is_a_hit_on_another(
    kind: str, builder: Machine, node: Machine, key: Path, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = "s3://artifacts/fleet" if kind == "bucket" else node.directory / "store"
    for machine in (builder, node):
        machine.environment.update(s3.environment())
    assert [one["state"] for one in builder.push(store, key)] == ["added"]
    assert [one["state"] for one in builder.push(store, key)] == ["present"]
    node.trust(key)
    pulled = node.pull(store)
    assert [(one["state"], one["builder"]) for one in pulled["artifacts"]] == [("adopted", "ci")]
    assert [one["state"] for one in node.pull(store)["artifacts"]] == ["present"]
    # From here on the store is not needed.
    s3.hangs.set()
    shutil.rmtree(node.directory / "store", ignore_errors=True)
    there, expected = await started(builder, monkeypatch)
    here, outputs = await started(node, monkeypatch)
    assert there.kind is here.kind is CacheOutcomeKind.HIT
    assert outputs == expected
    # What was adopted is not signed again, and that is not a failure.
    assert [one["state"] for one in node.push(node.directory / "own store", key)] == ["adopted from another builder"]


def test_nothing_is_signed_that_a_driver_of_this_machine_has_not_stored(builder: Machine, node: Machine, key: Path) -> None:
    store = node.directory / "store"
    shutil.copytree(builder.cache, node.cache)
    (one,) = node.push(store, key, code=1)
    assert one["refusal"]["reason"] == "no_integrity_record"
    shutil.copytree(builder.state, node.state)
    (file,) = node.cache.glob("entries/*/*/model0")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    (one,) = node.push(store, key, code=1)
    assert one["refusal"]["reason"] == "wrong_bytes"
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_only_trusted_builders_are_pulled_and_damage_is_refused(builder: Machine, node: Machine, key: Path) -> None:
    store = node.directory / "store"
    builder.push(store, key)
    sentence = node.fails("fleet", "pull", store, node.cache, code=2)
    assert "no builder is trusted" in sentence
    assert os.fspath(node.keyring) in sentence
    stranger = node.directory / "stranger"
    node.run("fleet", "keygen", stranger, "--name", "stranger")
    node.trust(stranger)
    assert node.pull(store) | {"fingerprints": None} == {"artifacts": [], "others": 1, "fingerprints": None}
    node.trust(key)
    # A stranger's statement at the trusted builder's place.
    (statement,) = [path for path in store.rglob("statement/*/*/*") if path.is_file()]
    signed = statement.read_bytes()
    other_store = node.directory / "other store"
    builder.push(other_store, stranger)
    (other,) = [path for path in other_store.rglob("statement/*/*/*") if path.is_file()]
    statement.write_bytes(other.read_bytes())
    (one,) = node.pull(store, code=1)["artifacts"]
    assert one["refusal"]["reason"] == "wrong_token"
    statement.write_bytes(signed)
    largest = max(store.rglob("blake3/*"), key=lambda path: path.stat().st_size)
    contents = bytearray(largest.read_bytes())
    contents[0] ^= 1
    largest.write_bytes(contents)
    (one,) = node.pull(store, code=1)["artifacts"]
    assert one["refusal"]["reason"] == "wrong_bytes"
    found = node.json("fleet", "verify", store, code=1)
    assert {one["reason"] for one in found["bad"]} == {"wrong_bytes"}
    assert found["signatures"] is True
    node.json("fleet", "verify", store, "--remove", code=1)
    assert [one["state"] for one in builder.push(store, key)] == ["added"]
    assert node.json("fleet", "verify", store)["bad"] == []
    assert [one["state"] for one in node.pull(store)["artifacts"]] == ["adopted"]
    (node.keyring / f"{key.name}.pub").unlink()
    assert node.push(node.directory / "own", stranger, code=1)[0]["refusal"]["reason"] == "revoked"


@pytest.mark.parametrize("where", ["records too", "nothing at all"])
def test_an_image_that_is_read_only_starts_with_a_hit(where: str, builder: Machine, node: Machine, key: Path) -> None:
    """The artifacts are a folder of the image. The app may write nowhere, and neither cache nor records came along."""
    store = node.directory / "store"
    builder.push(store, key)
    node.trust(key)
    for folder in (node.cache, node.state):
        folder.mkdir(mode=0o700)
    locked = [node.cache, node.state, store, *store.rglob("*")]
    for path in locked:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if where == "nothing at all":
        node.directory.chmod(0o555)
        shutil.rmtree(node.cache)
        shutil.rmtree(node.state)
    command = [sys.executable, "-m", "tests.fleet.image_app", *map(os.fspath, (carried("silero"), store, node.cache, node.state))]
    for _ in range(2):  # nothing is kept, and the second start is as the first
        ran = run_app(command, env=node.environment, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        said = json.loads(ran.stdout)
        assert (said["kind"], said["detail"]) == ("hit", "compiled by builder 'ci'")
        assert said["save_failure"] == "no_permission"
    node.directory.chmod(0o700)


@pytest.mark.parametrize("umask", [0o002, 0o022])
def test_a_new_public_key_may_be_copied_into_a_keyring_as_it_is(node: Machine, umask: int) -> None:
    """No keyring takes a file that the group may write to."""
    before = os.umask(umask)
    try:
        made = node.json("fleet", "keygen", node.directory / "key", "--name", "ci")
    finally:
        os.umask(before)
    assert Path(made["public"]).stat().st_mode & 0o777 == 0o644


def test_a_key_is_made_once_and_kept_secret(node: Machine) -> None:
    key = node.directory / "key"
    made = node.json("fleet", "keygen", key, "--name", "ci", "--device", DEVICE, "--days", "30")
    assert key.stat().st_mode & 0o777 == 0o600
    public = json.loads(Path(made["public"]).read_text())
    assert (public["name"], public["devices"]) == ("ci", [DEVICE])
    assert public["not_after"]
    assert "secret" in node.run("fleet", "keygen", "--help")[0]
    assert "exists" in node.fails("fleet", "keygen", key, "--name", "ci", code=2)
    assert "at least 1" in node.fails("fleet", "keygen", key, "--name", "ci", "--days", "0", code=2)
    assert "such a date cannot be written" in node.fails("fleet", "keygen", f"{key}2", "--name", "ci", "--days", "99999999", code=2)
    assert not Path(f"{key}2").exists()


def test_wrong_usage_and_a_store_that_is_not_there_are_one_sentence_each(
    node: Machine, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.trust(key)
    dead = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (node.environment | dead).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(node.directory)

    def fails(*arguments: object, code: int) -> str:
        assert main(["fleet", *map(str, arguments)]) == code
        said = capsys.readouterr()
        assert said.out == ""
        (sentence,) = said.err.splitlines()
        return sentence

    (node.cache / "entries").mkdir(parents=True)
    missing = node.directory / "missing"
    assert "there is no cache directory" in fails("push", missing, "store", "--key", key, code=2)
    assert "the private key" in fails("push", node.cache, "store", "--key", missing, code=2)
    assert "there is no directory" in fails("verify", missing, code=1)
    assert "give a directory" in fails("gc", "ftp://host", code=2)
    assert "--keep '1x'" in fails("gc", node.directory, "--keep", "1x", code=2)
    assert "--max '5 apples'" in fails("gc", node.directory, "--max", "5 apples", code=2)
    assert "artifact store s3://bucket: listing statement failed" in fails("pull", "s3://bucket", node.cache, code=1)
    assert "not installed" in fails("pull", node.directory, node.cache, "--device", "missing", code=2)
    monkeypatch.setenv("AIONN_ADOPT", "off")
    assert "switched off by AIONN_ADOPT" in fails("pull", "s3://bucket", node.cache, code=2)
    assert not (node.directory / "store").exists()


def test_gc_says_what_it_would_remove_and_removes_it(builder: Machine, node: Machine, key: Path) -> None:
    store = node.directory / "store"
    builder.push(store, key)
    month_ago = (store / "blake3").stat().st_mtime - 31 * 86400
    for path in store.rglob("*"):
        if path.is_file():
            os.utime(path, (month_ago, month_ago))
    would = node.json("fleet", "gc", store, "--dry-run")
    assert (would["statements"], would["kept"], would["dry_run"]) == (1, 0, True)
    assert would["files"] > 0
    assert "1 statement" in node.run("fleet", "gc", store, "--keep", "40d", "--max", "50G")[0]
    assert node.json("fleet", "gc", store) == would | {"dry_run": False}
    assert [path for path in store.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("package", ["obstore", "cryptography"])
def test_a_missing_package_is_one_sentence(package: str, tmp_path: Path) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from aionn.cli import main; sys.exit(main(['fleet', 'gc', 'store']))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.strip() == "aionn: aionn fleet needs obstore and cryptography; install them with: pip install 'aionn[fleet]'"
