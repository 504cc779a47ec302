"""A trainer of the user's own is compared while it runs: its lines, else its logs; and stopped."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.errors import VerificationFailed
from ckptsurgeon.launch.relaunch import command, relaunch
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.look.expected import expected
from tests.conftest import Trained
from tests.support.surgeries import operate
from train.log import Report, loss_line
from train.progress import Progress

LONG = "import time; time.sleep(60)"


def lines(run: Run, factor: float = 1.0, count: int = 2) -> list[str]:
    """What Megatron prints of the first updates after the latest step."""
    promise = expected(run, run.latest())
    state = run.checkpoint(run.latest()).state()
    size, begin = state.batch_size, promise.promise.consumed_samples
    assert size is not None and begin is not None
    out = []
    for k in range(1, count + 1):
        rate = promise.rate(k + 1, size)
        assert rate is not None
        report = Report(2.5, rate * factor, size, 1.0, promise.promise.loss_scale or 1.0, 0, 0.1)
        progress = Progress(iteration=state.step + k, samples=begin + k * size)
        out.append(loss_line(report, progress, 100))
    return out


def start(root: Path, code: str, check: bool = False) -> tuple[int, str, Comparison]:
    wanted = {"relaunch": {"command": [sys.executable, "-c", code]}}
    (root / "ckptsurgeon.yaml").write_text(json.dumps(wanted))
    run, out = Run.open(root), io.StringIO()
    comparison = Comparison(expected(run, run.latest()))
    promise = comparison.expected.promise
    status = relaunch(run, promise, command(run), check=check, out=out, comparison=comparison)
    return status, out.getvalue(), comparison


def test_lines_that_keep_the_promise_are_said_to(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    root = trained()
    text = lines(Run.open(root))
    status, out, comparison = start(root, f"print('hello'); print({text[0]!r}); print({text[1]!r})")
    assert (status, out.splitlines()) == (0, ["hello", *text])
    assert comparison.differs == [] and comparison.done
    told = capsys.readouterr().err
    assert (
        "note: the trainer's output agrees with the promise of step 9: step 9, lr of update" in told
    )
    assert "note: the trainer does not say: lr of update 9, betas, eps" in told
    assert "nothing was compared" not in told


def test_a_line_that_breaks_the_promise_stops_the_trainer(trained: Trained) -> None:
    root = trained()
    operate(root, {"set": {"eps": 1e-6}})
    (text,) = lines(Run.open(root), factor=2.0, count=1)
    later = f"import time, pathlib; time.sleep(10); pathlib.Path({str(root / 'later')!r}).touch()"
    with pytest.raises(VerificationFailed, match="lr of update 10: promised") as error:
        start(root, f"print({text!r}); {later}")
    assert not (root / "later").exists()
    assert error.value.exit_code == 4
    assert " ".join(text.split()) in error.value.what
    assert "was stopped" in error.value.untouched
    assert error.value.next[-1].startswith("ckptsurgeon undo")


def test_check_stops_a_trainer_whose_first_updates_agree(trained: Trained) -> None:
    root = trained()
    text = lines(Run.open(root))
    status, out, _ = start(root, f"print({text[0]!r}); print({text[1]!r}); {LONG}", check=True)
    assert (status, out.splitlines()) == (0, text)


def test_a_dict_is_not_taken_for_the_json_line(trained: Trained) -> None:
    """The Hugging Face Trainer prints one: it says nothing that this run could be held to."""
    root = trained()
    line = "{'loss': '3.0', 'learning_rate': '0.0002', 'epoch': '0.5'}"
    status, out, comparison = start(root, f"print({line!r})")
    assert (status, out) == (0, f"{line}\n")
    assert comparison.not_compared == ["the line names no step"]


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.long
def test_a_trainer_that_prints_nothing_is_held_to_its_logs(trained: Trained, factor: float) -> None:
    root = trained()
    run = Run.open(root)
    rates = [expected(run, 8).rate(k, None) for k in (2, 3)]
    assert all(rates)
    code = (
        "from torch.utils.tensorboard import SummaryWriter\n"
        f"writer = SummaryWriter({str(root / 'tensorboard')!r})\n"
        f"for step, rate in zip((9, 10), {rates!r}):\n"
        f"    writer.add_scalar('learning-rate/learning-rate', rate * {factor}, step)\n"
        "writer.close()"
    )
    if factor == 1.0:
        status, _, comparison = start(root, code)
        assert status == 0
        assert [item.partition(":")[0] for item in comparison.agrees] == [
            "step 9", "lr of update 10", "lr of update 11",
        ]  # fmt: skip
    else:
        with pytest.raises(VerificationFailed, match=r"lr of update 10: .*tfevents"):
            start(root, code)


def test_points_from_before_the_start_are_not_its_word(trained: Trained) -> None:
    """The run logged its updates up to 8, and a trainer of before the surgery others."""
    root = trained()
    _, _, comparison = start(root, "print('quiet')")
    assert comparison.lines == [] and not comparison.begun
