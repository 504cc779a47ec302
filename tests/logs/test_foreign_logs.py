"""Logs of trainers and trackers that have no reader of their own, in the form in which each is
written; the numbers are made up."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from ckptsurgeon.errors import UsageError
from ckptsurgeon.logs.curves import Curves
from ckptsurgeon.logs.rows import of_file
from ckptsurgeon.look.advise import judge

LOSSES = [4.5, 4.25, 4.0, 3.75]


def read(
    folder: Path, text: str, name: str = "log", own: dict[str, str] | None = None,
    step: str | None = None,
) -> Curves:  # fmt: skip
    (folder / name).write_text(text)
    return of_file(folder / name, own or {}, step)


LINES = [
    ("iter {step}: loss {loss:.4f}, time 263.56ms, mfu -100.00%", {}),
    ("step {step:4}/19560 | loss {loss:.6f} (+nanz)| norm 2.1829 (+nanz)| lr 1.54e-05 | "
     "4186.35 ms | 32.3% bf16 MFU | 120712 tok/s", {"grad-norm": 2.1829, "lr": 1.54e-05}),
    ("s:{step} trl:{loss:.4f} lr:0.000003 norm:13.12", {"grad-norm": 13.12, "lr": 3e-06}),
    ("step:{step}/20344 train_loss:{loss:.4f} train_time:34635190ms step_avg:1703.57ms", {}),
    ("step {step:5d} | loss: {loss:.6f} | lr 6.3289e-05 | norm: 0.2829 | dt: 404.51ms",
     {"grad-norm": 0.2829, "lr": 6.3289e-05}),
    (" iteration {step:8}/  320000 | elapsed time per iteration (ms): 2280.8 | "
     "learning rate 1.500E-05 | lm loss {loss:.6E} | loss scale 65536.0 |",
     {"loss-scale": 65536.0, "lr": 1.5e-05}),
    (" iteration {step:8}/  320000 | consumed samples: 512 | lm-loss: {loss:.6E} | "
     "loss scale: 65536.0 | grad norm: 1.5 |", {"loss-scale": 65536.0, "grad-norm": 1.5}),
    ("step={step} loss={loss}", {}),
    ("{step}/20000 train_loss: {loss} train_time: 0.9m tok/s: 7691255", {}),
    ("1776142719.400 {step}/20000 train_loss: {loss}", {}),
    ("2026-01-02 10:11:12,345 - INFO - Step {step}, Loss: {loss:.2f}", {}),
]  # fmt: skip
NAMES = [
    "nanoGPT", "llm.c", "llm.c-main", "modded-nanogpt", "build-nanogpt", "old-megatron", "lm-loss",
    "pairs", "first", "clock", "logging",
]  # fmt: skip
"""What each of LINES is of."""


@pytest.mark.parametrize(("line", "others"), LINES, ids=NAMES)
def test_printed_lines(tmp_path: Path, line: str, others: dict[str, float]) -> None:
    lines = [line.format(step=10 * k, loss=loss) for k, loss in enumerate(LOSSES, 1)]
    kept = read(tmp_path, "starting\nval loss 3.0\n" + "\n".join(lines) + "\n").kept
    assert kept["loss"].steps.tolist() == [10, 20, 30, 40]
    assert kept["loss"].values.tolist() == pytest.approx(LOSSES)
    assert {name: kept[name].values[0] for name in others} == pytest.approx(others)


@pytest.mark.parametrize("word", ["nan", "NaN", "NAN", "-nan", "inf"])
@pytest.mark.parametrize("line", [line for line, _ in LINES], ids=NAMES)
def test_a_loss_that_is_no_number_is_read_where_any_other_is(
    tmp_path: Path, line: str, word: str
) -> None:
    """As `%f` of C and `.6E` of Python print it, also where a number follows it."""
    lost = re.sub(r"{loss[^}]*}", word, line).replace("(+nanz)", "(-nanz)")
    lines = [line.format(step=k, loss=4.0) for k in (1, 2)]
    lines += [lost.format(step=k) for k in (3, 4)]
    loss = read(tmp_path, "\n".join(lines) + "\n").kept["loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4]
    assert [math.isfinite(value) for value in loss.values] == [True, True, False, False]


def test_megatron_leaves_a_loss_out_that_is_no_number(tmp_path: Path) -> None:
    """A line whose iterations were skipped has none either: that is no NaN."""
    line = " iteration {}/ 900 | consumed samples: 8 | {} loss scale: 1.0 | {} |"
    line += " number of skipped iterations: {} | number of nan iterations: 0 |\n"
    good = [(k, f"lm loss: {4 - k / 1000:.6E} |", "grad norm: 0.7", 0) for k in range(4, 200)]
    said = [*((k, "", "params norm: 9.1", 1) for k in range(1, 4)), *good]
    text = "".join(line.format(*each) for each in said)
    kept = read(tmp_path, text).kept
    assert kept["loss"].steps.tolist() == list(range(4, 200))
    assert judge(Curves(kept)).verdict == "healthy"
    text += "".join(line.format(k, "", "grad norm: nan", 0) for k in range(200, 203))
    told = judge(read(tmp_path, text))
    assert told.verdict == "diverged" and told.spike is not None
    assert told.spike.first == told.spike.broken == 200


@pytest.mark.parametrize("line", ["Epoch {}/9 loss: 2.0", "01/0{} 10:11:12 loss: 2.0"])
def test_an_epoch_and_a_date_are_no_step(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError):
        read(tmp_path, "".join(f"{line.format(k)}\n" for k in range(1, 9)))


def test_nan_is_read(tmp_path: Path) -> None:
    kept = read(tmp_path, "iter 1: loss 2.0, time 1ms\niter 2: loss nan, time 1ms\n").kept
    assert str(kept["loss"].values.tolist()) == "[2.0, nan]"


def test_names_that_only_the_user_knows(tmp_path: Path) -> None:
    lines = "".join(f"tick {k} nll {loss}\n" for k, loss in enumerate(LOSSES))
    with pytest.raises(UsageError):
        read(tmp_path, lines)
    kept = read(tmp_path, lines, own={"loss": "nll"}, step="tick").kept
    assert kept["loss"].values.tolist() == LOSSES and kept["loss"].steps.tolist() == [0, 1, 2, 3]


def test_an_export_of_wandb(tmp_path: Path) -> None:
    head = '"Step","brave-run - train/loss","brave-run - train/loss__MIN"\n'
    rows = "".join(f'"{k}","{loss}","{loss}"\n' for k, loss in enumerate(LOSSES))
    assert read(tmp_path, head + rows, "e.csv").kept["loss"].values.tolist() == LOSSES


def test_an_export_of_several_runs_names_their_columns(tmp_path: Path) -> None:
    text = '"Step","a - train/loss","b - train/loss"\n"1","2.5","3.5"\n'
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text, "e.csv")
    assert "a - train/loss, b - train/loss" in refused.value.what
    kept = read(tmp_path, text, "e.csv", own={"loss": "b - train/loss"}).kept
    assert kept["loss"].values.tolist() == [3.5]


def test_llama_factory(tmp_path: Path) -> None:
    rows = [{"current_steps": 10 * k, "total_steps": 99, "loss": loss, "learning_rate": 1e-5,
             "epoch": 0.1, "elapsed_time": "0:00:24"} for k, loss in enumerate(LOSSES)]  # fmt: skip
    kept = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "t.jsonl").kept
    assert kept["loss"].steps.tolist() == [0, 10, 20, 30] and kept["lr"].values[0] == 1e-5


def dicts(bar: str) -> str:
    rows = [{"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5, "epoch": 0.01 * k}
            for k, loss in enumerate(LOSSES, 1)]  # fmt: skip
    return "".join(f"{bar.format(50 * k)}{row}\n" for k, row in enumerate(rows, 1))


def test_dicts_behind_a_progress_bar(tmp_path: Path) -> None:
    found = read(tmp_path, dicts("  5%|▌    | {}/10000 [03:20<1:03:20,  2.5it/s]\r"))
    assert found.kept["loss"].steps.tolist() == [50, 100, 150, 200] and not found.notes


def test_dicts_alone_are_counted_and_it_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, dicts(""))
    assert found.kept["loss"].steps.tolist() == [1, 2, 3, 4]
    assert found.notes == ("its lines name no step: a step is a line here",)


def test_the_mean_of_a_run_is_not_its_newest_loss(tmp_path: Path) -> None:
    rows = [{"step": 10 * k, "loss": loss} for k, loss in enumerate(LOSSES, 1)]
    last = {"step": 41, "train_loss": 4.125, "train_runtime": 2.0, "epoch": 1.0}
    text = json.dumps({"log_history": [*rows, last]})
    assert read(tmp_path, text, "trainer_state.json").kept["loss"].values.tolist() == LOSSES


def test_a_nan_that_the_trainer_logs_as_zero(tmp_path: Path) -> None:
    rows = [{"step": k, "loss": 2.0, "grad_norm": 1.0} for k in range(200)]
    rows += [{"step": k, "loss": 0.0, "grad_norm": float("nan")} for k in range(200, 260)]
    told = judge(read(tmp_path, json.dumps({"log_history": rows}), "trainer_state.json"))
    assert told.verdict == "diverged" and told.spike is not None
    assert told.spike.first == told.spike.broken == 200
