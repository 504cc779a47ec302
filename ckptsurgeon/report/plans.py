"""Plan, Receipt, Recipe, Recovery and errors as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.fields.constants import SAFE, TORCH
from ckptsurgeon.hints import Command, Hint, command
from ckptsurgeon.hints import text as hint_text
from ckptsurgeon.plans.edits import (
    AnyChange,
    Append,
    Content,
    Edit,
    Hole,
    Move,
    Replace,
    length,
)
from ckptsurgeon.plans.log_fields import LOG_FIELDS
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.remote import reads
from ckptsurgeon.report.changes import changes
from ckptsurgeon.report.edits import edits
from ckptsurgeon.report.style import (
    GREEN,
    MANY,
    RED,
    YELLOW,
    Row,
    Style,
    clean,
    hanging,
    packed,
    size,
    table,
    value,
)
from ckptsurgeon.transaction.kept import CHANGED, SAME

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.transaction.entry import Step
    from ckptsurgeon.transaction.given_up import GivenUp
    from ckptsurgeon.transaction.recovery import Recovery


SHARDS = (*TORCH, SAFE)
HOLD = "hold"
"""The kind of a re-warm window in which the weights stay."""
ONE_STEP = " (for this step only)"
NOT_ASKED = "whether your trainer takes it is not known"
LABELS = {
    "betas": "beta", "adam_step": "adam step", "weight_decay": "weight decay",
    "loss_scale": "loss scale", "clip_grad": "clip", "consumed_samples": "next sample",
    "data_batches": "next batch", "data_epoch": "epoch",
}  # fmt: skip
"""Fields of a promise that people call otherwise."""


def plan(
    plan: Plan,
    name: str,
    style: Style,
    undone: Receipt | None = None,
    redone: Receipt | None = None,
    *,
    brief: bool = False,
    files: bool = False,
) -> str:
    """What is about to change, what the next step will use, what it costs.

    `undone` is the receipt that an undo takes back: its changes are shown the other way round. Is
    it an undo itself, then `redone` is the surgery that comes into force again.
    `brief` leaves the changes out; with `files` stands what is done to each file, too, and so it
    does where no changes are known."""
    if plan.empty:
        why = f"{plan.title} would change nothing in {clean(name)}"
        if plan.promise is not None and plan.recipe.keys() - {"why", "name"} == {"rollback"}:
            why = f"{clean(name)} is already at that step"
            if "step" not in plan.promise.not_known:
                why = f"{clean(name)} is already at step {plan.promise.step - 1}"
        if plan.title == "nothing":
            why = "the recipe asks for nothing"
        return "\n".join([*hanging("nothing to do: ", why, style), *_notes(plan, style)])
    rows = changes(plan.changes)
    head = hanging(f"{clean(name)}   ", clean(plan.title), style)
    if undone is not None:
        about = f"{clean(undone.title)}   by {clean(undone.user)}, {undone.when}"
        head = hanging(f"receipt {undone.id}   ", about, style)
        forth = changes(_reached(plan, redone.changes)) if redone is not None else []
        rows = [*forth, *changes(_reached(plan, undone.changes), back=True), *rows]
    label = "  cost   "
    lines = [*head, ""]
    if rows and not brief:
        lines += [*table(rows, style), ""]
    if files or not (rows or brief):
        lines += [*table(edits(plan.edits, whole=files), style), ""]
    if plan.promise is not None and (values := promise(plan.promise)):
        will = "will" if plan.promise.asked else "would"
        label = f"  {next_step(plan.promise)} {will} use   "
        lines += packed(label, values, style)
    undo = "" if plan.undoes else ", undo kept"
    lines += hanging(f"{'  cost':<{len(label)}}", f"{cost(plan.edits)}{undo}", style)
    return "\n".join([*lines, *_notes(plan, style)])


def _reached(plan: Plan, items: Sequence[AnyChange]) -> list[AnyChange]:
    """Those that an undo takes back: none in a file that it leaves as it is."""
    if plan.restored != CHANGED:
        return [*items]
    names = {e.dst if isinstance(e, Move) else e.file for e in plan.edits}
    names |= {edit.src for edit in plan.edits if isinstance(edit, Move)}
    return [item for item in items if item.file in names]


def _notes(plan: Plan, style: Style) -> list[str]:
    return [line for text in plan.warnings for line in hanging("  note  ", clean(text), style)]


def promise(promise: Promise) -> list[str]:
    """What the trainer will use, one item a field, without those that the format does not keep."""
    return [item for _, item in fields(promise)]


def next_step(promise: Promise) -> str:
    """What it is called, by its number where that is known."""
    return "the next step" if "step" in promise.not_known else f"step {promise.step}"


def fields(promise: Promise) -> list[tuple[str, str]]:
    """The same, each with the name of its field."""
    settings = promise.settings or ()
    labels = dict(LABELS)
    if "adam" not in (promise.optimizer or "adam").lower():
        labels["adam_step"] = "optimizer step"
    values = {
        "lr": promise.lr,
        "betas": promise.betas,
        "adam_step": promise.adam_step,
        "eps": promise.eps,
        **{key: values if len(set(values)) > 1 else values[0] for key, values in settings},
        "weight_decay": promise.weight_decay,
        "loss_scale": promise.loss_scale,
        "clip_grad": promise.clip_grad,
        "seed": promise.seed,
        "consumed_samples": promise.consumed_samples,
        "data_batches": promise.data_batches,
        "data_epoch": promise.data_epoch,
        "skip": promise.skip,
        "rewarm": promise.rewarm or None,
    }
    return [
        (name, _reach(promise, name, f"{labels.get(name, name)} {_of_groups(promise, name, item)}"))
        for name, item in values.items()
        if item is not None
    ]


def _of_groups(promise: Promise, name: str, item: Any) -> str:
    """A value, or that of each param group where they differ."""
    index = ("betas", "eps").index(name) if name in ("betas", "eps") else None
    if index is None or promise.groups is None:
        return value(name, item)
    each = [value(name, group[index]) for group in promise.groups]
    different = list(dict.fromkeys(each))
    if len(different) == 1:
        return different[0]
    return f"{' | '.join(each if len(each) <= MANY else different)} (by group)"


def _reach(promise: Promise, name: str, item: str) -> str:
    """How far a value is sure."""
    if name in promise.not_known:
        return f"{item} (as saved; the trainer decides)"
    return f"{item}{ONE_STEP}" if name in promise.one_step else item


def cost(edits: Sequence[Edit]) -> str:
    """Bytes that will be written, and how many shards are copied for it: an append copies none. In
    a bucket, zeros are sent as well."""
    written, copied, sent = 0, set(), reads.current() is not None
    for edit in edits:
        if isinstance(edit, Append):
            runs = [(edit.old_size, edit.new_size)] if sent else edit.runs
            written += sum(end - start for start, end in runs)
        elif isinstance(edit, (Move, Replace)) and isinstance(edit.content, Content):
            pieces = edit.content.pieces
            written += sum(length(each) for each in pieces if sent or not isinstance(each, Hole))
            file = edit.file if isinstance(edit, Replace) else edit.like
            if file is not None and file.endswith(SHARDS) and pieces:
                copied.add(file)  # once, though it is first emptied where two must agree
        elif isinstance(edit, Replace) and isinstance(edit.content, Queries):
            written += edit.content.size
    shards = f"{count(len(copied), 'shard')} copied" if copied else "no shard copied"
    return f"{size(written)} {'sent' if sent else 'written'}, {shards}"


RELAUNCH = command("relaunch")
COUNTED = ("adam_step", "consumed_samples", "data_batches", "data_epoch", "rewarm")
"""Fields of a promise that most surgeries move and few are about."""


_RESTORED = {
    SAME: "{are} byte for byte what {were} before",
    CHANGED: "{are} what {were} before",
    "": "{are} restored, and not compared with what {were} before",
}
"""What an undo may say, by what it compared."""


def done(
    receipt: Receipt,
    style: Style,
    *,
    back: Command | None = None,
    resume: Hint = RELAUNCH,
    check: Hint = "",
    whole: bool = True,
) -> str:
    """What was done, and what comes next: `back` takes it back, by default an undo; `resume` is
    empty for bare logs, and so is `check` where `relaunch` holds the trainer to it. After an undo
    the run is not `whole` where somebody else has removed a step since."""
    text = f"receipt {receipt.id}{_restored(receipt, whole)}"
    lines = []
    if receipt.promise is not None:
        changed = {change.field for change in receipt.changes}
        text += f"; {_verdict(receipt.promise, changed, _fresh(receipt))}"
        lines = reasons(receipt.promise, style, {"lr", *LOG_FIELDS, *changed})
    lines.insert(0, f"{style.paint('done:', GREEN)} {text}")
    back = back or command("undo", receipt.id)
    lines.append(f"  {back.words[0]:<8} {back}")
    if resume:
        lines.append(f"  resume   {hint_text(resume)}")
    if check:
        lines.append(f"  check    {hint_text(check)}")
    return "\n".join(lines)


def _restored(receipt: Receipt, whole: bool = True) -> str:
    """What an undo brought back, by what it compared; empty for any other surgery. Other files of
    the run, as its trainer's config, are not looked at."""
    if receipt.undoes is None:
        return ""
    what, are, were = "what it changed", "is", "it was"
    if receipt.steps and whole:
        what, are, were = "checkpoints and logs", "are", "they were"
    but = ", but for files taken or left as they are" if receipt.restored == CHANGED else ""
    how = _RESTORED.get(receipt.restored, _RESTORED[""]).format(are=are, were=were)
    return f"; {what} {how} {receipt.undoes}{but}"


