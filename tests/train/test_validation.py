"""Validation, curriculum and batch-size ramp-up: logged where Megatron logs, resumed exactly."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.launch import launch
from tests.support.trained_run import losses, step_back
from train.checkpoint import read_client_state
from train.config import load_config
from train.data import split_documents
from train.errors import TrainError
from train.grid import Grid
from train.indexed_dataset import IndexedDataset, IndexedDatasetWriter

VALIDATION = "lm-loss-validation/lm loss validation"
VALUE = re.compile(r"^ validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL")


def validations(stdout: str) -> dict[int, str]:
    found = (VALUE.match(line) for line in stdout.splitlines())
    return {int(match[1]): match[2] for match in found if match}


def test_the_split_cuts_no_document_and_no_part_overlaps(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", 256) as writer:
        for document in range(10):
            writer.add_document(np.full(document + 1, document))
    dataset = IndexedDataset(tmp_path / "data")
    parts = [set(dataset.tokens[part].tolist()) for part in split_documents(dataset, [8, 1, 1])]
    assert parts == [set(range(8)), {8}, {9}]
    whole, *rest = split_documents(dataset, [1, 0, 0])
    assert len(dataset.tokens[whole]) == 55
    assert all(len(dataset.tokens[part]) == 0 for part in rest)


GROWING = (
    "--config=train/configs/tiny.yaml", "--from-scratch", "train_iters=8", "save_interval=4",
    "micro_batch_size=2", "rampup_batch_size=[4,4,20]", "eval_interval=2", "eval_iters=2",
    "split='9,1,0'", "curriculum.min_difficulty=8", "curriculum.total_curriculum_step=8",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("zero_stage=3",),
        ("pipeline_model_parallel_size=2",),
        ("tensor_model_parallel_size=2",),
        ("dtype=bf16", "zero_stage=1"),
    ],
    ids=" ".join,
)
def test_every_way_to_share_the_model_logs_the_same(
    tmp_path: Path, corpus: Path, more: tuple[str, ...]
) -> None:
    dtype = [word for word in more if word.startswith("dtype")]
    one = launch(*GROWING, f"save={tmp_path / 'one'}", f"data={corpus}", *dtype)
    two = launch(*GROWING, f"save={tmp_path / 'two'}", f"data={corpus}", *more, ranks=2)
    accuracy = 2e-2 if dtype else 1e-5
    for read in (losses, validations):
        theirs, ours = read(two.stdout), read(one.stdout)
        assert theirs.keys() == ours.keys() and ours
        for iteration, loss in ours.items():
            assert float(theirs[iteration]) == pytest.approx(float(loss), rel=accuracy)


@pytest.mark.long
def test_a_resumed_run_validates_and_grows_as_the_uninterrupted_one(
    tmp_path: Path, corpus: Path
) -> None:
    run = tmp_path / "run"
    done = launch(*GROWING, f"save={run}", f"data={corpus}")
    lengths = [8, 8, 16, 16, 16, 24, 24, 32]
    sizes = [4, 4, 4, 4, 4, 8, 8, 8]  # from sample 20 on the batch is full
    samples = np.cumsum(sizes).tolist()
    tokens = np.cumsum(np.array(sizes) * lengths).tolist()
    assert sorted(validations(done.stdout)) == [2, 4, 6, 8]

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    series = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    grown = [(e.step, int(e.tensor_proto.float_val[0])) for e in series["curriculum_seqlen"]]
    assert grown == list(enumerate(lengths, 1))
    assert [e.step for e in series["learning-rate/learning-rate vs tokens"]] == tokens
    for tag in (VALIDATION, f"{VALIDATION} ppl"):
        assert [e.step for e in series[tag]] == [2, 4, 6, 8]
        assert [e.step for e in series[f"{tag} vs samples"]] == samples[1::2]
        assert [e.step for e in series[f"{tag} vs tokens"]] == tokens[1::2]
        assert len(series[f"{tag} vs gigaflos (without embeddings)"]) == 4
    state = torch.load(run / "global_step8/mp_rank_00_model_states.pt", weights_only=False)
    assert state["tokens"] == state["lr_scheduler"]["num_tokens"] == tokens[-1]
    assert state["args"].consumed_train_samples == samples[-1]
    assert state["args"].consumed_valid_samples == 4 * 2 * 8
    assert state["args"].split == "9,1,0"

    step_back(run, 4)
    again = launch(
        "--config", str(run / "train.yaml"), "curriculum.min_difficulty=16", "log_interval=2"
    )
    assert "curriculum: config Curriculum(min_difficulty=16" in again.stderr
    assert validations(again.stdout) == {i: validations(done.stdout)[i] for i in (6, 8)}
    one = {i: float(loss) for i, loss in losses(done.stdout).items()}
    two = {i: float(loss) for i, loss in losses(again.stdout).items()}
    assert sorted(two) == [6, 8]  # the mean over the interval
    assert all(abs(two[i] - (one[i - 1] + one[i]) / 2) < 2e-6 for i in two)

    config = load_config(run / "train.yaml", ["split='8,2,0'"])
    with pytest.raises(TrainError, match=r"split is 9,1,0, the config says 8,2,0"):
        read_client_state(run / "global_step8", config, Grid())
