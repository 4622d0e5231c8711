"""`python -m tests.bench NAME [args]`: run the benchmark of that name. Each prints machine, unit and p50/p99 beside named rivals."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Hand the rest of the command line to `tests.bench.<NAME>.main`."""
    here = Path(__file__).parent
    known = sorted(path.stem for path in here.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8") and path.stem != "__main__")
    if not argv or argv[0] not in known:
        print(f"usage: python -m tests.bench NAME [args]; NAME is one of {', '.join(known)}", file=sys.stderr)
        return 2
    importlib.import_module(f"tests.bench.{argv[0]}").main(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