def _fresh(receipt: Receipt) -> bool:
    """Whether all moments begin anew; not where a reset was narrowed to some."""
    asked = "moments" in (receipt.recipe.get("reset") or ())
    return asked and receipt.undoes is None and not receipt.recipe.get("moments")


def _verdict(values: Promise, changed: Collection[str], fresh: bool) -> str:
    """What was read back from the disk of the fields that were `changed`, as far as a trainer is
    bound, and of moments that are `fresh`; lr where nothing that the next update uses was."""
    if not values.asked:
        return f"written, and read back; {NOT_ASKED}"
    if values.lr == 0 and (values.rewarm or ("",))[0] == HOLD:
        _, start, end = values.rewarm or ("", 0, 0)
        until = f" until the schedule is at sample {end}, from {start}"
        if values.then is not None:
            step, rate = values.then
            until = f"; lr {value('lr', rate)} from step {step}"
        return f"verified: step {values.step} holds the weights{until}"
    items = fields(values)
    if not items:
        return "verified on disk"
    silent = {*COUNTED, *(["lr"] if "lr" in values.not_known else [])}
    shown = [item for name, item in items if name in changed and name not in silent]
    shown += ["fresh moments"] * fresh
    if "lr" in values.not_known:
        known = f"verified on disk{': ' if shown else ''}{', '.join(shown[:MANY])}"
        return f"{known}; what lr step {values.step} uses is not known here"
    if not shown or "lr" in changed:
        shown = list(dict.fromkeys([items[0][1], *shown]))
    return f"verified: step {values.step} uses {', '.join(shown[:MANY])}"


