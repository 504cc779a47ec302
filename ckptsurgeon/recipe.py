"""The state the user wants: Recipe, its YAML, its overrides; alone imports OmegaConf.

A recipe holds wanted values, not steps: the order of its keys means nothing, what is absent is
kept, and applying it twice changes nothing. It is data from anywhere: resolvers are off; aliases,
tags, duplicate keys, deep nesting and files over 1 MB are refused before a value is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import UsageError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
STATES = ("moments", "loss_scale")
DECAY_STYLES = ("constant", "linear", "cosine")
SYNONYMS = {
    "learning_rate": "lr", "max_lr": "lr", "peak_lr": "lr", "lr_warmup_samples": "warmup",
    "warmup_steps": "warmup", "warmup_samples": "warmup", "lr_decay_samples": "decay",
    "decay_steps": "decay", "lr_decay_style": "decay_style", "wd": "weight_decay",
    "grad_clip": "clip_grad", "clip": "clip_grad", "gradient_clipping": "clip_grad",
    "max_grad_norm": "clip_grad", "epsilon": "eps", "b1": "beta1", "b2": "beta2",
    "beta1": "beta1", "beta2": "beta2", "eps": "eps",
}  # fmt: skip
"""What other trainers call a key of `set`."""


@dataclass(frozen=True)
class Rollback:
    """Back to step `to`: newer checkpoints go to the attic, the pointers name `to`."""

    to: int


@dataclass(frozen=True)
class Repair:
    """The pointers name step `to`, or the newest complete checkpoint; no checkpoint moves."""

    to: int | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """Wanted values. A text such as `0.5x` scales the present one.

    `lr` is the peak of the schedule (Megatron's max_lr); `warmup` and `decay` count samples."""

    lr: float | str | None = None
    min_lr: float | str | None = None
    warmup: int | None = None
    decay: int | None = None
    decay_style: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | str | None = None
    weight_decay: float | str | None = None
    clip_grad: float | str | None = None
    seed: int | None = None
    loss_scale: float | str | None = None

    def given(self) -> dict[str, Any]:
        """The keys that were set, in the order of the table above."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class TensorBoard:
    """`truncate` cuts event files at the rollback step (or `after`) by lineage; the cut branch is
    kept as a run of its own named `keep_as` unless `keep` is false; `rename` maps old tag to new.

    `branch`, `order` and `axes` decide what the logs can't prove (operations/lineage.py); `salvage`
    drops records that are damaged; `note` writes the surgery into the logs."""

    truncate: bool = True
    after: int | None = None
    keep: bool = True
    keep_as: str | None = None
    rename: dict[str, str] = field(default_factory=dict)
    regex: bool = False
    allow_merge: bool = False
    branch: list[str] = field(default_factory=list)
    order: str | None = None
    axes: dict[str, str] = field(default_factory=dict)
    salvage: bool = False
    note: bool = True


@dataclass(frozen=True)
class Relaunch:
    """How to start the trainer afterwards: ranks on this machine, and more arguments for it."""

    nproc_per_node: int | None = None
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """Everything one surgery wants. `why` is the logbook line that the receipt keeps."""

    version: int = 1
    name: str = ""
    why: str = ""
    rollback: Rollback | None = None
    repair_latest: Repair | None = None
    set: Hyperparameters = field(default_factory=Hyperparameters)
    reset: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    clear_skip: bool = False
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    relaunch: Relaunch | None = None

    def __post_init__(self) -> None:
        _check(self)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data without what it leaves at its default."""
    return _sparse(recipe)


def _sparse(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        here = getattr(value, item.name)
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if here == default and default is not dataclasses.MISSING:
            continue
        out[item.name] = _sparse(here) if dataclasses.is_dataclass(here) else here
    return out


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from YAML, then lay `section.key=value` overrides over it.

    Raises UsageError: with the line for broken YAML, with the nearest key for an unknown one."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}",
            next="ckptsurgeon plan RECIPE.yaml    with a file that is there",
        ) from None
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"{path}: {len(raw)} bytes; a recipe has at most {MAX_BYTES}",
            next="check that this is the recipe and not another file",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start}: not UTF-8 text", next="save it as UTF-8"
        ) from None
    return from_data(_parse(text, str(path)), overrides, where=str(path))


