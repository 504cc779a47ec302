"""NeMo 2: `weights/` saved by Megatron-core's own dist_checkpointing, the rest by the sources.

NeMo does not install beside a present torch. Megatron-core reads what a rollback leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
NAME = "model--val_loss={:.2f}-step={}-consumed_samples={}.0"


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        # Megatron-core asks for the device that it saves from; a CPU has nothing to wait for.
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        yield
    dist.destroy_process_group()


def state(step: int) -> dict[str, Any]:
    """What Lightning's `dump_checkpoint` and MegatronStrategy.save_checkpoint put together."""
    from megatron.core.dist_checkpointing import ShardedTensor

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
    values = torch.full((4, 2), float(step))
    return {
        "epoch": 0, "global_step": step, "pytorch-lightning_version": "2.5.0", "state_dict": {},
        "loops": {}, "callbacks": {}, "optimizer_states": {},
        "lr_schedulers": [schedule.state_dict()],
        "sharded_state_dict": {
            "module.weight": ShardedTensor.from_rank_offsets("module.weight", values)
        },
        "optimizer": [
            {"optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "step": step}]},
             "exp_avg": ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.weight", values)}
        ],
    }  # fmt: skip


def save(folder: Path, step: int) -> None:
    from megatron.core import dist_checkpointing

    (folder / "weights").mkdir(parents=True)
    dist_checkpointing.save(state(step), str(folder / "weights"))
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text("_target_: model\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "log" / "checkpoints"
    for step in (10, 20, 30):
        save(root / NAME.format(1 / step, step, 8 * step), step)
    save(root / f"{NAME.format(1 / 30, 30, 240)}-last", 30)
    return root


def resumes(root: Path) -> Path:
    """The folder that AutoResume takes: of several `*last` the newest by its own time."""
    return max(root.glob("*last"), key=lambda path: path.lstat().st_mtime)


def test_a_rollback_leads_to_the_step(root: Path) -> None:
    from megatron.core import dist_checkpointing

    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("nemo", [10, 20, 30], 30)
    assert look.verify(run, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 20}})
    assert "names no optimizer" in "\n".join(plan.warnings)
    assert "known by its description alone" in "\n".join(plan.warnings)
    assert Run.open(root).steps() == [10, 20]
    weights = resumes(root) / "weights"
    loaded = dist_checkpointing.load(
        {"sharded_state_dict": state(0)["sharded_state_dict"]}, str(weights)
    )
    assert loaded["sharded_state_dict"]["module.weight"].unique().tolist() == [20.0]
    assert dist_checkpointing.load_common_state_dict(str(weights))["global_step"] == 20
    assert loaded["global_step"] == 20
    take_back(root, before)
    assert Run.open(root).latest() == 30


@pytest.mark.parametrize(
    "recipe", [{"set": {"lr": 1e-4}}, {"set": {"beta2": 0.9}}, {"set": {"weight_decay": 0.0}},
               {"reset": ["moments"]}],
)  # fmt: skip
def test_what_is_in_megatrons_form_is_refused(root: Path, recipe: dict[str, Any]) -> None:
    before = snapshot(root)
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(Run.open(root), from_data(recipe))
    assert "keeps no" in refused.value.what or "no optimizer state" in refused.value.what
    assert snapshot(root) == before


def test_a_step_that_is_not_whole_is_not_resumed(root: Path) -> None:
    step = root / NAME.format(1 / 20, 20, 160) / "weights"
    (step / "metadata.json").unlink()
    assert not Run.open(root).complete(20)
    with pytest.raises(SurgeryError, match="incomplete"):
        surgery.plan(Run.open(root), from_data({"rollback": {"to": 20}}))
