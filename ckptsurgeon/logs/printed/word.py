"""The trainer's word: what it says of its first updates, held against the promise.

A promise is for update N + 1, the first after the checkpoint of step N. A difference is one that no
rounding explains. What a trainer never says is listed as not said, and what has nothing to be held
against as not compared; neither counts as agreed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptsurgeon.edits import Promise
from ckptsurgeon.logs.printed.stated import Number, Stated

UPDATES = 2
"""Statements about so many different updates are heard."""
BACK = 0.25
"""A rate whose logarithm is nearer to that from before the surgery than this share of the change
has gone back to it."""
LONGEST = 240
NEVER_SAID = ("lr", "betas", "eps", "weight_decay", "adam_step", "loss_scale", "clip_grad",
              "consumed_samples", "skip", "seed")  # fmt: skip
WORDS = {
    "weight_decay": "weight decay", "adam_step": "step of Adam", "loss_scale": "loss scale",
    "clip_grad": "gradient clipping", "consumed_samples": "consumed samples",
    "batch_size": "global batch size", "skip": "skip ranges",
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What a trainer that goes on from one checkpoint should say.

    `rate` is the lr of the k-th update from here, where so many samples are in a batch, or None
    where only the trainer's own config says it; `decides_lr` is false where that config decides
    the first one as well. `before` is the lr of that update if there had been no surgery.
    `epoch_steps` is how many updates an epoch has, `skipped` how many overflowed so far, and
    `remedy` what makes a trainer that differs agree."""

    promise: Promise
    rate: Callable[[int, int | None], float | None]
    decides_lr: bool = True
    before: float | None = None
    batch_size: int | None = None
    epoch_steps: float | None = None
    skipped: int | None = None
    remedy: tuple[str, ...] = ()


