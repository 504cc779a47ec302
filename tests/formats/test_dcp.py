"""torchtitan's and OLMo-core's folders, written and read by torch.distributed.checkpoint itself."""

from __future__ import annotations

import io
import pickle
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typer.testing import CliRunner

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.dcp_trainers import Trainer, _titan_state, olmo, resumed_titan, torchtitan
from tests.support.event_logs import write_log
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.mark.parametrize("old", [True, False])
def test_what_was_set_is_what_the_next_step_uses(tmp_path: Path, old: bool) -> None:
    root = torchtitan(tmp_path, old=old)
    before = snapshot(root)
    recipe = {
        "rollback": {"to": 4},
        "set": {"lr": 2e-3, "beta1": 0.8, "eps": 1e-6, "weight_decay": 0.3},
        "reset": ["moments"],
    }
    plan = operate(root, recipe)
    assert plan.promise is not None
    assert Run.open(root).latest() == 4
    trainer = resumed_titan(root, old=old, lr=1e-3 if old else 2e-3)
    used = trainer.used()
    assert used["lr"] == [plan.promise.lr] * 2 == [pytest.approx(2e-3 / 5)] * 2
    assert used["betas"] == [(0.8, 0.95)] * 2 == [plan.promise.betas] * 2
    assert used["eps"] == [plan.promise.eps] * 2
    assert used["weight_decay"] == [0.3, 0.0]
    assert used["adam_step"] == [0] * 4
    assert used["moments"] == [0] * 8
    trainer.update()
    assert trainer.used()["lr"] == [pytest.approx(2e-3 / 6)] * 2
    take_back(root, before)
    assert resumed_titan(root, old=old).used()["adam_step"] == [6] * 4


def test_the_log_folder_beside_its_steps_is_the_runs(tmp_path: Path) -> None:
    """torchtitan has `checkpoint` and `tb` in its `dump_folder`, unless it is told otherwise."""
    root = torchtitan(tmp_path / "checkpoint")
    log = write_log(tmp_path / "tb" / "20261129-0224", [2.0] * 6, tag="loss_metrics/avg_loss")
    before = snapshot(tmp_path)
    operate(root, {"rollback": {"to": 4}})
    assert [stream.last for s in Run.open(root).log_sources() for stream in s.streams()] == [4]
    assert list((tmp_path / "tb").glob("*/cut-0001/*tfevents*"))
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(tmp_path) == before
    assert Run.open(root).logs.all() == [log]
    assert Run.open(root.rename(tmp_path / "of_two_runs")).logs.all() == []


def test_a_version_that_keeps_no_rates_needs_the_flag(tmp_path: Path) -> None:
    plan = surgery.plan(Run.open(torchtitan(tmp_path, old=False)), from_data({"set": {"lr": 5e-4}}))
    assert any("only --optimizer.lr 0.0005 does" in line for line in plan.warnings)
    with pytest.raises(SurgeryError, match="own config") as error:
        surgery.plan(Run.open(tmp_path), from_data({"set": {"min_lr": 1e-5}}))
    assert "--lr_scheduler.min_lr_factor" in " ".join(error.value.next)


def test_zeroed_moments_cost_no_bytes_and_touch_no_file(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    before = snapshot(root)
    plan = operate(root, {"reset": ["moments"]})
    after = snapshot(root)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"step-6/.metadata"}
    (new,) = after.keys() - before.keys()
    tensors = [root / name for name in before if "step-6/__" in name]
    assert (root / new).stat().st_size < sum(file.stat().st_size for file in tensors)
    assert len(plan.edits) == 2
    operate(root, {"set": {"eps": 1e-5}})
    assert len(list((root / "step-6").glob("__ckptsurgeon_*.distcp"))) == 2


