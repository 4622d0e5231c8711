"""Processes that count on pages of their own, for tests of the exporter. Each reads commands from stdin and answers with a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.apps import App

# Counts on a page without a runtime, so it starts at once. `N` counts N executions, `close` closes the page and opens another one.
WRITER = """
import sys
from aionn.pages.app_layout import Kind; from aionn.pages import app_layout; from aionn.pages.app_page import close_page, open_page

def begin():
    global page, runtime
    page = open_page()
    runtime = page.slot(Kind.RUNTIME, sys.argv[1], "serving")
    open_burst()

def open_burst():
    global burst
    texts = "detector", "reference", "first", "", sys.argv[1]
    burst = page.slot(Kind.BURST, *texts, parent=page.past(Kind.PAST_BURSTS, *texts))

begin()
print("ready", flush=True)
for line in sys.stdin:
    if line == "close\\n":
        page.release(burst)
        page.release(runtime)
        close_page(page)
        begin()
    elif line == "burst\\n":
        page.release(burst)
        open_burst()
    else:
        for _ in range(int(line)):
            burst.answered(1000, 1000)
            burst.add(app_layout.COMPUTED, 1)
    print("done", flush=True)
"""

# Answers requests with a real model in a real driver process, half of them over a burst that stays open.
SERVER = """
import asyncio, sys
import numpy as np
import aionn
from aionn.testing import identity_model

async def main():
    loop = asyncio.get_running_loop()
    inputs = {"input": np.zeros((1, 16), np.float32)}
    async with aionn.Runtime(start=(), name=sys.argv[1]) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",), name="detector")
        async with compilation.burst() as burst:
            print("ready", flush=True)
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                for number in range(int(line)):
                    await (burst if number % 2 else compilation).compute(inputs)
                print("done", flush=True)

asyncio.run(main())
"""


class Worker:
    """One such process. Use it in `with`, or `kill` it."""

    def __init__(self, source: str, name: str) -> None:
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
        command = [sys.executable, "-c", source, name]
        self.process: subprocess.Popen[str] = App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> Worker:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ready(self) -> Worker:
        assert self._line() == "ready"
        return self

    def do(self, command: object) -> None:
        """Have a command carried out."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()
