"""Lightning: its own Trainer writes plain `.ckpt` files, and resumes from the edited ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.advise.advice import judge
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.loss_tail import loss_tail
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.sparkline import headline
from ckptsurgeon.surgery.export import export
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
PEAK = 1e-3
MOMENTS = ("exp_avg", "exp_avg_sq")


def fit(root: Path, steps: int, *, last: Any = True, resume: str | None = None) -> list[Any]:
    """What the first optimizer holds before each update, made by a real Trainer that saves every 2
    steps into `root/checkpoints`."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[Any] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            adam = torch.optim.AdamW(self.parameters(), lr=PEAK, weight_decay=0.1)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40, eta_min=1e-5)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            group = optimizer.param_groups[0]
            state = optimizer.state.get(group["params"][0], {})
            held = [optimizer.state.get(p, {}) for p in group["params"]]
            seen.append(
                {"weights": {n: p.detach().clone() for n, p in self.named_parameters()}}
                | {kind: [s[kind].clone() for s in held if s] for kind in MOMENTS}
                | {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                | {"step": self.trainer.global_step}
                | {"adam": int(state["step"]) if state else 0}
                | {"moment": state["exp_avg"].abs().sum().item() if state else 0.0}
            )

    torch.manual_seed(0)
    data = torch.rand(256, 4, generator=torch.Generator().manual_seed(1))
    saver = ModelCheckpoint(
        dirpath=root / "checkpoints", every_n_train_steps=2, save_top_k=-1, save_last=last
    )
    trainer = lightning.Trainer(
        default_root_dir=root, max_steps=steps, accelerator="cpu", logger=False,
        callbacks=[saver], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume)
    return seen


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    made: dict[Any, Path] = {}

    def make(last: Any) -> Path:
        if last not in made:
            made[last] = tmp_path_factory.mktemp("lightning") / "run"
            fit(made[last], 8, last=last)
        return made[last]

    return make


@pytest.fixture
def root(original: Callable[[Any], Path], tmp_path: Path) -> Path:
    return shutil.copytree(original(True), tmp_path / "run")


def operate(folder: Path, **recipe: Any) -> Any:
    run = Run.open(folder)
    plan = surgery.plan(run, from_data(recipe))
    surgery.apply(run, plan)
    return plan.promise


RECIPES: dict[str, dict[str, Any]] = {
    "nothing but the step": {},
    "lr": {"set": {"lr": 3e-4}},
    "the rest": {"set": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.02}},
    "moments": {"reset": ["moments"]},
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("last", [True, "link"])
def test_the_trainer_resumes_at_the_promise(
    original: Callable[[Any], Path], tmp_path: Path, name: str, last: Any
) -> None:
    root = shutil.copytree(original(last), tmp_path / "run", symlinks=True)
    if last == "link":  # the library's links are absolute
        link = root / "checkpoints" / "last.ckpt"
        link.unlink()
        link.symlink_to("epoch=0-step=8.ckpt")
    before = snapshot(root)
    promise = operate(root / "checkpoints", rollback={"to": 4}, **RECIPES[name])
    assert look.verify(Run.open(root / "checkpoints"), level=3).findings == ()
    copy = shutil.copytree(root, tmp_path / "resumed", symlinks=True)  # the attic's link dangles
    resumed = fit(copy, 6, last=last, resume="last")
    first, second = resumed
    assert (promise.step, first["step"] + 1) == (5, 5)
    assert first["lr"] == pytest.approx(promise.lr, rel=1e-12)
    assert (first["betas"], first["eps"]) == (promise.betas, promise.eps)
    assert (first["weight_decay"],) == promise.weight_decay
    assert first["adam"] == promise.adam_step == (0 if name == "moments" else 4)
    assert (first["moment"] == 0) == (name == "moments")
    twin = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4 if name == "lr" else PEAK)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(twin, T_max=40, eta_min=1e-5)
    for _ in range(5):
        twin.step()
        cosine.step()
    assert second["lr"] == pytest.approx(cosine.get_last_lr()[0], rel=1e-9)
    run = Run.open(root / "checkpoints")
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_an_undo_leads_a_copy_that_was_saved_over_back_to_the_step(tmp_path: Path) -> None:
    """A restart would have gone on with what was trained since."""
    root = tmp_path / "run"
    fit(root, 8)
    folder = root / "checkpoints"
    operate(folder, set={"beta2": 0.9})
    fit(root, 12, resume=str(folder / "last.ckpt"))
    run = Run.open(folder)
    with pytest.raises(SurgeryError, match=r"last\.ckpt: saved again") as refused:
        surgery.plan_undo(run)
    assert "makes this a copy of it" in str(refused.value.next)
    surgery.apply(run, surgery.plan_undo(run, as_they_are=True))
    assert (Run.open(folder).latest(), Run.open(folder).steps()) == (8, [2, 4, 6, 8])
    first = fit(root, 9, resume="last")[0]
    assert (first["step"], first["betas"]) == (8, (0.9, 0.999))