def from_data(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "the command line"
) -> Recipe:
    """A Recipe from plain data plus `section.key=value` overrides; types and keys are checked."""
    merged: dict[str, Any] = dict(data)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UsageError(f"{override!r} is not KEY=VALUE", next="for example: set.lr=3e-5")
        _lay(merged, key.split("."), _parse_scalar(value), override)
    recipe = _build(Recipe, merged, "", where)
    assert isinstance(recipe, Recipe)
    return recipe


def settings(path: Path) -> dict[str, Any]:
    """The plain data of a run's `ckptsurgeon.yaml`, read with the same refusals as a recipe."""
    return _parse(path.read_text("utf-8"), str(path))


# --- YAML ----------------------------------------------------------------------------------------


def _parse(text: str, where: str) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf

    fix = "quote texts that hold `: ` or `#`, for example: why: 'spike: roll back'"
    try:
        _refuse_tricks(yaml.parse(text, Loader=yaml.SafeLoader), where)
        loaded = OmegaConf.create(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}{line}: {problem}", next=fix) from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deep", next="a recipe has two levels") from None
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).splitlines()[0]}", next=fix) from None
    data = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(data, dict):
        raise UsageError(
            f"{where}: a recipe is a mapping of sections", next="see recipes/ for examples"
        )
    return {str(key): value for key, value in data.items()}


def _refuse_tricks(events: Iterator[Any], where: str) -> None:
    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        name = type(event).__name__
        if name == "AliasEvent" or getattr(event, "anchor", None):
            raise UsageError(
                f"{where}:{line}: anchors and aliases are refused", next="write it out"
            )
        if getattr(event, "tag", None):
            raise UsageError(
                f"{where}:{line}: tag {event.tag} is refused", next="write a plain value"
            )
        if name == "ScalarEvent" and "${" in event.value:
            raise UsageError(
                f"{where}:{line}: ${{…}} is never expanded in a recipe",
                next="write the value itself",
            )
        depth += name in ("MappingStartEvent", "SequenceStartEvent")
        depth -= name in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{where}:{line}: nested deeper than {MAX_DEPTH}", next="a recipe has two levels"
            )


def _parse_scalar(text: str) -> Any:
    try:
        return _parse(f"value: {text}" if text else "value: ''", "the command line")["value"]
    except UsageError:
        return text


def _lay(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        data[key] = dict(inner) if isinstance(inner, Mapping) else {}
        data = data[key]
    if not keys[-1]:
        raise UsageError(f"{override!r} is not KEY=VALUE", next="for example: set.lr=3e-5")
    data[keys[-1]] = value


# --- types ---------------------------------------------------------------------------------------


def _build(kind: type, data: Any, prefix: str, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{where}: `{prefix.rstrip('.')}` must be a mapping, not {data!r}",
            next=f"its keys are: {', '.join(f.name for f in dataclasses.fields(kind))}",
        )
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in hints], where)
        values[key] = _convert(hints[key], value, f"{prefix}{key}", where)
    missing = [
        f"{prefix}{item.name}"
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
        and item.name not in values
    ]
    if missing:
        raise UsageError(f"{where}: `{missing[0]}` is missing", next=f"add {missing[0]}")
    return kind(**values)


def unknown_key(key: str, known: Sequence[str], where: str) -> UsageError:
    """The error for a key that does not exist, with the nearest one that does."""
    word = key.rpartition(".")[2].replace("-", "_").removeprefix("adam_")
    words = {name.rpartition(".")[2]: name for name in known}
    meant = SYNONYMS.get(word)
    if meant not in words:
        meant = next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.5)), None)
    near = [words[meant]] if meant is not None else []
    hint = f"did you mean `{near[0]}`?" if near else f"the keys are: {', '.join(known)}"
    return UsageError(f"{where}: unknown key `{key}`", next=hint)


