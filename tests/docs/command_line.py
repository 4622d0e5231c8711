"""The page of the command line, made from the commands themselves. Write it with `python -m tests.docs.command_line`."""

from __future__ import annotations

import re

from aionn.cli.commands import app
from tests.docs.pages import DOCS

PAGE = DOCS / "reference" / "command-line.md"

HEAD = """# The command line

This page lists the commands of `aionn`, with all their options. `aionn COMMAND --help` prints the same at a terminal.

## At a terminal

These commands run your own model, without any code. `. .venv/bin/activate` puts `aionn` on the path:

```sh
aionn devices                                   # what is installed, and whether it works here
aionn run model.onnx --repeat 100 --burst       # inputs and outputs, and how long a run takes
aionn compile model.onnx --cache-dir cache      # so that later starts only load
aionn cache verify cache                        # also: ls, prune
```

The commands need the extra `cli`: `pip install 'aionn[cli,onnxruntime]'`. An app that imports aionn does not.
`aionn completion bash` prints a script for the Tab key, and likewise for zsh and fish.

The exit code is 0 for success, 1 for a failure, 2 for wrong usage and 130 for an interrupt. Errors are one sentence on stderr.
With `--json` a command prints one JSON value on stdout.

`aionn run model.onnx --trace trace.json` writes what happened to a file that Perfetto opens.
An app gets the same spans and counters through `aionn.trace`.
"""


def page() -> str:
    """Return the page as Markdown."""
    # Where Python runs a module, the generator puts its name into the usage.
    made = re.sub(r"^(aionn .*?) -m [\w.]+", r"\1", app.generate_docs(usage_name="aionn"), flags=re.MULTILINE)
    commands = made[made.index("\n## ", made.index("**Commands**")) :]
    # One paragraph is one line, as in the other pages of this kind; the lines of a docstring would be code in Markdown.
    commands = re.sub(r"\n {4}(?=\S)", " ", commands).replace("```console", "```text")
    commands = re.sub(r"\n{3,}", "\n\n", commands)
    return f"{HEAD}{commands.rstrip()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