def test_rates_that_are_tensors(tmp_path: Path) -> None:
    """As torch.compile wants them: each is a value of its own in the folder."""
    root = torchtitan(tmp_path, lr=torch.tensor(1e-3))
    before, plain = snapshot(root), resumed_titan(root, lr=torch.tensor(1e-3))
    plan = operate(root, {"set": {"lr": 5e-4}})
    trainer = resumed_titan(root, lr=torch.tensor(1e-3))
    assert plan.promise is not None and plan.promise.lr == float(trainer.used()["lr"][0])
    for _ in range(3):
        mine, theirs = (float(each.used()["lr"][0]) for each in (trainer, plain))
        assert mine == pytest.approx(theirs / 2)
        trainer.update()
        plain.update()
    take_back(root, before)
    first = float(resumed_titan(root, lr=torch.tensor(1e-3)).used()["lr"][0])
    plan = surgery.plan(Run.open(root), from_data({"cooldown": {"steps": 2}}))
    surgery.apply(Run.open(root), plan)
    schedule = resumed_titan(root, lr=torch.tensor(1e-3)).schedule
    assert [float(rate) for rate in schedule.base_lrs] == [first] * 2


def test_the_moments_of_some_parameters_become_zero(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    operate(root, {"reset": ["moments"], "moments": {"params": r"^0\."}})
    trainer = resumed_titan(root)
    sums = {
        name: float(trainer.optimizer.state[p]["exp_avg"].abs().sum())
        for name, p in trainer.model.named_parameters()
    }
    assert sums["0.weight"] == sums["0.bias"] == 0
    assert sums["1.weight"] > 0 and sums["1.bias"] > 0


def test_what_amsgrad_and_muon_keep_is_reset_too(tmp_path: Path) -> None:
    """torchtitan's DistMuon keeps a momentum of the matrices, beside AdamW of the rest."""
    trainer = Trainer(amsgrad=True)
    trainer.update()
    state = _titan_state(trainer, 2, old=False)
    muon = torch.optim.Muon([torch.nn.Parameter(torch.ones(4, 4))])
    muon.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    muon.step()
    (momentum,) = (held["momentum_buffer"] for held in muon.state.values())
    state["optimizer"]["state.2.weight.momentum_buffer"] = momentum.clone()
    for key in ("lr", "momentum", "nesterov", "weight_decay", "eps", "ns_steps"):
        held = muon.param_groups[0][key]
        state["optimizer"][f"param_groups.2.weight.{key}"] = held
    dcp.save(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
    before = snapshot(tmp_path)
    plan = operate(tmp_path, {"reset": ["moments"]})
    assert any("Muon" in warning for warning in plan.warnings)
    names = [name for name in state["optimizer"] if name.startswith("state.")]
    assert sum("max_exp_avg_sq" in name for name in names) == 4
    wanted = {f"optimizer.{name}": torch.ones_like(state["optimizer"][name]) for name in names}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert not any(tensor.any() for tensor in wanted.values())
    take_back(tmp_path, before)
    operate(tmp_path, {"reset": ["moments"], "moments": {"params": "^2"}})
    dcp.load(wanted, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert not wanted["optimizer.state.2.weight.momentum_buffer"].any()
    assert wanted["optimizer.state.1.weight.max_exp_avg_sq"].any()


def test_the_highest_step_is_the_latest_and_must_be_complete(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    (root / "step-6" / ".metadata").unlink()
    run = Run.open(root)
    assert run.steps() == [2, 4, 6] and run.latest() == 4  # as torchtitan: it wants .metadata
    assert any(".metadata" in text for text in look.verify(run, 6).findings)
    (root / "step-4" / "__0_0.distcp").write_bytes(b"PK")
    with pytest.raises(SurgeryError, match=r"step 4 is incomplete .* would resume it") as error:
        run.latest()
    assert "rollback --to 2" in error.value.next[0]
    shown = CliRunner().invoke(app, ["status", "-C", str(root)]).stdout
    assert "incomplete, and its trainer would resume it" in shown
    with pytest.raises(SurgeryError, match="cut short"):
        run.checkpoint(4)
    with pytest.raises(SurgeryError, match="would resume it"):
        surgery.plan(run, from_data({"set": {"eps": 1e-6}}))
    operate(root, {"rollback": {"to": 2}, "set": {"eps": 1e-6}})
    assert run.latest() == 2


def test_weights_for_hugging_face_and_near_names_are_what_torchtitan_takes(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    (root / "step-6").rename(root / "step-6.bak")
    told = look.verify(Run.open(root)).findings
    assert any("step-6.bak: is taken for step 6" in text for text in told)
    (root / "step-8").mkdir()
    (root / "step-8" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SurgeryError, match="step 8 is incomplete"):
        Run.open(root).latest()


def test_olmo_core_is_operated_on_and_its_lr_is_refused(tmp_path: Path) -> None:
    root = olmo(tmp_path)
    before = snapshot(root)
    recipe = {"rollback": {"to": 2}, "set": {"beta2": 0.99}, "reset": ["moments"]}
    plan = operate(root, recipe)
    assert plan.promise is not None and plan.promise.step == 3
    trainer = Trainer()
    trainer.update()
    state = {"optim": trainer.flat()}
    dcp.load(state, checkpoint_id=root / "step2" / "model_and_optim", no_dist=True)
    trainer.load_flat(state["optim"])
    used = trainer.used()
    assert used["betas"] == [(0.9, 0.99)] * 2
    assert used["adam_step"] == [0] * 4 and used["moments"] == [0] * 8
    with pytest.raises(SurgeryError, match="at every step") as error:
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    assert "train_module.optim.lr" in " ".join(error.value.next)
    take_back(root, before)
    operate(root, {"set": {"tokens": 4096}})
    for rank in range(2):
        kept = torch.load(root / "step6" / "train" / f"rank{rank}.pt", weights_only=False)
        assert kept["global_train_tokens_seen"] == 4096


def test_olmo_cores_ranks_and_counters_are_checked(tmp_path: Path) -> None:
    root = olmo(tmp_path)
    counters = torch.load(root / "step6" / "train" / "rank1.pt", weights_only=False)
    torch.save({**counters, "global_step": 5}, root / "step6" / "train" / "rank1.pt")
    findings = look.verify(Run.open(root)).findings
    assert any("disagree on iteration" in text for text in findings)
    (root / "step6" / "train" / "rank1.pt").unlink()
    with pytest.raises(SurgeryError, match="step 6 is incomplete"):
        Run.open(root).latest()  # OLMo-core gives such a rank the state of rank 0
    (root / "step6" / ".metadata.json").unlink()
    assert Run.open(root).latest() == 4


@pytest.mark.parametrize("level", [3, 4])
def test_a_flipped_byte_in_a_blob_is_found(tmp_path: Path, level: int) -> None:
    root = torchtitan(tmp_path)
    file = root / "step-6" / "__0_0.distcp"
    saved = dcp.FileSystemReader(root / "step-6").read_metadata().storage_data
    info = next(
        info for index, info in saved.items()
        if index.fqn == "optimizer.state.0.weight.exp_avg_sq"
    )  # fmt: skip
    data = bytearray(file.read_bytes())
    blob = bytes(data[info.offset : info.offset + info.length])
    state = torch.load(io.BytesIO(blob), weights_only=True)
    at = info.offset + blob.find(state.numpy().tobytes())
    data[at + 3] ^= 0x80
    file.write_bytes(data)
    assert look.verify(Run.open(root), level=2).findings == ()
    findings = look.verify(Run.open(root), level=level).findings
    assert any(f"from byte {info.offset} on" in text and "has CRC" in text for text in findings)


def test_hostile_metadata_is_refused(tmp_path: Path) -> None:
    root = torchtitan(tmp_path)
    path = root / "step-6" / ".metadata"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"__0_0.distcp", b"../0.distcp_"))
    with pytest.raises(SurgeryError, match="leaves the folder"):
        Run.open(root).checkpoint(6)
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(SurgeryError, match="not a Metadata of torch"):
        Run.open(root).checkpoint(6)
    path.write_bytes(good[:-40])
    with pytest.raises(SurgeryError):
        Run.open(root).checkpoint(6)


@pytest.mark.long
def test_a_metadata_of_a_hundred_thousand_chunks_is_read(tmp_path: Path) -> None:
    """As FSDP on 256 ranks saves 100 tensors with their moments: one opcode for every two bytes."""
    described, stored = {}, {}
    for tensor in range(390):
        name, size = f"layers.{tensor}.weight", torch.Size([4, 8])
        offsets = [torch.Size([4 * rank, 0]) for rank in range(256)]
        chunks = [ChunkStorageMetadata(offset, size) for offset in offsets]
        described[name] = TensorStorageMetadata(TensorProperties(), torch.Size([1024, 8]), chunks)
        for rank, offset in enumerate(offsets):
            info = _StorageInfo(f"__{rank}_0.distcp", 1200 * tensor, 1200)
            stored[MetadataIndex(name, offset, rank)] = info
    saved = Metadata(described, storage_data=stored)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(saved))
    items = Saved.open(tmp_path).items
    assert sum(map(len, items.values())) == 99_840
    assert items["layers.7.weight"][255][1:5] == ("__255_0.distcp", 8400, 1200, (1020, 0))


def test_a_linked_folder_and_skips_are_refused(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    for recipe in ({"skip": ["8-9"]}, {"set": {"clip_grad": 0.5}}, {"reset": ["loss_scale"]}):
        with pytest.raises((SurgeryError, UsageError)):
            surgery.plan(Run.open(root), from_data(recipe))
    (root / "step-6").rename(tmp_path / "elsewhere")
    (root / "step-6").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SurgeryError, match=r"symbolic link.* no edit goes through one"):
        surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.9}}))