def test_an_undo_takes_away_a_copy_that_a_saver_made_since(root: Path) -> None:
    """In a run that was copied the saver leaves `last.ckpt`, and makes `last-v1.ckpt`."""
    folder = root / "checkpoints"
    before = snapshot(root)
    operate(folder, set={"beta2": 0.9})
    fit(root, 12, resume=str(folder / "last.ckpt"))
    assert (folder / "last-v1.ckpt").exists() and Run.open(folder).latest() == 12
    run = Run.open(folder)
    surgery.apply(run, surgery.plan_undo(run))
    assert Run.open(folder).latest() == 8
    assert snapshot(root) == before


def test_two_optimizers_in_one_file(tmp_path: Path) -> None:
    """Each with a schedule of its own; a step of either counts."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Pair(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.automatic_optimization = False
            self.held: list[Any] = []

        def training_step(self, batch: Any, index: int) -> None:
            both = self.optimizers()
            self.held.append([one.param_groups[0]["betas"] for one in both])
            self.manual_backward(self.layers[1](self.layers[0](batch)).pow(2).mean())
            for one, schedule in zip(both, self.lr_schedulers(), strict=True):
                one.step()
                schedule.step()

        def configure_optimizers(self) -> Any:
            both = [torch.optim.AdamW(layer.parameters(), lr=PEAK) for layer in self.layers]
            return both, [torch.optim.lr_scheduler.StepLR(one, 3) for one in both]

    def run(steps: int, resume: str | None = None) -> list[Any]:
        trainer = lightning.Trainer(
            default_root_dir=tmp_path, max_steps=steps, accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)],
        )  # fmt: skip
        module = Pair()
        trainer.fit(module, torch.utils.data.DataLoader(torch.rand(64, 4)), ckpt_path=resume)
        return module.held

    run(8)
    operate(tmp_path, rollback={"to": 4}, set={"beta2": 0.9, "eps": 1e-6})
    assert look.verify(Run.open(tmp_path), level=4).findings == ()
    assert run(6, str(tmp_path / "step=4.ckpt")) == [[(0.9, 0.9)] * 2]
    with pytest.raises(SurgeryError, match="2 optimizers, and a recipe has one lr"):
        operate(tmp_path, set={"lr": 1e-4})


def test_a_rate_that_two_schedulers_make_is_not_set_by_one_of_them(
    root: Path, tmp_path: Path
) -> None:
    """Lightning takes a warm-up by steps and a decay by epochs: the groups have their product."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=PEAK)
    both = [
        torch.optim.lr_scheduler.LinearLR(adam, 0.5, total_iters=4),
        torch.optim.lr_scheduler.ExponentialLR(adam, 0.5),
    ]
    for schedule in both:
        adam.step()
        schedule.step()
    for file in (root / "checkpoints").glob("*.ckpt"):
        document = torch.load(file, weights_only=False)
        document["lr_schedulers"] = [schedule.state_dict() for schedule in both]
        torch.save(document, file)
    before = snapshot(root)
    folder = root / "checkpoints"
    for recipe in ({"set": {"lr": "0.5x"}}, {"set": {"position": 3}}, {"cooldown": {"steps": 4}}):
        with pytest.raises(SurgeryError, match="several schedulers share one optimizer"):
            operate(folder, **recipe)
    assert snapshot(root) == before
    assert operate(folder, set={"beta2": 0.9}).betas == (0.9, 0.9)


