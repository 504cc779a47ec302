"""What each hint takes over of the command that was typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from ckptsurgeon.cli.commands import Command as Row
from ckptsurgeon.cli.commands import commands
from ckptsurgeon.cli.options import Common
from ckptsurgeon.cli.parameter_types import parameter_types
from ckptsurgeon.hints import TYPED, Command
from ckptsurgeon.operations.fields import Fields
from ckptsurgeon.plans.frozen import frozen

CARRIED = ("as_json", "allow_global", "tb", "log", "tag", "rule", "branch", "order", "step")
"""Options that mean the same in every command that has them from the same bundle."""


NO_PICKLE_READ = ("undo", "redo")
"""Commands that bring back bytes as they were, whatever globals they name."""
OF_A_RUN = ("verify",)
"""Commands whose `--tb` has the logs of a run; that of others stands in its place."""


@frozen
class Given:
    """An option that was typed: its words, and the bundle that it is of."""

    name: str
    words: list[str]
    bundle: type[Any]


def follow(common: Common, *others: object) -> None:
    """From here on each hint is for the same run, and with the same options, as the command that
    was typed with these bundles."""
    given = [option for bundle in (common, *others) for option in _given(bundle)]
    TYPED.set(replace(TYPED.get(), options=lambda hint: _taken(hint, common, given)))


def _taken(hint: Command, common: Common, given: Sequence[Given]) -> tuple[list[str], list[str]]:
    """What `hint` takes over before its name and behind its words."""
    row = commands().get(hint.words[0])
    own = {word.partition("=")[0] for word in hint.words}
    after: list[str] = []
    if row is not None and given:
        kinds = _bundles(row)
        for option in given:
            if option.name == "--allow-global" and hint.words[0] in NO_PICKLE_READ:
                continue
            if option.name not in own and any(issubclass(kind, option.bundle) for kind in kinds):
                after += option.words
    shown_only = common.dry_run and not hint.real and not own & {"-n", "--dry-run"}
    if row is not None and row.changes and shown_only:
        after.append("--dry-run")
    before: list[str] = []
    bare = "--tb" in {*own, *after} and hint.words[0] not in OF_A_RUN
    if common.where is not None and not hint.run and not bare:
        named = str(common.where)
        before += ["-C", f"./{named}" if named.startswith("-") else named]
    if common.format_name and "--format" not in own:
        before += ["--format", common.format_name]
    if common.optimizer and "--optimizer" not in own:
        before += ["--optimizer", str(common.optimizer)]
    return before, after


def _bundles(row: Row) -> list[type[Any]]:
    """The classes whose fields are options of a command, and not those of a recipe."""
    kinds = parameter_types(row.function()).values()
    return [
        kind
        for kind in kinds
        if isinstance(kind, type) and is_dataclass(kind) and not issubclass(kind, Fields)
    ]


def _given(bundle: Any) -> list[Given]:
    out = []
    for item in fields(bundle):
        value = getattr(bundle, item.name)
        if item.name not in CARRIED or value == item.default:
            continue
        owner = next(
            kind for kind in type(bundle).__mro__ if item.name in vars(kind)["__annotations__"]
        )
        _, info = get_args(get_type_hints(owner, include_extras=True)[item.name])
        name = str(info.default)  # where Typer keeps the first name of an option in Annotated
        values = value if isinstance(value, list) else [value]
        words = [name] if value is True else [w for each in values for w in (name, str(each))]
        out.append(Given(name, words, owner))
    return out


def follow_refused(context: Any, words: Sequence[str]) -> None:
    """As `follow`, for words that Click refused in this context: of the options that it can make
    out among them."""
    name = getattr(context, "info_name", None)
    row = commands().get(name or "")
    if row is None or name not in words:
        return
    parsed = context.command.make_context(
        name, list(words[words.index(name) + 1 :]), parent=context.parent, resilient_parsing=True,
        ignore_unknown_options=True, allow_extra_args=True,
    )  # fmt: skip
    given = {name: value for name, value in parsed.params.items() if value is not None}
    bundles = [
        kind(**{item.name: given[item.name] for item in fields(kind) if item.name in given})
        for kind in _bundles(row)
    ]
    common = next(bundle for bundle in bundles if isinstance(bundle, Common))
    follow(common, *(bundle for bundle in bundles if bundle is not common))
