"""Runs of fairseq's own command line, and what surgeries say of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import run_module
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot

NEEDED = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not (beside("fairseq") / "omegaconf").is_dir() or sys.version_info >= (3, 12),
        reason="make test-formats installs fairseq, for Python 3.11 and older",
    ),
]
Made = dict[int, dict[str, Any]]
PEAK, WARMUP, TOTAL = 1e-3, 2, 100
MODEL = """. --task rows --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16
    --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 32
    --decoder-attention-heads 2 --share-decoder-input-output-embed --tokens-per-sample 8
    --dropout 0.1 --criterion cross_entropy --batch-size 4 --num-workers 0 --seed 7 --cpu
    --clip-norm 1.0 --optimizer adam --weight-decay 0.1 --log-format json --log-interval 1
    --save-interval-updates 2"""
SCHEDULE = f"""--lr {PEAK} --lr-scheduler polynomial_decay --warmup-updates {WARMUP}
    --total-num-update {TOTAL}"""
HALF = "--memory-efficient-fp16 --fp16-init-scale 4"
SETTINGS = {"beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}


def train(
    root: Path,
    stop: int,
    words: str = "",
    *,
    schedule: str = SCHEDULE,
    ranks: int = 1,
    log: Path | None = None,
    more: Sequence[str] = (),
) -> Made:
    """To update `stop`, from where fairseq resumes: what each one used. `log` gets what it says,
    and `more` are arguments that may be empty."""
    done = run_module(
        "tests.support.fairseq_trainer", *f"{MODEL} {schedule}".split(),
        "--adam-betas", "(0.9, 0.95)", "--save-dir", root, "--max-update", stop, *words.split(),
        *more,
        ranks=ranks, environment={"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    return {int(update): used for update, used in json.loads(line).items()}


def rate(
    now: int, peak: float = PEAK, warmup: int = WARMUP, total: int = TOTAL, end: float = 0
) -> float:
    """What polynomial_decay makes of so many updates."""
    return end + (peak - end) * (1 - (now - warmup) / (total - warmup))


def names(root: Path) -> set[str]:
    return {path.name for path in root.glob("*.pt")}


def document(root: Path, name: str) -> dict[str, Any]:
    return dict(torch.load(root / name, weights_only=False))


def refused(root: Path, recipe: dict[str, Any]) -> str:
    """What a refusal says to do."""
    before = snapshot(root)
    with pytest.raises(SurgeryError) as error:
        surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
    return str(error.value.next[0])


def flags(hint: str) -> str:
    """Those that a hint names, with their values."""
    return " ".join(re.findall(r"--\S+ \S+", hint))


def twin(root: Path) -> Path:
    shutil.rmtree(root.with_name("twin"), ignore_errors=True)
    return Path(shutil.copytree(root, root.with_name("twin")))
