"""Plan, Receipt, Recipe, Recovery and errors as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckptsurgeon.edits import (
    ABSENT,
    AnyChange,
    Append,
    Change,
    Edit,
    Hole,
    Move,
    Plan,
    Promise,
    Receipt,
    Replace,
    Rewrite,
    length,
)
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.report.style import (
    GREEN,
    MANY,
    RED,
    Row,
    Style,
    arrow,
    clean,
    count,
    names,
    packed,
    size,
    table,
    value,
)

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.transaction.journal import Recovery


def plan(plan: Plan, name: str, style: Style, undone: Receipt | None = None) -> str:
    """What is about to change, what the next step will use, what it costs.

    `undone` is the receipt that an undo takes back: its changes are shown the other way round."""
    if plan.empty:
        why = f"{clean(name)} is already as asked ({plan.title})"
        if plan.title == "nothing":
            why = "the recipe asks for nothing"
        return "\n".join([f"nothing to do: {why}", *_notes(plan, style)])
    rows = changes(plan.changes)
    head = f"{clean(name)}   {clean(plan.title)}"
    if undone is not None:
        head = f"receipt {undone.id}   {undone.title}   by {undone.user}, {undone.when}"
        rows = [*changes(undone.changes, back=True), *rows]
    label = f"  step {plan.promise.step} will use   " if plan.promise else "  cost   "
    lines = [head, "", *table(rows, style), ""]
    if plan.promise is not None:
        lines += packed(label, promise(plan.promise), style)
    undo = "" if plan.undoes else ", undo kept"
    lines.append(f"{'  cost':<{len(label)}}{cost(plan.edits)}{undo}")
    return "\n".join([*lines, *_notes(plan, style)])


def _notes(plan: Plan, style: Style) -> list[str]:
    wrapped = (
        textwrap.wrap(clean(text), style.width - 8, break_on_hyphens=False)
        for text in plan.warnings
    )
    return [f"{'        ' if i else '  note  '}{line}" for w in wrapped for i, line in enumerate(w)]


def changes(items: Sequence[AnyChange], *, back: bool = False) -> list[Row]:
    """Rows of changes; equal changes of one field are one row, which counts its places.

    With `back`, the rows of taking them back."""
    rows: list[Row] = []
    for field in dict.fromkeys(item.field for item in items):
        mine = [item for item in items if item.field == field]
        rows += _changed(field, [item for item in mine if isinstance(item, Change)], back)
        files = [item for item in mine if not isinstance(item, Change)]
        if field == "checkpoint":
            rows += _asides([item.file for item in files], back)
        elif files:
            rows += _rewritten(field, files, back)
    return rows


def _changed(field: str, items: Sequence[Change], back: bool) -> list[Row]:
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for item in items:
        place = str(item.path[-1]) if item.path else item.file
        groups.setdefault((place, repr(item.old), repr(item.new)), []).append(item)
    several = len({place for place, _, _ in groups}) > 1
    rows = []
    for (place, _, _), group in groups.items():
        ends = (group[0].old, group[0].new)
        old, new = reversed(ends) if back else ends
        sign, text = "~", arrow(field, old, new)
        if old in (None, ABSENT, [], (), ""):
            sign, text = "+", value(field, new)
        if group[0].path:
            shards = len({item.file for item in group})
            note = f"{count(len(group), 'place')} in {count(shards, 'shard')}"
            note += f" ({clean(place)})" if several else ""
        else:
            note = "" if place == field else clean(place)
        rows.append(Row(field, text, note, sign))
    return rows


def _asides(files: Sequence[str], back: bool) -> list[Row]:
    short = [re.sub(r"^\D+(?=\d+$)", "", PurePosixPath(file).name) for file in files]
    where = "from the attic" if back else "to the attic"
    return [Row("checkpoints", names(short), where, "<" if back else ">")] if short else []


def _rewritten(field: str, items: Sequence[AnyChange], back: bool) -> list[Row]:
    notes: dict[str, list[str]] = {}
    for item in items:
        sign, note = _about(item, back)
        notes.setdefault(sign, []).append(note)
    parts = []
    for sign, texts in notes.items():
        if len(set(texts)) > 1 and len(texts) <= MANY:
            parts += [(sign, f"1 file{note}") for note in texts]
        else:
            more = "" if len(set(texts)) == 1 else ", the first"
            parts.append((sign, f"{count(len(texts), 'file')}{more}{texts[0]}"))
    label = "events" if field == "tensorboard" else field
    line = ", ".join([parts[0][1], *(f"{sign} {text}" for sign, text in parts[1:])])
    if len(line) <= 64:
        return [Row(label, line, sign=parts[0][0])]
    return [Row(label, text, sign=sign) for sign, text in parts]


def _about(item: AnyChange, back: bool) -> tuple[str, str]:
    """Sign of an event file's change, and what follows `1 file`."""
    if isinstance(item, Rewrite) and item.new_file:
        folder = clean(PurePosixPath(item.file).parent.name) or "."
        return (">", " to the attic") if back else ("+", f" in {folder}/: {clean(item.note)}")
    if isinstance(item, Rewrite):
        return ("~", " as before") if back else ("~", f": {clean(item.note)}")
    return ("<", " from the attic") if back else (">", " to the attic")


