"""The system's own chromium, in which tests look at pages (Debian: `apt-get install chromium`).

Where it is missing, the tests are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
FLAGS = (
    "--headless=new",  # the old headless mode has no microphone
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@contextmanager
def page_of_chromium(permissions: Sequence[str], flags: Sequence[str] = ()) -> Iterator[Any]:
    """Return an empty page, whose sites have these permissions. The browser ends with the body."""
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip("chromium is not installed, so no page was tried in a browser; run apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=False, args=[*FLAGS, *flags])
        try:
            yield chromium.new_context(permissions=list(permissions)).new_page()
        finally:
            chromium.close()
