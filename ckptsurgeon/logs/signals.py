"""What a logged number is of a run: loss, gradient norm, loss scale, …, by the name it has in logs.

Names are those of Megatron-LM and Megatron-DeepSpeed (`training_log`), torchtitan and OLMo-core
(`printed/` names the files), transformers, nanotron, metaseq and fairseq, Meta Lingua, Lightning's
examples, and DeepSpeed's monitor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

LOSS, GRAD_NORM, LOSS_SCALE, LR = "loss", "grad-norm", "loss-scale", "lr"
BATCH_SIZE, SAMPLES, TOKENS = "batch-size", "samples", "tokens"
NAMES: Mapping[str, tuple[str, ...]] = {
    LOSS: (
        "lm-loss-training/lm loss", "lm loss", "loss_metrics/global_avg_loss", "train/CE loss",
        "train/loss", "train_loss", "training_loss", "lm_loss", "loss", "train/train_loss",
        "Train/loss", "Loss/train", "train_loss_step", "Train/Samples/train_loss", "trl",
        "loss/train/total", "loss/out", "NLL Loss", "total_loss",
    ),
    GRAD_NORM: (
        "grad-norm/grad-norm", "grad-norm", "grad_norm", "optim/total grad norm",
        "train/grad_norm", "gnorm", "gradient_norm", "train/grad-norm", "total_grad_norm", "norm",
        "l2_norm/grad/global", "optim/grad_norm",
    ),
    LOSS_SCALE: (
        "loss-scale/loss-scale", "loss-scale", "loss_scale", "train/loss_scale",
        "Train/Samples/loss_scale",
    ),
    LR: (
        "learning-rate/learning-rate", "learning-rate", "lr", "optim/LR (group 0)",
        "train/learning_rate", "learning_rate", "train/lr", "lr-AdamW", "lr-Adam",
        "Train/Samples/lr", "lr-AdamW/group0", "lr-DecoupledAdamW/group0",
        "optim/lr",
    ),
    BATCH_SIZE: ("batch-size/batch-size", "batch-size", "batch_size", "global_batch_size"),
    SAMPLES: (
        "steps-vs-samples/y=samples,x=steps", "consumed_samples", "consumed samples", "time/sample",
    ),
    TOKENS: (
        "steps-vs-tokens/y=tokens,x=steps", "consumed_tokens", "throughput/total tokens",
        "n_tokens_seen", "num_input_tokens_seen", "train/num_input_tokens_seen", "tokens",
        "time/token",
    ),
}  # fmt: skip
"""Signal → names, the one to take first."""
STEPS = (
    "trainer/global_step", "train/global_step", "global_step", "step", "iteration", "num_updates",
    "iter", "steps", "current_steps", "update", "_step", "s", "global_step/max_steps",
)  # fmt: skip
"""What counts updates in a table, in JSON and in printed lines, the name to take first."""
_OF = re.compile(r"\s*(\d+)\s*/\s*\d+\s*")
"""How many of all: ms-swift writes `"5/10"`."""
TIMES = ("wall_time", "timestamp", "_timestamp", "time", "created_at")
"""The column with the time of a row, in seconds since 1970."""
HELD_OUT = frozenset({"eval", "evaluation", "val", "valid", "validation", "test", "dev"})
"""Words of a group of tags whose loss is not that of the training."""
EPOCH = 1e9
"""What a time is at least that counts the seconds since 1970, and not since the start."""


def found(names: Collection[str], own: Mapping[str, str]) -> dict[str, str]:
    """Signal → its name among `names`; `own` is the user's word and wins. A name that is known to
    the letter comes before one that is known but for capitals, blanks and hyphens."""
    chosen = {}
    alike = {_folded(name): name for name in sorted(names, reverse=True)}
    for signal, known in NAMES.items():
        name = own.get(signal) or next((name for name in known if name in names), None)
        name = name or next((alike[n] for n in map(_folded, known) if n in alike), None)
        name = name or (_in_a_group(names, known) if signal in (LOSS, LR) else None)
        if name is not None and name in names:
            chosen[signal] = name
    return chosen


def _in_a_group(names: Collection[str], known: Collection[str]) -> str | None:
    """The only one of `names` that is a known one after its last slash, and not of held-out
    data."""
    bare = {_folded(name) for name in known if "/" not in name}
    inside = [
        name
        for name in names
        if _folded(name.rpartition("/")[2]) in bare
        and HELD_OUT.isdisjoint(re.split(r"[/_]", _folded(name)))
    ]
    return inside[0] if len(inside) == 1 else None


def plain(name: str) -> str:
    """A name without what trackers and trainers add to it: the run before it in an export of W&B
    (`run - train/loss`), capitals, and blanks or hyphens for underscores."""
    return _folded(name.rpartition(" - ")[2])


def _folded(name: str) -> str:
    return re.sub(r"[ -]", "_", name.strip().lower())


def commonest(counts: Mapping[str, int], own: Mapping[str, str]) -> dict[str, list[str]]:
    """Signal → its names in a file, by `plain`, where `counts` says how often each name was filled.
    The name comes first that has most points, of equals the one that is known best: means of an
    epoch and of a whole run stand beside the loss of each step. Others of the same `plain` name
    follow: nothing tells them apart."""
    chosen: dict[str, list[str]] = {}
    for signal, known in NAMES.items():
        if signal in own:
            chosen[signal] = [own[signal]] if own[signal] in counts else []
            continue
        order = list(dict.fromkeys(map(plain, known)))
        names = [name for name in counts if plain(name) in order]
        if not names:
            continue
        best = min(names, key=lambda name: (-counts[name], order.index(plain(name))))
        same = [name for name in names if plain(name) == plain(best) and name != best]
        chosen[signal] = [best, *same]
    return chosen


def step_name(names: Iterable[str], own: str | None) -> str | None:
    """The name that counts updates: the user's, else the best known one."""
    if own is not None:
        return own if own in names else None
    return _known_step_name(tuple(names))


@lru_cache(maxsize=1024)  # the records of a log have the same names
def _known_step_name(names: tuple[str, ...]) -> str | None:
    known = {plain(name): name for name in reversed(names)}
    exact = next((known[name] for name in STEPS if name in known), None)
    if exact is not None:
        return exact
    last = {name.rpartition("_")[2]: known[name] for name in known if " " in known[name]}
    return next((last[name] for name in ("step", "iteration", "iter") if name in last), None)


def epoch_name(names: Iterable[str]) -> str | None:
    """The name that counts epochs, in whatever capitals and between whatever blanks."""
    return next((name for name in names if plain(name) == "epoch"), None)


def point(item: Mapping[str, Any], own: str | None = None) -> tuple[int | None, float]:
    """The number of a record by `step_name`, None without one, and its time since 1970, or NaN."""
    named = step_name([key for key in item if isinstance(key, str)], own)
    step = number(item[named]) if named is not None else None
    if step is None or not math.isfinite(step) or not 0 <= step < 1 << 60:
        return None, math.nan
    times = (number(item.get(key)) for key in TIMES)
    return int(step), next((time for time in times if time is not None and time > EPOCH), math.nan)


def number(value: Any) -> float | None:
    """A number, also as text; of so many of all (`5/10`) the first. NaN and Inf are numbers here.
    None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and (match := _OF.fullmatch(value)):
        value = match[1]
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
