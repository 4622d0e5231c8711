"""A Ray cluster of one node, for all test processes of a run: `python -m tests.ray.cluster FIFO ADDRESS_FILE`.

The node writes its address to a file when it is ready. It ends when no process holds the FIFO open for writing any more, so it ends also if
those processes were killed. A process that comes later starts another node. Dashboard, usage statistics and object store are off or as
small as Ray allows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray refuses less than 75 MB
CPUS = 16  # slots for tasks and replicas, not processors
STARTED_WITHIN_S = 110.0

# Ray reads these when it is imported. A test's cluster asks no token of its clients, and writes nothing into the user's home.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # a worker starts when a task needs one
}

FARM_DEVICES = ("onnxruntime", "aionn.testing.fake_engine:FakeEngine")
LOCK = "ray-lock"
"""The name of a lock beside the address file. A process holds the lock while it starts a node, joins the node or ends it."""

FARM_KEY = "farm.key"
"""The key of the node's builder lies under this name beside the address file."""


@contextlib.contextmanager
def shared_cluster(folder: Path) -> Iterator[str]:
    """Use the cluster of a run for the body, and start it if no process has done so yet.

    Args:
        folder: one for all processes of the run.

    Yields:
        Its address, for `ray.init(address=...)`.
    """
    fifo, address_file, log = folder / "ray-cluster", folder / "ray-address", folder / "ray-log"
    with filelock.FileLock(folder / LOCK, timeout=STARTED_WITHIN_S):
        if not fifo.exists():
            os.mkfifo(fifo)
        try:
            holder = _join(fifo)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            both = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)  # a FIFO that is open for both never blocks
            try:
                _start(fifo, address_file, log)
                holder = _join(fifo)
            finally:
                os.close(both)
    try:
        yield address_file.read_text()
    finally:
        os.close(holder)


def _join(fifo: Path) -> int:
    """Open the FIFO as a user. Fails with ENXIO if no node runs, because only the node reads."""
    return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _start(fifo: Path, address_file: Path, log: Path) -> None:
    with log.open("wb") as output:
        process = subprocess.Popen(
            # In a session of its own, so that a ^C of pytest does not end it before the tests. It is not a child of this process, so
            # that tests here do not take the node's drivers for theirs.
            ["setsid", "--fork", sys.executable, "-m", "tests.ray.cluster", os.fspath(fifo), os.fspath(address_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=os.environ | ENVIRONMENT,
            cwd=Path(__file__).parents[2],
        )
    assert process.stdout is not None
    with process.stdout as ready:
        said = ready.readline()  # nothing if the process ended
    process.wait()
    if not said:
        raise RuntimeError(f"the Ray node did not start:\n{log.read_text()}")


def main(fifo: str, address_file: str) -> None:
    """Run the node until the last user of the FIFO has left."""
    import ray

    from aionn.fleet import BuilderKey
    from aionn.ray import node_resources

    users = os.open(fifo, os.O_RDONLY)
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray and its children must not hold the pipe
    os.set_inheritable(ready.fileno(), False)
    key = Path(address_file).with_name(FARM_KEY)
    key.unlink(missing_ok=True)  # of a node that has ended
    BuilderKey.generate("farm").save(key)
    os.environ["AIONN_FARM_KEY"] = os.fspath(key)  # for the worker processes of the node
    folder = tempfile.mkdtemp(prefix="aionn-ray-")  # Ray makes sockets in it, whose paths must be short
    try:
        started = ray.init(
            num_cpus=CPUS,
            resources=node_resources(FARM_DEVICES),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
        Path(address_file).write_text(started.address_info["address"])
        ready.write("ready\n")
        ready.close()
        with _without_users(users, Path(address_file).with_name(LOCK)):
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _without_users(users: int, lock: Path) -> Iterator[None]:
    """Wait until the last user has left. Later users wait until the body has ended, and then start another node."""
    os.set_blocking(users, False)
    while True:
        select.select([users], [], [])
        with filelock.FileLock(lock):
            try:
                os.read(users, 1)  # raises only if the FIFO has a writer, which is a user
            except BlockingIOError:
                continue  # a user came meanwhile
            os.close(users)
            yield
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
