"""What a saver remembers of its files: after a rollback it names none that is not in the run.

Lightning's own Trainer trains, saves and cleans up before and after, with the library's picker.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon.run.run import Run
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
BEST = {1: 0.9, 2: 0.5, 3: 0.8, 4: 0.7, 5: 0.6, 6: 0.1, 7: 0.9, 8: 0.2}
"""What the first branch logs at each step: its best are 2, and after the rollback point 6 and 8."""


def fit(
    root: Path,
    stop: int,
    scores: Mapping[int, float],
    *,
    keep: int = 1,
    mode: str = "min",
    last: Any = True,
    others: Path | None = None,
    resume: str | None = None,
) -> Any:
    """A real Trainer to step `stop`. One saver keeps every second step and `last`, another the
    `keep` best by the score that is logged, in a folder of its own if `others` is given."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            score = scores[self.trainer.global_step + 1]
            self.log("score", score if mode == "min" else -score)
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    folder = root / "checkpoints"
    savers = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=last),
        ModelCheckpoint(
            others or folder, "best-{step}", monitor="score", mode=mode, save_top_k=keep,
            every_n_train_steps=2,
        ),
    ]  # fmt: skip
    trainer = lightning.Trainer(
        default_root_dir=root, max_steps=stop, accelerator="cpu", logger=False, callbacks=savers,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    data = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume)
    return trainer


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir() if path.suffix == ".ckpt")


def memory(path: Path, filename: str = "best") -> dict[str, Any]:
    """What the saver of the best remembers in a step, paths by name and scores as numbers."""
    saved = torch.load(path, weights_only=False)["callbacks"]
    (state,) = (item for key, item in saved.items() if ("score" in key) == (filename == "best"))
    scores = {Path(name).name: value.item() for name, value in state["best_k_models"].items()}
    rest = {key: value for key, value in state.items() if key not in ("best_k_models", "dirpath")}
    return {"best_k_models": scores} | {
        key: Path(value).name if key.endswith("path") else value for key, value in rest.items()
    }


