"""`aionn.Model`: an ONNX file, read once, its weights in shared memory that every driver can map.

The weights are frozen before any other process sees the pool: no driver can get a writable mapping of them. The pool goes
with the last reference to the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aionn.errors import CallerError, ExecutionError
from aionn.graph import Home, contents_of, read_onnx
from aionn.hal import model as hal_model
from aionn.hal.types import IMemory
from aionn.memory.memory import Memory
from aionn.memory.region import PROT_READ, Region


class Model(hal_model.Model):
    """A model as an app holds it: its graph, and its large constants in shared memory.

    Attributes:
        inputs: `hal.Operand` by name, in the graph's order, with `.type`, `.dimensions` (0: open) and `.symbols`.
        outputs: the same for its outputs, as the file declares them. Files do declare wrong shapes; arrays have the true ones.
        token: 32 bytes that name the content (graph and every constant): the same file gives the same token in every
            run and at every path.

    Example:
        >>> model = aionn.Model.from_onnx("silero_vad.onnx")
        >>> model.inputs["state"].dimensions
        (2, 1, 128)
        >>> compilation = await runtime.compile(model, cache_dir=cache_dir, token=model.token)
    """

    @classmethod
    def from_onnx(cls, source: str | os.PathLike[str] | bytes, *, memories: Mapping[str, Memory] | None = None) -> Model:
        """Read an ONNX model. Blocks for as long as its bytes take to be read and copied once.

        Weights in files beside the model are not copied but mapped, here and in drivers. Leave such a file as it is for as long as the
        model is used. Replace it by a new one (rename) rather than write into it.

        Args:
            source: path of a .onnx file, or its contents. Weights in files beside the model are found only from a path: beside it, or
                beside the file that it links to (as in Hugging Face's cache). Files elsewhere are refused.
            memories: memory, or slices of it, that stands for such a file, by the name that the graph gives
                (external_data's location). It is used in place and shared with drivers, which cannot write to it; the app must
                not, either. The model keeps it mapped, also when the app closes it.

        Raises:
            CallerError: there is no ONNX model at `source`; or a constant lies beyond the file or memory it is said to be in.
            CompilationError: the graph is broken, or has inputs or outputs that are not tensors.
            MemoryAllocationError: the weights do not fit into shared memory.
        """
        regions: list[Region] = []

        def allocate(size_bytes: int) -> IMemory:
            regions.append(Region.allocate(size_bytes, freezable=True))
            return regions[-1]

        homes = {}
        pools: dict[Region, Memory] = {}
        for name, memory in _by_name(memories):
            # One pool for all slices of it, with a user of its own: the app may close what it gave.
            whole = pools.setdefault(memory.pool, memory.whole())
            homes[name] = Home(whole, memory.offset_bytes, memory.size_bytes)
        try:
            read = read_onnx(source, allocate, _mapped, homes)
        except ExecutionError as error:
            raise CallerError(f"the model's weights cannot be read: {error}. Put the whole file back") from error
        for region in regions:
            region.freeze()
        changeable = [hal_model.may_change(pool) for pool in read.pools]
        digests = zip(read.constants, read.digests, strict=True)
        return cls(
            graph=read.graph,
            inputs=read.inputs,
            outputs=read.outputs,
            operations=read.operations,
            constants=read.constants,
            pools=read.pools,
            token=read.token,
            contents=contents_of(digest for constant, digest in digests if changeable[constant.location.pool_index]),
        )


def _mapped(path: Path) -> IMemory:
    """Return a file beside the model, mapped for reading."""
    with open(path, "rb", buffering=0) as file:
        return Memory.from_fd(file, os.fstat(file.fileno()).st_size, PROT_READ)


def _by_name(memories: Mapping[str, Memory] | None) -> Iterable[tuple[str, Memory]]:
    """Return the pairs of `memories`.

    Raises:
        CallerError: it is not a mapping, or a value is not a `Memory`.
    """
    if memories is None:
        return ()
    if not isinstance(memories, Mapping):
        raise CallerError(f"memories: expected a dict of memories by file name, got {type(memories).__name__}")
    for name, memory in memories.items():
        if not isinstance(memory, Memory):
            raise CallerError(f"memories[{name!r}]: expected a Memory, got {type(memory).__name__} (a HardwareBuffer has one as .memory)")
    return memories.items()
