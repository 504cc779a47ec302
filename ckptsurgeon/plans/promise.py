"""What the next step of a trainer will use, and how far that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from typing import TypeAlias

from ckptsurgeon.plans.frozen import held

Epsilon: TypeAlias = float | tuple[float | None, ...] | None
"""What an optimizer adds to its denominators: Adafactor has two."""


class Caveat(str):
    """A sentence about `field` of a promise, for its reader: the next step uses the value and the
    one after it does not, or, unless `known`, the checkpoint does not decide it at all."""

    field: str
    known: bool

    def __new__(cls, text: str, field: str, *, known: bool = True) -> Caveat:
        self = super().__new__(cls, text)
        self.field, self.known = field, known
        return self


@held
class Promise:
    """What the trainer will really use at `step` = N + 1.

    `lr` is the rate of the first update; `weight_decay` has one value per param group;
    `adam_step` is the counter before that update; `consumed_samples` is the position of the next
    sample; `skip` are inclusive iteration ranges; `rewarm` is (kind, start, end), positions of the
    schedule in samples, or (). None: the format does not keep the field.
    `settings` are the other numbers that the param groups hold, of each group. A trainer that
    counts batches goes on with batch `data_batches` (from 0) of pass `data_epoch` (from 1).
    `optimizer` is its name, or of several with the same keys all names. Where param groups differ
    in them, `groups` has the betas and eps of each; `betas` and `eps` are those of the first.

    What follows says how far the values reach, and is no value itself. `one_step` are the fields
    that only this step uses as they are, `not_known` those that the checkpoint does not decide,
    each with the reason and what helps; `not_understood` those that it keeps in a way that is not
    known here, which are None, with the key path. `then` is the first step after a window that
    holds the weights, and its rate. `asked` is whether a loader of the trainer has been asked, in
    a test, which values it takes."""

    step: int
    lr: float | None
    betas: tuple[float, ...] | None
    eps: Epsilon
    weight_decay: tuple[float, ...] | None
    adam_step: int | None
    loss_scale: float | None
    clip_grad: float | None
    consumed_samples: int | None
    skip: tuple[tuple[int, int], ...] | None
    seed: int | None
    rewarm: tuple[str, int, int] | tuple[()] | None = None
    optimizer: str | None = None
    groups: tuple[tuple[tuple[float, ...] | None, Epsilon], ...] | None = None
    settings: tuple[tuple[str, tuple[float, ...]], ...] | None = None
    data_epoch: int | None = None
    data_batches: int | None = None
    one_step: Mapping[str, str] = field(default_factory=dict, compare=False)
    not_known: Mapping[str, str] = field(default_factory=dict, compare=False)
    not_understood: Mapping[str, str] = field(default_factory=dict, compare=False)
    then: tuple[int, float] | None = field(default=None, compare=False)
    asked: bool = field(default=True, compare=False)

    @classmethod
    def unknown(cls, step: int) -> Promise:
        """That the next step is `step`, and nothing else."""
        return cls(step, None, None, None, None, None, None, None, None, None, None)

    @classmethod
    def values(cls) -> tuple[str, ...]:
        """The fields that are values of the step, in order."""
        return tuple(item.name for item in fields(cls) if item.compare)

    def passed(self, first: int, last: int) -> int:
        """How many iterations after `first`, up to `last`, are in `skip`: they make no update."""
        ranges = ((max(a, first + 1), min(b, last)) for a, b in self.skip or ())
        return sum(max(0, b - a + 1) for a, b in ranges)

    def with_caveats(self, sentences: Iterable[str]) -> Promise:
        """The same with each `Caveat` among the sentences."""
        caveats = [item for item in sentences if isinstance(item, Caveat)]
        one_step = {item.field: str(item) for item in caveats if item.known}
        not_known = {item.field: str(item) for item in caveats if not item.known}
        return replace(
            self, one_step={**self.one_step, **one_step}, not_known={**self.not_known, **not_known}
        )


def differences(promised: Promise, actual: Promise) -> list[str]:
    """The fields in which two promises differ, one sentence each."""
    return [
        f"{name}: promised {getattr(promised, name)!r}, found {getattr(actual, name)!r}"
        for name in Promise.values()
        if getattr(promised, name) != getattr(actual, name)
    ]
