"""What contradicts itself in a DeepSpeed checkpoint: shards among each other, mappings, numbers.

Told from the trees alone; no tensor is read but those of one element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.files.pickles.tree import Object, Tensor, get
from ckptsurgeon.formats.deepspeed import parallel
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.understood import is_count, refusal, said_in, understood
from ckptsurgeon.formats.schedules.annealing import learning_rate

RANK = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
IN_MODELS = (
    "iteration", "global_steps", "global_samples", "skipped_steps", "tokens", "dp_world_size",
    "mp_world_size", "lr_scheduler", "skip_train_iteration_range", "rewarm",
    "ds_version", "checkpoint_parallel_dimensions",
)  # fmt: skip
IN_OPTIMIZERS = ("loss_scaler", "dynamic_loss_scale", "zero_stage", "ds_version", "clip_grad")
MAX_NODES, MAX_DEPTH = 10_000, 50
"""Of a value that is compared."""
NUMBERS = ("lr", "betas", "eps", "weight_decay", "adam_step", "loss_scale")
"""Fields that can't be located where a value is impossible."""


def contradictions(checkpoint: DeepSpeedShards) -> list[str]:
    """One sentence for each field in which shards differ, each number that can't be, and each
    mapping that does not cover its flat partition."""
    out: list[str] = []
    for look in (_impossible, _disagreements, _foreign, _layers, _mappings):
        with said_in(out), understood(checkpoint.path):
            out += look(checkpoint)
    return list(dict.fromkeys(out))


# --- agreement -----------------------------------------------------------------------------------


def _disagreements(checkpoint: DeepSpeedShards) -> Iterator[str]:
    for key in IN_MODELS:
        yield from _differ(key, {p: t.get(key) for p, t in checkpoint.models().items()})
    outers = {
        item.file: get(checkpoint.trees[item.file], item.outer) for item in checkpoint.optimizers()
    }
    for key in IN_OPTIMIZERS:
        yield from _differ(key, {p: outer.get(key) for p, outer in outers.items()})
    groups: dict[str, dict[Path, Any]] = {}
    for item in checkpoint.optimizers():
        if not item.elastic:
            for i, group in enumerate(
                get(checkpoint.trees[item.file], (*item.base, "param_groups"))
            ):
                for key in group.keys() - {"params", "step"}:
                    name = f"{key} of param group {i}"
                    groups.setdefault(name, {})[item.file] = checkpoint.plain(item.file, group[key])
    for name in sorted(groups):
        yield from _differ(name, groups[name])
    steps: dict[Path, Any] = {}
    for place in checkpoint.locate("adam_step"):
        if place.wins:
            steps[place.file] = place.value
    yield from _differ("adam_step", steps)


def _differ(name: str, values: Mapping[Path, Any]) -> Iterator[str]:
    """The files that have another value than most, all of them by name."""
    groups: dict[str, list[Path]] = {}
    for path, value in values.items():
        groups.setdefault(_text(value), []).append(path)
    if len(groups) < 2:
        return
    usual, *others = sorted(groups.items(), key=lambda item: -len(item[1]))
    base = usual[1][0].name if len(usual[1]) == 1 else f"{count(len(usual[1]), 'shard')}"
    differences = "; ".join(
        f"{_short(text)} in {', '.join(sorted(path.name for path in paths))}"
        for text, paths in others
    )
    yield f"shards disagree on {name}: {_short(usual[0])} in {base}, {differences}"


def _text(value: Any) -> str:
    """What makes two values equal: 1 and 1.0 are, True and 1 are not."""
    try:
        return _written(value, [MAX_NODES], 0)
    except ValueError:  # also Python's own, for an integer of thousands of digits
        return "more than any trainer saves"


def _written(value: Any, left: list[int], depth: int) -> str:
    """`value` as text; a list that contains itself has no end, so nodes and depth are counted."""
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise ValueError("too large")
    if isinstance(value, Object):
        parts = [value.args, value.state, value.items, value.appends]
        return f"{value.cls!r}{_written(parts, left, depth + 1)}"
    if isinstance(value, dict):
        items = (f"{key!r}: {_written(item, left, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_written(item, left, depth + 1) for item in value) + "]"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    return repr(value)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"


def _impossible(checkpoint: DeepSpeedShards) -> list[str]:
    out: list[str] = []
    for name in NUMBERS:
        with said_in(out):
            checkpoint.locate(name)
    return out


