"""One case of `test_never_stale`: a tiny model that is compiled and stored, and what may be changed before it is compiled again.

Each case has other weights, so cases may share a driver and its records.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.caching.manifest import decode_manifest, encode_manifest
from aionn.caching.outcomes import CacheOutcome, Refusal
from aionn.testing import FakeDevice
from tests.leaks import ended
from tests.runtime.idling_app import IDLE_S, asleep, until

ROOT = Path(__file__).parents[2]
WIDTH = 64
X = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
Outputs = dict[str, NDArray[Any]]


def model_bytes(
    seed: int,
    *,
    weight: float = 0.0,
    bias: float = 0.0,
    alpha: float = 0.1,
    names: tuple[str, str] = ("x", "y"),
    opset: int = 17,
    producer: str = "",
) -> onnx.ModelProto:
    """y = LeakyRelu(x @ weights + bias). The weights have 16 KB, the bias has 256 bytes.

    Args:
        weight, bias: what to add to one number of that constant.
        names: of the input and of the output.
    """
    random = np.random.default_rng(seed)
    weights, biases = (random.standard_normal(shape).astype(np.float32) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    weights[3, 5] += weight
    biases[7] += bias
    x, y = names
    nodes = [
        helper.make_node("MatMul", [x, "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["sum"]),
        helper.make_node("LeakyRelu", ["sum"], [y], alpha=alpha),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, WIDTH)) for name in (x, y)]
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(biases, "bias")]
    graph = helper.make_graph(nodes, "stale", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, producer_name=producer)


async def read_model(how: str, path: Path) -> aionn.Model:
    """Read a model with `Model.from_onnx` or `Model.load`."""
    read: Any = getattr(aionn.Model, how)(path)
    model: aionn.Model = await read if inspect.isawaitable(read) else read
    return model


async def token_of(model: Any) -> bytes:
    """Return the model's own token."""
    digest = getattr(model, "digest", None)
    if digest is not None:
        await digest()
    token: bytes = model.token
    return token


