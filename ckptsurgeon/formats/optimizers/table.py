"""The table of known optimizers, and which of them a state dict is of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.fields.values import StateDict
from ckptsurgeon.formats.optimizers import (
    pages,
    pytorch_optimizer,
    quantized,
    torch_optim,
    trainers,
)
from ckptsurgeon.formats.optimizers.entry import CONSTANT, Entry
from ckptsurgeon.hints import again, command
from ckptsurgeon.plans.frozen import frozen

ENTRIES: tuple[Entry, ...] = (
    *torch_optim.ENTRIES,
    *trainers.ENTRIES,
    *quantized.ENTRIES,
    *pytorch_optimizer.ENTRIES,
)

STEPS = frozenset({"step", "common_step"})
"""The count of updates, which optimizers keep here or there; `locate` finds it."""
WAYS = frozenset({"capturable", "decoupled_weight_decay", "differentiable", "fused"})
"""Settings that newer versions added to optimizers of the same states."""
LARGEST = "max_exp_avg_sq"
"""What Adam keeps with `amsgrad` alone: without it nothing is missing."""
COUNTED = frozenset(key for item in ENTRIES for key in item.counters)
"""The keys of groups that some optimizer counts in."""
COMMON = frozenset(
    {
        "params", "param_names", "names", "name", "lr", "initial_lr", "weight_decay", "step",
        "foreach", "maximize",
        # torch's schedulers that cycle the rate and the momentum
        "max_lr", "min_lr", "base_momentum", "max_momentum",
        # Megatron-LM
        "wd_mult", "lr_mult", "start_wd", "end_wd", "pre_wd_mult", "pre_lr_mult",
        "pre_mult_lr", "pre_mult_wd", "optimizer",
        "is_expert_parallel", "is_decoupled_lr", "default_config", "is_vision_model_param",
        # DeepSpeed, OLMo-core, nanotron
        "moe", "random_ltd", "fixed_fields", "named_params",
    }
)  # fmt: skip
"""Keys of a param group that say nothing about which optimizer it is of, and that a reset leaves:
the update count `step` apart, which every reset sets to its start."""
BUILT = frozenset(
    {
        "rank", "block_size", "max_precondition_dim", "max_precond_dim", "merge_dims", "max_dim",
        "history_size", "keep_num", "max_size_triangular", "min_ndim_triangular", "lora_l_dim",
        "lora_r_dim", "master_byte_width", "subset_size", "eps",
    }
)  # fmt: skip
"""Settings that the states were made by, so that none of them can change alone; and eps, which has
rules of its own."""
HYPERPARAMETERS = frozenset(
    {key for item in ENTRIES for key in item.group} - BUILT - COMMON - {"betas"}
    | {"beta3", "eps1", "eps2"}
)
"""What `set` knows by the names of the param groups, besides those that every optimizer has."""


@frozen
class Known:
    """What is known of the optimizers of one run besides the table: the entries of its `page`, and
    the `settings` that stay as they are, though no entry has them."""

    page: tuple[Entry, ...] = ()
    settings: frozenset[str] = frozenset()


TABLE = Known()
"""The table alone."""


def recognise(state_dict: StateDict, known: Known = TABLE) -> Entry:
    """The optimizer that has just these keys. Raises SurgeryError for keys that none has, and for
    keys that are those of several which begin differently."""
    state, group = frozenset(state_dict.state) - STEPS, _settings(state_dict)
    beside = frozenset(state_dict.beside)
    best = _best(state, group, beside, known.page)
    if not best and known.settings & group:
        best = _best(state, group - known.settings, beside, known.page)
        group -= known.settings
    if not best:
        raise unknown(state_dict)
    if not state and not group & COUNTED:  # nothing to begin anew, whichever it is
        return next((item for item in best if not item.refused), best[0])
    if len({_starts(item, state, group) for item in best}) > 1:
        names = " or ".join(dict.fromkeys(item.name for item in best))
        raise SurgeryError(
            f"{state_dict.file.name}: the optimizer is {names}, which keep the same keys "
            f"({', '.join(sorted(state))}) and begin with different values",
            next="start the trainer without its saved optimizer state",
        )
    return best[0]


def unexplained(state_dict: StateDict, known: Known = TABLE) -> frozenset[str]:
    """The keys of its groups that no optimizer has beside these states, and that may be settings:
    a number, a text, a switch, None, or several of them."""
    state, group = frozenset(state_dict.state) - STEPS, _settings(state_dict)
    beside = frozenset(state_dict.beside)
    if _best(state, group, beside, known.page):
        return frozenset()
    alike = [
        item
        for item in (*known.page, *ENTRIES, *pages.shipped())
        if state <= set(item.state) and beside <= set(item.beside)
    ]
    further = [sorted(group - _group(item)) for item in alike]
    fewest = min(further, key=lambda keys: (len(keys), keys), default=[])
    counted = {key for item in alike for key in item.counters}
    return frozenset(
        key
        for key in fewest
        if key not in counted and all(_is_plain(p.value) for p in state_dict.group[key])
    )


def _is_plain(value: Any) -> bool:
    several = isinstance(value, (list, tuple))
    return all(
        isinstance(v, (bool, int, float, str, NoneType)) for v in (value if several else [value])
    )


def candidates(state_dict: StateDict, known: Known = TABLE) -> tuple[Entry, ...]:
    """Every optimizer that has just these keys; none where no known one does."""
    state, group = frozenset(state_dict.state) - STEPS, _settings(state_dict)
    if not (state or group):
        return ()
    return _best(state, group, frozenset(state_dict.beside), known.page)


def changing(state_dict: StateDict, known: Entry, usual: Collection[str]) -> list[str]:
    """The keys of its states beside the `usual` ones that an update of the optimizer changes."""
    return [key for key in state_dict.state if key not in usual and known.state[key] != CONSTANT]


def with_groups(state_dict: StateDict, others: Sequence[StateDict]) -> StateDict:
    """The states with the param groups of the first of `others` of which some optimizer has both;
    where none has, with those of the first."""
    tries = [state_dict._replace(group=other.group) for other in others]
    return next((each for each in tries if candidates(each)), tries[0])


def name(state_dict: StateDict, known: Known = TABLE) -> str:
    """What the optimizer is called; of several with the same keys, all of them."""
    best = candidates(state_dict, known)
    if not best:
        return ""
    names = dict.fromkeys(item.name for item in best)
    if {"Adam", "AdamW"} <= set(names):
        decoupled = {place.value for place in state_dict.group.get("decoupled_weight_decay", ())}
        if len(decoupled) == 1:
            del names["Adam" if decoupled == {True} else "AdamW"]
    first, *others = names
    if len(others) > 2:
        return f"{first} or {count(len(others), 'other')} with the same keys"
    return " or ".join(names)


@lru_cache(maxsize=1024)
def _best(
    state: frozenset[str],
    group: frozenset[str],
    beside: frozenset[str],
    page: tuple[Entry, ...] = (),
) -> tuple[Entry, ...]:
    """The entries that have all of these keys and the fewest others: the same of every shard. Those
    of a `page` come first; the pages that are shipped are read where the table has no such entry.
    Without groups, only optimizers of torch and of trainers: others save theirs."""
    if found := _fitting(page, state, group, beside):
        return found
    if not group:
        return _fitting((*torch_optim.ENTRIES, *trainers.ENTRIES), state, group, beside)
    found = _fitting(ENTRIES, state, group, beside)
    if found and not any(_missing(found[0], state, group)):
        return found
    return _fitting((*ENTRIES, *pages.shipped()), state, group, beside)


def _fitting(
    entries: Sequence[Entry],
    state: frozenset[str],
    group: frozenset[str],
    beside: frozenset[str],
) -> tuple[Entry, ...]:
    fits = [
        item
        for item in entries
        if state <= set(item.state) and group <= _group(item) and beside <= set(item.beside)
    ]
    fewest = min((_missing(item, state, group) for item in fits), default=(0, 0))
    return tuple(item for item in fits if _missing(item, state, group) == fewest)


def unknown(state_dict: StateDict) -> SurgeryError:
    """The error that names each key that no entry explains, and how many there are."""
    entries = (*ENTRIES, *pages.shipped())
    every = {key for item in entries for key in item.state} | STEPS
    settings = {key for item in entries for key in _group(item)}
    beside = {key for item in entries for key in item.beside}
    parts = [
        f"{key} (of {len(state_dict.state[key])})" for key in sorted(set(state_dict.state) - every)
    ]
    parts += [f"{key} (in param groups)" for key in sorted(_settings(state_dict) - settings)]
    parts += [f"{key} (beside the states)" for key in state_dict.beside if key not in beside]
    if not parts:
        keys = sorted(set(state_dict.state) - STEPS)
        parts = [
            f"{', '.join(keys)} with {', '.join(sorted(_settings(state_dict))) or 'no settings'}"
            + "".join(f" beside {key}" for key in state_dict.beside)
        ]
    return SurgeryError(
        f"{state_dict.file.name}: no known optimizer keeps {'; '.join(parts)}, "
        "so what a new one begins with is not known",
        next=(
            command(
                "check-optimizer",
                "MODULE.CLASS",
                "-o",
                "optimizer.yaml",
                why="where the class is installed",
            ),
            again("--optimizer", "optimizer.yaml", why="with the page that it wrote"),
            "start the trainer without its saved optimizer state",
        ),
    )


def _settings(state_dict: StateDict) -> frozenset[str]:
    """The keys of the groups that tell optimizers apart; a text is a label that someone gave."""
    return frozenset(
        key
        for key, places in state_dict.group.items()
        if key not in COMMON and not all(isinstance(place.value, str) for place in places)
    )


def _group(item: Entry) -> set[str]:
    return set(item.group) | set(item.counters)


def _missing(item: Entry, state: frozenset[str], group: frozenset[str]) -> tuple[int, int]:
    """How many keys of the entry are not there, and how many of those that newer versions added.
    Nothing is missing of what is not saved at all: there may be no states, or no groups."""
    usual = {key for key, start in item.state.items() if start != CONSTANT} - STEPS - {LARGEST}
    lacking = _group(item) - group if group else set()
    return len(usual - state if state else ()) + len(lacking - WAYS), len(lacking & WAYS)


def _starts(item: Entry, state: frozenset[str], group: frozenset[str]) -> tuple[object, ...]:
    starts = [(key, item.state.get(key, "")) for key in sorted(state)]
    counted = [(key, item.counters.get(key, "")) for key in sorted(group)]
    return (*starts, *counted, *sorted(item.beside.items()), item.unless, item.refused)