@dataclass
class Word:
    """What was heard so far. `differs` holds a sentence for each difference, with the line."""

    expected: Expected
    agrees: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _updates: set[int] = field(default_factory=set)
    _skipped: int = 0

    @property
    def heard(self) -> bool:
        """Whether anything that was said could be held against the promise."""
        return bool(self.agrees or self.differs)

    @property
    def done(self) -> bool:
        """Whether the first updates have spoken: of what follows nothing was promised."""
        return len(self._updates) >= UPDATES

    @property
    def not_said(self) -> list[str]:
        """The fields of the promise that no line named."""
        promise = self.expected.promise
        return [
            f"lr of update {promise.step}" if name == "lr" else WORDS.get(name, name)
            for name in NEVER_SAID
            if getattr(promise, name) not in (None, ())
            and name not in self._said
            and (name != "lr" or self.expected.decides_lr)
        ]

    def hear(self, said: Stated) -> None:
        """Hold one statement against the promise."""
        if self.done:
            return
        self.lines.append(said.text)
        updates = self._which(said)
        if not updates:
            return
        self._updates.add(max(updates))
        self._skipped += said.skipped or 0
        left_out = self._skipped
        if said.skipped_total is not None and self.expected.skipped is not None:
            left_out = said.skipped_total - self.expected.skipped
        batch = None if said.batch_size is None else round(said.batch_size.value)
        self._rates(said, [k - left_out for k in updates], batch)
        if len(updates) == 1:
            self._counts(said, updates[0], batch)
        self._betas(said)

    # --- which update ----------------------------------------------------------------------------

    def _which(self, said: Stated) -> list[int]:
        """How far after the checkpoint the update is: 1 is the promised one. Several where the line
        names an epoch alone."""
        last = self.expected.promise.step - 1
        if said.step is not None:
            if said.step <= last:
                self._differs("step", f"{last + 1}", f"update {said.step}", said)
                return []
            self._agrees(f"step {said.step}", first=not self._updates)
            return [said.step - last]
        steps = self.expected.epoch_steps
        if said.epoch is None or not steps:
            self._unknown("the line names no step")
            return []
        low = math.ceil((said.epoch.value - said.epoch.half) * steps - 1e-6)
        high = math.floor((said.epoch.value + said.epoch.half) * steps + 1e-6)
        if high <= last:
            self._differs("epoch", f"beyond {last / steps:.4g}", f"{said.epoch}", said)
            return []
        return [step - last for step in range(max(low, last + 1), high + 1)][:1000]

    # --- the rates -------------------------------------------------------------------------------

    def _rates(self, said: Stated, updates: list[int], batch: int | None) -> None:
        for number, after in ((said.lr, (0,)), (said.next_lr, (1,)), (said.either_lr, (0, 1))):
            if number is not None:
                self._rate(said, number, [k + a for k in updates for a in after], batch)

    def _rate(self, said: Stated, number: Number, which: list[int], batch: int | None) -> None:
        """One rate against those of the updates that it may be of."""
        promise = self.expected.promise
        of = f"lr of update {promise.step - 1 + which[0]}"
        if not self.expected.decides_lr:
            self._unknown("lr: the trainer computes it from its own config at every step")
            return
        wanted = {k: self.expected.rate(k, batch) for k in dict.fromkeys(which) if k > 0}
        known = {k: rate for k, rate in wanted.items() if rate is not None}
        if 1 in wanted:
            self._said.add("lr")
        if any(number.agrees(rate) for rate in known.values()):
            self._agrees(f"{of}: {number}")
        elif len(known) == len(wanted) and known:
            self._differs(of, f"{next(iter(known.values())):.9g}", f"{number}", said)
        elif self._went_back(number.value):
            told = f"{number}, as before the surgery"
            self._differs(of, f"a schedule from {promise.lr:.9g} on", told, said)
        else:
            self._unknown(f"{of}: only the trainer's own config says it")

    def _went_back(self, rate: float) -> bool:
        """Whether a rate is about the one from before the surgery, and the promised one is not."""
        old, new = self.expected.before, self.expected.promise.lr
        if not old or not new or rate <= 0 or min(old, new) <= 0:
            return False
        change = abs(math.log(new / old))
        return change > 1e-6 and abs(math.log(rate / old)) < BACK * change

    # --- the rest --------------------------------------------------------------------------------

    def _counts(self, said: Stated, k: int, batch: int | None) -> None:
        promise, size = self.expected.promise, self.expected.batch_size
        if batch is not None and size is not None:
            same = f"global batch size {batch}"
            if batch == size:
                self._agrees(same)
            else:
                self._unknown(f"{same}: {size} in the checkpoint; a flag may change it")
        held, each = promise.consumed_samples, batch if batch is not None else size
        if said.consumed_samples is not None:
            self._said.add("consumed_samples")
            if held is None or each is None or (k > 1 and size is None):
                self._unknown("consumed samples: the size of a batch is not known")
            elif said.consumed_samples.agrees(held + k * each):
                self._agrees(f"consumed samples {said.consumed_samples}")
            else:
                told = f"{held} and {k} x {each} after it, so {held + k * each}"
                self._differs("consumed samples", told, f"{said.consumed_samples}", said)
        if said.loss_scale is not None and promise.loss_scale is not None:
            self._scale(said, said.loss_scale, promise.loss_scale, k)

    def _scale(self, said: Stated, number: Number, promised: float, k: int) -> None:
        """An update may double or halve a dynamic scale, and what is said is from after it."""
        self._said.add("loss_scale")
        if number.agrees(promised) or (promised != 1 and _doublings(number.value / promised) <= k):
            self._agrees(f"loss scale {number}")
        else:
            self._differs("loss scale", f"{promised:g}", f"{number}", said)

    def _betas(self, said: Stated) -> None:
        promised = self.expected.promise.betas
        if said.betas is None or promised is None:
            return
        self._said.add("betas")
        told = f"{said.betas[0]}, {said.betas[1]}"
        if all(number.agrees(beta) for number, beta in zip(said.betas, promised, strict=True)):
            self._agrees(f"betas {told}")
        else:
            self._differs("betas", f"{promised[0]:g}, {promised[1]:g}", told, said)

    # --- verdicts --------------------------------------------------------------------------------

    def _agrees(self, words: str, first: bool = True) -> None:
        if first and words not in self.agrees:
            self.agrees.append(words)

    def _differs(self, name: str, promised: str, told: str, said: Stated) -> None:
        line = said.text if len(said.text) <= LONGEST else f"{said.text[:LONGEST]}…"
        self.differs.append(f"{name}: promised {promised}, says {told}, in its line: {line}")

    def _unknown(self, words: str) -> None:
        if words not in self.not_compared:
            self.not_compared.append(words)


def _doublings(ratio: float) -> float:
    """How many times a number was doubled or halved; infinite when it was anything else."""
    if ratio <= 0 or not math.isfinite(ratio):
        return math.inf
    count = math.log2(ratio)
    return abs(count) if abs(count - round(count)) < 1e-6 else math.inf


def after(statements: list[Stated], step: int) -> list[Stated]:
    """Of what a trainer said over several starts, that of the start which went on after `step`.

    A start is where the numbers go back. It is the last one that has the first number beyond
    `step`; where a later start does not go on from there at all, that one, and all it says."""
    starts: list[list[Stated]] = []
    highest = -1
    for said in statements:
        if not starts or (said.step is not None and said.step <= highest):
            starts.append([])
        starts[-1].append(said)
        if said.step is not None:
            highest = said.step
    if not starts:
        return []
    last = starts[-1]
    numbers = [s.step for s in statements if s.step is not None and s.step > step]
    if len(starts) > 1 and last[0].step is not None and last[0].step <= step:
        return last
    first = min(numbers, default=None)
    for start in reversed(starts):
        if first is None or any(said.step == first for said in start):
            return [said for said in start if said.step is None or said.step > step]
    return []
