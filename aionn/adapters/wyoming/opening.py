"""Find the models of a server, see what each of them is, and open them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import aionn
from aionn.adapters.wyoming.models import SoundModel
from aionn.adapters.wyoming.server import Heard
from aionn.adapters.wyoming.voice import is_voice
from aionn.adapters.wyoming.wake_words import FEATURES, Features, WakeWord, embeddings_of
from aionn.errors import CallerError

_ENDINGS = (".tflite", ".onnx")
_PACKAGE = "pyopen_wakeword"
"""Its wheel has the models of five wake words. Its code is not used."""


async def open_models(
    runtime: aionn.Runtime, stack: AsyncExitStack, models: Sequence[str], features: str | None, threshold: float
) -> Heard:
    """Open wake words, the models that make their features, and a model of voice activity.

    Args:
        stack: closes the bursts.
        models: paths of .tflite and .onnx files, and of folders with wake words. None at all stands for the wheel `pyopen-wakeword`.
        features: the folder of melspectrogram and embedding_model. None: that of the first wake word.

    Raises:
        CallerError: a path has no model, a model is neither a wake word nor one of voice activity, or features are missing.
        AionnError: as `Runtime.compile`.
    """
    files: dict[str, SoundModel] = {}
    voices: list[SoundModel] = []
    for path in _paths(models):
        file = await SoundModel.read(path)
        if is_voice(file):
            voices.append(file)
        elif embeddings_of(file):
            before = files.setdefault(path.stem, file)  # .tflite comes first, where a folder has both
            if before.path.parent != path.parent:
                raise CallerError(f"{str(before.path)!r} and {str(path)!r} are both the wake word {path.stem!r}; give one of them")
        else:
            found = ", ".join(f"{name!r} {list(operand.dimensions or ())}" for name, operand in file.model.inputs.items())
            wanted = "a wake word of openWakeWord takes [1, 16, 96], and Silero VAD takes 'input' and 'state'"
            raise CallerError(f"the model {str(path)!r} takes {found}; {wanted}")
    if len(voices) > 1:
        raise CallerError(f"{str(voices[0].path)!r} and {str(voices[1].path)!r} are both models of voice activity; give one of them")
    made = await _features(runtime, stack, Path(features or next(iter(files.values())).path.parent)) if files else None
    words = {name: WakeWord(name, await file.open(runtime, stack), embeddings_of(file)) for name, file in files.items()}
    return Heard(words, made, await voices[0].open(runtime, stack) if voices else None, threshold)


def _paths(models: Sequence[str]) -> list[Path]:
    if not models:
        spec = find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise CallerError("there is no model; give --model PATH, or get five wake words: pip install --no-deps pyopen-wakeword")
        models = [str(Path(spec.submodule_search_locations[0], "models"))]
    found: list[Path] = []
    for given in map(Path, models):
        inside = list(_models_in(given)) if given.is_dir() else [given]
        if not inside:
            raise CallerError(f"the folder {str(given)!r} has no wake word; give one with .tflite or .onnx files")
        found += inside
    return found


def _models_in(folder: Path) -> Iterable[Path]:
    for ending in _ENDINGS:
        yield from (path for path in sorted(folder.glob(f"*{ending}")) if path.stem not in FEATURES)


async def _features(runtime: aionn.Runtime, stack: AsyncExitStack, folder: Path) -> Features:
    opened = []
    for name, shape in FEATURES.items():
        path = next((path for ending in _ENDINGS if (path := folder / (name + ending)).is_file()), None)
        if path is None:
            raise CallerError(f"there is no {name}.tflite or {name}.onnx in {str(folder)!r}; name the folder that has it with --features")
        opened.append(await (await SoundModel.read(path, shape)).open(runtime, stack))
    features = Features(*opened)
    await features.learn_silence()
    return features
