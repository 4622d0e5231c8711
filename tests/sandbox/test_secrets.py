"""What an app knows and its drivers must not: variables, descriptors, files. The evil engine looks for it from inside a real driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import aionn
from tests.sandbox.asking import NEEDS, WORD, ask, evil_model
from tests.sandbox.evil_engine import EVIL, EVIL_COMPILER, Answer, Question

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

BOTH = pytest.mark.parametrize("device", [EVIL, EVIL_COMPILER])
SECRETS = (
    *("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "DATABASE_URL", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "KRB5CCNAME"),
    *("NVIDIA_API_KEY", "OPENVINO_AUTH", "PYTHON_KEYRING_PASSWORD", "OV_CLIENT_SECRET", "CUDA_CREDENTIALS"),  # of families that are kept
)
KEPT = ("LC_TIME", "OMP_WAIT_POLICY", "ORT_LOG")


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def model(tmp_path: Path) -> aionn.Model:
    return evil_model(tmp_path / "models")


def secret(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(WORD)
    return path


def files_below(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


async def answered(model: aionn.Model, device: str, question: Question, sandbox: str, **more: Any) -> Answer:
    async with aionn.Runtime(sandbox=sandbox, engine_needs=NEEDS, **more) as runtime:
        return await ask(await runtime.compile(model, devices=(device,)), question)


@BOTH
async def test_no_variable_with_a_secret_reaches_a_driver(device: str, model: aionn.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *KEPT):
        monkeypatch.setenv(name, f"{WORD} {name}")
    found = await answered(model, device, Question(), "auto")
    assert {name for name, value in found.environment.items() if value.startswith(WORD)} == set(KEPT)
    assert found.environment["HOME"] == "/nonexistent"
    free = await answered(model, device, Question(), "off")
    assert {name for name, value in free.environment.items() if value.startswith(WORD)} == {*SECRETS, *KEPT}


@BOTH
async def test_a_driver_gets_the_variables_that_the_app_gives_it(device: str, model: aionn.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WORD)
    given = {"HF_TOKEN": "of the driver", "MY_LICENCE_KEY": "1", "LC_TIME": "C"}
    found = await answered(model, device, Question(), "auto", driver_env=given)
    assert given.items() <= found.environment.items()
    assert WORD not in found.environment.values()


@BOTH
async def test_no_descriptor_of_the_app_reaches_a_driver(device: str, model: aionn.Model, tmp_path: Path) -> None:
    inherited, kept = secret(tmp_path / "inherited"), secret(tmp_path / "kept")
    with inherited.open() as first, kept.open():
        os.set_inheritable(first.fileno(), True)
        for sandbox in ("auto", "off"):
            found = await answered(model, device, Question(), sandbox)
            assert not {str(inherited), str(kept)} & set(found.descriptors.values())
            assert not [path for path in found.descriptors.values() if path.startswith(str(tmp_path / "home"))]


@BOTH
async def test_no_file_of_the_user_can_be_read_by_a_driver(
    device: str, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, cache, models = tmp_path / "home", tmp_path / "cache", tmp_path / "models"
    monkeypatch.setenv("HOME", str(home))
    secrets = [
        *(secret(home / name) for name in (".ssh/id_ed25519", ".aws/credentials", ".netrc", ".config/app/token")),
        secret(cache / "other"),
        secret(models / "other.onnx"),
        secret(tmp_path / "beside"),
    ]
    other = EVIL if device == EVIL_COMPILER else EVIL_COMPILER
    for sandbox in ("auto", "off"):
        async with aionn.Runtime(sandbox=sandbox, engine_needs=NEEDS) as runtime:
            cached: dict[str, Any] = {"cache_dir": cache, "token": model.token}
            sibling = await ask(await runtime.compile(model, devices=(other,), **cached), Question())
            compilation = await runtime.compile(model, devices=(device,), **cached)
            everything = files_below(tmp_path)
            paths = (*everything, "/etc/passwd", "/etc/hostname", f"/proc/{os.getpid()}/environ", f"/proc/{sibling.pid}/environ")
            found = await ask(compilation, Question(paths=paths))
        records = [path for path in everything if "/state/" in path]
        assert len(records) >= 2  # of both drivers
        assert len([path for path in everything if path.startswith(str(cache))]) > 1
        if sandbox == "auto":
            # The driver's own records, and nothing else.
            own = set(found.readable)
            assert own < set(records)
            assert len({Path(path).parent for path in own}) == 1
        else:
            assert {str(path) for path in secrets} <= set(found.readable)
            assert {path: found.readable[path] for path in map(str, secrets)} == dict.fromkeys(map(str, secrets), WORD)