def resumes(root: Path) -> int:
    """The step that the library's own rule for `ckpt_path="last"` takes."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.trainer.states import TrainerFn

    trainer = lightning.Trainer(
        default_root_dir=root, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(root / "checkpoints")],
    )  # fmt: skip
    path = trainer._checkpoint_connector._parse_ckpt_path(
        TrainerFn.FITTING, "last", model_provided=True, model_connected=True
    )
    return int(torch.load(path, weights_only=False)["global_step"])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_score_without_a_file_ranks_nothing_any_more(tmp_path: Path, mode: str) -> None:
    """Step 2 was the best up to 4, and left when 6 was better; 6 leaves with the rollback. The best
    of the new branch is saved, although it is worse than 2 was."""
    fit(tmp_path, 8, BEST, mode=mode)
    folder = tmp_path / "checkpoints"
    before = snapshot(folder)
    assert names(tmp_path)[0] == "best-step=6.ckpt"
    assert list(memory(folder / "step=4.ckpt")["best_k_models"]) == ["best-step=2.ckpt"]
    plan = operate(folder, {"rollback": {"to": 4}})
    assert "no longer ranks best-step=2.ckpt" in "\n".join(plan.warnings)
    for name in ("step=4.ckpt", "last.ckpt"):
        held = memory(folder / name)
        assert (held["best_k_models"], held["best_model_path"]) == ({}, "")
        assert (held["kth_best_model_path"], held["best_model_score"]) == ("", None)
    take_back(folder, before)
    operate(folder, {"rollback": {"to": 4}})
    worse = {5: 0.95, 6: 0.9, 7: 0.9, 8: 0.8}
    trainer = fit(tmp_path, 8, worse, mode=mode, resume="last")
    assert names(tmp_path) == [
        "best-step=8.ckpt", "last.ckpt", *(f"step={step}.ckpt" for step in (2, 4, 6, 8))
    ]  # fmt: skip
    best = Path(trainer.checkpoint_callbacks[1].best_model_path)
    assert torch.load(best, weights_only=False)["global_step"] == 8


def test_without_it_the_new_branch_would_have_no_best(tmp_path: Path) -> None:
    """What the surgery is for: the state as it was saved lets a file that is gone be the best."""
    fit(tmp_path, 8, BEST)
    folder = tmp_path / "checkpoints"
    for name in ("best-step=6.ckpt", "step=6.ckpt", "step=8.ckpt", "last.ckpt"):
        (folder / name).unlink()
    worse = {5: 0.95, 6: 0.9, 7: 0.9, 8: 0.8}
    trainer = fit(tmp_path, 8, worse, resume=str(folder / "step=4.ckpt"))
    assert not Path(trainer.checkpoint_callbacks[1].best_model_path).exists()


def test_the_rest_keeps_its_ranks(tmp_path: Path) -> None:
    """Of the two best at step 6 the worse one left when 8 was better than both. Then a saver has
    room for one more, and what it removes is the worst that it has."""
    scores = {**BEST, 2: 0.3, 4: 0.4, 6: 0.5, 8: 0.1}
    fit(tmp_path, 8, scores, keep=2)
    folder = tmp_path / "checkpoints"
    assert names(tmp_path)[:2] == ["best-step=2.ckpt", "best-step=8.ckpt"]
    assert memory(folder / "step=6.ckpt")["kth_best_model_path"] == "best-step=4.ckpt"
    operate(folder, {"rollback": {"to": 6}, "set": {"eps": 1e-6}})
    held = memory(folder / "last.ckpt")
    assert held["best_k_models"] == {"best-step=2.ckpt": pytest.approx(0.3)}
    assert held["best_model_path"] == held["kth_best_model_path"] == "best-step=2.ckpt"
    assert held["best_model_score"] == held["kth_value"] == pytest.approx(0.3)
    fit(tmp_path, 10, {7: 0.9, 8: 0.6, 9: 0.9, 10: 0.5}, keep=2, resume="last")
    assert names(tmp_path)[:2] == ["best-step=10.ckpt", "best-step=2.ckpt"]


def test_the_best_of_what_is_left_is_the_best(tmp_path: Path) -> None:
    """A file that someone removed by hand was the best."""
    fit(tmp_path, 8, {**BEST, 2: 0.3, 4: 0.4, 6: 0.5, 8: 0.6}, keep=-1)
    folder = tmp_path / "checkpoints"
    (folder / "best-step=2.ckpt").unlink()
    operate(folder, {"rollback": {"to": 6}})
    held = memory(folder / "best-step=6.ckpt")
    assert list(held["best_k_models"]) == ["best-step=4.ckpt", "best-step=6.ckpt"]
    assert held["best_model_path"] == "best-step=4.ckpt"
    assert held["best_model_score"] == pytest.approx(0.4)
    assert held["kth_best_model_path"] == "best-step=6.ckpt"
    operate(folder, {"rollback": {"to": 4}})
    assert list(memory(folder / "best-step=4.ckpt")["best_k_models"]) == ["best-step=4.ckpt"]


def test_the_copy_that_is_resumed_is_the_savers_last(tmp_path: Path) -> None:
    """The first step of a run knows of no `last` yet; unless it does, the saver would begin
    `last-v1.ckpt` beside the old one."""
    fit(tmp_path, 6, BEST)
    folder = tmp_path / "checkpoints"
    assert memory(folder / "step=2.ckpt", "last")["last_model_path"] == ""
    operate(folder, {"rollback": {"to": 2}, "reset": ["moments"]})
    fit(tmp_path, 4, BEST, resume="last")
    assert [name for name in names(tmp_path) if name.startswith("last")] == ["last.ckpt"]
    assert resumes(tmp_path) == 4


def test_each_last_leads_to_the_step(tmp_path: Path) -> None:
    """`last` is picked by its time; an undo brings the times back."""
    fit(tmp_path, 6, BEST)
    folder = tmp_path / "checkpoints"
    (folder / "last.ckpt").rename(folder / "last-v1.ckpt")
    shutil.copy(folder / "step=4.ckpt", folder / "last.ckpt")
    os.utime(folder / "last.ckpt", (1, 1))
    assert resumes(tmp_path) == 6
    before = snapshot(folder)
    operate(folder, {"rollback": {"to": 2}, "set": {"beta2": 0.9}})
    assert resumes(tmp_path) == Run.open(folder).latest() == 2
    take_back(folder, before)
    assert resumes(tmp_path) == Run.open(folder).latest() == 6


def test_a_saver_of_another_folder_is_named(tmp_path: Path) -> None:
    fit(tmp_path, 8, BEST, others=tmp_path / "best")
    plan = operate(tmp_path / "checkpoints", {"rollback": {"to": 4}})
    (told,) = (text for text in plan.warnings if "ModelCheckpoint" in text)
    assert f"saves into {tmp_path / 'best'}, which this surgery leaves alone" in told