def promise(promise: Promise) -> list[str]:
    """What the trainer will use, one item a field, without those that the format does not keep."""
    settings = promise.settings or ()
    items = {
        "lr": promise.lr,
        "beta": promise.betas,
        "adam step": promise.adam_step,
        "eps": promise.eps,
        **{key: values if len(set(values)) > 1 else values[0] for key, values in settings},
        "weight decay": promise.weight_decay,
        "loss scale": promise.loss_scale,
        "clip": promise.clip_grad,
        "seed": promise.seed,
        "next sample": promise.consumed_samples,
        "next batch": promise.data_batches,
        "epoch": promise.data_epoch,
        "skip": promise.skip,
        "rewarm": promise.rewarm or None,
    }
    return [f"{name} {value(name, item)}" for name, item in items.items() if item is not None]


def cost(edits: Sequence[Edit]) -> str:
    """Bytes that will be written, and how many shards are copied for it: an append copies none."""
    written, copied = 0, 0
    for edit in edits:
        if isinstance(edit, Append):
            written += sum(len(data) for _, data in edit.writes)
        elif isinstance(edit, (Move, Replace)) and edit.content is not None:
            pieces = edit.content.pieces
            written += sum(length(piece) for piece in pieces if not isinstance(piece, Hole))
            if isinstance(edit, Replace) and edit.file.endswith(".pt"):
                copied += 1
    shards = f"{count(copied, 'shard')} copied" if copied else "no shard copied"
    return f"{size(written)} written, {shards}"


def done(receipt: Receipt, style: Style, *, resumes: bool = True) -> str:
    """What was done, and the two commands that come next; bare logs are not resumed."""
    text = f"receipt {receipt.id}"
    if receipt.undoes is not None:
        what = "the run is" if receipt.steps else "what it changed is"
        text += f"; {what} byte for byte what it was before {receipt.undoes}"
    if receipt.promise is not None:
        no_update = receipt.promise.lr == 0 and (receipt.promise.rewarm or ("",))[0] == "hold"
        uses = "holds the weights (lr 0)" if no_update else f"uses {promise(receipt.promise)[0]}"
        text += f"; verified: step {receipt.promise.step} {uses}"
    lines = [f"{style.paint('done:', GREEN)} {text}"]
    if receipt.undoes is None:
        lines.append(f"  undo     ckptsurgeon undo {receipt.id}")
    if resumes:
        lines.append("  resume   ckptsurgeon relaunch")
    return "\n".join(lines)


def log(receipts: Sequence[Receipt], style: Style) -> str:
    """The surgeries, newest first, each with its reason."""
    undone = {item.undoes: item.id for item in receipts if item.undoes is not None}
    lines = []
    for item in reversed(receipts):
        after = f"   (undone by {undone[item.id]})" if item.id in undone else ""
        lines.append(f"{item.id}   {item.title}{after}")
        lines.append(f"       {item.when}   {clean(item.user)}@{clean(item.host)}")
        for line in textwrap.wrap(clean(item.why), style.width - 12):
            lines.append(
                f"       why: {line}" if "why:" not in lines[-1] else f"            {line}"
            )
    return "\n".join(lines) or "no surgery yet"


def recovery(done: Recovery, style: Style) -> str:
    """What `recover` found and did."""
    if done.outcome == "nothing":
        return "nothing to recover: no surgery was interrupted"
    if done.outcome == "discarded":
        return f"{style.paint('discarded:', GREEN)} {done.title}; the run is exactly as it was"
    text = f"{style.paint('finished:', GREEN)} {done.title}"
    if done.receipt is not None:
        text += f"; receipt {done.receipt}\n  undo     ckptsurgeon undo {done.receipt}"
    return text


def recipe(recipe: Recipe) -> str:
    """The recipe as YAML that `plan` and `apply` read."""
    import yaml

    from ckptsurgeon.recipe.file import to_data

    return str(yaml.safe_dump(to_data(recipe), sort_keys=False, allow_unicode=True)).rstrip()


def error(error: SurgeryError, style: Style) -> str:
    """Three parts: what happened, what was left untouched, what to do next."""
    parts = [("error:", [error.what]), ("untouched:", [error.untouched]), ("next:", error.next)]
    lines = []
    for label, texts in parts:
        inner = [line for text in texts for line in text.splitlines()]
        for i, line in enumerate(inner):
            start = style.paint(label, RED if label == "error:" else "")
            lines.append(f"{' ' * len(label) if i else start} {clean(line)}")
    return "\n".join(lines)