def test_status_and_advise_read_what_its_csv_logger_wrote(tmp_path: Path) -> None:
    """Beside the folder of its checkpoints, where it lies if nobody says otherwise."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            factor = float("nan") if self.global_step >= 16 else 1.0
            loss = self.layer(batch).pow(2).mean() * factor
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch).pow(2).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=PEAK)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.rand(40, 4), batch_size=4)
    logger = CSVLogger(str(tmp_path))
    trainer = lightning.Trainer(
        max_steps=24, accelerator="cpu", logger=logger, log_every_n_steps=1,
        callbacks=[ModelCheckpoint(every_n_train_steps=6, save_top_k=-1)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), data, data)
    run = Run.open(Path(logger.log_dir) / "checkpoints")
    seen, read = loss_tail(run), own(run, {})
    assert seen is not None and list(seen.steps) == list(range(24)) == list(read.kept["loss"].steps)
    assert headline(seen) is not None and judge(read).verdict == "diverged"
    assert "NaN from step 16 on" in (headline(seen) or ("",))[0]


def test_slurm_requeue_does_not_lead_back(root: Path, tmp_path: Path) -> None:
    """Lightning loads the highest hpc_ckpt_<n> before any other; see `_hpc_resume_path`."""
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    folder = root / "checkpoints"
    shutil.copy(folder / "epoch=0-step=8.ckpt", folder / "hpc_ckpt_1.ckpt")
    highest = _CheckpointConnector._CheckpointConnector__max_ckpt_version_in_folder  # type: ignore[attr-defined]
    assert highest(folder) == 1
    operate(folder, rollback={"to": 4})
    kept = torch.load(folder / f"hpc_ckpt_{highest(folder)}.ckpt", weights_only=False)
    assert kept["global_step"] == 4


def test_the_saver_deletes_nothing_of_the_new_branch(root: Path) -> None:
    """With save_top_k=-1 a relaunch keeps what is there and adds its own steps."""
    folder = root / "checkpoints"
    operate(folder, rollback={"to": 4})
    fit(root, 8, resume="last")
    assert Run.open(folder).steps() == [2, 4, 6, 8]
    assert Run.open(folder).latest() == 8


def test_weights_are_exported(root: Path) -> None:
    run = Run.open(root / "checkpoints")
    names = {weight.name: weight.shape for weight in run.checkpoint(8).weights()}
    assert names == {"layer.weight": (2, 4), "layer.bias": (2,)}


def test_level_4_reads_the_moments_and_no_score(root: Path) -> None:
    """The saver's own state has kth_value, which is Inf."""
    run = Run.open(root / "checkpoints")
    checked = look.verify(run, level=4)
    assert checked.findings == ()
    assert checked.moments["exp_avg"].max > 0
    assert not any("Adam's bound" in text for text in checked.not_compared)
    file = root / "checkpoints" / "epoch=0-step=8.ckpt"
    saved = torch.load(file, weights_only=False)
    saved["optimizer_states"][0]["state"][0]["exp_avg"][0, 1] = float("nan")
    torch.save(saved, file)
    (finding,) = look.verify(Run.open(root / "checkpoints"), level=4).findings
    assert "epoch=0-step=8.ckpt" in finding and "(exp_avg) has NaN or Inf: 1 of 8" in finding


def saved(folder: Path, step: int) -> dict[str, Any]:
    document = torch.load(folder / f"epoch=0-step={step}.ckpt", weights_only=False)
    states = document["optimizer_states"][0]["state"].values()
    moments = {kind: [state[kind] for state in states] for kind in MOMENTS}
    return {"weights": document["state_dict"], **moments}


@pytest.mark.parametrize("last", [True, "link"])
def test_the_trainer_loads_new_numbers(
    original: Callable[[Any], Path], tmp_path: Path, last: Any
) -> None:
    """By the copy `last.ckpt`, which gets what the step gets: torch's, bit for bit."""
    root = shutil.copytree(original(last), tmp_path / "run", symlinks=True)
    folder = root / "checkpoints"
    if last == "link":  # the library's links are absolute
        (folder / "last.ckpt").unlink()
        (folder / "last.ckpt").symlink_to("epoch=0-step=8.ckpt")
    before, first, old = snapshot(root), saved(folder, 2), saved(folder, 8)

    def mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a.double() + b.double()) / 2).float()

    means = {kind: list(map(mean, first[kind], old[kind])) for kind in MOMENTS}
    weights = {name: mean(t, old["weights"][name]) for name, t in first["weights"].items()}
    scaled = {name: t * 0.5 if "bias" in name else t for name, t in old["weights"].items()}
    for number, (recipe, wanted) in enumerate((
        ({"average": {"steps": ["2", "8"], "moments": "average"}}, {**means, "weights": weights}),
        ({"scale": {"params": "bias", "by": 0.5}}, {**old, "weights": scaled}),
        ({"graft": {"step": 2}}, {**first, "weights": old["weights"]}),
    )):  # fmt: skip
        operate(folder, **recipe)
        assert look.verify(Run.open(folder), level=4).findings == ()
        copy = shutil.copytree(root, tmp_path / f"resumed-{number}", symlinks=True)
        (found, *_) = fit(copy, 9, last=last, resume="last")
        assert found["step"] == 8
        for name, tensor in wanted["weights"].items():
            assert torch.equal(found["weights"][name], tensor)
        for kind in MOMENTS:
            assert all(torch.equal(a, b) for a, b in zip(found[kind], wanted[kind], strict=True))
        run = Run.open(folder)
        surgery.apply(run, surgery.plan_undo(run))
        assert snapshot(root) == before


def test_the_average_of_a_callback_is_not_what_is_trained(tmp_path: Path) -> None:
    """WeightAveraging saves its average as `state_dict`, and what is trained beside it."""
    import lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=PEAK)

    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, max_steps=4, accelerator="cpu", logger=False,
        callbacks=[EMAWeightAveraging(decay=0.9), saver], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.rand(32, 4), batch_size=4))
    for recipe in ({"scale": {"params": "weight", "by": 0.5}}, {"average": {"last": 2}}):
        with pytest.raises(
            SurgeryError, match="current_model_state holds a second copy of the weights"
        ):
            surgery.plan(Run.open(tmp_path), from_data(recipe))
    surgery.plan(Run.open(tmp_path), from_data({"graft": {"step": 2}}))
    (note,) = export(Run.open(tmp_path), 4, tmp_path.with_name("weights of it")).notes
    assert note.startswith("these weights are the average that WeightAveraging saved")
