"""Each refusal leads somewhere: its hints are followed, on the run that was refused, to their end.

A hint ends well if it is a command that works as it is printed, or if it names a flag, a key or a
file of the trainer. It may not lead in a circle, to wrong usage, or past three commands, and keeps
the --dry-run and the --json of what was typed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptsurgeon import Run
from ckptsurgeon.cli import app
from ckptsurgeon.cli.commands import commands
from tests.formats.matrix import FORMATS
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]

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
    r"|^(?:mkdir ASIDE && )?mv \S+ \S+|`[a-z]\w*`"
)
"""A flag, a key of a config or of the command, a file, or the new name of a folder."""
CARRIED = ("--dry-run", "--json")


def walk(words: Sequence[str], way: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with the ways that start with this command; none if each ends well."""
    here = (*way, shlex.join(words))
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100"}).invoke(
        app, [*words, *([] if _looks(words) else ["--dry-run"]), "--json"]
    )
    if result.exit_code in (0, 3, 4):
        return []
    shown = " → ".join(here)
    if way and result.exit_code == 2:
        return [f"{shown}: wrong usage: {result.stderr}"]
    if len(here) > DEPTH:
        return [f"{shown}: no end after {DEPTH} commands"]
    try:
        hints = json.loads(result.stderr)["next"]
    except (ValueError, KeyError):
        return [f"{shown}: no hint can be read from {result.stderr!r}"]
    if not hints:
        return [f"{shown}: refused without a hint: {result.stderr}"]
    bad = []
    for hint in hints:
        if words[0] == "graft" and hint.startswith("ckptsurgeon reset"):
            bad.append(f"{shown} → {hint}: another wish")
        if hint.startswith("ckptsurgeon "):
            typed = shlex.split(hint.split("    ")[0])[1:]
            kept = {"--json"}
            if commands()[typed[0]].changes and not _looks(words):
                kept.add("--dry-run")
            if "--help" not in typed and kept - set(typed):
                bad.append(f"{shown} → {hint}: without {kept - set(typed)}")
            following = [word for word in typed if word not in CARRIED]
            if shlex.join(following) in here:
                bad.append(f"{shown} → {hint}: a circle")
            else:
                bad += walk(following, here)
        elif not OF_A_TRAINER.search(hint):
            bad.append(f"{shown}: {hint!r} names no command and no flag, key or file")
    return bad


def _looks(words: Sequence[str]) -> bool:
    return words[0] in ("status", "show", "log", "verify", "doctor", "plan") or "--help" in words


@pytest.mark.thinned(3)
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_every_hint_leads_to_something_that_works(
    run_of: Callable[[str], Path],
    name: str,
    share: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `make test` a third of the commands on each format, of each three formats all."""
    root = Path(shutil.copytree(run_of(name), tmp_path / "run", symlinks=True))
    before = snapshot(root)
    monkeypatch.chdir(root)
    words = _words_of(root)
    bad = []
    for command in COMMANDS[[*FORMATS].index(name) % share :: share]:
        bad += walk([words.get(word, word) for word in command.split()])
    assert not bad, "\n".join(bad)
    assert snapshot(root) == before


def _words_of(root: Path) -> Mapping[str, str]:
    run = Run.open(root)
    return {
        "FIRST": str(run.steps()[0]),
        "NEXT": str(run.checkpoint(run.latest()).state().step + 1),
        "BRANCH": str(root.parent / "branch"),
        "EXPORT": str(root.parent / "export"),
    }