def _convert(hint: Any, value: Any, key: str, where: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
        if len(options) == 1:
            return _convert(options[0], value, key, where)
        return _number(value, key, where)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, f"{key}.", where)
    if hint is float:
        return _number(value, key, where, relative=False)
    if typing.get_origin(hint) is list:
        items = value if isinstance(value, list) else [value]
        if any(not isinstance(item, (str, int)) or isinstance(item, bool) for item in items):
            raise _wrong(key, value, "a list of texts", where)
        return [str(item) for item in items]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise _wrong(key, value, "a mapping of text to text", where)
        return {str(k): v for k, v in value.items()}
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e6 samples is how people write it
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        words = {int: "a whole number", str: "a text", bool: "true or false"}
        raise _wrong(key, value, words[hint], where)
    return value


def _number(value: Any, key: str, where: str, relative: bool = True) -> float | str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise _wrong(key, value, "a finite number", where)
        return float(value)
    if isinstance(value, str):
        body = value[:-1] if value.endswith("x") and relative else value
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", body):
            return value if body != value else float(value)
    wanted = "a number such as 3e-5, or a scale such as 0.5x" if relative else "a number"
    raise _wrong(key, value, wanted, where)


def _wrong(key: str, value: Any, wanted: str, where: str) -> UsageError:
    return UsageError(f"{where}: `{key}` is {value!r}", next=f"write {wanted}")


def absolute(recipe: Recipe, present: Mapping[str, float | None]) -> Recipe:
    """The recipe with each `0.5x` replaced by that share of the `present` value: a plan keeps
    absolute values, so that applying it twice changes nothing."""
    resolved: dict[str, Any] = {}
    for key, value in recipe.set.given().items():
        if key != "decay_style" and isinstance(value, str):
            base = present.get(key)
            if base is None:
                raise UsageError(
                    f"`{key}: {value}`: the checkpoint keeps no single {key} to scale",
                    next=f"{key}: NUMBER",
                )
            resolved[key] = float(value[:-1]) * base
    return dataclasses.replace(recipe, set=dataclasses.replace(recipe.set, **resolved))


# --- values --------------------------------------------------------------------------------------


def ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`["6900-7010", "7100"]` as inclusive iteration ranges."""
    out = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
        if match is None:
            raise UsageError(f"skip range {text!r} is not A-B", next="for example: 6900-7010")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise UsageError(
                f"skip range {text!r} is empty", next="iterations count from 1, and A is at most B"
            )
        out.append((first, last))
    return out


def _check(recipe: Recipe) -> None:
    if recipe.version != 1:
        raise UsageError(f"recipe version {recipe.version} is not known", next="version: 1")
    for state in recipe.reset:
        if state not in STATES:
            raise unknown_key(state, STATES, "reset")
    ranges(recipe.skip)
    wanted = recipe.set
    if wanted.decay_style is not None and wanted.decay_style not in DECAY_STYLES:
        raise unknown_key(wanted.decay_style, DECAY_STYLES, "set.decay_style")
    bounds = {"beta1": (0.0, 1.0), "beta2": (0.0, 1.0)}
    for key, (low, high) in bounds.items():
        value = getattr(wanted, key)
        if value is not None and not low <= value < high:
            raise UsageError(f"`set.{key}` is {value}", next=f"{low:g} <= {key} < {high:g}")
    for key in ("lr", "min_lr", "weight_decay", "clip_grad", "warmup", "decay", "seed"):
        value = getattr(wanted, key)
        if isinstance(value, (int, float)) and value < 0:
            raise UsageError(f"`set.{key}` is {value}", next=f"{key} is never below 0")
    for key in ("eps", "loss_scale"):
        value = getattr(wanted, key)
        if isinstance(value, float) and value <= 0:
            raise UsageError(f"`set.{key}` is {value}", next=f"{key} is above 0")
    for section in (recipe.rollback, recipe.repair_latest):
        if section is not None and section.to is not None and section.to < 0:
            raise UsageError(f"step {section.to} is below 0", next="ckptsurgeon status")
    if recipe.rollback is not None and recipe.repair_latest is not None:
        raise UsageError(
            "`rollback` sets the pointers itself; `repair_latest` beside it has no meaning",
            next="drop repair_latest",
        )
