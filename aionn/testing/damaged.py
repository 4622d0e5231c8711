"""`python -m aionn.testing.damaged ENGINE FOLDER`: load damaged artifacts in a process that may crash.

The folder has a sub-folder per artifact, with its files: model0, model1, ..., data0, ... For each artifact one line is printed: its name
before it is loaded, then "refused" or "loaded". So the last line names the artifact that ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aionn.driver.registry import find_engine
from aionn.hal.engine import Artifact, CompileOptions


def read(folder: Path) -> Artifact:
    """Return the artifact in a folder."""
    files: dict[str, list[bytes]] = {"model": [], "data": []}
    for kind, found in files.items():
        while (path := folder / f"{kind}{len(found)}").exists():
            found.append(path.read_bytes())
    return Artifact(tuple(files["model"]), tuple(files["data"]))


def write(folder: Path, artifact: Artifact) -> None:
    """Write an artifact into a folder that does not exist yet."""
    folder.mkdir()
    for kind, files in (("model", artifact.model), ("data", artifact.data)):
        for index, content in enumerate(files):
            (folder / f"{kind}{index}").write_bytes(content)


def main(name: str, folder: str) -> None:
    engine = find_engine(name)
    for path in sorted(Path(folder).iterdir()):
        print(path.name, end=" ", flush=True)
        try:
            engine.load(read(path), CompileOptions())
        except Exception:
            print("refused", flush=True)
        else:
            print("loaded", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
