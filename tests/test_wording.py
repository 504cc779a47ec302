"""Words that a first reader did not understand stay gone, and those in their place are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import REPO

GONE = {
    r"left its course|came back at once": "no divergence in",
    r"not yet, [^.]* later": "not recovered after",
    r"what going back throws away": "what you would lose",
    r"^\{\} before it|\d before it; ": " earlier; ",
    r"too near to the first sign": "too close to onset",
    r"before, \S+ at most": " before, peak ",
    r"[Ii] can't tell": "unknown: ",
    r"What was left\b": "Abandoned branches",
    r"what was kept, what was left\b": "what was kept, what was abandoned",
    r"trainer went on from": "the trainer resumed from",
    r"thrown away": "discarded",
    r"eps decides": "eps dominates",
    r"by (the|their) weights alone": "estimated attention logits",
    r"half are under|pure noise has": "(noise alone: ",
    r"of no direction": "isotropic inputs",
    r"kept: the trainer agrees": "the trainer matches",
    r"broken: the trainer": "mismatch:",
    r"already as asked": "would change nothing in",
    r"and so (\d|\{\})": "other file",
    r"its trainer as before": "restart its trainer with",
    r"rates are in the relaunch": "come from the launch config",
    r"no values from flags": "no launch flags that are known",
    r"how this run was started is": "no launch command is recorded",
    r"^the command line: ": "is {}, and not {}",
    r"` does not take": "takes no argument",
    r"change its rights": "change its permissions",
    r"Go on in (bf16|fp32)": "Switch to bf16 or fp32",
    r"Draw the run": "Plot the run's history",
    r"step to take them of": "Source step",
    r"weights are times": "Multiplier",
    r"On dark ground": "Dark theme",
    r"at which the decay ends": "The floor of the decay",
    r"no training leads to": "values training can't produce",
    r"against the promise": "compares it with the plan",
    r"afresh": "resets",
    r"passe[sd] over (the|no) data|are passed over;": "are skipped",
    r"saved scheduler can hold": "What a scheduler's state can't hold is refused",
    r"a thread a file": "one thread per file",
    r"starts the last one is heard": "The last start counts",
    r"ten fates": "covers ten scenarios",
}
"""A pattern of the old words, and the new ones."""


def sentences(path: Path) -> Iterator[str]:
    """The texts of a module in one piece each, `{}` for what is filled in; no docstring: what
    `--help` says of a command stands in docs/cli.md."""
    tree = ast.parse(path.read_text())
    nodes, apart = [*ast.walk(tree)], set()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                apart.add(id(docstring))
            case ast.JoinedStr(values=parts):
                apart |= {id(part) for part in parts}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            pieces = [getattr(part, "value", None) for part in node.values]
            yield "".join(piece if isinstance(piece, str) else "{}" for piece in pieces)
        elif isinstance(node, ast.Constant) and id(node) not in apart:
            yield str(node.value)


@pytest.fixture(scope="module")
def told() -> list[str]:
    """All that a user reads, each text on one line."""
    modules = [text for path in (REPO / "ckptsurgeon").rglob("*.py") for text in sentences(path)]
    pages = [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")]
    blocks = [block for page in pages for block in page.read_text().split("\n\n")]
    return [" ".join(text.split(" ")).replace("\n", " ") for text in (*modules, *blocks)]


@pytest.mark.long
@pytest.mark.parametrize("old", GONE)
def test_the_old_words_are_gone_and_the_new_ones_are_there(told: list[str], old: str) -> None:
    assert [text for text in told if re.search(old, text)] == []
    assert any(GONE[old] in text for text in told), GONE[old]
