"""Each one-line command is the recipe that its flags stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.operations.events import TensorBoard
from ckptsurgeon.recipe.file import load, to_data
from tests.cli.conftest import Surgeon

CASES: dict[str, dict[str, Any]] = {
    "rollback --to 6210": {"rollback": {"to": 6210}},
    "rollback --to 6210 --set lr=3e-5 --set eps=1e-8 --reset moments --reset loss-scale "
    "--skip 6900-7010 --skip 7100 --keep-tb glitch --why spike": {
        "why": "spike",
        "rollback": {"to": 6210},
        "set": {"lr": 3e-5, "eps": 1e-8},
        "reset": ["moments", "loss_scale"],
        "skip": ["6900-7010", "7100"],
        "tensorboard": {"keep_as": "glitch"},
    },
    "rollback --to 6210 --no-truncate": {
        "rollback": {"to": 6210},
        "tensorboard": {"truncate": False},
    },
    "rollback --to 6210 --no-keep-tb": {"rollback": {"to": 6210}, "tensorboard": {"keep": False}},
    "set-lr 3e-5": {"set": {"lr": 3e-5}},
    "set-lr 3e-5 --min-lr 3e-6 --warmup 1e6 --decay 2000000 --decay-style cosine": {
        "set": {
            "lr": 3e-5,
            "min_lr": 3e-6,
            "warmup": 1_000_000,
            "decay": 2_000_000,
            "decay_style": "cosine",
        }
    },
    "set-lr --scale 0.5": {"set": {"lr": "0.5x"}},
    "set-lr --scale 0.5x": {"set": {"lr": "0.5x"}},
    "reset moments,loss-scale": {"reset": ["moments", "loss_scale"]},
    "set-lr 0.5x": {"set": {"lr": "0.5x"}},
    "set-lr 3e-4 --restart --warmup 500 --decay 2e4 --decay-style cosine": {
        "rewarm_schedule": {"to": 3e-4, "warmup": 500, "decay": 20_000, "shape": "cosine"}
    },
    "average --last 3": {"average": {"last": 3}},
    "average 6000 6100 --moments average": {
        "average": {"steps": ["6000", "6100"], "moments": "average"}
    },
    "graft moments --from 6100 --only exp_avg --params norm": {
        "graft": {"step": 6100, "only": "exp_avg", "params": "norm"}
    },
    "clip-moments --above 100 --params norm": {"clip_moments": {"above": 100.0, "params": "norm"}},
    "clip-moments --percentile 99.9": {"clip_moments": {"percentile": 99.9}},
    "scale query_key_value --by 0.9 --moments scale": {
        "scale": {"params": "query_key_value", "by": 0.9, "moments": "scale"}
    },
    "scale --qk-clip 100": {"scale": {"qk_clip": {"threshold": 100.0}}},
    "cooldown 10%": {"cooldown": {"percent": 10.0}},
    "cooldown 2000 --shape 1-sqrt --to 1e-6": {
        "cooldown": {"steps": 2000, "shape": "1-sqrt", "to": 1e-6}
    },
    "set-lr --min-lr 1e-6": {"set": {"min_lr": 1e-6}},
    "set beta2=0.95 set.clip_grad=0.3": {"set": {"beta2": 0.95, "clip_grad": 0.3}},
    "reset moments loss-scale": {"reset": ["moments", "loss_scale"]},
    "reset moments --rewarm 100": {"reset": ["moments"], "rewarm": {"iterations": 100}},
    "rollback --to 6210 --rewarm-ramp 500": {
        "rollback": {"to": 6210},
        "rewarm": {"iterations": 500, "kind": "ramp"},
    },
    "skip 5-9 12": {"skip": ["5-9", "12"]},
    "skip --clear": {"clear_skip": True},
    "skip 5-9 --clear": {"skip": ["5-9"], "clear_skip": True},
    "repair-latest": {"repair_latest": {}},
    "repair-latest --to 6": {"repair_latest": {"to": 6}},
    "truncate-tb-events --after 6": {"tensorboard": {"after": 6}},
    "truncate-tb-events --after 6 --keep-tb old": {"tensorboard": {"after": 6, "keep_as": "old"}},
    "truncate-logs --after 6": {"logs": {"after": 6}},
    "truncate-logs --after 6 --no-keep-tb": {"logs": {"after": 6}, "tensorboard": {"keep": False}},
    "rename-logs a b/a": {"logs": {"rename": {"a": "b/a"}}},
    "rename-tb-events a b/a": {"tensorboard": {"rename": {"a": "b/a"}}},
    "rename-tb-events a b b a": {"tensorboard": {"rename": {"a": "b", "b": "a"}}},
    "rename-tb-events a.* b --regex --allow-merge": {
        "tensorboard": {"rename": {"a.*": "b"}, "regex": True, "allow_merge": True}
    },
}


@pytest.mark.parametrize("line", CASES)
def test_a_one_liner_is_a_recipe(surgeon: Surgeon, tmp_path: Path, line: str) -> None:
    result = surgeon(*line.split(), "--print-recipe")
    assert (result.exit_code, result.stderr) == (0, "")
    file = tmp_path / "recipe.yaml"
    file.write_text(result.stdout, "utf-8")
    assert to_data(load(file)) == CASES[line]


@pytest.mark.parametrize(
    "text",
    [
        "tensorboard:\n  rename:\n    lm loss: lm-loss-training/lm loss\n    grad-norm: g/norm\n",
        "lm loss: lm-loss-training/lm loss\ngrad-norm: g/norm\n",
    ],
)
def test_a_map_is_a_recipe_or_plain_pairs(surgeon: Surgeon, tmp_path: Path, text: str) -> None:
    pairs = tmp_path / "tags.yaml"
    pairs.write_text(text)
    result = surgeon("rename-tb-events", "--map", pairs, "--print-recipe")
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert load(printed)[TensorBoard].rename == {
        "lm loss": "lm-loss-training/lm loss",
        "grad-norm": "g/norm",
    }


def test_a_reason_may_hold_any_text(surgeon: Surgeon, tmp_path: Path) -> None:
    why = "lm loss 6.4 → 14: back # to 'the' last good step"
    result = surgeon("set", "seed=43", "--why", why, "--print-recipe")
    file = tmp_path / "recipe.yaml"
    file.write_text(result.stdout, "utf-8")
    assert load(file).why == why
