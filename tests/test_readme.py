"""README's commands give what README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPO
from tests.support.transcripts import BLOCK, matches

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
README = (REPO / "README.md").read_text("utf-8")


def transcript(name: str) -> list[str]:
    return next(body for word, body in BLOCK.findall(README) if word == name).splitlines()


@pytest.mark.long
def test_the_demo_recovers_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", str(tmp_path / "demo")],
        cwd=REPO,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = done.stdout.replace(f"{tmp_path}/", "").splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("$ cd "))
    assert matches(transcript("demo"), printed[start:], same_numbers=False), done.stdout


def test_the_readme_can_be_read_at_night() -> None:
    assert len(README.split()) <= 1400


def test_the_readme_goes_from_the_emergency_to_the_reference() -> None:
    """The promise, how to install it, the night on which it is needed; commands and docs follow."""
    above, *parts = re.split(r"^## ", README, flags=re.MULTILINE)
    assert "docs/demo.svg" in above and "exactly\n> as it was" in above and "`undo`" in above
    assert [part.partition("\n")[0] for part in parts] == [
        "Install", "My run diverged", "Other emergencies", "Is my trainer supported?", "Commands",
        "How it stays safe", "Documentation", "The bundled trainer",
    ]  # fmt: skip
    install, night, others, trainers, commands = parts[:5]
    assert "--install-completion" in install
    typed = re.findall(r"^\$ ckptsurgeon ([\w-]+)", night, re.MULTILINE)
    assert typed == ["status", "advise", "plan", "apply", "undo"] and "--relaunch" in night
    assert others.count(" | `ckptsurgeon ") >= 10
    assert "trainer | edit | relaunch | set by flags" in trainers
    said = re.findall(r"^`.*?`\s*\| (.*)$", re.sub(r"\]\(.*?\)", "]", commands), re.MULTILINE)
    assert len(said) > 30 and max(len(words.split()) for words in said) <= 12


def test_every_command_is_in_the_readme() -> None:
    from ckptsurgeon.cli.commands import commands

    assert commands()
    assert [name for name in commands() if f"`{name}" not in README] == []


def test_a_row_of_a_command_names_options_that_it_has() -> None:
    reference = (REPO / "docs" / "cli.md").read_text("utf-8").split("\n## ")[1:]
    options = {text.split()[0]: set(OPTION.findall(text)) for text in reference}
    rows = re.findall(r"^(`\w.*?`) \| (.*)$", README, re.MULTILINE)
    named = {row.strip("`").split()[0]: set(OPTION.findall(row + text)) for row, text in rows}
    assert named.keys() >= options.keys()
    unknown = {name: used - options[name] for name, used in named.items() if name in options}
    assert {name: words for name, words in unknown.items() if words} == {}


def test_every_file_that_a_page_links_to_is_there() -> None:
    pages = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
    links = [
        page.parent / link
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
        if "://" not in link
    ]
    assert len(links) > 10
    assert [str(link) for link in links if not link.exists()] == []


def test_decisions_are_counted_through() -> None:
    files = sorted((REPO / "docs" / "decisions").iterdir())
    assert [file.name[:4] for file in files] == [f"{n:04d}" for n in range(1, len(files) + 1)]
    for number, file in enumerate(files, 1):
        assert file.read_text("utf-8").startswith(f"# {number}. "), file


def test_the_recipe_in_the_readme_loads(tmp_path: Path) -> None:
    from ckptsurgeon import Rollback, load

    block = next(b for b in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "rollback" in b)
    file = tmp_path / "recipe.yaml"
    file.write_text(block)
    recipe = load(file)
    assert recipe[Rollback].to == 6210


def test_the_matcher_sees_a_difference() -> None:
    assert matches(["a 1", "…", "b 2"], ["a 1", "x", "y", "b 2"])
    assert not matches(["a 1"], ["a 2"])
    assert matches(["a 1"], ["a 25.3"], same_numbers=False)
    assert not matches(["a 1"], ["b 1"], same_numbers=False)
    assert not matches(["a"], ["a", "b"])
