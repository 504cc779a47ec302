"""A policy is read as a person means it, or refused by its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.guard.event import ASKED, STARTED, Event
from ckptsurgeon.guard.policy import CAUSES, DIVERGED, ENDED, HUNG, NAN, Policy, load
from ckptsurgeon.guard.treatment import NEAR, beyond


def read(folder: Path, text: str) -> Policy:
    file = folder / "night.yaml"
    file.write_text(text)
    return load(file)


def test_the_key_on_is_a_text_although_yaml_calls_it_true(tmp_path: Path) -> None:
    assert read(tmp_path, "watch:\n  on: diverged\n").on == ["diverged"]
    assert read(tmp_path, "watch: {on: [nan, hung]}\n").on == ["nan", "hung"]
    assert read(tmp_path, "watch:\n") == Policy() == Policy(on=list(CAUSES))


def test_it_advises_unless_it_is_told_to_act(tmp_path: Path) -> None:
    assert not read(tmp_path, "watch: {on: diverged}").acts
    assert read(tmp_path, "watch: {do: apply}").acts


def test_a_loss_of_nan_is_a_divergence_and_not_the_other_way_round() -> None:
    assert Policy(on=[DIVERGED]).wants(NAN) and not Policy(on=[NAN]).wants(DIVERGED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("watch: {on: divergd}", "`watch.on` takes no 'divergd'"),
        ("watch: {do: aply}", "`watch.do` takes no 'aply'"),
        ("watch: {max_surgery: 1}", "unknown key `watch.max_surgery`"),
        ("watch: {max_surgeries: -1}", "`watch.max_surgeries` is -1"),
        ("watch: {every: 0}", "`watch.every` is 0"),
        ("watch: {hung: soon}", "`watch.hung` is 'soon'"),
        ("on: diverged", "unknown key"),
        ("do: apply", "`do` stands outside of `watch`"),
        ("watch: [diverged]", "`watch` must be a mapping"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    assert said in refused.value.what


def test_commands_that_others_may_have_written_are_not_started(tmp_path: Path) -> None:
    file = tmp_path / "night.yaml"
    file.write_text("watch: {notify: [./page-me.sh]}")
    assert load(file).notify == ["./page-me.sh"]
    file.chmod(0o666)
    with pytest.raises(SurgeryError, match="anybody may write"):
        load(file)
    file.write_text("watch: {do: advise}")
    assert load(file).do == "advise"


# --- its bounds ----------------------------------------------------------------------------------

TROUBLES = st.lists(
    st.tuples(
        st.sampled_from([DIVERGED, DIVERGED, NAN, HUNG, ENDED]),
        st.integers(0, 2000),
        st.sampled_from(["loss", "grad-norm"]),
        st.sampled_from([100, 200]),
    ),
    max_size=14,
)


@given(TROUBLES, st.integers(0, 4), st.integers(0, 400), st.integers(0, 3))
def test_whatever_happens_in_a_night_no_bound_is_broken(
    troubles: list[tuple[str, int, str, int]], most: int, apart: int, restarts: int
) -> None:
    """And nothing that the bounds allow is refused."""
    policy = Policy(max_surgeries=most, min_steps=apart, max_restarts=restarts)
    known: list[Event] = []
    for n, (cause, step, signal, saved) in enumerate(troubles, 1):
        edits = cause in (DIVERGED, NAN)
        event = Event(f"{n:04d}", cause, "", "", saved=saved)
        event = event.with_(step=step, signal=signal) if edits else event
        why = beyond(policy, [*known, event], event)
        treated = [each for each in known if each.receipt is not None]
        if edits:
            near = [e for e in treated if e.signal == signal and abs((e.step or 0) - step) <= NEAR]
            last = max((each.step or 0 for each in treated), default=-apart)
            assert bool(why) == (len(treated) >= most or bool(near) or step < last + apart)
        else:
            row = 0
            for each in reversed(known):
                if each.cause not in (HUNG, ENDED) or each.saved != saved:
                    break
                row += each.state == STARTED
            assert bool(why) == (row >= restarts)
        state = ASKED if why else STARTED
        known.append(event.with_(state=state, receipt=None if why or not edits else f"{n:04d}"))
    assert sum(each.receipt is not None for each in known) <= most
