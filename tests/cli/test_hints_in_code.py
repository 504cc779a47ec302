"""Each command that the code prints, and each of the README, can be typed as it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ckptsurgeon import hints
from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands
from tests.support.launch import REPO

EXCEPTED = [
    ".\n# Made by `ckptsurgeon advise`; look at it first: ckptsurgeon plan FILE\n",
    "As `ckptsurgeon set`; repeatable.",
    "As `ckptsurgeon set`; repeatable.",
    "an interrupted surgery is waiting: ckptsurgeon recover",
]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF = {
    "look/ready.py": {"ready"},
    "logs/rows.py": {"advise", "report", "watch"},
    "operations/numbered_parameters.py": {"plan", "apply", "transplant"},
    "operations/parameter_names.py": {"plan", "apply", "transplant"},
    "operations/transplanted_numbers.py": {"plan", "apply", "transplant"},
    "surgery/fork.py": {"fork"},
    "surgery/restore.py": {"undo", "redo"},
    "surgery/saved_again.py": {"undo", "redo"},
}
"""The commands that alone reach the code of a file."""
ACTS = ("setting", "otherwise")


def test_each_hint_in_the_code_is_a_command_that_can_be_typed() -> None:
    """The command exists, its options are its own, and nothing that it needs is missing."""
    known = options()
    found = 0
    for path, call in calls():
        words = [filled(word) for word in call.args]
        where = f"{path}:{call.lineno}: {words}"
        if words[:1] == ["VALUE"]:  # of a function that takes the words from its caller
            continue
        found += 1
        assert words[0] in known, where
        wrong = [w for w in words if OPTION.fullmatch(w) and w not in known[words[0]]]
        assert wrong == [], where
        assert words[0] != "rollback" or {"--to", "VALUE"} & set(words), where
    assert found > 150


def test_no_hint_adds_an_option_that_the_typed_command_has_not() -> None:
    """Of each call of `again` outside the commands' own files, for each command that reaches it."""
    known, tried, wrong = options(), 0, []
    page = (REPO / "docs" / "recipes.md").read_text()
    keys = {"to", *re.findall(r"^\| `([a-z_.]+)` \|", page, re.M)}
    for path, call in calls("again"):
        where = path.relative_to(REPO / "ckptsurgeon").as_posix()
        if where.startswith("cli/"):
            continue
        given = {word.arg: filled(word.value) for word in call.keywords if word.arg in ACTS}
        assert given.get("setting", "to=").partition("=")[0] in keys, where
        hint = hints.again(*map(filled, call.args), **given)
        for name in OF.get(where, known):
            typed = hints.TYPED.set(hints.Typed((name,), takes=known[name].__contains__))
            try:
                act, why = hints.apart(hint)
                assert (str(hint), f"{hint}", hints.text(hint)) == (
                    act, act, f"{act}    {why}" if why else act,
                )  # fmt: skip
            finally:
                hints.TYPED.reset(typed)
            lacking = [word for word in OPTION.findall(act) if word not in known[name]]
            wrong += [f"{where}:{call.lineno}: {act}"] if lacking or not act else []
            tried += bool(hint.added)
    assert wrong == []
    assert tried > 300


def test_no_hint_in_the_code_names_a_step_of_its_own() -> None:
    """A number that stands alone, or behind an option that takes a step, is one that this run may
    not have: such a hint is filled in from the run, or goes without."""
    of_steps = {
        "average",
        "diff",
        "doctor",
        "export",
        "graft",
        "rollback",
        "show",
        "skip",
        "verify",
    }
    takes_step = {"--against", "--from", "--step", "--to"}
    wrong = []
    for path, call in calls():
        name, *words = map(filled, call.args)
        for before, word in pairwise([name, *words]):
            alone = not before.startswith("--") or before in takes_step
            if name in of_steps and alone and re.fullmatch(r"\d+(-\d+)?", word):
                wrong.append(f"{path}:{call.lineno}: {word}")
    assert wrong == []


def test_no_text_of_the_code_has_a_command_in_it() -> None:
    """A command is made by `command`, which quotes its words and carries over what was typed; the
    exception are help and the comments in files that are written."""
    names = "|".join(commands())
    typed = re.compile(rf"ckptsurgeon (-\S+ \S+ )*({names})\b")
    found = []
    for path in (REPO / "ckptsurgeon").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            shown = node.value if isinstance(node, ast.Constant) and id(node) not in silent else ""
            if isinstance(shown, str) and typed.search(shown):
                found.append(shown)
    assert sorted(found) == EXCEPTED


def test_no_line_of_the_readme_has_an_option_that_is_not_there() -> None:
    known = options()
    rows = re.findall(r"^`([a-z-]+)[^`]*` \|(.*)$", (REPO / "README.md").read_text(), re.M)
    for name, row in rows:
        assert [word for word in OPTION.findall(row) if word not in known[name]] == [], name
    assert len(rows) > 20


def test_each_emergency_of_the_readme_has_a_command_that_can_be_typed() -> None:
    known = options()
    text = (REPO / "README.md").read_text()
    typed = [line.split() for line in re.findall(r"\| `ckptsurgeon (.*)`$", text, re.M)]
    assert len(typed) == 10
    for name, *words in typed:
        assert [word for word in OPTION.findall(" ".join(words)) if word not in known[name]] == []


def options() -> dict[str, set[str]]:
    """The options of each command."""
    return {
        name: {"--help"}
        | {word for item in build(row).params for word in (*item.opts, *item.secondary_opts)}
        for name, row in commands().items()
    }


def calls(maker: str = "command") -> Iterator[tuple[Path, ast.Call]]:
    """Each call of `command`, or of another maker, of `ckptsurgeon.hints`."""
    for path in (REPO / "ckptsurgeon").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        own = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "ckptsurgeon.hints"
            and any(name.name == maker for name in node.names)
            for node in ast.walk(tree)
        )
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == f"hints.{maker}" or (name == maker and own):
                yield path, node


def filled(node: ast.expr) -> str:
    """A word, with VALUE where a value is put into it."""
    if isinstance(node, ast.Starred):
        return "VALUE"
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in parts)
