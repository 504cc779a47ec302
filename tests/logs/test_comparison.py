"""What agrees with a promise, what differs, what can't be compared, and what was never said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsurgeon.logs.printed.comparison import Comparison, Expected, after
from ckptsurgeon.logs.printed.stated import LoggedUpdate, exact, rounded
from ckptsurgeon.plans.promise import Promise

PROMISE = Promise(
    step=7, lr=4e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=(0.1, 0.0), adam_step=6,
    loss_scale=4096.0, clip_grad=1.0, consumed_samples=12, skip=(), seed=1234,
)  # fmt: skip
RATES = {1: 4e-4, 2: 3e-4, 3: 2e-4}


def expect(**more: object) -> Expected:
    made: dict[str, object] = {"rate": lambda k, _: RATES.get(k), "batch_size": 2, **more}
    return Expected(PROMISE, **made)  # type: ignore[arg-type]


def say(step: int | None, **more: object) -> LoggedUpdate:
    return LoggedUpdate("a trainer", f"line of {step}", step=step, **more)  # type: ignore[arg-type]


def feed(*statements: LoggedUpdate, **more: object) -> Comparison:
    comparison = Comparison(expect(**more))
    for statement in statements:
        comparison.feed(statement)
    return comparison


def test_a_rate_is_of_the_update_that_the_trainer_prints_it_for() -> None:
    assert feed(say(7, lr=rounded("4.0E-04"))).agrees == ["step 7", "lr of update 7: 4.0E-04"]
    assert feed(say(7, next_lr=rounded("3.0E-04"))).agrees[1] == "lr of update 8: 3.0E-04"
    assert feed(say(7, next_lr=rounded("4.0E-04"))).differs == [
        "lr of update 8: promised 0.0003, says 4.0E-04, in its line: line of 7"
    ]
    for rate, update in (("4.0E-04", 7), ("3.0E-04", 8)):
        comparison = feed(say(7, either_lr=rounded(rate)))
        assert (comparison.differs, comparison.agrees[1]) == ([], f"lr of update {update}: {rate}")
        assert ("lr of update 7" in comparison.not_said) is (update == 8)
    assert feed(say(7, either_lr=rounded("2.0E-04"))).differs != []


def test_a_line_of_a_later_update_has_its_own_rate() -> None:
    assert feed(say(9, lr=exact(2e-4))).agrees == ["step 9", "lr of update 9: 0.0002"]
    assert feed(say(9, lr=exact(4e-4))).differs[0].startswith("lr of update 9: promised 0.0002")


def test_an_update_that_overflowed_leaves_the_schedule_where_it_was() -> None:
    first = say(7, next_lr=exact(4e-4), skipped=1)
    second = say(8, next_lr=exact(3e-4), skipped=0)
    assert feed(first, second).differs == []
    own = say(7, lr=exact(4e-4), skipped=1), say(8, lr=exact(4e-4), skipped=0)
    assert feed(*own).agrees == ["step 7", "lr of update 7: 0.0004", "lr of update 8: 0.0004"]
    assert feed(say(7, next_lr=exact(4e-4), skipped_total=6), skipped=5).differs == []
    assert feed(say(7, next_lr=exact(4e-4), skipped_total=5), skipped=5).differs != []


def test_the_schedule_stays_while_data_is_passed_over() -> None:
    skipping = Expected(replace(PROMISE, skip=((7, 8), (20, 30))), lambda k, _: RATES.get(k))
    comparison = Comparison(skipping)
    comparison.feed(say(9, lr=exact(4e-4), next_lr=exact(3e-4)))
    assert comparison.agrees == ["step 9", "lr of update 9: 0.0004", "lr of update 10: 0.0003"]


@pytest.mark.parametrize(
    ("statement", "field"),
    [
        (say(6), "step: promised 7, says 6"),
        (say(1, lr=exact(1.0)), "step: promised 7, says 1"),
        (say(7, consumed_samples=rounded("2")), "consumed samples: promised 12 and 1 x 2"),
        (say(7, consumed_samples=rounded("12")), "consumed samples: promised 12 and 1 x 2"),
        (say(7, loss_scale=rounded("65536.0")), "loss scale: promised 4096, says 65536.0"),
        (say(7, loss_scale=rounded("4000.0")), "loss scale: promised 4096, says 4000.0"),
        (say(7, betas=(exact(0.9), exact(0.999))), "betas: promised 0.9, 0.95, says 0.9, 0.999"),
        (say(7, betas=tuple(map(exact, (0.9, 0.95, 0.99)))), "betas: promised 0.9, 0.95, says 0.9"),
    ],
)
def test_a_difference_names_both_and_quotes_the_line(statement: LoggedUpdate, field: str) -> None:
    (difference,) = feed(statement).differs
    assert difference.startswith(field)
    assert difference.endswith(f", in its line: {statement.text}")


@pytest.mark.parametrize("scale", ["4096.0", "2048.0", "8192.0"])
def test_one_update_may_double_or_halve_the_loss_scale(scale: str) -> None:
    assert f"loss scale {scale}" in feed(say(7, loss_scale=rounded(scale))).agrees


def test_another_batch_size_is_told_and_is_no_difference() -> None:
    """A flag may change it: the samples are then counted with what the trainer says."""
    comparison = feed(say(7, batch_size=rounded("4"), consumed_samples=rounded("16")))
    assert comparison.differs == []
    assert comparison.not_compared == [
        "global batch size 4: 2 in the checkpoint; a flag may change it"
    ]
    assert "consumed samples 16" in comparison.agrees


def test_what_was_never_said_is_no_agreement() -> None:
    comparison = feed(say(7, next_lr=exact(3e-4)), say(8, next_lr=exact(2e-4)))
    assert comparison.done
    assert comparison.not_said == [
        "lr of update 7", "betas", "eps", "weight decay", "step of Adam", "loss scale",
        "gradient clipping", "consumed samples", "seed",
    ]  # fmt: skip
    assert "lr of update 7" not in feed(say(7, lr=exact(4e-4))).not_said


def test_a_rate_that_only_the_config_knows_is_not_compared() -> None:
    comparison = feed(say(7, next_lr=exact(3e-4)), rate=lambda k, _: RATES[1] if k == 1 else None)
    assert (comparison.differs, comparison.agrees) == ([], ["step 7"])
    assert comparison.not_compared == ["lr of update 8: only the trainer's own config says it"]


@pytest.mark.parametrize(
    ("rate", "back"), [(8e-4, True), (7.9e-4, True), (4e-4, False), (3.9e-4, False), (5e-4, False)]
)
def test_a_rate_that_went_back_to_before_the_surgery_is_caught(rate: float, back: bool) -> None:
    """Although the checkpoint does not say what follows: half the rate was set, and it is gone."""
    known = {"rate": lambda k, _: RATES[1] if k == 1 else None, "before": 8e-4}
    comparison = feed(say(7, next_lr=exact(rate)), **known)
    assert bool(comparison.differs) == back
    assert (
        not back or "says 0.0007" in comparison.differs[0] or "says 0.0008" in comparison.differs[0]
    )


def test_two_updates_are_heard_and_no_more() -> None:
    comparison = feed(say(7), say(8), say(9, lr=exact(1.0)))
    assert comparison.done and comparison.differs == [] and len(comparison.lines) == 2


def test_an_epoch_is_as_good_as_a_step_where_its_digits_do() -> None:
    lines = [
        LoggedUpdate("t", "x", epoch=rounded(text), lr=exact(4e-4)) for text in ("0.4375", "0.44")
    ]
    assert feed(lines[0], epoch_steps=16.0).agrees == ["step 7", "lr of update 7: 0.0004"]
    assert feed(lines[1], epoch_steps=1600.0).agrees == []  # steps 697 to 711
    assert feed(lines[0]).not_compared == ["the line names no step"]


def test_of_several_starts_the_one_after_the_checkpoint_is_heard() -> None:
    def steps(*numbers: int) -> list[int | None]:
        return [item.step for item in after([say(n) for n in numbers], expect())]

    assert steps(5, 6, 7, 8) == [7, 8]  # one file, started before
    assert steps(6, 7, 8, 7, 8, 9) == [7, 8, 9]  # rolled back to 6
    assert steps(7, 8, 9, 7, 8, 8, 9) == [7, 8]  # and resumed once more since
    assert steps(5, 6, 7, 1, 2) == [1, 2]  # begun anew
    assert steps(3, 4) == []  # nothing since
    assert steps() == []
