"""metaseq: its links, folders, flags, data and optimizers, by its source and by runs by hand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon import look, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.plain.fairseq import Fairseq
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.look.diff.surgery import of_receipt
from ckptsurgeon.plans.edits import Append, Relink, Replace
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import fork
from tests.support.fairseq_files import NAMES, held, make_run, names, rate, refused, resumed
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def polynomial(now: int, zero: int, warmup: int, total: int, lr: float) -> float:
    """The rate that metaseq sets after update `now`, which the next one uses
    (`polynomial_decay_schedule.py`, b8924c0): 0, a rise, a linear decay to 0."""
    if zero > 0 and now <= zero:
        return 0.0
    if warmup > 0 and now <= warmup + zero:
        return lr * (now - zero) / warmup
    return lr * (1 - (now - warmup - zero) / (total - warmup - zero))


@pytest.mark.parametrize("kind", ["hold", "ramp"])
def test_the_rewarm_of_metaseq_is_its_own_flags(tmp_path: Path, kind: str) -> None:
    run = Run.open(make_run(tmp_path / "run"))
    step, window = run.checkpoint(run.latest()).state().step, {"iterations": 3, "kind": kind}
    with pytest.raises(SurgeryError) as error:
        surgery.plan(run, from_data({"reset": ["moments"], "rewarm": window}))
    hints = " ".join(error.value.next)
    assert "--lr-scheduler polynomial_decay" in hints  # of others these flags are unknown
    zero, warmup = (
        int(re.search(rf"{flag} (\d+)", hints)[1])  # type: ignore[index]
        for flag in ("--zero-lr-warmup-steps", "--warmup-updates")
    )
    rates = [polynomial(now, zero, warmup, 1000, 1e-3) for now in range(step, step + 5)]
    assert rates[0] == 0 and rates[-1] > 9e-4
    shares = [0, 0, 0, 1, 1] if kind == "hold" else [0, 1 / 3, 2 / 3, 1, 1]
    assert rates == pytest.approx([share * 1e-3 for share in shares], rel=4e-3)
    assert "ckptsurgeon set-lr" not in hints  # it is refused here


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_the_skip_of_metaseq_passes_over_the_wanted_data(
    now: int, gaps: list[tuple[int, int]]
) -> None:
    """It counts the updates alone, and at the first of a range it passes over as many batches as
    the range is long (`train` and `get_skip_batches` in `metaseq/cli/train.py`, f7ffa5f)."""
    wanted, at = [], now
    for gap, length in gaps:
        wanted.append((at + gap + 1, at + gap + length))
        at += gap + length
    hint = str(Fairseq().advise_skip(wanted))
    pairs = [item.split("-") for item in re.search(r"batches ([\d,-]+)", hint)[1].split(",")]  # type: ignore[index]
    left = {int(first): int(last) - int(first) + 1 for first, last in pairs}
    trained, update = [], now + 1
    for batch in range(now + 1, at + 5):
        if left.get(update, 0) > 0:
            left[update] -= 1
            continue
        trained.append(batch)
        update += 1
    passed = {batch for first, last in wanted for batch in range(first, last + 1)}
    assert trained == [batch for batch in range(now + 1, at + 5) if batch not in passed]


def test_no_file_is_restored_beside_a_model_to_begin_with(tmp_path: Path) -> None:
    """Such a command line ends with an error (`load_checkpoint` in `metaseq/checkpoint_utils.py`,
    f7ffa5f); what comes last on it counts."""
    flags = {"checkpoint": {"finetune_from_model": "/models/125m.pt"}}
    run = Run.open(make_run(tmp_path / "run", command_line=flags))
    (note,) = (n for n in look.inspect(run).notes if "--finetune-from-model" in n)
    assert "/models/125m.pt: relaunch without it" in note
    assert launch_flags(run)[2:] == ["--finetune-from-model", ""]
    assert "without --finetune-from-model" in refused(run.root, {"set": {"lr": 1e-5}})
    plain = Run.open(make_run(tmp_path / "plain"))
    assert not any("--finetune-from-model" in note for note in look.inspect(plain).notes)
    assert len(launch_flags(plain)) == 2


def test_what_metaseq_keeps_of_streamed_data_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", streamed=True, links=True)
    before = snapshot(run)
    plan = operate(run, {"rollback": {"to": 20}, "set": {"eps": 1e-6}})
    assert "not known to be harmless" not in str(plan.warnings)
    _, document = resumed(run / f"checkpoint_last{NAMES[0]}.pt")
    cache = document["extra_state"]["train_iterator"]["tokenization_cache"]
    assert cache.lengths == bytes(range(256)) * 20
    take_back(run, before)


def test_last_files_that_are_links_lead_to_the_step(run: Path) -> None:
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        last.unlink()
        last.symlink_to(f"checkpoint_30{suffix}.pt")
    before = snapshot(run)
    plan = operate(run, {"rollback": {"to": 10}, "set": {"eps": 1e-6}})
    links = [edit.file for edit in plan.edits if isinstance(edit, Replace) and "last" in edit.file]
    assert links[0] == links[-1]  # empty until the others are done: no reader mixes steps
    told = report.plan(plan, "run", report.Style())
    assert told.count("the link checkpoint_last") == 4 and "no shard copied" in told
    found = of_receipt(Run.open(run), plan.id).changes
    assert sum(isinstance(change, Relink) for change in found) == 4
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        assert last.readlink() == Path(f"checkpoint_10{suffix}.pt")
        assert held(last, "eps") == 1e-6
    take_back(run, before)


def test_an_edit_of_the_step_that_links_lead_to_leaves_the_links(tmp_path: Path) -> None:
    """metaseq takes a link away and makes the next one, and replaces no file."""
    run = make_run(tmp_path / "run", links=True)
    before = snapshot(run)
    plan = operate(run, {"set": {"eps": 1e-6}})
    assert {type(edit) for edit in plan.edits} == {Append}
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        assert last.is_symlink() and held(last, "eps") == 1e-6
    made = fork(Run.open(run), 30, tmp_path / "branch", from_data({}), how="copy").folder
    assert (made / f"checkpoint_last{NAMES[0]}.pt").readlink() == Path(
        f"checkpoint_30{NAMES[0]}.pt"
    )
    take_back(run, before)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_metaseq_could_not_replace_becomes_a_link(tmp_path: Path, links: bool) -> None:
    """Only metaseq since 2023 has such a flag; others copy through a link."""
    flags = {"checkpoint": {"local_save_interval_updates": 0}} if links else None
    run = make_run(tmp_path / "run", command_line=flags)
    before = snapshot(run)
    plan = operate(run, {"rollback": {"to": 20}, "set": {"eps": 1e-6}})
    assert ("a file → checkpoint_20" in report.plan(plan, "run", report.Style())) == links
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        assert last.is_symlink() == links and held(last, "eps") == 1e-6
    found = of_receipt(Run.open(run), plan.id).changes
    assert sum(isinstance(change, Relink) for change in found) == (4 if links else 0)
    made = fork(Run.open(run), 10, tmp_path / "branch", from_data({}), how="copy").folder
    assert (made / f"checkpoint_last{NAMES[3]}.pt").is_symlink() == links
    take_back(run, before)
    (tmp_path / "again").mkdir()
    made = fork(Run.open(run), 30, tmp_path / "again" / "branch", from_data({}), how="copy").folder
    assert (made / f"checkpoint_last{NAMES[3]}.pt").is_symlink() == links


def test_links_that_lead_nowhere_are_repaired(tmp_path: Path) -> None:
    """metaseq makes a link to the path as --save-dir has it, and that may be a relative one."""
    run = make_run(tmp_path / "run", links=True)
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        last.unlink()
        last.symlink_to(f"run/checkpoint_30{suffix}.pt")
    before = snapshot(run)
    assert look.verify(Run.open(run)).findings
    operate(run, {"repair_latest": {}})
    assert held(run / f"checkpoint_last{NAMES[1]}.pt", "lr") == rate(30)
    take_back(run, before)


def test_folders_without_a_pointer_lose_the_later_steps(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", folders=True)
    before = snapshot(root)
    operate(root, {"rollback": {"to": 20}, "set": {"beta1": 0.8}})
    assert names(root) == {"checkpoint_10", "checkpoint_20"}
    for suffix in NAMES:
        assert held(root / "checkpoint_20" / f"checkpoint{suffix}.pt", "betas") == (0.8, 0.95)
    take_back(root, before)


def test_a_folder_that_only_begins_like_a_later_step_leaves_with_it(tmp_path: Path) -> None:
    """metaseq goes by the start of a name, and by the number of files in the folder."""
    root = make_run(tmp_path / "run", folders=True)
    shutil.copytree(root / "checkpoint_30", root / "checkpoint_20_before")
    shutil.copytree(root / "checkpoint_30", root / "checkpoint_30-half")
    (root / "checkpoint_30-half" / f"checkpoint{NAMES[0]}.pt").unlink()
    before = snapshot(root)
    operate(root, {"rollback": {"to": 20}})
    assert names(root) == {"checkpoint_10", "checkpoint_20", "checkpoint_30-half"}
    take_back(root, before)
    (root / "checkpoint_20" / "notes.txt").write_text("x")
    told = "\n".join(look.verify(Run.open(root), 20).findings)
    assert "notes.txt: is counted by the trainer" in told


@pytest.mark.parametrize("stats", [False, True])
def test_the_first_fused_adam_is_known(tmp_path: Path, stats: bool) -> None:
    """OPT's: with --fp16-adam-stats its moments are codes, and what they are times of is saved."""
    root = make_run(tmp_path / "run", suffixes=NAMES[:1])
    for path in root.iterdir():
        document = torch.load(path, weights_only=False)
        saved = document["last_optimizer_state"]
        del saved["param_groups"][0]["amsgrad"]
        kept = {"lr", "betas", "eps", "weight_decay", "params"}
        group = {k: v for k, v in saved["param_groups"][0].items() if k in kept}
        saved["param_groups"] = [{**group, "bias_correction": True, "max_grad_norm": 0.0}]
        for state in saved["state"].values() if stats else ():
            for kind in ("exp_avg", "exp_avg_sq"):
                scale = 1e-8 + state[kind].abs().max() / 65504
                state |= {kind: (state[kind] / scale).half(), f"{kind}_scale": scale}
        torch.save(document, path)
    before = snapshot(root)
    assert look.verify(Run.open(root), level=4).findings == ()
    assert str(look.inspect(Run.open(root)).promise.optimizer).startswith("FusedAdam")
    operate(root, {"reset": ["moments"]})
    saved = torch.load(root / f"checkpoint_last{NAMES[0]}.pt", weights_only=False)
    for state in saved["last_optimizer_state"]["state"].values():
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any() and state["step"] == 0
        assert not stats or float(state["exp_avg_sq_scale"]) == 1
    take_back(root, before)
    for recipe in ({"graft": {"step": 10}}, {"clip_moments": {"above": 10.0}}) if stats else ():
        assert "exp_avg_scale, exp_avg_sq_scale beside the" in refused(root, recipe)


def test_what_fairscale_gathers_is_an_adam(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", suffixes=[""])
    for path in root.iterdir():
        document = torch.load(path, weights_only=False)
        more = {"param_id_map": {0: 0, 1: 1}, "uncollected_local_ids": []}
        document["last_optimizer_state"] |= more
        torch.save(document, path)
    assert look.inspect(Run.open(root)).promise.optimizer == "Adam"
    operate(root, {"reset": ["moments"]})