def test_a_link_to_a_folder_of_the_run_is_refused_with_what_helps(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    (root / "kept").mkdir()
    (root / "step-6").rename(root / "kept" / "six")
    (root / "step-6").symlink_to("kept/six")
    with pytest.raises(SurgeryError, match="no edit goes through one") as refused:
        surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.9}}))
    subprocess.run(refused.value.next[0].split("    ")[0], shell=True, check=True)
    assert not surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.9}})).empty


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """torch warns that no process group is there, which `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- a folder of one's own -----------------------------------------------------------------------


def own(root: Path, steps: tuple[int, ...] = (8, 12)) -> Path:
    """A loop that saves its own dict, in folders that are named like torchtitan's."""
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 40)
    for step in range(1, steps[-1] + 1):
        model(torch.ones(2, 4)).sum().backward()
        adam.step()
        schedule.step()
        if step in steps:
            saved = {
                "model": model.state_dict(), "optim": adam.state_dict(), "step": step,
                "sched": schedule.state_dict(),
            }  # fmt: skip
            dcp.save(saved, checkpoint_id=root / f"step-{step}", no_dist=True)
    return root


OWN_PAGE = """
name: own
files:
  "step-{step}":
    loader: dcp
    optimizers: [[optim]]
    schedulers: [[sched]]
    weights: [[model]]
    fields: {iteration: [[step]]}
"""


