"""Whether the recorded command starts as many ranks as a step can be loaded on. Reads only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import prod

from ckptsurgeon.errors import NotUnderstood
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import BoundToRanks
from ckptsurgeon.hints import command
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.run.run import Run
from ckptsurgeon.run.search import SETTINGS

LAUNCHERS = {
    "torchrun": ("nproc-per-node", "nnodes"),
    "torch.distributed.run": ("nproc-per-node", "nnodes"),
    "deepspeed": ("num-gpus", "num-nodes"),
}
"""How each is told its ranks on a node, and its nodes."""


def torn(run: Run, checkpoint: Checkpoint) -> list[Finding]:
    """A finding where they differ; nothing where the command or the checkpoint does not say it."""
    own = run.settings.get("relaunch")
    words = own.get("command") if isinstance(own, dict) else None
    started = ranks(list(map(str, words))) if isinstance(words, list) else None
    saved = None
    bound = BoundToRanks.optional(checkpoint)
    with contextlib.suppress(NotUnderstood):
        saved = None if bound is None else bound.loads_on()
    if started is None or saved is None or started == saved:
        return []
    what = (
        f"{SETTINGS} starts {started} rank{'s' if started > 1 else ''}, and step "
        f"{checkpoint.step} loads on the {saved} that saved it, and on no other number"
    )
    why = f"fills one step that a fresh run saved on {started}: docs/transplant.md"
    return [Finding(what, command("transplant", "--from", run.root, run="NEW", why=why))]


def ranks(words: Sequence[str]) -> int | None:
    """How many ranks a command starts in all; None where it does not say it in numbers. Without a
    host file the launcher of DeepSpeed has one node, and what hosts it finds is not known here."""
    launcher = next((word for word in words if word.rpartition("/")[2] in LAUNCHERS), None)
    if launcher is None:
        return None
    at = words.index(launcher) + 1
    given: dict[str, str] = {}
    while at < len(words) and words[at].startswith("-"):  # what follows is the trainer's own
        name, equals, value = words[at].lstrip("-").replace("_", "-").partition("=")
        if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
            value = words[at + 1]
            at += name not in ALONE
        given[name] = value
        at += 1
    each, nodes = LAUNCHERS[launcher.rpartition("/")[2]]
    said = [given.get(each, ""), given.get(nodes, "1" if nodes == "nnodes" else "")]
    return prod(map(int, said)) if all(text.isdigit() for text in said) else None


ALONE = ("standalone", "no-python", "module", "m", "no-local-rank", "force-multi")
"""Flags of launchers that no value follows."""
