"""Run, one Checkpoint and Verification as text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count, why_unread
from ckptsurgeon.formats.layout import resumes
from ckptsurgeon.hints import Hint, command, text
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.report.fields import SHOWN, places
from ckptsurgeon.report.plans import NOT_ASKED, fields, next_step, promise, reasons
from ckptsurgeon.report.style import (
    GREEN,
    RED,
    Row,
    Style,
    clean,
    fits,
    hanging,
    names,
    number,
    size,
    table,
    value,
)
from ckptsurgeon.report.vitals import signs
from ckptsurgeon.transaction.home import EVENTS, NOTE

if TYPE_CHECKING:
    from pathlib import Path

    from ckptsurgeon.formats import Checkpoint, Place, State
    from ckptsurgeon.logs.printed.comparison import Comparison
    from ckptsurgeon.look import Verification
    from ckptsurgeon.look.advise import Advice
    from ckptsurgeon.look.finding import Finding
    from ckptsurgeon.look.resumed.verdict import Verdict
    from ckptsurgeon.look.vitals.vitals import Vitals
    from ckptsurgeon.run.run import Run


LABEL = 12
"""The longest name of an optimizer that is the label of its row."""
FINDINGS = 20
"""So many are listed: a disk that lost its files makes a finding of each chunk in them."""


def status(
    run: Run,
    state: State | None,
    problem: SurgeryError | None,
    style: Style,
    loss: Sequence[Row] = (),
    headline: tuple[str, Hint] | None = None,
    found: Sequence[Finding] = (),
) -> str:
    """The run on one screen. `problem` is why the latest checkpoint can't be read, `loss` what
    `sparkline` made of the logs, `headline` what is wrong with the loss and what to do next, and
    `found` what is wrong with how the run is started."""
    at, known = run.format.name, True
    if state is not None:
        known = "step" not in state.promise.not_known
        at = f"{f'at step {state.step}' if known else 'at a step not known'}   {state.dialect}"
    surgery, unfinished = _surgery(run), run.under_way() or run.interrupted()
    rows = surgery if unfinished else []
    if not run.bare:
        pointers = _pointers(run) if known else []
        rows = [*rows, _steps(run, known=known), *pointers]
    if problem is not None:
        rows += [Row("problem", clean(line)) for line in problem.what.splitlines()]
        rows += [Row("next", hint) for hint in problem.next]
    for item in found:
        rows += [Row("problem", clean(item.what)), Row("next", text(item.next or ""))]
    if state is not None:
        rows += _hyperparameters(state)
    rows += loss
    try:
        events, live = _events(run), _live(run)
    except OSError as error:  # of a server that does not answer
        events, live = [Row("log", clean(why_unread(error)), "can't be looked at")], []
    rows += [*events, *([] if unfinished else surgery), *live]
    lines = [*hanging(f"{clean(run.name)}   ", at, style), ""]
    if headline is not None:
        what, next = headline
        lines += [style.paint(line, RED) for line in hanging("  ", what, style)]
        lines += [f"      next: {text(next)}", ""]
    return "\n".join([*lines, *table(rows, style)])


def _live(run: Run) -> list[Row]:
    return [Row("live", clean(line)) for line in run.writers()]


def _steps(run: Run, *, known: bool) -> Row:
    """`known` is whether the number of the one that is read is its own, or stands for it."""
    steps = run.steps()
    conditions: dict[str, list[str]] = {}
    for step, condition in run.conditions.of_each(steps).items():
        if condition == "complete" and run.linked(step):
            condition = "symlinked"
        conditions.setdefault(condition, []).append(str(step))
    conditions.pop("complete", None)
    note = "   ".join(f"{what}: {names(which)}" for what, which in conditions.items())
    note = note or "all complete"
    listed = names([str(step) for step in steps]) if known else "1, of a number not known"
    return Row("steps", listed or "none", note if steps else "")


def _pointers(run: Run) -> list[Row]:
    named = run.pointers()
    if not named:
        complete = run.complete_among(run.steps())
        highest = str(complete[-1]) if complete else "none"
        resumed_step = resumes(run.format, run.root)
        if complete and resumed_step is not None and resumed_step > complete[-1]:
            return [Row("latest", str(resumed_step), "incomplete, and its trainer would resume it")]
        return [Row("latest", highest, "the highest complete step; its trainer keeps no pointer")]
    steps = set(named.values())
    if len(steps) == 1 and None not in steps:
        step = next(iter(steps))
        agree = "the pointer names a saved step" if len(named) == 1 else "all pointers agree"
        return [Row("latest", str(step), agree if step in run.steps() else "not saved")]
    return [Row("latest", f"{file} → {_named(run, step)}") for file, step in named.items()]


def _named(run: Run, step: int | None) -> str:
    if step is None:
        return "names no step"
    return str(step) if step in run.steps() else f"{step} (not saved)"


def _hyperparameters(state: State) -> list[Row]:
    values = state.promise
    lr = "not known" if values.lr is None else f"{values.lr:.3e}"
    if {"lr", "state"} & values.not_understood.keys():
        lr = "not understood"
    rows = [Row("lr", lr, schedule(state))]
    own = {"betas", "adam_step", "eps", *dict(values.settings or ())}
    own_items = [
        re.sub(r"^\w+ (?=step)", "", item) for field, item in fields(values) if field in own
    ]
    label = values.optimizer or "optimizer"
    if len(label) > LABEL:
        rows.append(Row("optimizer", label))
        label = "optimizer"
    if own_items:
        rows.append(Row(label, "   ".join(own_items)))
    if values.weight_decay is not None:
        rows.append(Row("weight decay", value("", values.weight_decay), "one per param group"))
    if values.loss_scale is not None:
        kind = "dynamic" if state.dynamic_loss_scale else "static"
        rows.append(Row("loss scale", number(values.loss_scale), kind))
    if values.clip_grad is not None:
        rows.append(Row("clip", number(values.clip_grad)))
    if values.skip is not None:
        rows.append(Row("skip", value("skip", values.skip)))
    if values.rewarm:
        rows.append(Row("rewarm", value("rewarm", values.rewarm)))
    rows += [Row("note", clean(note)) for note in state.notes]
    return rows


def schedule(state: State) -> str:
    """The schedule in words: where it goes, and where it stands."""
    fields = state.schedule
    if {"scheduler", "state"} & state.promise.not_understood.keys():
        return "its schedule is not understood"
    if fields is None:
        return clean(state.scheduler) or "no schedule is saved"
    peak, floor = float(fields["max_lr"]), float(fields["min_lr"])
    now, warmup, end = (int(fields[key]) for key in ("num_steps", "warmup_steps", "decay_steps"))
    style = fields["decay_style"]
    after = "constant" if style == "constant" else f"{style} to {floor:.3e}"
    if now < warmup:
        return f"warming up to {peak:.3e}, sample {now} of {warmup}, then {after}"
    if style == "constant":
        return f"constant at {peak:.3e}"
    if now > end:
        return f"{style} from {peak:.3e} ended, {floor:.3e} from now on"
    return f"{style} from {peak:.3e} to {floor:.3e}, sample {now} of {end}"


def _events(run: Run) -> list[Row]:
    from ckptsurgeon.logs.event_folder import EventFolder
    from ckptsurgeon.run.log_numbers import counts_steps

    rows = []
    for source in run.log_sources():
        events = isinstance(source, EventFolder)
        files = [*disk.matching(source.path, f"*{EVENTS}*")] if events else [source.path]
        for stream in source.streams():
            notes = [count(len(files), "file")] if events else []
            if stream.last is not None:
                word = "step" if counts_steps(run, stream.last, stream.each) else "number"
                notes += [f"to {word} {stream.last}", *_written(files)]
            rows.append(Row("events" if events else "log", clean(stream.name), ", ".join(notes)))
    gone = [f"{clean(name)} is not there" for name in run.logs.lacking()]
    rows += [Row("events", what, "which ckptsurgeon.yaml names") for what in gone]
    return rows or [Row("events", "none")]


def _written(files: Sequence[Path]) -> list[str]:
    """When a trainer last wrote to a log; a cut leaves it at the time of the last event that
    stays. Nothing of a log that is a folder."""
    times = [
        path.stat().st_mtime
        for path in files
        if not path.name.endswith(NOTE) and not disk.is_folder(path)
    ]
    if not times:
        return []
    last = datetime.fromtimestamp(max(times), timezone.utc)
    return [f"written {last.isoformat(timespec='seconds')}"]


def _surgery(run: Run) -> list[Row]:
    busy, waiting = run.under_way(), run.interrupted()
    if busy is not None:
        return [Row("surgery", f"under way: {clean(busy)}")]
    if waiting is not None:
        return [Row("surgery", f"interrupted: {waiting}", text(command("recover")))]
    receipts, damaged = run.receipts(), run.damaged_receipts()
    rows = [Row("surgery", f"{id}  {clean(wrong)}") for id, wrong in damaged.items()]
    if not receipts:
        return rows or [Row("surgery", "none yet")]
    last = receipts[-1]
    rows.insert(0, Row("surgery", f"{last.id}  {last.title}", last.when))
    if len(receipts) > 1:
        rows.append(Row("surgery", f"{len(receipts) - 1} more", text(command("log"))))
    return rows


def checkpoint(run: Run, checkpoint: Checkpoint, style: Style) -> str:
    """One step: what comes next, and every place of each field with the place that wins."""
    state = run.with_caveats(checkpoint.state())
    rows = [Row("dialect", state.dialect), Row("schedule", schedule(state))]
    if state.promise.optimizer:
        rows.insert(1, Row("optimizer", state.promise.optimizer))
    rows += [Row(next_step(state.promise), item) for item in promise(state.promise)]
    rows += [Row("note", clean(note)) for note in state.notes]
    lines = [f"{clean(run.name)}   step {state.step}", "", *table(rows, style), ""]
    found = {field: places(checkpoint, field) for field in SHOWN}
    by_depth = [
        [row for field in found for row in _places(field, found[field], depth)]
        for depth in (3, 2, 1)
    ]
    told_apart = [rows for rows in by_depth if _paths(rows) == _paths(by_depth[0])]
    beside = [rows for rows in told_apart if fits(rows, style)]
    below = [
        [Row(row.label, t) for row in rows for t in (row.text, f"  {row.note}")]
        for rows in told_apart
    ]
    unbroken = [rows for rows in below if len(table(rows, style)) == len(rows)]
    best, *_ = [*beside, *unbroken, *below]
    return "\n".join([*lines, *table(best, style)])


def _paths(rows: Sequence[Row]) -> int:
    """How many paths of a field can be told from one another."""
    return len({(row.label, row.note.rpartition("   ")[2]) for row in rows})


def _places(field: str, places: Sequence[Place], depth: int) -> list[Row]:
    groups: dict[tuple[str, bool], list[Place]] = {}
    for place in places:
        text = value(field, place.value)
        groups.setdefault((text, place.wins), []).append(place)
    rows = []
    for (text, wins), group in sorted(groups.items(), key=lambda item: not item[0][1]):
        path = clean(".".join(map(str, group[0].path[-depth:])))
        shards = len({place.file for place in group})
        where = f"{count(len(group), 'place')} in {count(shards, 'shard')}"
        rows.append(Row(field, text, f"{'wins' if wins else 'copy'}   {where}   {path}"))
    return rows


def verification(
    result: Verification, style: Style, comparison: Comparison | None = None, *, remedy: Hint = ""
) -> str:
    """Sound, or every finding, of the step or of the run around it; the level it was read to, and
    what no CRC could prove. With `word` also what the trainer said. Findings end with the
    `remedy`."""
    head = (
        f"step {result.step}: {count(result.files, 'file')}, {result.format}, level {result.level}"
        f"{'' if result.against is None else f', compared with step {result.against}'}"
    )
    if not result.findings:
        lines = [f"{style.paint('sound:', GREEN)} {head}", *_next(result.promise, style)]
    else:
        label = style.paint("not sound:", RED)
        lines = [f"{label} {head}, {count(len(result.findings), 'finding')}"]
        lines += [f"  {clean(finding)}" for finding in result.findings[:FINDINGS]]
        lines += _hidden(len(result.findings))
        lines += [f"      next: {text(remedy)}"] if remedy else []
    if result.no_crc:
        lines.append(f"  no CRC: damage in {size(result.no_crc)} of this step can't be detected")
    for name, moment in (result.moments or {}).items():
        lines.append(f"  {name}: L1 norm {moment.l1:.6g}   max {moment.max:.6g}")
    unclear = {} if result.promise is None else result.promise.not_understood
    lines += [f"  {clean(text)}" for text in dict.fromkeys(unclear.values())]
    agreed = [str(each) for each in result.since if each.agrees]
    if result.against is not None and agreed:
        lines += [f"  agrees with step {result.against}:", *(f"    {clean(t)}" for t in agreed)]
    lines += [f"  not compared: {clean(text)}" for text in result.not_compared]
    lines += [] if comparison is None else _comparison(comparison, style)
    return "\n".join(lines)


def first_save(step: int, before: int, since: Sequence[Verdict], style: Style) -> str:
    """Whether the first step that a trainer saved goes on from the one that it loaded."""
    found = [each.text for each in since if each.differs]
    if found:
        label = style.paint("mismatch:", RED)
        lines = [f"{label} step {step} does not go on from step {before}"]
        lines += [f"  {clean(what)}" for what in found]
        lines.append(f"      next: {text(command('verify', step, '--after', before))}")
        return "\n".join(lines)
    agreed = ", ".join(each.subject for each in since if each.agrees)
    if not agreed:
        return f"nothing says whether step {step} goes on from step {before}"
    label = style.paint("verified:", GREEN)
    return f"{label} step {step} goes on from step {before}: {clean(agreed)}"


def _hidden(findings: int) -> list[str]:
    return [f"  and {findings - FINDINGS} more: --json has all"] if findings > FINDINGS else []


def _comparison(comparison: Comparison, style: Style) -> list[str]:
    """What the trainer said: first what it does not do, with the line and what helps."""
    step = comparison.expected.promise.step
    if comparison.differs:
        lines = [
            f"{style.paint('mismatch:', RED)} the trainer differs from the promise of step {step}"
        ]
    elif comparison.begun:
        lines = [
            f"{style.paint('verified:', GREEN)} the trainer matches the promise of step {step}"
        ]
    else:
        lines = [f"nothing that the trainer said could be compared with the promise of step {step}"]
    lines += [f"  {clean(sentence)}" for sentence in comparison.differs]
    for title, items in (
        ("agrees", comparison.agrees),
        ("not compared", comparison.not_compared),
        ("not said", comparison.not_said),
    ):
        if items:
            lines.append(f"  {title}: {clean(', '.join(items))}")
    if comparison.differs:
        lines += [f"      next: {clean(text(hint))}" for hint in comparison.expected.remedy]
    return lines


def _next(values: Promise | None, style: Style) -> list[str]:
    if values is None:
        return []
    name = f"{values.optimizer}: " if values.optimizer else ""
    verb = "uses" if values.asked else "would use"
    uses = [f"  step {values.step} {verb} {name}{'   '.join(promise(values)[:3])}"]
    compare = command("verify", "--log", "FILE")
    not_asked = [] if values.asked else [f"  {NOT_ASKED}: {compare} compares"]
    return [*(uses if promise(values) else []), *reasons(values, style), *not_asked]


def diagnoses(
    run: Run, findings: Sequence[Finding], style: Style, loss: Advice, seen: Vitals | None = None
) -> str:
    """Each thing that is wrong with what helps below it, then what is known of the loss, and the
    vital signs. Healthy is a run of which advise says so, too: else only its files are sound."""
    from ckptsurgeon.look.advise import DIVERGED, HEALTHY, RECOVERED
    from ckptsurgeon.report.advice import verdict

    name, steps = clean(run.name), count(len(run.steps()), "step")
    good = "healthy:" if loss.verdict in (HEALTHY, RECOVERED) else "sound:"
    lines = [f"{style.paint(good, GREEN)} {name}, {steps}"]
    if findings:
        head = f"{name}, {count(len(findings), 'finding')}"
        lines = [f"{style.paint('problems:', RED)} {head}"]
    for item in findings[:FINDINGS]:
        lines += [f"  {clean(item.what)}", f"      next: {text(item.next or '')}"]
    lines += _hidden(len(findings))
    if loss.verdict not in (HEALTHY, DIVERGED):  # which is the first line, or a finding
        lines += hanging("  the loss   ", clean(verdict(loss)), style)
    with contextlib.suppress(OSError):  # of logs that can't be looked at, which is among them
        if (alive := run.trainer()) is not None:
            lines.append(f"  {clean(alive)}; what it saves just now is not finished yet")
    return "\n".join(lines if seen is None else [*lines, *signs(seen, style)])