def test_a_folder_that_is_only_named_like_a_trainers_leads_to_a_page_that_reads_it(
    tmp_path: Path,
) -> None:
    """It is sound, and is rolled back as typed and as called; no number of it is edited until a
    page says what is whose."""
    root, page = own(tmp_path / "run"), tmp_path / "own.yaml"
    page.write_text(OWN_PAGE)
    before = snapshot(root)

    def typed(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words, "-C", str(root)])
        return done.exit_code, done.output

    for words in (("status",), ("show",), ("verify", "--level", "3"), ("doctor",)):
        code, told = typed(*words)
        assert code == 0 and "damaged" not in told and "restore" not in told
    code, told = typed("set-lr", "1e-4", "--yes")
    assert (code, snapshot(root) == before) == (1, True)
    assert "a page with `loader: dcp`" in told and "holds the model alone" not in told
    assert typed("rollback", "--to", "8", "--yes")[0] == 0
    assert not (root / "step-12").exists()
    assert typed("undo", "--yes")[0] == 0 and snapshot(root) == before
    code, told = typed("check-format", str(page))
    assert (code, "every operation was undone, byte for byte" in told) == (0, True)
    usual = Run.open(root, str(page)).checkpoint(12).state().promise.lr
    assert typed("set-lr", "1e-4", "--yes", "--format", str(page))[0] == 0
    told = Run.open(root, str(page)).checkpoint(12).state().promise.lr
    assert usual is not None and told == pytest.approx(usual / 10)


@pytest.mark.parametrize("newest", [12, 16])
def test_a_step_of_such_a_loop_leaves_with_all_that_has_its_number(
    tmp_path: Path, newest: int
) -> None:
    """Half of a step would be what its own restart finds; of torchtitan all is in the folder."""
    root = own(tmp_path / "run")
    names = [f"{kind}.{step}" for step in (8, 12, newest) for kind in ("meta", "rng")]
    for name in (*names, "notes.txt", "mp4.12"):
        (root / name).write_text(name)
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": 8}})))
    left = {path.name for path in root.iterdir()} - {".ckptsurgeon"}
    assert left == {"step-8", "meta.8", "rng.8", "notes.txt", "mp4.12"}
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