def _foreign(checkpoint: DeepSpeedShards) -> Iterator[str]:
    """Shards that agree with each other, and still belong to another step or world size."""
    for path, tree in checkpoint.models().items() if checkpoint.numbered else ():
        # `set iteration` changes one of the two; a file of another step differs in both.
        found = [tree.get(key) for key in ("iteration", "global_steps")]
        counters = [number for number in found if is_count(number)]
        if counters and checkpoint.step not in counters:
            yield f"{path.name}: holds step {counters[0]}, not {checkpoint.step}"
    first = next(iter(checkpoint.models().values()))
    ranks = first.get("dp_world_size", 1)
    for item in checkpoint.optimizers():
        if item.elastic and not checkpoint.at(
            item.file, (*item.outer, "base_optimizer_state_step")
        ):
            yield (
                f"{item.file.name}: an elastic optimizer without base_optimizer_state_step, which "
                "DeepSpeed asserts on load (it saves it only for Adam with a step in its groups)"
            )
        counts = get(checkpoint.trees[item.file], item.outer).get("partition_count")
        counts = counts if isinstance(counts, (list, tuple)) else [counts]
        if counts and all(map(is_count, counts)) and ranks not in counts:  # experts have fewer
            yield (
                f"{item.file.name}: is one of {count(counts[0], 'data-parallel partition')}, not "
                f"of {ranks}"
            )
    schedule = checkpoint.annealed()
    if schedule is None or not checkpoint.groups_win:
        return
    # Either alone may be meant: a trainer may scale rates, and a surgery may reset the counter.
    lr, taken = learning_rate(schedule), checkpoint.step - first.get("skipped_steps", 0)
    rates = [place.value for place in checkpoint.locate("lr")]
    steps = [place.value for place in checkpoint.locate("adam_step") if place.wins]
    as_scheduled = any(math.isclose(rate, lr, rel_tol=1e-6) for rate in rates)
    if rates and steps and taken not in steps and not as_scheduled:
        yield (
            f"the optimizer shards hold lr {rates[0]!r} after {steps[0]:g} Adam steps, and the "
            f"scheduler gives {lr!r} after {taken}: they are of another step"
        )


def _layers(checkpoint: DeepSpeedShards) -> Iterator[str]:
    return parallel.contradictions(checkpoint.models())


# --- flat partitions -----------------------------------------------------------------------------


def _mappings(checkpoint: DeepSpeedShards) -> Iterator[str]:
    """`param_slice_mappings` (ZeRO 1 and 2): for each group, which parameter's elements lie where
    in this rank's flat partition. Padding is allowed where the shard says so: between parameters,
    and after the last one of the last rank that has any."""
    ranks: dict[str, list[tuple[int, Path, Mapping[str, Any]]]] = {}
    for item in checkpoint.optimizers():
        outer = get(checkpoint.trees[item.file], item.outer)
        match = RANK.search(item.file.name)
        if match and isinstance(outer.get("param_slice_mappings"), (list, tuple)):
            ranks.setdefault(match["mp"], []).append((int(match["dp"]), item.file, outer))
    for shards in ranks.values():
        last_first = sorted(shards, key=lambda shard: -shard[0])
        paddings = last_first[0][2].get("group_paddings") or []
        followed: set[int] = set()
        for _, path, outer in last_first:
            between = outer.get("param_alignment_paddings") or []
            flats = outer.get("single_partition_of_fp32_groups") or []
            for i, mapping in enumerate(outer["param_slice_mappings"]):
                inner = sum(map(_elements, between[i])) if i < len(between) else 0
                after = _elements(paddings[i]) if i < len(paddings) and i not in followed else 0
                flat = flats[i] if i < len(flats) else None
                size = flat.numel if isinstance(flat, Tensor) else None
                for problem in _cover(mapping, size, inner, after):
                    yield f"{path.name}: param group {i}: {problem}"
                if mapping:
                    followed.add(i)


def _elements(number: Any) -> int:
    """A padding. Raises ValueError for what is none."""
    if not is_count(number):
        raise ValueError(refusal("a padding", number, "a number of elements"))
    return int(number)


def _cover(mapping: Mapping[str, Any], size: int | None, inner: int, after: int) -> Iterator[str]:
    """Where the fragments overlap, leave more than the padding, or leave the partition."""
    parts = sorted((get(part, ("start",)), get(part, ("numel",)), n) for n, part in mapping.items())
    at, gaps = 0, 0
    for start, numel, name in parts:
        if start < at:
            yield f"{name} at element {start} overlaps what ends at {at}"
        elif start > at:
            gaps += start - at
            if gaps > inner:
                yield f"no parameter has the elements {at} to {start}"
        at = max(at, start + numel)
    if size is not None and at > size:
        yield f"the parameters end at element {at} of a flat partition of {size}"
    elif size is not None and parts and size - at > after + max(0, inner - gaps):
        yield f"no parameter has the elements {at} to {size}"
