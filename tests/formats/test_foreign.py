"""What another library than torch saved is refused by the library's name, whoever asks first."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptsurgeon.cli import app
from tests.support.snapshot import snapshot
from tests.support.tiny_run import GROUP, write_torch_file


def stable_baselines(root: Path) -> None:
    """`save_to_zip_file` of Stable-Baselines3 2.9.2."""
    (root / "models").mkdir(parents=True)
    for step in (64, 128):
        with zipfile.ZipFile(root / "models" / f"rl_model_{step}_steps.zip", "w") as archive:
            for name in ("data", "pytorch_variables.pth", "policy.pth", "policy.optimizer.pth"):
                archive.writestr(name, "{}")


def llm_c(root: Path) -> None:
    """`write_checkpoint` of train_gpt2.cu in karpathy/llm.c at f1e2ace."""
    root.mkdir(parents=True)
    for step in (10, 20):
        for name, magic in (("model_{:08d}.bin", 20240326), ("state_{:08d}_00000.bin", 20240527)):
            header = magic.to_bytes(4, "little") + bytes(1020)
            (root / name.format(step)).write_bytes(header + bytes(4000))
        (root / f"DONE_{step:08d}").touch()


def keras(root: Path) -> None:
    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "model_01.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")


def keras_weights(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "cp-0001.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


MADE = {
    "Stable-Baselines3": stable_baselines, "llm.c": llm_c, "Keras": keras, "Keras ": keras_weights,
}  # fmt: skip


@pytest.mark.parametrize("library", MADE)
@pytest.mark.parametrize("words", [("status",), ("set", "lr=1e-4", "--yes"), ("draft-format",)])
def test_a_foreign_step_is_named(tmp_path: Path, library: str, words: tuple[str, ...]) -> None:
    root = tmp_path / "run"
    MADE[library](root)
    before = snapshot(root)
    told = CliRunner().invoke(app, [*words, "-C", str(root)])
    if "draft-format" in told.stderr:  # as its names are those of a known kind of step
        told = CliRunner().invoke(app, ["draft-format", "-C", str(root)])
    what, untouched, then = told.stderr.splitlines()
    assert told.exit_code == 2 and f"was saved by {library.strip()}" in what
    assert "exactly as it was" in untouched and "RUN" not in then
    assert snapshot(root) == before


def test_ranks_in_the_names_of_picotron_are_counted(tmp_path: Path) -> None:
    """`CheckpointManager` of huggingface/picotron at 59714b1: rank and world size in one word."""
    root = tmp_path / "run"
    adam = {"state": {0: {"step": 2.0}}, "param_groups": [{**GROUP, "params": [0]}]}
    for step in (2, 4):
        (root / str(step)).mkdir(parents=True)
        for rank in (0, 1):
            name = f"weights_tp_rank_world_size={rank}_2_pp_rank_world_size=0_1.pth"
            write_torch_file(root / str(step) / name, {"optimizer": adam, "trained_steps": step})
    page = tmp_path / "own.yaml"
    drafted = CliRunner().invoke(app, ["draft-format", "-C", str(root), "-o", str(page)])
    assert drafted.exit_code == 0
    (root / "4" / "weights_tp_rank_world_size=1_2_pp_rank_world_size=0_1.pth").unlink()
    said = CliRunner().invoke(app, ["--format", str(page), "status", "-C", str(root)])
    assert "2 ranks" in said.stdout and "incomplete: 4" in said.stdout