def reasons(promise: Promise, style: Style, named: Collection[str] = ("lr",)) -> list[str]:
    """Why a value of `named` holds for one step only or is not known, and what helps."""
    known = {**promise.one_step, **promise.not_known}
    sentences = dict.fromkeys(why for name, why in known.items() if name in named)
    return [line for why in sentences for line in hanging("  but      ", clean(why), style)]


def log(
    receipts: Sequence[Receipt],
    style: Style,
    *,
    pruned: Collection[str] = (),
    damaged: Mapping[str, str] | None = None,
    given_up: Sequence[GivenUp] = (),
) -> str:
    """The surgeries, newest first, each with its reason; the attics of those in `pruned` are gone,
    and the receipts of those in `damaged` can't be read; those `given_up` were not done."""
    from ckptsurgeon.transaction.receipts import taken_back

    undone = taken_back(receipts)
    over = {item.receipt.id: item for item in given_up}
    known = {item.id: item for item in (*receipts, *(item.receipt for item in given_up))}
    wrong = damaged or {}
    lines = []
    for id in sorted({*known, *wrong}, key=int, reverse=True):
        after = f"   ({_how(known, id)} by {undone[id]})" if id in undone else ""
        if id not in known:
            after = after or "   (can't be undone)"
            lines += hanging(f"{id}   ", f"{clean(wrong[id])}{after}", style)
            continue
        item = known[id]
        after += "   (given up)" if id in over else ""
        after += "   (pruned: no undo)" if id in pruned and id not in over else ""
        lines += hanging(f"{item.id}   ", f"{clean(item.title)}{after}", style)
        who = f"{item.when}   {clean(item.user)}@{clean(item.host)}"
        lines += hanging("       ", who, style)
        if item.why:
            lines += hanging("       why: ", clean(item.why), style)
        for file, kept in over[id].left.items() if id in over else ():
            lines += hanging("       left: ", _left(file, "" if id in pruned else kept), style)
    return "\n".join(lines) or "no surgery yet"


