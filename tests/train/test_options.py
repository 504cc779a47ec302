"""Every option of model and numerics trains, saves and resumes with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptsurgeon import Hyperparameters, Recipe, Reset, Rollback, Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train.errors import TrainError

OPTIONS = {
    "mt_nlg": ["init_method_std=mt_nlg"],
    "embed_layernorm": ["embed_layernorm=true"],
    "stable": ["attention=stable"],
    "plain-dropout": ["attention=plain", "attention_dropout=0.1"],
    "relu": ["activation_fn=relu"],
    "sinusoidal": ["position_init=sinusoidal"],
    "alibi": ["position_embedding_type=alibi"],
    "alibi-plain": ["position_embedding_type=alibi", "attention=plain"],
    "rope": ["position_embedding_type=rope", "rotary_base=500000.0"],
    "documents": ["reset_attention_mask=true", "reset_position_ids=true", "eod_token=0"],
    "documents-alibi": [
        "reset_attention_mask=true",
        "position_embedding_type=alibi",
        "eod_token=0",
        "zero_stage=2",
    ],
    "rms": ["normalization=RMSNorm"],
    "swiglu": ["swiglu=true", "add_bias_linear=false"],
    "normformer": ["normformer=true"],
    "grouped": ["num_query_groups=1"],
    "scaled": ["scale_embeddings=true", "embedding_dropout=0.1"],
    "dropout": ["hidden_dropout=0.1", "attention_dropout=0.1"],
    "ffn": ["ffn_hidden_size=48"],
    "sgdw": ["optimizer=sgdw"],
    "sgdw-no-momentum": ["optimizer=sgdw", "sgd_momentum=0.0"],
    "sgdw-zero0": ["optimizer=sgdw", "zero_stage=0"],
    "sgdw-zero2": ["optimizer=sgdw", "zero_stage=2"],
    "lamb": ["optimizer=lamb"],
    "lamb-zero0": ["optimizer=lamb", "zero_stage=0"],
    "lamb-zero2": ["optimizer=lamb", "zero_stage=2"],
    "sgdw-bf16-zero0": ["optimizer=sgdw", "dtype=bf16", "zero_stage=0"],
    "lamb-bf16": ["optimizer=lamb", "dtype=bf16"],
    "lamb-bf16-zero0": ["optimizer=lamb", "dtype=bf16", "zero_stage=0"],
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("overrides", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.long
def test_a_run_resumes_bit_for_bit(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    run = tmp_path / "run"
    whole = in_process.train(run, *overrides)
    saved = torch.load(run / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in ("init_method_std", "dtype"):
            assert str(getattr(saved["args"], key)).lower() == value.lower()
    step_back(run, 4)
    assert in_process.train(run, *overrides) == {i: whole[i] for i in (5, 6)}


def test_dropout_of_another_seed_is_another_run(in_process: InProcess, tmp_path: Path) -> None:
    overrides = ["hidden_dropout=0.1", "train_iters=2"]
    one = in_process.train(tmp_path / "one", *overrides)
    dropped = in_process.train(tmp_path / "two", *overrides, "hidden_dropout=0.2")
    assert one[1] != dropped[1]


@pytest.mark.parametrize(
    "override",
    [
        "ffn_hidden_size=48",
        "embed_layernorm=true",
        "untie_embeddings=true",
        "zero_stage=0",
        "swiglu=true",
        "position_embedding_type=rope",
    ],
)
@pytest.mark.long
def test_another_shape_is_refused_on_resume(
    in_process: InProcess, tmp_path: Path, override: str
) -> None:
    run, key = tmp_path / "run", override.partition("=")[0]
    in_process.train(run, "train_iters=2")
    with pytest.raises(TrainError, match=f"{key} is .*, the config says"):
        in_process.prepare(run, override)


def test_what_a_restart_may_change_is_told(in_process: InProcess, tmp_path: Path) -> None:
    """OPT's run 11.10 changed GELU to ReLU and the attention at a restart."""
    from train.trainer import differences

    run = tmp_path / "run"
    in_process.train(run, "train_iters=2")
    resumed = in_process.prepare(run, "activation_fn=relu", "attention=stable")
    assert differences(resumed) == [
        "activation_fn: config relu, checkpoint gelu: the config wins",
        "attention: config stable, checkpoint sdpa: the config wins",
    ]


def test_the_parameters_are_told_after_the_first_line(
    in_process: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.train(tmp_path / "run", "train_iters=1", "ffn_hidden_size=48")
    assert in_process.said[1].startswith(" parameters: ")
    assert "ffn_hidden_size is 48, not 4 x hidden_size = 128" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("optimizer", "recipe"),
    [
        ("sgdw", Recipe(Rollback(to=4), Hyperparameters(lr=5e-4, weight_decay=0.3))),
        (
            "lamb",
            Recipe(Rollback(to=4), Hyperparameters(beta2=0.9), Reset(reset=["moments"])),
        ),
    ],
)
@pytest.mark.long
def test_a_surgery_on_another_optimizer_keeps_its_promise(
    in_process: InProcess, tmp_path: Path, optimizer: str, recipe: Recipe, stage: int
) -> None:
    run, overrides = tmp_path / "run", [f"optimizer={optimizer}", f"zero_stage={stage}"]
    in_process.train(run, *overrides)
    wanted = plan(Run.open(run), recipe)
    surgery.apply(Run.open(run), wanted)
    assert wanted.promise is not None
    assert (wanted.promise.betas is None) == (optimizer == "sgdw")
    assert compare(wanted.promise, in_process.resumed_line(run, *overrides)) == []
    assert sorted(in_process.train(run, *overrides)) == [5, 6]
