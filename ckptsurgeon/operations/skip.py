"""Iteration ranges whose data is passed over without training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Annotated

from ckptsurgeon.errors import NotUnderstood, SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.capabilities import SkipsByFlag
from ckptsurgeon.formats.fields.skipped import ahead, merge
from ckptsurgeon.formats.schedules.rampup import batch_size
from ckptsurgeon.hints import Command, Hint, command
from ckptsurgeon.operations.counters import counter_changes
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import MAX_COUNT
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import AnyChange, Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

NONE_BEFORE = command("status", why="no saved step is before it")


@held
class Skip(Section):
    """Ranges to pass over, 1-based, both ends included, as Megatron counts: added to those that are
    there already, unless `clear_skip` forgets these.

    `skip_by_counters` advances the consumed samples past them instead, and keeps the numbers of
    the iterations."""

    skip: Annotated[
        list[str],
        Key(
            "iterations from 1, both ends included; added to the ranges already there",
            "A-B",
            "Iterations, from 1, both ends included.",
            value="list of `A-B`",
        ),
    ] = field(default_factory=list)
    skip_by_counters: Annotated[
        bool,
        Key(
            "advance the consumed samples past `skip` instead: for trainers whose flag "
            "does not do what it says",
            "--by-counters",
            "Advance the consumed samples instead.",
        ),
    ] = False
    clear_skip: Annotated[bool, Key("forget the ranges set earlier", "--clear")] = False

    def check(self, recipe: Recipe) -> None:
        ranges(self.skip)
        if self.skip_by_counters and not self.skip:
            raise UsageError("`skip_by_counters` needs a range", next="skip: [A-B]")
        for counter in ("consumed_samples", "data_batches"):
            if self.skip_by_counters and recipe[Hyperparameters].given().get(counter) is not None:
                raise UsageError(
                    f"both skip_by_counters and set.{counter} were given",
                    next="drop one of them: each sets where the data continues",
                )

    def title(self, run: Run, step: int) -> list[str]:
        cleared = ["clear skip"] if self.clear_skip else []
        how = " by counters" if self.skip_by_counters else ""
        typed = " ".join(_range(*pair) for pair in ranges(self.skip))
        return [*cleared, *([f"skip {typed}{how}"] if typed else [])]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        changes: list[AnyChange] = []
        warnings: list[str] = []
        done = recipe[Hyperparameters].iteration_after(checkpoint.state())
        if self.skip_by_counters:
            counter = _counter(checkpoint.state())
            position = self._advanced(run, checkpoint)
            moved = recipe[Hyperparameters].position is not None
            changes, warnings = counter_changes(run, checkpoint, {counter: position}, moved)
            unit = "sample" if counter == "consumed_samples" else "batch"
            warnings.append(
                f"iteration {done + 1} trains on {unit} {position}: iteration numbers are not "
                "skipped, so the next skip counts from there"
            )
        new_ranges = [] if self.skip_by_counters else ranges(self.skip)
        if not new_ranges and not self.clear_skip:
            return changes, warnings
        places = checkpoint.locate("skip")
        if not places:
            raise self._kept_nowhere(run, checkpoint, new_ranges)
        warnings += [*_ends(new_ranges), *_past(run, new_ranges, checkpoint.state(), done)]
        for place in places:
            old = [(int(first), int(last)) for first, last in place.value]
            new = self.ranges_after(old)
            if new != old:
                file, pairs = run.relative(place.file), [list(pair) for pair in new]
                changes.append(Change(file, "skip", place.value, pairs, place.path))
        return changes, warnings

    def _kept_nowhere(
        self, run: Run, checkpoint: Checkpoint, new_ranges: Sequence[tuple[int, int]]
    ) -> SurgeryError:
        """What the trainer takes, and the counters where the checkpoint has them."""
        name = checkpoint.path.name
        if not new_ranges:
            return SurgeryError(
                f"{name} keeps no skip ranges: there is nothing to clear",
                next=command("show", why="what the checkpoint keeps"),
            )
        state, what = checkpoint.state(), f"{name} keeps no skip ranges"
        wanted = merge(new_ranges)
        first, last = wanted[0]
        if last <= state.step:
            before = _before(run, first)
            hint = self._by_flag(run, checkpoint, wanted, first - 1 if before is None else before)
            return SurgeryError(what, next=_gone_back(run, first, hint))
        hints = [self._by_flag(run, checkpoint, ahead(wanted, state.step), state.step)]
        if state.step != run.latest():
            hints = _gone_back(run, state.step + 1, hints[0])
        with suppress(NotUnderstood):  # the trainer's own way is left
            if _movable(state) and first <= state.step + 1:
                why = "advance its position instead"
                hints.append(command("skip", *self.skip, "--by-counters", why=why))
        return SurgeryError(what, next=hints)

    def _by_flag(
        self, run: Run, checkpoint: Checkpoint, wanted: list[tuple[int, int]], step: int
    ) -> Hint:
        """The trainer's own way, from `step` on. A flag says all that is passed over, so it has
        what the last launch was told to pass over as well, unless that is to be forgotten."""
        able = SkipsByFlag.optional(checkpoint)
        if able is not None and not self.clear_skip:
            wanted = able.with_skipped(wanted, step)
        return run.format.advise_skip(wanted)

    def ranges_after(self, present: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranges that are passed over after the surgery."""
        earlier = [] if self.clear_skip else present
        return merge([*earlier, *([] if self.skip_by_counters else ranges(self.skip))])

    def consumed_after(self, run: Run, settings: Hyperparameters, checkpoint: Checkpoint) -> int:
        """The sample at which the data goes on after the surgery."""
        state = checkpoint.state()
        if self.skip_by_counters and _counter(state) == "consumed_samples":
            return self._advanced(run, checkpoint)
        if settings.consumed_samples is not None:
            return settings.consumed_samples
        return state.needed("consumed_samples").consumed_samples or 0

    def _advanced(self, run: Run, checkpoint: Checkpoint) -> int:
        """The samples consumed, or the batches given out, once these iterations are passed over.

        They must follow the checkpoint's step without a gap. The same skip, applied before and not
        undone, is done already."""
        state, wanted = checkpoint.state(), merge(ranges(self.skip))
        if state.data:
            hint = self._by_flag(run, checkpoint, wanted, state.step)
            raise SurgeryError(state.data, next=hint)
        counter = _counter(state)
        by_samples = counter == "consumed_samples"
        at: int | None = getattr(state.promise, counter)
        if at is None or not _movable(state):
            raise SurgeryError(
                "the checkpoint keeps no consumed samples or no batch size to advance them by",
                next=self._by_flag(run, checkpoint, wanted, state.step),
            )
        first, last = state.step + 1, state.step
        for begin, end in sorted(ranges(self.skip)):
            if begin > last + 1 or end < first:
                raise UsageError(
                    f"skip {_range(begin, end)} by counters does not begin at the next iteration, "
                    f"{last + 1}",
                    next=_reachable(run, begin, end, last + 1),
                )
            last = max(last, end)
        before = {"step": first, counter: at}
        if any(_same_skip(receipt, self, before) for receipt in standing(run.receipts())):
            return at
        if not by_samples:
            return at + last - state.step
        for _ in range(first, last + 1):
            at += batch_size(state, at)
        return at


