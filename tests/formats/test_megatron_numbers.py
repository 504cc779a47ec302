"""Averages, scales, grafts and clipped moments of what megatron-core saved, as it loads them back.

Run by `make test-formats`; without megatron-core they are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import REPO
from tests.support.new_numbers import cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

pytestmark = pytest.mark.formats
pytest.importorskip("megatron.core")

KINDS = {
    "legacy": ["--sharding", "legacy"],
    "legacy-fp16": ["--sharding", "legacy", "--fp16"],
    "legacy-plain": ["--sharding", "legacy", "--no-distributed"],
    "legacy-plain-fp16": ["--sharding", "legacy", "--no-distributed", "--fp16"],
    "fully": ["--sharding", "fully_reshardable", "--fp16"],
    "dist-plain": ["--sharding", "fully_reshardable", "--no-distributed", "--fp16"],
    "dist-plain-fp32": ["--sharding", "fully_reshardable", "--no-distributed"],
    "torch_dcp-fp16": ["--sharding", "torch_dcp", "--no-distributed", "--fp16"],
}
CASES = cases(2, 6, "up.weight")
TRACKER = "latest_checkpointed_iteration.txt"


def megatron(what: str, roots: list[Path], *flags: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_real", what]
    done = subprocess.run(
        [*command, *map(str, roots), *flags],
        cwd=REPO, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.thinned(3)
@pytest.mark.witness(
    "Megatron-LM legacy",
    "average",
    "average --moments average",
    "scale",
    "scale --moments scale",
    "graft moments",
    "graft moments --params",
    "clip_moments",
    by="megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM torch_dist",
    "average",
    "average --moments average",
    "scale",
    "scale --moments scale",
    "graft moments",
    "graft moments --params",
    "clip_moments",
    by="megatron-core",
)
@pytest.mark.witness(
    "Megatron-LM torch_dcp",
    "average",
    "average --moments average",
    "scale",
    "scale --moments scale",
    "graft moments",
    "graft moments --params",
    "clip_moments",
    by="megatron-core",
)
@pytest.mark.parametrize("kind", KINDS)
def test_megatron_loads_what_torch_computes(kind: str, tmp_path: Path) -> None:
    """Steps and results are loaded by one process, which says whose each tensor is."""
    root = tmp_path / "run"
    megatron("save", [root], *KINDS[kind])
    roots = {"2": tmp_path / "at-2", "6": tmp_path / "at-6"}
    for step, copy in roots.items():
        shutil.copytree(root, copy)
        (copy / TRACKER).write_text(step)
    for name, (recipe, _) in CASES.items():
        before = snapshot(root)
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == ()
        roots[name] = tmp_path / name
        shutil.copytree(root, roots[name], ignore=shutil.ignore_patterns(".ckptsurgeon"))
        take_back(root, before)
    megatron("gather", list(roots.values()), *KINDS[kind])
    held = {name: torch.load(copy.with_suffix(".pt")) for name, copy in roots.items()}
    for name, (_, expected) in CASES.items():
        assert len(held[name]) == 6
        same(held[name], expected(held["2"], held["6"]), held["6"])


@pytest.mark.parametrize("sharding", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_buckets_without_names_are_refused(sharding: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    megatron("save", [root], "--sharding", sharding, "--steps", "2", "4")
    for recipe in ({"average": {"last": 2}}, {"scale": {"params": "up", "by": 0.5}}):
        with pytest.raises(SurgeryError, match="which parameters lie in them") as error:
            surgery.plan(Run.open(root), from_data(recipe))
        assert "--dist-ckpt-optim-fully-reshardable" in " ".join(error.value.next)


def test_new_numbers_under_a_manifest_are_refused(tmp_path: Path) -> None:
    """Its sums are of bytes that are computed only when they are written."""
    root = tmp_path / "run"
    flags = ["--sharding", "fully_reshardable", "--verify-integrity", "--steps", "2", "4"]
    megatron("save", [root], *flags)
    with pytest.raises(SurgeryError, match="a sum is asked for"):
        surgery.plan(Run.open(root), from_data({"average": {"last": 2}}))
