"""`python -m tests.fuzz TARGET [--runs N] [--seed S] [--plain] [--input HEX] [--corpus DIRECTORY]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz one target; without one, list them.")
    parser.add_argument("target", nargs="?")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs; -1: until it is interrupted (with atheris)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the plain loop, also where atheris is installed")
    parser.add_argument("--input", type=bytes.fromhex, help="run this one input, in hexadecimal digits")
    parser.add_argument("--corpus", type=Path, help="where inputs that reached something new are kept; default: nowhere")
    chosen = parser.parse_args()
    guided = not chosen.plain and chosen.input is None and find_spec("atheris") is not None
    if guided:
        import atheris

        # Before anything of aionn is imported: instrumented code tells which branches an input reached.
        with atheris.instrument_imports(include=["aionn"]):
            from tests.fuzz.targets import TARGETS, let_go
    else:
        from tests.fuzz.targets import TARGETS, let_go
    if chosen.target not in TARGETS:
        sys.exit("targets: " + " ".join(TARGETS))
    target = TARGETS[chosen.target]
    if chosen.input is not None:
        target.one(chosen.input)
        let_go()
        return
    if not guided:
        from tests.fuzz.mutation import run_plainly

        run_plainly(chosen.target, target, chosen.runs, chosen.seed)
        let_go()
        print(f"{chosen.target}: {chosen.runs} inputs by the plain loop, without coverage; seed {chosen.seed}")
        return
    with tempfile.TemporaryDirectory(prefix="corpus-") as own:
        corpus = chosen.corpus or Path(own)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(target.seeds()):
            (corpus / f"seed-{number}").write_bytes(data)
        options = [f"-runs={chosen.runs}", f"-seed={chosen.seed}", f"-max_len={target.max_bytes}", f"-artifact_prefix={Path(own).parent}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], target.one)
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
