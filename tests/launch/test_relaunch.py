"""The trainer waits for its first line to be compared: on a broken promise it trains no step."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, VerificationFailed
from ckptsurgeon.launch.relaunch import command, compare, relaunch
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.snapshot import snapshot


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_broken_promise_stops_the_bundled_trainer_before_its_first_step(
    trained: Trained, ranks: int
) -> None:
    root = trained(ranks=ranks)
    before = snapshot(root)
    run = Run.open(root)
    promise = replace(look.inspect(run).promise, lr=1.0)
    argv = command(run, None, ["train_iters=10"])
    with pytest.raises(VerificationFailed, match=r"lr: promised 1\.0, uses 0\.000"):
        relaunch(run, promise, argv, check=False, out=io.StringIO())
    assert snapshot(root) == before


@pytest.mark.slow
def test_a_kept_promise_lets_two_ranks_train(trained: Trained) -> None:
    root = trained(ranks=2)
    run = Run.open(root)
    argv = command(run, None, ["train_iters=10"])
    out = io.StringIO()
    assert relaunch(run, look.inspect(run).promise, argv, check=False, out=out) == 0
    assert compare(look.inspect(run, 8).promise, out.getvalue().splitlines()[0]) == []
    assert run.latest() == 10


def own_trainer(root: Path, code: str) -> Run:
    wanted = {"relaunch": {"command": [sys.executable, "-c", code]}}
    (root / "ckptsurgeon.yaml").write_text(json.dumps(wanted))
    return Run.open(root)


def test_a_trainer_of_the_users_own_may_print_other_lines_first(trained: Trained) -> None:
    run = own_trainer(trained(), """print('hello'); print('{"step": 3}'); print('end')""")
    promise = look.inspect(run).promise
    with pytest.raises(VerificationFailed, match="step: promised 9, uses 3"):
        relaunch(run, promise, command(run), check=False, out=io.StringIO())


def test_a_trainer_that_prints_no_object_is_not_stopped_and_that_is_said(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_trainer(trained(), "print('iteration 9')")
    out = io.StringIO()
    promise = look.inspect(run).promise
    assert relaunch(run, promise, command(run), check=False, out=out) == 0
    assert out.getvalue() == "iteration 9\n"
    assert "nothing was compared" in capsys.readouterr().err


def test_bytes_that_are_no_text_do_not_stop_a_trainer(trained: Trained) -> None:
    code = r"""import sys; sys.stdout.buffer.write(b"loss \xff\n"); sys.exit(7)"""
    run = own_trainer(trained(), code)
    out = io.StringIO()
    assert relaunch(run, look.inspect(run).promise, command(run), check=False, out=out) == 7
    assert out.getvalue() == "loss \\xff\n"


def test_every_kind_of_difference_is_named(trained: Trained) -> None:
    promise = replace(look.inspect(Run.open(trained())).promise, skip=((9, 12),))
    told = json.loads(
        json.dumps({**vars(promise), "weight_decay": list(promise.weight_decay or ())})
    )
    assert compare(promise, json.dumps(told)) == []
    assert compare(promise, json.dumps({**told, "betas": [0.9, 0.9]})) == [
        "betas: promised [0.9, 0.95], uses [0.9, 0.9]"
    ]
    assert compare(promise, json.dumps({**told, "skip": []})) == [
        "skip: promised [[9, 12]], uses []"
    ]
    assert compare(promise, json.dumps({k: v for k, v in told.items() if k != "seed"})) == [
        "seed: promised 1234, not reported"
    ]
    assert compare(promise, json.dumps({"step": 9, "lr": promise.lr, "skip": [[9, 12]]})) == [
        "not reported: betas, eps, weight_decay, adam_step, loss_scale, clip_grad, "
        "consumed_samples, seed, rewarm"
    ]
    assert compare(promise, "Traceback\n")[0].startswith("its first line is not the JSON object")
    nearly = {**told, "lr": promise.lr * (1 + 1e-9)}
    assert len(compare(promise, json.dumps(nearly))) == 1


def test_undo_is_named_only_where_a_surgery_made_the_promise(trained: Trained) -> None:
    run = own_trainer(trained(), """print('{"lr": 5.0}')""")

    def broken() -> VerificationFailed:
        promise = look.inspect(run).promise
        with pytest.raises(VerificationFailed) as caught:
            relaunch(run, promise, command(run), check=False, out=io.StringIO())
        return caught.value

    assert [hint.split("    ")[0] for hint in broken().next] == ["ckptsurgeon show"]
    surgery.apply(run, plan(run, from_data({"set": {"lr": 5e-4}})))
    assert [hint.split("    ")[0] for hint in broken().next] == ["ckptsurgeon undo"]
    surgery.apply(run, surgery.plan_undo(run))
    assert [hint.split("    ")[0] for hint in broken().next] == ["ckptsurgeon show"]


def test_a_trainer_that_dies_early_is_not_blamed_on_a_surgery(trained: Trained) -> None:
    run = own_trainer(trained(), "raise SystemExit(3)")
    with pytest.raises(SurgeryError, match="status 3") as caught:
        relaunch(run, look.inspect(run).promise, command(run), check=True, out=io.StringIO())
    assert "surgery" not in caught.value.untouched
    assert "undo" not in " ".join(caught.value.next)
