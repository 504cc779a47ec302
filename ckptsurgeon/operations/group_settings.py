"""Hyperparameters of some parameters only: of the param groups that hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.files.expressions import matching
from ckptsurgeon.formats import Checkpoint, Place, Setting
from ckptsurgeon.formats.capabilities import NamesGroups, SetsAnew
from ckptsurgeon.formats.optimizers.table import HYPERPARAMETERS
from ckptsurgeon.formats.schedules.check import AFTER_LOADING
from ckptsurgeon.hints import command
from ckptsurgeon.operations import taken
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import EPS, RATE, SHARE
from ckptsurgeon.operations.place_changes import PlaceChanges
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

PLURAL = {"beta1": ("betas", 0), "beta2": ("betas", 1), "beta3": ("betas", 2)}
"""Keys that are one number of several."""


@held
class GroupSettings(Section):
    """Wanted values for the param groups whose parameters match `params`, in every shard.

    A group is changed as a whole: where only some of its parameters match, the recipe is refused.
    A weight decay that is 0 is set as well, as the groups were named."""

    key: ClassVar[str] = "set_params"
    rest: ClassVar[tuple[str, frozenset[str]]] = ("settings", HYPERPARAMETERS)
    synonyms: ClassVar[Mapping[str, str]] = {"wd": "weight_decay", "learning_rate": "lr"}

    params: Annotated[
        str,
        Key(
            "the values beside it are for the param groups all of whose parameters match, "
            "where the format knows their names",
            value="a regular expression",
            pattern=True,
        ),
    ]
    lr: Annotated[
        float | None,
        Key("their peak, where no scheduler is saved or it is a LambdaLR", limits=RATE),
    ] = None
    weight_decay: Annotated[float | None, Key("also where it is 0 now", limits=RATE)] = None
    beta1: Annotated[float | None, Key("", limits=SHARE)] = None
    beta2: Annotated[float | None, Key("", limits=SHARE)] = None
    eps: Annotated[float | None, Key("", limits=EPS)] = None
    settings: Annotated[
        dict[str, float], Key("what these groups hold, as with `set.KEY`", value="number")
    ] = dataclasses.field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The keys that were set."""
        fields = dataclasses.asdict(self)
        del fields["params"]
        settings = fields.pop("settings")
        return {key: value for key, value in (fields | settings).items() if value is not None}

    def check(self, recipe: Recipe) -> None:
        values = self.given()
        if not values:
            raise UsageError("`set_params` sets nothing", next="for example: weight_decay: 0.01")
        for key, value in values.items():
            if isinstance(value, str):
                raise UsageError(
                    f"`set_params.{key}` is {value!r}: groups may hold different values",
                    next=f"{key}: NUMBER",
                )
        everywhere = {_name(key) for key in recipe[Hyperparameters].given()}
        if both := [key for key in values if _name(key) in everywhere]:
            raise UsageError(
                f"both `set` and `set_params` set {', '.join(both)}",
                next="use two recipes, one after the other",
            )

    def title(self, run: Run, step: int) -> list[str]:
        pairs = " ".join(f"{key}={value:g}" for key, value in self.given().items())
        return [f"set {pairs} ({self.params})"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        setter = PlaceChanges(run)
        for key, value in self.given().items():
            decides = key != "lr" or not checkpoint.locate("scheduler")
            if decides:
                SetsAnew.refuse(checkpoint, key, value)
            name, index = PLURAL.get(key, (key, None))
            places = _matching(checkpoint, name, self.params)
            if decides:
                SetsAnew.refuse(checkpoint, key, value, places)
            for place in places:
                if index is not None:
                    setter.put_nth(name, place, index, value)
                    continue
                for setting in _new(checkpoint, name, place, value):
                    setter.put(*setting)
        return list(setter.changes.values()), []

    def refuse_untaken(self, changes: Sequence[AnyChange], after: Checkpoint) -> None:
        taken.refuse_untaken(self.given(), changes, after)


def _name(key: str) -> str:
    return PLURAL.get(key, (key, None))[0]


def _matching(checkpoint: Checkpoint, key: str, pattern: str) -> list[Place]:
    """The places of `key` in the groups all of whose parameters match."""
    places = NamesGroups.of(checkpoint).of_parameters(key)
    if not places:
        raise SurgeryError(
            f"no param group holds {key}", next=command("show", why="what they hold")
        )
    every = (name for names, _ in places for name in names)
    chosen = matching(pattern, every, "set_params.params")
    out = []
    for names, place in places:
        inside = [name for name in names if name in chosen]
        if inside and len(inside) < len(names):
            some = ", ".join(sorted(set(names) - set(inside))[:3])
            raise SurgeryError(
                f"{len(inside)} of the {count(len(names), 'parameter')} of a param group match "
                f"{pattern!r}; it has one {key} for all of them",
                next=command(
                    "show", why=f"the groups; REGEX matches all of one or none: also {some}"
                ),
            )
        out += [place] if inside else []
    return out


def _new(checkpoint: Checkpoint, key: str, place: Place, value: float) -> Iterator[Setting]:
    """The place with its new value, and what its trainer computes that from."""
    if key != "lr":
        yield from NamesGroups.of(checkpoint).of_group(key, place, value)
        return
    index = checkpoint.group_of(place)
    beside = checkpoint.beside(place, "initial_lr")
    before = checkpoint.value(place.file, beside)
    schedulers = [p for p in checkpoint.locate("scheduler") if isinstance(p.value, Mapping)]
    if schedulers and not all("lr_lambdas" in p.value for p in schedulers):
        raise SurgeryError(
            "this scheduler computes the rates of all groups from more than their peaks",
            next=(command("set-lr", f"{value:g}", why="of all groups"), AFTER_LOADING),
        )
    peak = float(before) if before else float(place.value)
    if not schedulers or not peak:
        yield Setting(key, place, value)
        if before and place.value:
            initial = Place(place.file, beside, before)
            yield Setting(key, initial, before * (value / place.value))
        return
    yield Setting(key, place, place.value * (value / peak))
    yield Setting(key, Place(place.file, beside, before), value)
    for scheduler in schedulers:
        for name, factor in (("base_lrs", None), ("_last_lr", value / peak)):
            path = (*scheduler.path, name, index)
            old = checkpoint.value(scheduler.file, path)
            new = value if factor is None else old * factor
            yield Setting(key, Place(scheduler.file, path, old), new)
