"""The README's Python runs, top to bottom in one session, and says what it does; its commands exist."""

import re
from pathlib import Path

import pytest
from conftest import python_of

ROOT = Path(__file__).parents[1]
OWN_TEST = {"adding-a-mechanism.md", "hugging-face.md", "tasks.md"}  # executed elsewhere, each in its own way
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in OWN_TEST)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_of(page)
    session: dict = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), session)
    assert blocks or page != ROOT / "README.md"


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (
                f"{page.name} points to {target}, which is not there"
            )


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"`make ([\w-]+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name} names make {target}"