def _how(known: Mapping[str, Receipt], id: str) -> str:
    return "redone" if id in known and known[id].undoes is not None else "undone"


def recovery(
    done: Recovery, style: Style, receipt: Receipt | None = None, back: Command | None = None
) -> str:
    """What `recover` found and did; with the receipt of what it finished and what takes it back."""
    if done.outcome == "nothing":
        return "nothing to recover: no surgery was interrupted"
    title = clean(done.title or "")
    if done.outcome == "discarded":
        return f"{style.paint('discarded:', GREEN)} {title}; the run is exactly as it was"
    if done.outcome == "given up":
        text = f"{style.paint('given up:', YELLOW)} {title}; the rest is as it was before it"
        text += f"\n  {'verify':<8} {command('verify')}"
        return "\n".join([*table([*edits(done.steps), *_rows_left(done.left)], style), text])
    text = f"{style.paint('finished:', GREEN)} {title}"
    if receipt is not None:
        back = back or command("undo", receipt.id)
        text += f"; receipt {receipt.id}{_restored(receipt)}\n  {back.words[0]:<8} {back}"
    return "\n".join([*table(edits(done.steps), style), text])


def waiting(title: str, committed: bool | None, steps: Sequence[Step], style: Style) -> str:
    """What `recover` would do."""
    act = "finish or discard" if committed is None else "finish" if committed else "discard"
    return "\n".join([f"would {act}: {clean(title)}", *table(edits(steps), style)])


def way_back(title: str, steps: Sequence[Step], left: Mapping[str, str], style: Style) -> str:
    """What giving up a surgery would do."""
    rows = table([*edits(steps), *_rows_left(left)], style)
    return "\n".join([f"would {clean(title)}", *rows])


def _rows_left(left: Mapping[str, str]) -> list[Row]:
    return [Row("left", _left(file, kept)) for file, kept in left.items()]


def _left(file: str, kept: str) -> str:
    """A file that somebody else wrote, and where the one from before is."""
    return f"{clean(file)}, which is not the surgery's any more" + (
        f"; what it was before is {clean(kept)}" if kept else ""
    )


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
