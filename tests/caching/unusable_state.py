"""State directories that cannot be used, in every way. Run as `python -m tests.caching.unusable_state FAULT SANDBOX DIRECTORY`.

A process of its own, because some faults need a mount. Prints one line per compile: the outcome, the reason of a miss, and the reason why
nothing was stored. An exception is a fault of aionn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import aionn
from aionn.testing import identity_model
from tests.caching.unprivileged import NotPossibleError, _libc, mount_read_only

DEVICE = "onnxruntime"
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 16384, 1 << 18
_ANOTHER = 12345


def none(state: Path) -> None:
    state.mkdir()


def symlink(state: Path) -> None:
    (state.parent / "elsewhere").mkdir()
    state.symlink_to(state.parent / "elsewhere")


def symlink_of_device(state: Path) -> None:
    (state.parent / "elsewhere").mkdir()
    state.mkdir()
    (state / DEVICE).symlink_to(state.parent / "elsewhere")


def file(state: Path) -> None:
    state.write_bytes(b"")


def file_of_device(state: Path) -> None:
    state.mkdir()
    (state / DEVICE).write_bytes(b"")


def below_a_file(state: Path) -> None:
    state.parent.rmdir()
    state.parent.write_bytes(b"")


def nowhere(state: Path) -> None:
    state.parent.rmdir()
    state.parent.symlink_to("/proc/no such folder")


def of_another_user(state: Path) -> None:
    state.mkdir()
    _give_away(state)


def device_of_another_user(state: Path) -> None:
    (state / DEVICE).mkdir(parents=True)
    _give_away(state / DEVICE)


def _give_away(path: Path) -> None:
    try:
        os.chown(path, _ANOTHER, _ANOTHER)
    except PermissionError as error:
        raise NotPossibleError(str(error)) from error


def loose(state: Path) -> None:
    (state / DEVICE).mkdir(parents=True)
    for path in (state, state / DEVICE):
        path.chmod(0o777)


def read_only_before_the_first_use(state: Path) -> None:
    state.mkdir()
    mount_read_only(state)


def read_only_with_records(state: Path) -> None:
    compiled(state, "off")
    mount_read_only(state)


def full(state: Path) -> None:
    _mount_small(state)
    _fill(state)


def full_with_a_folder(state: Path) -> None:
    _mount_small(state)
    (state / DEVICE).mkdir()
    _fill(state)


def full_with_records(state: Path) -> None:
    _mount_small(state)
    compiled(state, "off")
    _fill(state)


def _mount_small(state: Path) -> None:
    if os.geteuid():
        raise NotPossibleError("only root mounts a file system")
    state.mkdir()
    _libc("unshare", _CLONE_NEWNS)
    _libc("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _libc("mount", b"tmpfs", os.fsencode(state), b"tmpfs", 0, b"size=1m,nr_inodes=16")


def _fill(state: Path) -> None:
    with (state / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    for number in range(16):
        try:
            (state / f"filler {number}").touch()
        except OSError:
            break


FAULTS: dict[str, Callable[[Path], None]] = {
    fault.__name__: fault
    for fault in (
        none,
        symlink,
        symlink_of_device,
        file,
        file_of_device,
        below_a_file,
        nowhere,
        of_another_user,
        device_of_another_user,
        loose,
        read_only_before_the_first_use,
        read_only_with_records,
        full,
        full_with_a_folder,
        full_with_records,
    )
}


def compiled(state: Path, sandbox: str, features: int = 16) -> str:
    """Compile and run a model. Returns what became of it in the cache."""
    model = aionn.Model.from_onnx(identity_model({"x": (1, features)}, outputs=["y"]))

    async def compile_one() -> str:
        async with aionn.Runtime(state_dir=state, start=(), sandbox=sandbox) as runtime:
            compilation = await runtime.compile(model, devices=(DEVICE,), cache_dir=state.parent.parent / "cache")
            x = np.full((1, features), 7, np.float32)
            np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x)
            (device,) = [device for device in runtime.devices if device.pid]
            assert device.sandbox is not None
            assert device.sandbox.level == sandbox
            (outcome,) = compilation.outcomes
        failure = outcome.save_failure
        return f"{outcome.kind.value} {outcome.reason and outcome.reason.value} {failure and failure.reason.value}"

    return aionn.run(compile_one)


def main(fault: str, sandbox: str, directory: str) -> None:
    state = Path(directory, "home", "state")
    state.parent.mkdir()
    FAULTS[fault](state)
    for features in (16, 16, 8):
        print(compiled(state, sandbox, features))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NotPossibleError as error:
        print(error, file=sys.stderr)
        sys.exit(77)
