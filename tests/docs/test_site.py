"""The site builds without a warning, has every page in its navigation and its index, and no link leads nowhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import page_of_chromium
from tests.docs.pages import DOCS, PAGES, ROOT

BUILD_S = 100
"""Three times the bound of row O17, since other tests run beside the build. It takes 4 s on a quiet machine."""

SECTIONS = ["Tutorials", "How-to", "Reference", "Explanation"]
SITE_PAGES = [page for page in PAGES if page.is_relative_to(DOCS)]


def in_navigation(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from [value] if isinstance(value, str) else in_navigation(value)


def config() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((DOCS / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return project


def test_the_navigation_has_every_page_once() -> None:
    listed = list(in_navigation(config()["nav"]))
    there = {page.relative_to(DOCS).as_posix() for page in SITE_PAGES} - {"index.md"}
    assert sorted(there - set(listed)) == [], "add these lines to nav in docs/zensical.toml"
    assert sorted(set(listed) - there) == [], "docs/zensical.toml names pages that are not there"
    assert len(listed) == len(set(listed))


def test_the_top_bar_has_four_words() -> None:
    assert [name for entry in config()["nav"] for name in entry] == SECTIONS


def test_the_index_links_to_every_page() -> None:
    index = DOCS / "index.md"
    linked = {target.resolve() for _, target, _ in links_of(index)}
    assert [str(page.relative_to(DOCS)) for page in SITE_PAGES if page.resolve() not in linked | {index.resolve()}] == []


def headings(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    slugs = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        slugs.add(re.sub(r"[\s-]+", "-", words))
    return slugs


def links_of(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Return each link to a file as its text, the file and the part behind #."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_nowhere(page: Path) -> None:
    broken = [link for link, target, _ in links_of(page) if not target.exists()]
    assert broken == []
    # Anchors of the pages made from docstrings are checked by the build.
    wrong = [
        link
        for link, target, anchor in links_of(page)
        if anchor and target.suffix == ".md" and "api" not in target.parts and anchor not in headings(target)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", SITE_PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_each_page_has_one_title_and_says_what_it_is_for(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    title, opening = text.split("\n\n")[:2]
    assert title.startswith("# ")
    first = re.split(r"(?<=[.])\s", opening)[0]
    assert re.match(r"(?:This page|aionn|`)", first), first
    assert len(first.split()) <= 30, first


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The site, and what its build has printed.

    It is built in a copy, so that nothing is written to the source. mkdocstrings finds the package by its installation.
    """
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns(".*"))
    build = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "docs/zensical.toml"]
    ran = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=BUILD_S, stdin=subprocess.DEVNULL)
    printed = ran.stdout + ran.stderr
    assert ran.returncode == 0, printed
    return folder / "docs" / ".site", printed


def test_the_site_builds_without_a_warning(built: tuple[Path, str]) -> None:
    site, printed = built
    assert "No issues found" in printed
    assert "griffe" not in printed
    assert len(list(site.rglob("index.html"))) == len(SITE_PAGES)
    api = (site / "reference" / "api" / "runtime" / "index.html").read_text(encoding="utf-8")
    assert 'id="aionn.Runtime.compile"' in api


# --- in a browser --------------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def home(built: tuple[Path, str]) -> Iterator[Any]:
    """The home of the site in a browser, which gets it over HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built[0])))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with page_of_chromium(["clipboard-read", "clipboard-write"]) as page:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            yield page
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_the_home_has_navigation_and_no_code_is_cut_off(home: Any, width: int, height: int) -> None:
    home.set_viewport_size({"width": width, "height": height})
    if width == 390:
        home.locator("label[for=__drawer].md-header__button").click()
    beside = home.locator("nav.md-nav--primary > .md-nav__list > .md-nav__item > label.md-nav__link")
    beside.last.wait_for(state="visible", timeout=30_000)
    assert [words.strip() for words in beside.all_inner_texts()] == SECTIONS
    site = home.url
    for page in ("", "tutorials/first-model/", "how-to/driver-deaths/", "how-to/serve-http/", "reference/api/runtime/"):
        home.goto(site + page)
        assert home.locator("pre > code").count() > 0
        cut = home.evaluate(
            "[...document.querySelectorAll('pre > code')].filter((code) => code.scrollWidth > code.clientWidth + 1"
            " || code.getBoundingClientRect().right > innerWidth).map((code) => code.innerText)"
        )
        assert cut == [], page
        assert home.evaluate("document.documentElement.scrollWidth") <= width, page


def test_copied_code_is_the_code_of_the_page(home: Any) -> None:
    home.set_viewport_size({"width": 390, "height": 844})
    home.locator("button[data-md-type=copy]").first.click(force=True)
    (code,) = re.findall(r"```python\n(.*?)\n```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)[:1]
    assert home.evaluate("navigator.clipboard.readText()") == code


def test_the_search_finds_compute(home: Any) -> None:
    home.locator(".md-search__button").click()
    home.get_by_role("combobox", name="Search").fill("compute")
    first = home.get_by_role("option").first
    first.wait_for(state="visible", timeout=30_000)
    assert first.get_attribute("href") == home.url + "reference/api/runtime/?h=compute#aionn.Compilation.compute"
