"""What each trainer's printed line says, with the precision and the update that it is of."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.logs.printed import (
    bundled,
    composer,
    deepspeed,
    fairseq2,
    lightning,
    megatron,
    metaseq,
    mmengine,
    nanotron,
    olmo_core,
    open_clip,
    own_loop,
    torchtitan,
    transformers,
    verl,
)
from ckptsurgeon.logs.printed.comparison import Expected
from ckptsurgeon.logs.printed.families import FAMILIES, Listener, families
from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, exact, rounded, significant
from tests.support.promise import PROMISE
from train.log import Report, loss_line
from train.progress import Progress

MEGATRON = (
    " [2026-08-22 15:22:22.000001] iteration     6901/  159576 | consumed samples:       251824 |"
    " elapsed time per iteration (ms): 812.4 | learning rate: 1.000000E-05 |"
    " global batch size:   512 | lm loss: 2.712345E+00 | loss scale: 4096.0 | grad norm: 1.234 |"
    " num zeros: 0 | number of skipped iterations:   1 | number of nan iterations:   0 |"
)


# --- the precision of a number -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "yes", "no"),
    [
        (rounded("1.0E-05"), [1.0e-5, 1.04e-5, 9.6e-6], [1.06e-5, 9.4e-6, 2e-5, 0.0]),
        (rounded("1.000E-05"), [1.0004e-5], [1.0006e-5, 1.04e-5]),
        (rounded("0.0001"), [1.4e-4, 6e-5], [1.6e-4, 4e-5]),
        (rounded("1,234"), [1234.4], [1234.6, 1.234]),
        (significant("0.0002889", 4), [2.8889e-4], [2.8897e-4]),
        (significant("3e-05", 4), [3.0004e-5], [3.0006e-5, 2.6e-5]),
        (significant("1e-05", 6), [1.000004e-5], [1.000006e-5]),
        (exact("3e-05"), [3e-5, 3e-5 * (1 + 5e-8)], [3.00001e-5, 2.6e-5]),
        (exact(0.0), [0.0], [1e-30]),
        (exact(math.nan), [], [0.0, math.nan]),
    ],
)
def test_a_number_agrees_with_what_rounds_to_it(
    number: Number, yes: list[float], no: list[float]
) -> None:
    assert [value for value in yes if not number.agrees(value)] == []
    assert [value for value in no if number.agrees(value)] == []


# --- one line of each ----------------------------------------------------------------------------


def told(said: LoggedUpdate | None) -> dict[str, object]:
    """What is not None, numbers as they were printed."""
    assert said is not None
    plain = {k: v for k, v in vars(said).items() if v is not None and k not in ("family", "text")}
    return {
        key: str(value) if isinstance(value, Number) else value
        for key, value in plain.items()
        if value is not False
    }


@given(
    size=st.integers(1, 64), updates=st.integers(1, 300), over=st.integers(0, 63),
    each=st.integers(1, 50), first=st.integers(0, 20),
)  # fmt: skip
def test_open_clip_names_an_update_by_its_epochs(
    size: int, updates: int, over: int, each: int, first: int
) -> None:
    """Samples beyond the last whole batch are counted in an epoch, and left out. Its line is that
    of `train_one_epoch`, which logs the first update of each epoch and the last one."""
    samples = size * updates + over % size
    statements, truth = [], []
    for epoch in (first, first + 1):
        for i in range(updates):
            if i % each == 0 or i + 1 == updates:
                seen = (i + 1) * size
                said = open_clip.read(
                    f"2026-11-29,19:56:43 | INFO | Train Epoch: {epoch} [{seen:>9}/{samples} "
                    f"({100.0 * (i + 1) / updates:.0f}%)] Data (t): 0.002 Batch (t): 0.028, "
                    f"{70.3435:#g}/s, {70.3435:#g}/s/gpu LR: {5e-4:5f} Logit Scale: {14.286:.3f} "
                    f"Contrastive_loss: {0.5:#.5g} ({0.6:#.5g}) Loss: {0.69315:#.5g} ({0.7:#.5g})"
                )
                assert said is not None and str(said.lr) == "0.000500"
                assert said.loss is not None and said.loss.value == 0.69315
                statements.append(said)
                truth.append(epoch * updates + i + 1)
    assert [each.step for each in open_clip.numbered(statements)] == truth
    known = Expected(PROMISE, lambda *_: None, epoch_steps=float(updates))
    assert [known.steps(said) for said in statements] == [range(n, n + 1) for n in truth]


def test_an_example_of_torch_is_not_open_clip() -> None:
    assert open_clip.read("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3") is None


def test_megatron_says_the_counters_after_an_update_and_the_rate_of_the_next() -> None:
    assert told(megatron.read(MEGATRON)) == {
        "step": 6901, "next_lr": "1.000000E-05", "consumed_samples": "251824",
        "batch_size": "512", "loss": "2.712345E+00", "grad_norm": "1.234", "loss_scale": "4096.0",
        "skipped": 1,
    }  # fmt: skip
    assert megatron.read(" validation loss at iteration 6901 | lm loss value: 2.7E+00 |") is None
    assert megatron.read("iteration 9") is None


def test_the_bundled_trainers_own_line_has_the_rate_of_its_update() -> None:
    report = Report(2.5, 3.21e-4, 16, 1.5, 1.0, 0, 0.2)
    line = loss_line(report, Progress(iteration=9, samples=144, tokens=0, gigaflos=0.0), 20)
    assert told(bundled.read(line)) == {
        "step": 9, "lr": "3.210E-04", "consumed_samples": "144", "batch_size": "16",
        "loss": "2.500000E+00", "grad_norm": "1.500", "loss_scale": "1.0", "skipped": 0,
    }  # fmt: skip
    assert families("deepspeed", own=True)[0].read(line) == bundled.read(line)


@pytest.mark.parametrize("mom", ["[(0.9, 0.95)]", "[[0.9, 0.95], [0.9, 0.95]]"])
def test_deepspeed_says_the_next_rate_and_the_betas(mom: str) -> None:
    line = f"[Rank 0] step=10, skipped=2, lr=[0.0003, 0.0001], mom={mom}"
    said = deepspeed.read(line)
    assert said is not None and said.betas is not None
    assert (said.step, said.skipped_total, str(said.next_lr)) == (10, 2, "0.0003")
    assert [beta.value for beta in said.betas] == [0.9, 0.95]


def test_deepspeed_at_its_birth_says_nothing_of_a_checkpoint() -> None:
    assert deepspeed.read("step=0, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]") is None
    sgd = deepspeed.read("step=3, skipped=0, lr=[0.001], mom=[0.9]")
    assert sgd is not None and sgd.betas is None


def test_the_trainer_of_hugging_face_says_its_epoch_and_not_its_step() -> None:
    new = transformers.read("{'loss': '3.031', 'learning_rate': '0.0002889', 'epoch': '0.5'}")
    assert told(new) == {"epoch": "0.5", "lr": "0.0002889"}
    old = transformers.read("  5%|  | {'loss': 3.0, 'learning_rate': 2e-05, 'epoch': 0.5}\n")
    assert told(old) == {"epoch": "0.5", "either_lr": "2e-05"}
    for line in ("{'eval_loss': 3.0, 'epoch': 0.5}", "{'learning_rate': __import__('os')}", "{'"):
        assert transformers.read(line) is None


def test_mmengine_says_the_rate_of_its_own_update() -> None:
    """Lines of XTuner 0.2.0 with MMEngine 0.10.6, one by epochs, and an object of its log."""
    head, tail = "11/30 07:10:59 - mmengine - INFO - ", "  eta: 0:00:00  time: 0.1686"
    line = f"{head}Iter(train) [ 5/10]  lr: 8.5355e-05{tail}  grad_norm: 2.2532  loss: 5.8720"
    said = {"step": 5, "lr": "8.5355e-05", "loss": "5.8720", "grad_norm": "2.2532"}
    assert told(mmengine.read(line)) == said
    epochs = f"{head}Epoch(train)  [ 2][ 3/10]  base_lr: 1.0000e-03 lr: 8.5355e-05{tail}"
    assert told(mmengine.read(epochs)) == {"step": 13, "lr": "8.5355e-05"}
    said = told(mmengine.read('{"lr": 8.535533905932738e-05, "loss": 5.8, "iter": 5, "step": 5}'))
    assert said == {"step": 5, "lr": "8.53553391e-05"}
    for other in ('{"acc": 0.5, "step": 1, "iter": 3}', f"{head}Iter(val) [1/2]  acc: 1.0", "{"):
        assert mmengine.read(other) is None


def test_ms_swift_says_its_step_and_the_rate_of_the_next_update() -> None:
    """Lines of 4.6.0, whose `_maybe_log_save_evaluate` asks for the rate after the scheduler."""
    counts = "'epoch': {0}0.1562{0}, 'global_step/max_steps': '5/10', 'elapsed_time': '0s'"
    new = transformers.read(f"{{'learning_rate': '5e-05', {counts.format(chr(39))}}}")
    old = transformers.read(f"{{'learning_rate': 5e-05, {counts.format('')}}}")
    assert told(new) == told(old) == {"step": 5, "next_lr": "5e-05"}


def test_the_state_of_hugging_face_says_steps() -> None:
    document = {"log_history": [{"step": 7, "learning_rate": 1e-4}, {"step": 7, "eval_loss": 1}]}
    assert [told(said) for said in transformers.history(document)] == [
        {"step": 7, "either_lr": "0.0001"}
    ]


def test_torchtitan_says_its_step_in_any_colour() -> None:
    line = "[titan] 2026-08-21 - root - INFO - \x1b[31mstep: 11  \x1b[32mloss:  6.90733  \x1b[39m"
    assert told(torchtitan.read(line)) == {"step": 11, "loss": "6.90733"}
    with_norm = told(torchtitan.read(f"{line}\x1b[34mgrad_norm:  1.2500"))
    assert with_norm == {"step": 11, "loss": "6.90733", "grad_norm": "1.2500"}
    assert torchtitan.read("INFO - validate step: 11  loss:  6.90733") is None


def test_olmo_core_says_its_rate_on_a_line_of_its_own() -> None:
    listener = Listener(FAMILIES["olmo-core"])
    lines = (
        "2026-06-22\thost:0\tolmo_core.train:92\tINFO\t[step=5/100,epoch=1,eta=0:10:00]\n",
        "    train/CE loss=5.512\n",
        "    optim/LR (group 0)=0.0004\n",
        "    optim/LR (group 1)=9.50E-05\n",
        "2026-06-22\thost:0\tolmo_core.train:92\tINFO\t[step=6/100,epoch=1]\n",
    )
    heard = [said for line in lines for said in listener.feed(line)]
    assert [told(said) for said in [*heard, *listener.end()]] == [
        {"step": 5, "lr": "0.0004"},
        {"step": 6, "begins": True},
    ]
    assert heard[0].lr is not None and heard[0].lr.agrees(4.4e-4)


def test_nanotron_says_the_next_rate_in_three_digits() -> None:
    line = (
        "\x1b[2;3m04/07 15:25:09 [INFO|DP=0]\x1b[0m: iteration: 7 / 100 | consumed_tokens: 1.79K |"
        " global_batch_size: 256 | lm_loss: 5.51 | lr: 9.99e-05 | eta: 0:00:10"
    )
    said = nanotron.read(line)
    assert said is not None and told(said) == {
        "step": 7, "next_lr": "9.99e-05", "loss": "5.51",
    }  # fmt: skip
    assert said.next_lr is not None and said.next_lr.agrees(9.994e-5)
    assert not said.next_lr.agrees(9.984e-5)


def test_metaseq_says_the_next_rate() -> None:
    stats = {"epoch": 1, "lr": "5.99e-05", "num_updates": "24001", "loss_scale": "4", "loss": "2.6"}
    line = f"2022-01-01 00:00:00 | INFO | train_inner | {json.dumps(stats)}"
    assert told(metaseq.read(line)) == {
        "step": 24001, "next_lr": "5.99e-05", "loss": "2.6", "loss_scale": "4",
    }  # fmt: skip
    assert metaseq.read(line.replace("| train_inner |", "| valid/combined |")) is None
    assert told(metaseq.read(json.dumps(stats))) == told(metaseq.read(line))  # of --log-file
    assert metaseq.read("x | INFO | train_inner | {}") is None
    epoch = json.dumps({f"train_{key}": value for key, value in stats.items()})
    assert metaseq.read(f"x | INFO | train | {epoch}") is None  # the update was said before
    assert metaseq.read(epoch) is None


def test_fairseq_says_the_same_without_json() -> None:
    line = (
        "2022-01-01 00:00:00 | INFO | train_inner | epoch 001:      3 / 8 loss=2.6, ppl=6.06, "
        "wps=0, num_updates=24001, lr=5.99e-05, gnorm=0.5, clip=0, loss_scale=4, wall=1"
    )
    assert told(metaseq.read(line)) == {
        "step": 24001, "next_lr": "5.99e-05", "loss": "2.6", "grad_norm": "0.5", "loss_scale": "4",
    }  # fmt: skip
    assert told(metaseq.read(line.rpartition(" | ")[2])) == told(metaseq.read(line))
    assert metaseq.read(line.replace("train_inner", "valid")) is None
    epoch = "x | INFO | train | epoch 001 | loss 2.7 | num_updates 24001 | lr 5.99e-05 | wall 2"
    assert metaseq.read(epoch) is None


def test_lightning_logs_a_rate_before_its_update() -> None:
    lines = ["epoch,lr-AdamW,step,train_loss\n", "0,,9,2.5\n", ",0.0003,10,\n"]
    assert lightning.is_metrics(lines[0])
    assert [told(said) for said in lightning.rows(lines)] == [{"step": 11, "lr": "0.0003"}]


COMPOSER = """[epoch=2][batch=3/16]:
\t Train time/batch: 18
\t Train loss/train/total: 2.8719
\t Train lr-AdamW/group0: 0.0010
\t Train lr-AdamW/group1: 0.0001
[batch=20/100]:
\t Train loss/train/total: nan
[Eval batch=1/5] Eval on eval data:
"""


def test_composer_says_the_next_rate_below_its_update() -> None:
    listener = Listener(families("composer"))
    heard = [said for line in COMPOSER.splitlines(True) for said in listener.feed(line)]
    assert [told(said) for said in [*heard, *listener.end()]] == [
        {"step": 19, "next_lr": "0.0010"},
        {"step": 20, "begins": True},
    ]
    read = [composer.read(line) for line in COMPOSER.splitlines(True)]
    assert [told(said) for said in read if said is not None and said.loss is not None] == [
        {"loss": "2.8719", "continues": True}, {"loss": "nan", "continues": True},
    ]  # fmt: skip


def test_verl_says_one_of_two_rates() -> None:
    line = (
        "\x1b[36m(TaskRunner pid=4017)\x1b[0m step:7 - global_seqlen/mean:512.0 - "
        "actor/pg_loss:np.float64(-0.013) - actor/grad_norm:np.float64(0.25) - actor/lr:1e-06"
    )
    said = verl.read(line)
    assert told(said) == {"step": 7, "either_lr": "1e-06", "grad_norm": "0.25"}
    tuned = verl.read("step:3 - train/loss:nan - train/lr:2.5e-05 - train/mfu:0")
    assert told(tuned) == {"step": 3, "either_lr": "2.5e-05", "loss": "nan"}
    assert verl.read("step:7/900 train_loss:2.8") is None


OWN = (
    "step {step} loss 3.4 lr {lr} gnorm 1.7", "[step {step}/400] loss: 3.4, lr: {lr}",
    "2026-11-28 03:12:07 INFO iter {step}: train loss 3.4 learning_rate={lr}",
    "{step}/400 train_loss: 3.4 lr: {lr}", '{{"step": {step}, "loss": 3.4, "lr": {lr}}}',
    "Epoch 3 | Step {step} | Loss 3.4 | LR {lr}",
)  # fmt: skip


@given(
    form=st.sampled_from(OWN),
    how=st.sampled_from(["{:.2e}", "{:.3e}", "{:.8f}", "{!r}"]),
    rate=st.floats(1.1e-6, 0.9),
    step=st.integers(1, 10**7),
)
def test_a_loop_of_ones_own_says_one_of_two_rates(
    form: str, how: str, rate: float, step: int
) -> None:
    """By the names in its lines, with the precision that it prints."""
    said = own_loop.read(form.format(step=step, lr=how.format(rate)))
    if said is None:  # too few digits are left of it
        assert how == "{:.8f}" or len(repr(rate).partition("e")[0].strip("0.")) < 2
        return
    assert said.step == step and said.either_lr is not None
    assert said.either_lr.agrees(rate)
    assert not said.either_lr.agrees(rate * 1.2) or how == "{:.8f}"


@pytest.mark.parametrize("line", ["step 7 loss 3.4", "lr 3.4e-4", "step 7 lr 0.001", "", "{"])
def test_a_line_without_a_step_or_a_rate_says_nothing(line: str) -> None:
    """Nor does a rate of one digit: it may be in full, or rounded."""
    assert own_loop.read(line) is None


@pytest.mark.parametrize(
    ("steps", "last", "counted"),
    [
        ([140, 141], 140, [141, 142]),  # goes on with the number of the checkpoint
        ([141, 142], 140, [141, 142]),
        ([0, 1, 2, 2, 3], 2, [1, 2, 3, 3, 4]),
        ([1, 2, 3, 4, 3, 4], 2, [1, 2, 3, 4, 3, 4]),
        ([120, 140, 160], 140, [120, 140, 160]),  # every 20 updates
        ([], 140, []),
    ],
)
def test_a_loop_counts_from_one_or_from_zero(
    steps: list[int], last: int, counted: list[int]
) -> None:
    said = own_loop.from_one([LoggedUpdate("", "", step=step) for step in steps], last)
    assert [each.step for each in said] == counted


def test_fairseq2_says_the_rate_of_the_update_itself() -> None:
    head = "2026-01-01 10:00:00 INFO: fairseq2 - Train Metrics (step 1,200) - "
    said = fairseq2.read(head + "NLL Loss: 2.31 | Gradient Norm: 0.8 | Learning Rate: 0.000495831")
    assert said is not None and said.lr is not None and said.lr.agrees(4.9583112e-4)
    assert not said.lr.agrees(4.9585e-4)
    assert told(said) == {"step": 1200, "lr": "0.000495831", "loss": "2.31", "grad_norm": "0.8"}
    groups = fairseq2.read(head + "Loss: nan | Learning Rate: 0.00025, 0.0005 | Loss Scale: 128")
    assert told(groups) == {"step": 1200, "lr": "0.0005", "loss": "nan", "loss_scale": "128"}
    assert fairseq2.read("fairseq2 - Validation Metrics (step 6) - NLL Loss: 2.3") is None


def test_no_line_of_one_trainer_is_taken_for_another() -> None:
    lines = (
        MEGATRON,
        "[Rank 0] step=10, skipped=0, lr=[0.0003], mom=[(0.9, 0.95)]",
        "{'loss': '3.0', 'learning_rate': '0.0002', 'epoch': '0.5'}",
        "INFO - step:  2  loss:  6.90733  grad_norm:  0.1",
        "INFO\t[step=5/100,epoch=1]",
        "iteration: 7 / 100 | consumed_tokens: 1.79K | lr: 9.99e-05 | eta: 0:00:10",
        '| INFO | train_inner | {"num_updates": "3", "lr": "1e-05"}',
        "| INFO | train_inner | epoch 001:      3 / 8 loss=2.6, num_updates=3, lr=1e-05",
        "[batch=5/100]:",
        "step:7 - actor/lr:1e-06",
        "fairseq2 - Train Metrics (step 6) - NLL Loss: 2.3 | Learning Rate: 0.0001",
    )
    readers = (
        megatron, deepspeed, transformers, torchtitan, olmo_core, nanotron, metaseq, metaseq,
        composer, verl, fairseq2,
    )  # fmt: skip
    for i, line in enumerate(lines):
        heard = [reader for reader in readers if reader.read(line) is not None]
        assert {*heard} == {readers[i]}, line