def _ends(asked: Sequence[tuple[int, int]]) -> list[str]:
    """A note on two iterations that may have been meant as the ends of a range."""
    match asked:
        case [(a, b), (c, d)] if a == b and c == d and b + 1 < c:
            return [f"only the iterations {a} and {c} are skipped; {a}-{c} is the range"]
    return []


def ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`["6900-7010", "7100"]` as inclusive iteration ranges."""
    out = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d{1,99})\s*(?:-\s*(\d{1,99})\s*)?", text)
        if match is None:
            apart = [part.strip() for part in text.split(",")]
            if len(apart) > 1 and all(re.fullmatch(r"\d+(-\d+)?", part) for part in apart):
                hint = f"each range by itself: {' '.join(apart)}"
                raise UsageError(f"skip range {text!r} is several", next=hint)
            ends = re.fullmatch(r"(\d{1,99})\D{1,3}(\d{1,99})", text)
            example = f"{ends[1]}-{ends[2]}" if ends else "6900-7010"
            raise UsageError(f"skip range {text!r} is not A-B", next=f"for example: {example}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_COUNT:
            raise UsageError(f"skip range {text!r} is too large", next=f"at most {MAX_COUNT}")
        if first < 1 or last < first:
            wrong = "starts before iteration 1" if first < 1 else "ends before it starts"
            raise UsageError(
                f"skip range {text!r} {wrong}", next="iterations count from 1, and A is at most B"
            )
        out.append((first, last))
    return out


def _past(run: Run, new: Sequence[tuple[int, int]], state: State, done: int) -> list[str]:
    """What to know of ranges that begin at or before the iteration `done`. Raises UsageError for
    one that ends there too, unless the checkpoint has it already: it would skip nothing."""
    present = merge((int(first), int(last)) for first, last in state.needed("skip").skip or ())
    notes = []
    for first, last in merge(new):
        if first > done or any(a <= first and last <= b for a, b in present):
            continue
        if last > done:
            notes.append(
                f"iterations {_range(first, done)} are past: of skip {_range(first, last)} only "
                f"{_range(done + 1, last)} will be skipped"
            )
            continue
        before = _before(run, first)
        hint = NONE_BEFORE
        if before is not None:
            words = ("--to", before, "--skip", _range(first, last))
            hint = command("rollback", *words, why="the newest step before it")
        are = f"iteration {first} is" if first == last else f"iterations {first}-{last} are"
        raise UsageError(f"{are} past: the run stands at {done}", next=hint)
    return notes


def _gone_back(run: Run, first: int, hint: Hint) -> list[Hint]:
    """What passes over the data from iteration `first` on, once the run is back before it; `hint`
    is for a run that stands there."""
    before = _before(run, first)
    if before is None:
        return [NONE_BEFORE]
    if isinstance(hint, Command) and hint.words[0] == "set":
        pairs = (word for pair in hint.words[1:] for word in ("--set", pair))
        return [command("rollback", "--to", before, *pairs)]
    if isinstance(hint, Command):  # there is no way
        return [hint]
    return [command("rollback", "--to", before, why="the newest step before it"), hint]


def _before(run: Run, iteration: int) -> int | None:
    """The newest complete step from which `iteration` is still to come."""
    older = (step for step in reversed(run.steps()) if step < iteration and run.complete(step))
    return next(older, None)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


# --- by counters ---------------------------------------------------------------------------------


def _counter(state: State) -> str:
    """What says where the data goes on: samples, or the batches that a loader counts."""
    promise = state.needed("data_batches")
    return "consumed_samples" if promise.data_batches is None else "data_batches"


def _movable(state: State) -> bool:
    """Whether counters say where the data goes on, and how far an iteration moves it."""
    promise = state.needed("consumed_samples", "batch_size", "rampup", "data_batches")
    samples = promise.consumed_samples is not None and state.batch_size is not None
    return samples or promise.data_batches is not None


def _reachable(run: Run, begin: int, end: int, following: int) -> Hint:
    """The command that passes over these iterations by counters."""
    if begin - 1 in run.steps() and run.complete(begin - 1):
        return command("rollback", "--to", begin - 1, why="and skip from there")
    if end >= following:
        why = f"from the next iteration on; step {begin - 1} is not saved"
        return command("skip", _range(following, end), "--by-counters", why=why)
    older = run.complete_among(step for step in run.steps() if step < begin)
    if not older:
        return command("status", why="the steps that are saved: none is before it")
    then = f"skip {_range(older[-1] + 1, end)} --by-counters"
    return command("rollback", "--to", older[-1], why=f"then {then}")


def _same_skip(receipt: Receipt, section: Skip, before: Mapping[str, int]) -> bool:
    """Whether `receipt` is of this skip and promised these fields."""
    recipe, promise = receipt.recipe, receipt.promise
    return (
        bool(recipe.get("skip_by_counters"))
        and list(recipe.get("skip", ())) == section.skip
        and promise is not None
        and all(getattr(promise, name) == value for name, value in before.items())
    )


# --- commands ------------------------------------------------------------------------------------


def skip(section: Skip) -> Recipe:
    """Skip the data of some iterations.

    The iterations and their samples count as usual, but nothing is trained and the schedule does
    not advance. Use --by-counters for trainers whose own flag works differently: it moves the data
    position past the samples of these iterations, and the next iteration keeps its number.

    Examples:
    ckptsurgeon skip 20-24 30
    ckptsurgeon skip 9-12 --by-counters
    ckptsurgeon skip --clear
    """
    if not section.skip and not section.clear_skip:
        hint = command("skip", "--help", why="a range is FIRST-LAST, of iterations")
        raise UsageError("no range was given", next=hint)
    return Recipe(section)


COMMANDS = {"skip": skip}