class Case:
    """What the next compilation is asked for. A change alters files and attributes.

    Attributes:
        model: the object that the last compilation was given, used again if `reuse` is set.
        alone: the arguments of a runtime for each compilation from now on, or None for the shared one.
        in_process: "a child" for a compilation by another process, "a reader" if it cannot write to the cache either.
        keeps_open: compilations stay open in `open`, so that later ones may share their weights in the driver.
        while_asleep: None, or what happens after the compilation was given back (`idle_s`) and before it is used again.
    """

    def __init__(self, name: str, how: str, folder: Path, shared: aionn.Runtime, state_dir: Path, fake: FakeDevice, patch: Any) -> None:
        self.seed, self.how, self.folder, self.shared, self.state_dir, self.fake = (
            zlib.crc32(name.encode()),
            how,
            folder,
            shared,
            state_dir,
            fake,
        )
        self.patch = patch
        self.path, self.cache_dir = folder / "model.onnx", folder / "cache"
        self.device = "onnxruntime"
        self.token: bytes | None = None
        self.options: dict[str, Any] = {}
        self.cached = True
        self.model: aionn.Model | None = None
        self.reuse = False
        self.alone: dict[str, Any] | None = None
        self.in_process = ""
        self.keeps_open, self.open = False, AsyncExitStack()
        self.while_asleep: Callable[[Case], None] | None = None
        self.rewrite()

    # --- compiling ---------------------------------------------------------------------------------------------------

    def now(self) -> Outputs:
        """Return what the model in the file computes now, by ONNX Runtime without aionn."""
        if self.device == self.fake.name:
            return {"y": X}
        session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        (x,) = session.get_inputs()
        return dict(zip((output.name for output in session.get_outputs()), session.run(None, {x.name: X}), strict=True))

    async def compile(self) -> tuple[CacheOutcome, Outputs]:
        if self.in_process:
            return await self._in_a_child()
        if self.alone is None:
            return await self._compile(self.shared)
        async with aionn.Runtime(**{"state_dir": self.state_dir, **self.alone}) as runtime:
            return await self._compile(runtime)

    async def _compile(self, runtime: aionn.Runtime) -> tuple[CacheOutcome, Outputs]:
        if self.model is None or not self.reuse:
            self.model = await read_model(self.how, self.path)
        chosen = dict(self.options)
        if self.cached:
            chosen |= {"cache_dir": self.cache_dir, "token": self.token or await token_of(self.model)}
        if self.while_asleep is not None:
            chosen["idle_s"] = IDLE_S
        async with AsyncExitStack() as closing:
            compilation = await runtime.compile(self.model, devices=(self.device,), **chosen)
            await (self.open if self.keeps_open else closing).enter_async_context(compilation)
            (x,) = self.model.inputs
            outputs = await compilation.compute({x: X})
            if self.while_asleep is not None:
                await until(lambda: asleep(compilation))
                self.while_asleep(self)
                outputs = await compilation.compute({x: X})
            (outcome,) = compilation.outcomes
            return outcome, dict(outputs)

    async def _in_a_child(self) -> tuple[CacheOutcome, Outputs]:
        arguments = (self.how, self.path, self.cache_dir, self.state_dir, self.in_process)
        command = [sys.executable, "-m", "tests.conformance.stale_app", *map(str, arguments)]
        ran = await anyio.run_process(command, cwd=ROOT, stderr=None)
        found = json.loads(ran.stdout)
        return msgspec.convert(found["outcome"], CacheOutcome), {
            name: np.array(value, np.float32) for name, value in found["outputs"].items()
        }

    # --- the model's files -------------------------------------------------------------------------------------------

    def rewrite(self, **changed: Any) -> None:
        """Replace the file by another one, as a careful writer does."""
        self._replace(self.path, model_bytes(self.seed, **changed).SerializeToString())

    def overwrite(self, **changed: Any) -> None:
        """Write into the file, which keeps its inode and its size."""
        _write_into(self.path, model_bytes(self.seed, **changed).SerializeToString())

    def put_weights_beside(self, name: str = "weights", **changed: Any) -> None:
        """Replace the file by one whose weights lie in a file beside it."""
        model = model_bytes(self.seed, **changed)
        (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "weights")
        (self.folder / name).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", "0"), ("length", str(4 * WIDTH * WIDTH))):
            tensor.external_data.add(key=key, value=value)
        self._replace(self.path, model.SerializeToString())

    @property
    def beside(self) -> Path:
        return self.folder / "weights"

    def weights(self, **changed: Any) -> bytes:
        (tensor,) = (tensor for tensor in model_bytes(self.seed, **changed).graph.initializer if tensor.name == "weights")
        content: bytes = tensor.raw_data
        return content

    def overwrite_beside(self, **changed: Any) -> None:
        _write_into(self.beside, self.weights(**changed))

    def replace_beside(self, **changed: Any) -> None:
        self._replace(self.beside, self.weights(**changed))

    def keeping_mtime(self, path: Path, write: Any) -> None:
        """Restore the time of the last write after `write`. The size is the same."""
        before = path.stat()
        write()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_mtime_ns, path.stat().st_size, path.stat().st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)

    def move(self, how: Any, name: str) -> None:
        """Use the file under another name: `how(from, to)` makes it."""
        how(self.path, self.folder / name)
        self.path = self.folder / name

    def _replace(self, path: Path, content: bytes) -> None:
        new = path.with_name("new")
        new.write_bytes(content)
        new.replace(path)

    # --- the cache's files -------------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[Path]:
        return sorted((self.cache_dir / "entries").iterdir(), key=lambda path: path.stat().st_ctime_ns)

    def stored(self, name: str, entry: int = 0) -> Path:
        """Return one file of an entry: "model0", "data0" or "manifest"."""
        (path,) = self.entries[entry].rglob(name)
        return path

    def flip(self, name: str) -> None:
        content = bytearray(self.stored(name).read_bytes())
        content[len(content) // 2] ^= 1
        _write_into(self.stored(name), bytes(content))

    async def compile_another(self) -> None:
        """Store another model beside this one, then go on with this one."""
        seed, self.seed = self.seed, self.seed ^ 1
        self.rewrite()
        await self.compile()
        self.seed = seed
        self.rewrite()
        assert len(self.entries) == 2

    async def swap_with_another(self) -> None:
        """Put another model's stored files in the place of this one's."""
        await self.compile_another()
        for name in ("model0", "data0"):
            _write_into(self.stored(name), self.stored(name, 1).read_bytes())

    async def take_the_entry_of_another(self, *, forged: bool) -> None:
        """Put another model's whole entry there. `forged`: its manifest says that it is this model's."""
        await self.compile_another()
        ours, other = self.entries
        manifest, its = (decode_manifest((entry / "manifest").read_bytes()) for entry in (ours, other))
        assert not isinstance(manifest, Refusal)
        assert not isinstance(its, Refusal)
        shutil.rmtree(ours)
        shutil.copytree(other, ours)
        if forged:
            its = msgspec.structs.replace(its, key=manifest.key, family=manifest.family, model_digest=manifest.model_digest)
            (ours / "manifest").write_bytes(encode_manifest(its))

    def change_manifest(self, **changed: Any) -> None:
        manifest = decode_manifest(self.stored("manifest").read_bytes())
        assert not isinstance(manifest, Refusal)
        self.stored("manifest").write_bytes(encode_manifest(msgspec.structs.replace(manifest, **changed)))

    def change_manifest_text(self) -> None:
        content = self.stored("manifest").read_bytes()
        self.stored("manifest").write_bytes(content.replace(b'"generation":1', b'"generation":2'))
        assert self.stored("manifest").read_bytes() != content

    # --- drivers -----------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> Any:
        (device,) = [device for device in self.shared.devices if device.name == self.device]
        return device

    async def kill_driver(self) -> None:
        before = self.driver.pid
        os.kill(before, signal.SIGKILL)
        assert await ended(before, 10)
        # Where a service reaps the driver, the runtime may see it later. What is sent to the driver until then is a MISS.
        await until(lambda: self.driver.pid != before)

    async def restart_driver(self) -> None:
        before = self.driver.pid
        await self.driver.restart()
        assert self.driver.pid != before

    def use(self, device: str) -> None:
        """Use another device. The fake one's driver reads its orders when it starts, so each compilation has its own."""
        self.device = device
        if device == self.fake.name:
            self.alone = {}

    def move_state(self, how: Any) -> None:
        how(self.state_dir, self.folder / "another state")
        self.state_dir = self.folder / "another state"

    def move_cache(self, how: Any) -> None:
        how(self.cache_dir, self.folder / "another cache")
        self.cache_dir = self.folder / "another cache"


def _write_into(path: Path, content: bytes) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    assert (path.stat().st_size, path.stat().st_ino) == (before.st_size, before.st_ino)
