"""The docs name files, and the files are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptsurgeon.formats.detect import DESCRIBED, FORMATS, named
from tests.support.launch import REPO

PAGES = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    REPO / "SECURITY.md",
    *REPO.glob("docs/*.md"),
]
TOPS = ("ckptsurgeon", "train", "csrc", "docs", "tests", "recipes", "bench")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Names in backticks that begin with a folder of the repository; NAME and N stand for any."""
    words = re.findall(r"`([\w./*-]+)`", page.read_text("utf-8"))
    paths = [word for word in words if word.split("/")[0] in TOPS and "/" in word]
    real = [path for path in paths if "NAME" not in path and not path.endswith(".pt")]
    missing = [path for path in real if not list(REPO.glob(path.rstrip("/")))]
    assert not missing


def test_every_room_is_in_the_architecture() -> None:
    text = (REPO / "docs" / "architecture.md").read_text("utf-8")
    rooms = {item.parent.name for item in (REPO / "ckptsurgeon").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in text} == set()


def test_the_first_table_has_every_format_by_the_name_that_the_option_takes() -> None:
    page = (REPO / "docs" / "formats.md").read_text("utf-8")
    table = page.partition("## Which of these")[2].partition("\n## ")[0]
    names = re.findall(r"^\|.*\| `([a-z0-9-]+)` \| \[.*\]\(.*\) \|$", table, re.MULTILINE)
    assert {f"{type(named(n)).__module__}:{type(named(n)).__name__}" for n in names} >= {*FORMATS}
    assert {*DESCRIBED} <= {*names}
    assert all(named(name).name == name for name in names)
