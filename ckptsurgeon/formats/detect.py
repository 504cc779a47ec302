"""Which format a run has: every format by its module and class, asked one after the other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.layout import Format, Paged
from ckptsurgeon.formats.step_folders import listed
from ckptsurgeon.hints import command

FORMATS = (
    "ckptsurgeon.formats.deepspeed.layout:DeepSpeed",
    "ckptsurgeon.formats.megatron.bridge_layout:MegatronBridge",
    "ckptsurgeon.formats.megatron.layout:Megatron",
    "ckptsurgeon.formats.dcp.layout:Torchtitan",
    "ckptsurgeon.formats.dcp.layout:OlmoCore",
    "ckptsurgeon.formats.plain.fairseq:Fairseq",
    "ckptsurgeon.formats.huggingface.layout:Transformers",
    "ckptsurgeon.formats.huggingface.layout:Accelerate",
    "ckptsurgeon.formats.plain.nanotron:Nanotron",
)
"""`module:Class` of each format, those that are told apart by more first. They are imported when
they are asked: most commands need one."""
WIDER = {"MegatronBridge": "Megatron", "Transformers": "Accelerate"}
"""Classes whose runs another would recognize too: what has more signs is what it is."""
STEPS = {
    "DeepSpeed": r"global_step\d+", "Megatron": r"iter_\d{7}", "Torchtitan": r"step-\d+",
    "OlmoCore": r"step\d+", "Fairseq": r"checkpoint.*\.pt", "Transformers": r"checkpoint-\d+",
    "Accelerate": r"checkpoint_\d+", "Nanotron": r"\d+",
}  # fmt: skip
"""What a step of each is called: a second format is asked only where such a name is there."""
DESCRIBED = (
    "lightning", "lightning-sharded", "lightning-deepspeed", "nemo", "composer", "composer-sharded",
    "automodel", "verl", "lingua", "open-clip", "timm", "ultralytics", "fairseq2",
    "litgpt", "litgpt-finetune", "mmengine", "mmengine-epochs",
    "torchtune", "espnet", "nanochat", "detectron2", "detectron2-plain", "lerobot",
    "prime-rl", "nemo-rl", "nemo-rl-native", "coqui", "nerfstudio", "rsl-rl", "detr",
    "sd-scripts",
)  # fmt: skip
"""Pages in `described/`, asked after all of these."""
PAGED = re.compile(
    r".*\.(?:ckpt|pt|pth\.tar)|ep(?:och_)?\d.*|(?:global_)?step[_-]\d+|.*step=\d+.*|.*-last|\d{10}"
    r"|weights|checkpoints|recipe_state|nerfstudio_models|.*-state"
    r"|(?:(?:iter|epoch|checkpoint|best_model)_\d+|checkpoint(?:\d{4,})?|best_model|model_\d{7})\.pth"
)
"""What a run of one of those pages has in its folder."""
SIGNS = "no global_step<N>, iter_<N> or step-<N> folder, no latest"
"""What most runs would have had, for one that no format recognizes."""


def detect(run: Path) -> Format | None:
    """The format of the run rooted at `run`, or None. Raises UsageError where two formats recognize
    it."""
    names = listed(run)
    recognized: list[Format] = []
    for path in FORMATS:
        if recognized and not _may_also_be(path, names, recognized):
            continue
        if (item := _made(path)).recognizes(run):
            recognized.append(item)
    # No page describes other files, and to read one costs more than to look.
    if any(PAGED.fullmatch(name) and not (recognized and name.endswith(".pt")) for name in names):
        recognized += [page for page in _pages() if page.recognizes(run)]
    if len(recognized) > 1:
        raise UsageError(
            f"{run} looks like a run of {' and '.join(item.name for item in recognized)}",
            next=[command("status", "--format", item.name) for item in recognized],
        )
    return recognized[0] if recognized else None


def is_run(folder: Path) -> bool:
    """Whether there is a run, of whichever format."""
    try:
        return detect(folder) is not None
    except UsageError:
        return True


def nameless(folder: Path, format: str) -> str:
    """Why a file here that could be a step by its name is none; "" if nothing looks like one."""
    if format:
        pages = [named(format)]
    elif any(name.endswith(".ckpt") for name in listed(folder)):
        pages = list(_pages())
    else:
        return ""
    return next(
        filter(None, (page.nameless(folder) for page in pages if isinstance(page, Paged))), ""
    )


def _may_also_be(path: str, names: Collection[str], recognized: Collection[Format]) -> bool:
    """Whether a step of another format lies in a run that `recognized` know."""
    cls = path.rpartition(":")[2]
    if cls not in STEPS or any(WIDER.get(type(item).__name__) == cls for item in recognized):
        return False
    return any(re.fullmatch(STEPS[cls], name) for name in names)


def named(name: str) -> Format:
    """The format that `--format` names: one of those above, one of a page here, a page of the
    user's own, or `torch:PATH=KEYS`. Raises UsageError."""
    from ckptsurgeon.formats.described import pages

    if name in DESCRIBED or not name.replace("-", "").isalpha():
        return pages.named(name, DESCRIBED)
    made = {item.name: item for item in map(_made, FORMATS)}
    return made.get(name) or pages.named(name, (*made, *DESCRIBED))


def _made(path: str) -> Format:
    module, _, cls = path.partition(":")
    item: Format = getattr(importlib.import_module(module), cls)()
    return item


def _pages() -> Iterator[Format]:
    from ckptsurgeon.formats.described import pages

    return (pages.shipped(name) for name in DESCRIBED)
