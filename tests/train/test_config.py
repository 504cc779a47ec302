"""The config: defaults, overrides, refusals, and the file that a run keeps of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.config import RUN_CONFIG, dump_config, load_config
from train.errors import UsageError

CONFIGS = Path(__file__).parent.parent.parent / "train" / "configs"
PATHS = ["save=/tmp/run", "data=/tmp/data"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    assert load_config(path, PATHS).save == "/tmp/run"


def config(tmp_path: Path, text: str, *overrides: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    load_config(path, [*PATHS, *overrides])
    return path


def test_overrides_win_and_exponents_are_numbers(tmp_path: Path) -> None:
    path = config(tmp_path, "lr: 3e-5\nadam_beta1: 0.8\n")
    loaded = load_config(path, [*PATHS, "adam_beta1=0", "rampup_batch_size=[4,4,32]"])
    assert (loaded.lr, loaded.adam_beta1, loaded.rampup_batch_size) == (3e-5, 0.0, [4, 4, 32])


@pytest.mark.parametrize("name", ["null", "small_init"])
def test_the_init_of_an_older_run_is_the_default_one(tmp_path: Path, name: str) -> None:
    path = config(tmp_path, f"init_method_std: {name}")
    assert load_config(path, PATHS).init_std == (2 / (5 * 32)) ** 0.5


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = config(tmp_path, "lr: 1")
    odd = "/tmp/it's a #run: [1]"
    assert load_config(path, ["data=/tmp/data", f"save={odd}"]).save == odd


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        ("learning_rate: 1", "lr=1", "learning_rate"),
        ("lr: 1", "leraning_rate=1", "leraning_rate"),
        ("lr: fast", "seed=1", "fast"),
        ("- lr", "seed=1", "not a mapping"),
        ("lr: 1", "seed", "not KEY=VALUE"),
        ("lr: 1", "adam_beta2=1", "adam_beta2 is 1.0; it must be in"),
        ("lr: 1", "min_lr=2", "min_lr is 2.0; it must be at most lr 1.0"),
        ("lr: 1", "poison=[9,3]", "1 <= a <= b"),
        ("lr: 1", "zero_stage=4", "zero_stage is 4"),
        ("lr: 1", "lr_decay_style=step", "linear or cosine or 1-sqrt or WSD or constant"),
        ("lr: 1", "keep_last=0", "keep_last is 0"),
        ("lr: 1", "eval_interval=5", "split is 1,0,0"),
        ("lr: 1", "split=9", "three shares"),
        ("lr: 1", "curriculum.schedule_type=custom", "curriculum.schedule_type is custom"),
        ("lr: 1", "curriculum.min_length=8", "min_length"),
        ("hidden_size: 33", "seed=1", "multiple of num_attention_heads"),
        (
            "lr: 1",
            "init_method_std=xavier",
            "a finite number above 0 or small_init or mt_nlg or fan_in",
        ),
        ("lr: 1", "init_method_std=-0.5", "init_method_std is -0.5"),
        ("lr: 1", "ffn_hidden_size=0", "ffn_hidden_size is 0"),
        ("lr: 1", "hidden_dropout=1", "hidden_dropout is 1.0; it must be in"),
        ("lr: 1", "initial_loss_scale=3e4", "a power of 2, at least min_loss_scale 1"),
        ("min_loss_scale: 8", "initial_loss_scale=4", "at least min_loss_scale 8"),
        ("lr: 1", "loss_scale=0", "at least 1, or null for the dynamic one"),
        ("lr: 1", "gradient_predivide_factor=0.5", "gradient_predivide_factor is 0.5"),
        ("lr: 1", "skip_grad_norm=-1", "skip_grad_norm is -1.0"),
        ("lr: 1", "optimizer=adam", "adamw or sgdw or lamb or adamw8bit"),
        ("optimizer: lamb", "zero_stage=3", "lamb with zero_stage 3"),
        ("lr: 1", "attention=flash", "sdpa or plain or stable"),
        ("lr: 1", "activation_fn=swiglu", "gelu or relu"),
        ("lr: 1", "reset_attention_mask=true", "eod_token is None; it must be the token that ends"),
        ("reset_position_ids: true", "position_embedding_type=rope", "eod_token is None"),
        ("{reset_position_ids: true, eod_token: 0}", "position_embedding_type=alibi", "with alibi"),
        ("{reset_attention_mask: true, eod_token: 0}", "pipeline_model_parallel_size=2", "stages"),
        ("lr: 1", "position_init=rotary", "gaussian or sinusoidal"),
        ("lr_warmup_samples: 900", "lr_decay_samples=900", "below lr_decay_samples 900"),
        ("lr: 1", "lr_decay_style=WSD", "lr_wsd_decay_samples is None with lr_decay_style WSD"),
        (
            "lr: 1",
            "lr_wsd_decay_samples=8",
            "8 with lr_decay_style linear; it must be set with WSD",
        ),
        ("lr_decay_style: WSD", "lr_wsd_decay_samples=900", "in 1 … 800, the samples from the"),
        ("lr: 1", "lr_wsd_decay_style=1-sqrt", "exponential or linear or cosine or minus_sqrt"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused(
    tmp_path: Path, text: str, override: str, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        config(tmp_path, text, override)
    assert says in caught.value.what


def test_paths_that_are_not_set_are_named(tmp_path: Path) -> None:
    path = config(tmp_path, "lr: 1")
    with pytest.raises(UsageError, match="data and save not set"):
        load_config(path)


def test_a_runs_own_config_trains_in_the_folder_it_lies_in(tmp_path: Path) -> None:
    path = config(tmp_path, "lr: 0.5")
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / RUN_CONFIG).write_text(dump_config(load_config(path, PATHS)))
    again = load_config(moved / RUN_CONFIG)
    assert (again.save, again.data, again.lr) == (str(moved), "/tmp/data", 0.5)
    assert load_config(moved / RUN_CONFIG, ["save=/tmp/other"]).save == "/tmp/other"
