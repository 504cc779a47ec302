"""Whether the recorded launch starts such ranks as a step can be loaded on. Reads only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from math import prod

from ckptsurgeon.errors import NotUnderstood, count
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import BoundToRanks
from ckptsurgeon.hints import command
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.operations.own_config import configured
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.run.search import SETTINGS

LAUNCHERS = {
    "torchrun": ("nproc-per-node", "nnodes"),
    "torch.distributed.run": ("nproc-per-node", "nnodes"),
    "deepspeed": ("num-gpus", "num-nodes"),
}
"""How each is told its ranks on a node, and its nodes."""
NUMBER = re.compile("[0-9]{1,9}")
AXES = {"tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp"}
"""How every Megatron and the bundled trainer are told these sizes: as an option, or as a key."""
AS_SAVED = ("use-mp-args-from-checkpoint-args", "use-checkpoint-args")
"""With these the loader may take the sizes of the step in place of those of the command."""


def torn(run: Run, checkpoint: Checkpoint) -> list[Finding]:
    """A finding where they differ, by what both the launch and the checkpoint say."""
    bound = BoundToRanks.optional(checkpoint)
    saved: Mapping[str, int] = {}
    with contextlib.suppress(NotUnderstood):
        saved = {} if bound is None else bound.loads_on()
    if not saved:
        return []
    own = run.settings.get("relaunch")
    words = own.get("command") if isinstance(own, dict) else None
    file, told = SETTINGS, started(list(map(str, words))) if isinstance(words, list) else {}
    if own is None:
        file, told = CONFIG, _configured(run)
    both = [name for name in ("ranks", *AXES.values()) if name in told and name in saved]
    differing = [name for name in both if told[name] != saved[name]]
    if not differing:
        return []
    wanted, kept = (
        ", ".join(_said(name, sizes[name]) for name in differing) for sizes in (told, saved)
    )
    what = f"{file} asks for {wanted}; step {checkpoint.step} loads only as saved, on {kept}"
    why = f"fills one step that a fresh run saved on {wanted}: docs/transplant.md"
    return [Finding(what, command("transplant", "--from", run.root, run="NEW", why=why))]


def _said(name: str, size: int) -> str:
    return count(size, "rank") if name == "ranks" else f"{name} {size}"


def started(words: Sequence[str]) -> dict[str, int]:
    """What a command says in numbers of the ranks that it starts: in all (`ranks`), of tensors
    (`tp`), of stages (`pp`)."""
    said: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        name = name.lstrip("-+").rpartition(".")[2].replace("_", "-")
        if name in AS_SAVED:
            said |= dict.fromkeys(AXES.values())
            break
        if name in AXES and (equals or word.startswith("-")):
            said[AXES[name]] = value if equals else following
    count = ranks(words)
    return ({} if count is None else {"ranks": count}) | _in_numbers(said)


def _configured(run: Run) -> dict[str, int]:
    """What the bundled trainer's config says of tensor and pipeline ranks: `relaunch` starts as
    many in all as saved the step."""
    said: dict[str, str | None] = {}
    with contextlib.suppress(OSError):
        said = {axis: configured(run, option.replace("-", "_")) for option, axis in AXES.items()}
    return _in_numbers(said)


def _in_numbers(said: Mapping[str, str | None]) -> dict[str, int]:
    return {name: int(text) for name, text in said.items() if text and NUMBER.fullmatch(text)}


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
    said = {each: given.get(each), nodes: given.get(nodes, "1" if nodes == "nnodes" else None)}
    numbers = _in_numbers(said)
    return prod(numbers.values()) if numbers.keys() == said.keys() else None


ALONE = ("standalone", "no-python", "module", "m", "no-local-rank", "force-multi")
"""Flags of launchers that no value follows."""
