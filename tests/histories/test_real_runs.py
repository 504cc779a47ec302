"""Surgeries of the chronicles on real runs: the poisoned data, the 23 renamed tags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Run, look
from ckptsurgeon.files.plain_yaml import read
from ckptsurgeon.launch.relaunch import compare
from tests.conftest import Trained
from tests.support.launch import REPO, first_line, launch
from tests.support.snapshot import snapshot

LOSS = re.compile(r"^ iteration +(\d+)/.* lm loss: (\S+) ", re.MULTILINE)
MAP = REPO / "recipes" / "tags" / "bigscience-23.yaml"


def surgeon(root: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *words, "-C", str(root), "--yes", "--no-tb-note"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(printed)}


@pytest.mark.slow
def test_a_poisoned_range_is_skipped_and_the_run_never_meets_it(
    tmp_path: Path, corpus: Path
) -> None:
    root = tmp_path / "run"
    config = ["train_iters=180", "log_interval=1", f"save={root}", f"data={corpus}"]
    poisoned = losses(
        launch("--config=train/configs/poison.yaml", "--from-scratch", *config).stdout
    )
    assert max(poisoned[step] for step in range(150, 171)) > 8

    printed = surgeon(root, "apply", "recipes/roll-back-and-skip.yaml", "--relaunch")
    skipped = losses(printed)
    assert sorted(skipped) == [*range(141, 150), *range(171, 181)]
    assert max(skipped.values()) < 4
    assert "iterations 150-170 are skipped" in printed


def tags(root: Path) -> set[str]:
    log = EventAccumulator(str(root / "tensorboard"), size_guidance={"tensors": 0})
    log.Reload()
    return set(log.Tags()["tensors"])


@pytest.mark.long
def test_the_23_pairs_rename_there_and_back_byte_for_byte(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    before, now = snapshot(root), tags(root)
    pairs = read(MAP)
    assert len(pairs) == 23
    logged = {old: new for old, new in pairs.items() if new in now}
    assert len(logged) >= 8
    back = tmp_path / "back.yaml"
    back.write_text("".join(f"{new!r}: {old!r}\n" for old, new in logged.items()))

    surgeon(root, "rename-tb-events", "--map", str(back))
    assert tags(root) == (now - set(logged.values())) | set(logged)

    printed = " ".join(surgeon(root, "rename-tb-events", "--map", str(MAP)).split())
    assert tags(root) == now
    after = snapshot(root)
    assert {name: (kind, content) for name, (kind, content, _) in after.items()} == {
        name: (kind, content) for name, (kind, content, _) in before.items()
    }
    for old in logged:
        assert f"{old} → {pairs[old]}: 8 events" in printed
    assert compare(look.inspect(Run.open(root)).promise, first_line(root)) == []


@pytest.mark.parametrize("path", sorted((REPO / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_says_why_and_is_found_by_its_name(path: Path) -> None:
    recipe = read(path)
    assert recipe.get("why") or recipe.get("name")
    assert re.fullmatch(r"[a-z0-9-]+", path.stem)
