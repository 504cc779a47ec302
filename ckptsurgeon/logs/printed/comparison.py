"""The trainer's word: what it says of its first updates, held against the promise.

A promise is for update N + 1, the first after the checkpoint of step N. A difference is one that no
rounding explains. What a trainer never says is listed as not said, and what has nothing to be held
against as not compared; neither counts as agreed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptsurgeon.hints import Hint
from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.promise import Promise

UPDATES = 2
"""Statements about so many different updates are compared."""
BACK = 0.25
"""A rate whose logarithm is nearer to that from before the surgery than this share of the change
has gone back to it."""
FAR = 50
"""Updates after the checkpoint that a trainer may log nothing of, or as many as were before it:
what it says then may count batches."""
LONGEST = 480
MOST = 200
"""Updates that one line may be of; one of an epoch of so many steps says too little."""
NEVER_SAID = ("lr", "betas", "eps", "weight_decay", "adam_step", "loss_scale", "clip_grad",
              "consumed_samples", "data_epoch", "data_batches", "skip", "seed")  # fmt: skip
WORDS = {
    "weight_decay": "weight decay", "adam_step": "step of Adam", "loss_scale": "loss scale",
    "clip_grad": "gradient clipping", "consumed_samples": "consumed samples",
    "batch_size": "global batch size", "skip": "skip ranges", "data_epoch": "epoch",
    "data_batches": "position in the data",
}  # fmt: skip


@frozen
class Expected:
    """What a trainer that goes on from one checkpoint should say.

    `rate` is the lr of the k-th update from here, where so many samples are in a batch, or None
    where only the trainer's own config says it; `decides_lr` is false where that config decides
    the first one as well, and `by_config` says that `rate` is by the config of the checkpoint, from
    which a launch may differ. `before` is the lr of that update if there had been no surgery.
    `batch_size` is that of the first update, and of those after it if `steady`. `epoch_steps` is
    how many updates an epoch has, `skipped` how many overflowed so far; the betas change at each
    update unless `steady_betas`. `remedy` is what makes a trainer that differs agree.
    `late` says that an engine inside makes the step of the schedule before the trainer asks for
    the rate, which then is the next update's whatever its release.
    `numbered` is the number under which a trainer that says a given one of a later update has the
    last update before the checkpoint, whose own number may count saves."""

    promise: Promise
    rate: Callable[[int, int | None], float | None]
    decides_lr: bool = True
    by_config: bool = False
    before: float | None = None
    batch_size: int | None = None
    steady: bool = True
    epoch_steps: float | None = None
    skipped: int | None = None
    steady_betas: bool = True
    late: bool = False
    remedy: tuple[Hint, ...] = ()
    numbered: Callable[[int], int] | None = None

    def last(self, said: int) -> int:
        """The number of the last update before the checkpoint, for a trainer that says `said`."""
        return self.promise.step - 1 if self.numbered is None else self.numbered(said)

    def steps(self, statement: LoggedUpdate) -> range | None:
        """The updates that a statement may be of: several where it names an epoch that was rounded,
        None where it names neither."""
        if statement.step is not None:
            return range(statement.step, statement.step + 1)
        epoch, steps = statement.epoch, self.epoch_steps
        if epoch is None or not steps:
            return None
        low = math.ceil((epoch.value - epoch.half) * steps - 1e-6)
        high = math.floor((epoch.value + epoch.half) * steps + 1e-6)
        return range(low, max(low, high) + 1)[:MOST]


@dataclass
class Comparison:
    """What the trainer has said so far. `differs` holds a sentence for each difference, with the
    line; `has_rates` is whether any statement named a learning rate."""

    expected: Expected
    agrees: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    has_rates: bool = False
    _fields: set[str] = field(default_factory=set)
    _updates: set[int] = field(default_factory=set)
    _skipped: int = 0
    _last: int | None = None

    @property
    def begun(self) -> bool:
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
        first = promise.step if self._last is None else self._last + 1
        return [
            f"lr of update {first}" if name == "lr" else WORDS.get(name, name)
            for name in NEVER_SAID
            if getattr(promise, name) not in (None, ())
            and name not in self._fields
            and (name != "lr" or self.expected.decides_lr)
        ]

    def sentences(self) -> list[str]:
        """All of it, a line for each kind of verdict."""
        step = self.expected.promise.step
        parts = (
            (f"the trainer's output agrees with the promise of step {step}", self.agrees),
            ("not compared", self.not_compared),
            ("the trainer does not say", self.not_said),
        )
        return [f"{title}: {', '.join(items)}" for title, items in parts if items]

    def add(self, other: Comparison) -> None:
        """Also what `other`, of the same checkpoint, has compared."""
        self.agrees += [item for item in other.agrees if item not in self.agrees]
        self.differs += [item for item in other.differs if item not in self.differs]
        self.not_compared += [i for i in other.not_compared if i not in self.not_compared]
        self.lines += other.lines
        self.has_rates |= other.has_rates
        self._fields |= other._fields
        self._updates |= other._updates
        self._last = other._last if self._last is None else self._last

    def feed(self, statement: LoggedUpdate) -> None:
        """Hold one statement against the promise."""
        if self.done:
            return
        self.lines.append(statement.text)
        updates = self._which(statement)
        if not updates:
            return
        self._updates.add(max(updates))
        self._skipped += statement.skipped or 0
        left_out = self._skipped
        if statement.skipped_total is not None and self.expected.skipped is not None:
            left_out = statement.skipped_total - self.expected.skipped
        batch = None if statement.batch_size is None else round(statement.batch_size.value)
        self._rates(statement, updates, left_out, batch)
        if len(updates) == 1:
            self._counts(statement, updates[0], batch)
        self._betas(statement)

    # --- which update ----------------------------------------------------------------------------

    def _which(self, statement: LoggedUpdate) -> list[int]:
        """How far after the checkpoint the update is: 1 is the promised one. Several where the line
        names an epoch alone, in too few digits."""
        steps = self.expected.steps(statement)
        if steps is None:
            self._unknown("the line names no step")
            return []
        if self._last is None:
            self._last = self.expected.last(steps[-1])
        last = self._last
        if steps[-1] <= last:
            self._differs("step", f"{last + 1}", f"{steps[-1]}", statement)
            return []
        if self.expected.numbered is not None and steps[0] - last >= max(last, FAR):
            self._unknown(f"step {steps[0]} comes long after {last}: not known what it counts")
            return []
        if len(steps) == 1:
            self._agrees(f"step {steps[0]}", first=not self._updates)
        return [step - last for step in steps if step > last]

    # --- the rates -------------------------------------------------------------------------------

    def _rates(
        self, statement: LoggedUpdate, updates: list[int], left_out: int, batch: int | None
    ) -> None:
        """The rates of `updates`, of which so many were left out: their schedule stood."""
        places = [k - left_out - self._passed_over(k) for k in updates]
        own = tuple(range(1 + (statement.skipped or 0)))  # it may be of one that overflowed itself
        either: tuple[int, ...] = (0, 1)
        if self.expected.late:
            own = either = (1,)
        rates = (statement.lr, own), (statement.next_lr, (1,)), (statement.either_lr, either)
        for number, later in rates:
            if number is not None:
                self.has_rates = True
                last = self.expected.promise.step - 1 if self._last is None else self._last
                first = last + updates[0] + later[0]
                which = [place + more for place in places for more in later]
                self._rate(statement, number, first, which, batch)

    def _passed_over(self, k: int) -> int:
        """How many of the k iterations are in a skip range of the checkpoint: their data is passed
        over, and the schedule stays."""
        first = self.expected.promise.step
        return sum(
            max(0, min(last, first + k - 1) - max(begin, first) + 1)
            for begin, last in self.expected.promise.skip or ()
        )

    def _rate(
        self, statement: LoggedUpdate, number: Number, first: int, which: list[int],
        batch: int | None,
    ) -> None:  # fmt: skip
        """One rate against those of the updates that it may be of: `first`, and those after it."""
        promise, of = self.expected.promise, f"lr of update {first}"
        candidates: dict[int, float | None] = {}
        if self.expected.decides_lr or self.expected.by_config:
            candidates = {k: self.expected.rate(k, batch) for k in dict.fromkeys(which) if k > 0}
        known = {k: rate for k, rate in candidates.items() if rate is not None}
        agreed = [k for k, rate in known.items() if number.agrees(rate)]
        if 1 in (agreed or candidates):
            self._fields.add("lr")
        if agreed:
            later = 0 if number is statement.lr else agreed[0] - which[0]
            self._agrees(f"lr of update {first + later}: {number}")
        elif len(known) == len(candidates) and known and self.expected.decides_lr:
            self._differs(of, f"{next(iter(known.values())):.9g}", f"{number}", statement)
        elif self._went_back(number.value):
            words = f"{number}, as before the surgery"
            self._differs(of, f"a schedule from {promise.lr:.9g} on", words, statement)
        elif self.expected.decides_lr:
            self._unknown(f"{of}: only the trainer's own config says it")
        else:
            self._unknown("lr: the trainer computes it again when it loads, from its own config")

    def _went_back(self, rate: float) -> bool:
        """Whether a rate is about the one from before the surgery, and the promised one is not."""
        old, new = self.expected.before, self.expected.promise.lr
        if not old or not new or rate <= 0 or min(old, new) <= 0:
            return False
        change = abs(math.log(new / old))
        return change > 1e-6 and abs(math.log(rate / old)) < BACK * change

    # --- the rest --------------------------------------------------------------------------------

    def _counts(self, statement: LoggedUpdate, k: int, batch: int | None) -> None:
        promise, size = self.expected.promise, self.expected.batch_size
        if batch is not None and size is not None:
            same = f"global batch size {batch}"
            if batch == size:
                self._agrees(same)
            else:
                self._unknown(f"{same}: {size} in the checkpoint; a flag may change it")
        start, each = promise.consumed_samples, batch if batch is not None else size
        if statement.consumed_samples is not None:
            self._fields.add("consumed_samples")
            if start is None or each is None or (k > 1 and not self.expected.steady):
                self._unknown("consumed samples: the size of a batch is not known")
            elif statement.consumed_samples.agrees(start + k * each):
                self._agrees(f"consumed samples {statement.consumed_samples}")
            else:
                words = f"{start} and {k} x {each} after it, so {start + k * each}"
                self._differs("consumed samples", words, f"{statement.consumed_samples}", statement)
        if statement.loss_scale is not None and promise.loss_scale is not None:
            self._scale(statement, statement.loss_scale, promise.loss_scale, k)

    def _scale(self, statement: LoggedUpdate, number: Number, promised: float, k: int) -> None:
        """An update may double or halve a dynamic scale, and what is said is from after it."""
        self._fields.add("loss_scale")
        if number.agrees(promised) or (promised != 1 and _doublings(number.value / promised) <= k):
            self._agrees(f"loss scale {number}")
        else:
            self._differs("loss scale", f"{promised:g}", f"{number}", statement)

    def _betas(self, statement: LoggedUpdate) -> None:
        promised = self.expected.promise.betas
        if statement.betas is None or promised is None:
            return
        self._fields.add("betas")
        if not self.expected.steady_betas:
            self._unknown("betas: the scheduler sets them at each update")
            return
        words = ", ".join(map(str, statement.betas))
        pairs = list(zip(statement.betas, promised, strict=False))
        same = len(statement.betas) == len(promised)
        if same and all(number.agrees(beta) for number, beta in pairs):
            self._agrees(f"betas {words}")
        else:
            self._differs("betas", ", ".join(f"{beta:g}" for beta in promised), words, statement)

    # --- verdicts --------------------------------------------------------------------------------

    def _agrees(self, words: str, first: bool = True) -> None:
        if first and words not in self.agrees:
            self.agrees.append(words)

    def _differs(self, name: str, promised: str, words: str, statement: LoggedUpdate) -> None:
        if any(sentence.startswith(f"{name}:") for sentence in self.differs):
            return  # of more lines the first one tells it
        line = statement.text if len(statement.text) <= LONGEST else f"{statement.text[:LONGEST]}…"
        self.differs.append(f"{name}: promised {promised}, says {words}, in its line: {line}")

    def _unknown(self, words: str) -> None:
        if words not in self.not_compared:
            self.not_compared.append(words)


def _doublings(ratio: float) -> float:
    """How many times a number was doubled or halved; infinite when it was anything else."""
    if ratio <= 0 or not math.isfinite(ratio):
        return math.inf
    count = math.log2(ratio)
    return abs(count) if abs(count - round(count)) < 1e-6 else math.inf


def after(statements: Sequence[LoggedUpdate], expected: Expected) -> list[LoggedUpdate]:
    """Of what a trainer said over several starts, that of the start which went on after the
    checkpoint.

    A start is where the numbers go back. It is the last one that has the first number beyond the
    checkpoint's; where the last start does not go on from there at all, that one, and all it
    says."""
    numbers = [steps[-1] if (steps := expected.steps(s)) else None for s in statements]
    step = expected.last(max((number for number in numbers if number is not None), default=0))
    starts: list[list[tuple[int | None, LoggedUpdate]]] = []
    highest = -1
    for number, statement in zip(numbers, statements, strict=True):
        if not starts or (number is not None and number <= highest):
            starts.append([])
        starts[-1].append((number, statement))
        highest = highest if number is None else number
    if not starts:
        return []
    first = starts[-1][0][0]
    if len(starts) > 1 and first is not None and first <= step:
        return [statement for _, statement in starts[-1]]
    beyond = [number for number in numbers if number is not None and number > step]
    if not beyond:
        return [s for number, s in zip(numbers, statements, strict=True) if number is None]
    chosen = next(s for s in reversed(starts) if min(beyond) in {number for number, _ in s})
    return [s for number, s in chosen if number is None or number > step]
