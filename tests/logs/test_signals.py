"""A logged number is known by its name, however that is spelled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.logs.signals import GRAD_NORM, HELD_OUT, LOSS, NAMES, commonest, found

KNOWN = sorted((signal, name) for signal, names in NAMES.items() for name in names)


@st.composite
def spelled(draw: st.DrawFn) -> tuple[str, str]:
    """A signal, and one of its names with other capitals, blanks and hyphens."""
    signal, name = draw(st.sampled_from(KNOWN))
    letters = [
        draw(st.sampled_from("_- " if letter in "_- " else (letter.lower(), letter.upper())))
        for letter in name
    ]
    return signal, "".join(letters)


@given(spelled())
def test_a_tag_and_a_column_are_known_by_the_same_spellings(word: tuple[str, str]) -> None:
    signal, name = word
    assert found({name}, {}) == {signal: name}
    assert commonest({name: 1}, {}) == {signal: [name]}


def test_a_name_that_is_known_to_the_letter_comes_first() -> None:
    assert found({"LOSS", "train/Loss", "train_loss"}, {}) == {LOSS: "train_loss"}
    assert found({"loss/train", "Loss/Valid"}, {}) == {LOSS: "loss/train"}
    assert found({"loss/train", "mine"}, {LOSS: "mine"}) == {LOSS: "mine"}
    assert GRAD_NORM not in found({"layer 3 - norm"}, {})


WORDS = st.sampled_from(["train", "runtime", "losses", "G", "model-7b"])
HELD = st.sampled_from(sorted(HELD_OUT))


@given(group=WORDS, name=st.sampled_from(["lm_loss", "Loss", "train loss"]), held=HELD)
def test_a_loss_is_known_in_any_group_of_its_own(group: str, name: str, held: str) -> None:
    tag = f"{group}/{name}"
    others = ["runtime/samples_per_sec", f"{held}/{name}", f"{group}/{held}_loss"]
    assert found([*others, tag], {})[LOSS] == tag
    assert LOSS not in found(others, {})
    assert LOSS not in found([f"G/{name}", f"D/{name}"], {})  # nobody said which one
