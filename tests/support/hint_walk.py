"""Hints are followed, three deep, until they end in something that works.

A hint ends well if it is a command that works as it is printed, or if it names a flag, a key or a
file of the trainer. It may not lead in a circle, to wrong usage, or past three commands, and keeps
the --dry-run and the --json of what was typed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typer.testing import CliRunner

from ckptsurgeon.cli import app
from ckptsurgeon.cli.commands import commands

DEPTH = 3
COMMANDS = (
    "rollback --to FIRST",
    "rollback --to FIRST --rewarm 2",
    "repair-latest",
    "repair-latest --to FIRST",
    "set-lr 0.5x",
    "set-lr 3e-5",
    "set-lr --min-lr 1e-7",
    "set-lr --warmup 1",
    "set-lr --decay 100000",
    "set-lr --decay-style cosine",
    "set beta1=0.8",
    "set beta2=0.9",
    "set beta3=0.9",
    "set momentum=0.5",
    "set alpha=0.5",
    "set eps=1e-6",
    "set weight_decay=0.3",
    "set clip_grad=0.25",
    "set loss_scale=256",
    "set seed=4321",
    "set consumed_samples=123",
    "set tokens=321",
    "set iteration=1",
    "set position=1",
    "set lr=1e-4 --params weight",
    "set weight_decay=0 --params weight",
    "reset moments",
    "reset moments --only exp_avg",
    "reset moments --only exp_avg_sq",
    "reset moments --params weight",
    "reset moments --rewarm 2",
    "reset moments --rewarm-ramp 2",
    "reset loss-scale",
    "graft moments --from FIRST",
    "graft moments --from FIRST --params weight",
    "skip 100-110",
    "skip NEXT",
    "skip NEXT --by-counters",
    "skip 100-110 --by-counters",
    "skip --clear",
    "swap-optimizer sgdw",
    "swap-optimizer adamw",
    "sync-replicas",
    "relaunch",
    "relaunch --print-flags",
    "truncate-tb-events --after 1",
    "rename-tb-events loss training-loss",
    "verify",
    "doctor",
    "status",
    "show",
    "show FIRST",
    "fork BRANCH --copy",
    "export -o EXPORT",
    "compact",
    "shrink",
    "prune",
    "prune --keep 1",
    "undo",
    "unlock",
    "recover",
    "log",
)
OF_A_TRAINER = re.compile(
    r"(?<![\w-])--?[a-z][\w.-]+|\b[a-z_]+\.[a-z_]+[\w.]*|\b[a-z]+_[a-z_]+\b|\S+\.(?:json|ya?ml|py|sh)\b"
    r"|^(?:mkdir ASIDE && )?mv \S+ \S+|\bcp -[ap]\b|`[a-z]\w*`| /\S+/$|> /\S+"
)
"""A flag, a key of a config or of the command, a file, or the new name of a folder."""
CARRIED = ("--dry-run", "--json")
CAPITALS = re.compile(r"[A-Z]{2,}")
LOOKS = (
    "status", "show", "log", "verify", "doctor", "plan", "advise", "report", "ready",
    "diff", "draft-format",
)  # fmt: skip
"""Commands that have no --dry-run."""


def walk(
    words: Sequence[str], way: tuple[str, ...] = (), fill: Mapping[str, str] | None = None
) -> list[str]:
    """What is wrong with the ways that start with this command; none if each ends well. `fill` has
    what a user puts in place of a word in capitals; one that is not in there ends the way. Without
    it there may be none."""
    here = (*way, shlex.join(words))
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100"}).invoke(
        app, [*words, *([] if _looks(words) else ["--dry-run"]), "--json"]
    )
    shown = " → ".join(here)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return [f"{shown}: {result.exception!r}"]
    if result.exit_code in (0, 3):
        return []
    if result.exit_code == 4:
        hints = list(_next(json.loads(result.stdout)))
    else:
        if way and result.exit_code == 2:
            return [f"{shown}: wrong usage: {result.stderr}"]
        try:
            hints = json.loads(result.stderr)["next"]
        except (ValueError, KeyError):
            return [f"{shown}: no hint can be read from {result.stderr!r}"]
        if not hints:
            return [f"{shown}: refused without a hint: {result.stderr}"]
    if len(here) > DEPTH:
        return [f"{shown}: no end after {DEPTH} commands"]
    bad = []
    for hint in hints:
        if words[0] == "graft" and hint.startswith("ckptsurgeon reset"):
            bad.append(f"{shown} → {hint}: another wish")
        if hint.startswith("ckptsurgeon "):
            typed = shlex.split(hint.split("    ")[0])[1:]
            if fill is not None:
                typed = [fill.get(word, word) for word in typed]
                if any(map(CAPITALS.fullmatch, typed)):
                    continue
            kept = {"--json"}
            if typed[0] in commands() and commands()[typed[0]].changes and not _looks(words):
                kept.add("--dry-run")
            if "--help" not in typed and kept - set(typed):
                bad.append(f"{shown} → {hint}: without {kept - set(typed)}")
            following = [word for word in typed if word not in CARRIED]
            if shlex.join(following) in here:
                bad.append(f"{shown} → {hint}: a circle")
            else:
                bad += walk(following, here, fill)
        elif result.exit_code != 4 and not OF_A_TRAINER.search(hint):
            bad.append(f"{shown}: {hint!r} names no command and no flag, key or file")
    return bad


def _next(document: Any) -> Iterator[str]:
    """The hints in a document, wherever they are."""
    if isinstance(document, dict):
        yield from (hint for hint in document.get("next") or () if isinstance(hint, str))
    if isinstance(document, (dict, list)):
        for item in document.values() if isinstance(document, dict) else document:
            yield from _next(item)


def _looks(words: Sequence[str]) -> bool:
    return words[0] in LOOKS or "--help" in words
