"""`relaunch --print-flags` says what the launcher needs, in the values that the checkpoint has."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.recipe.file import from_data
from tests.formats.matrix import make
from tests.support import fairseq_files

quiet = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")


@quiet
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Megatron-DeepSpeed", "--use-checkpoint-lr-scheduler"),
        ("Megatron-LM legacy", "--use-checkpoint-opt_param-scheduler"),
        ("Megatron-LM torch_dist", "--use-checkpoint-opt_param-scheduler"),
    ],
)
def test_megatron_is_told_the_edited_values(tmp_path: Path, name: str, use: str) -> None:
    run = Run.open(make(name, tmp_path / "a run"))
    edit = ["set", "lr=4.5e-5", "beta2=0.9", "weight_decay=0.2", "--yes", "-C", str(run.root)]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, edit)
    printed = shlex.join(["ckptsurgeon", "-C", str(run.root), "relaunch", "--print-flags"])
    assert f"  resume   {printed}    prints the flags" in done.stdout, done.output
    result = CliRunner().invoke(app, ["relaunch", "--print-flags", "-C", str(run.root)])
    assert result.exit_code == 0
    flags = shlex.split(result.stdout)
    assert flags[:3] == ["--load", str(run.root), use]
    pairs = dict(zip(flags[3::2], flags[4::2], strict=True))
    assert (pairs["--lr"], pairs["--adam-beta2"], pairs["--weight-decay"]) == (
        "4.5e-05", "0.9", "0.2",
    )  # fmt: skip
    assert pairs["--lr-decay-style"] in ("cosine", "linear")
    assert int(pairs["--lr-decay-samples"]) > int(pairs["--lr-warmup-samples"])


@pytest.mark.parametrize("folders", [False, True])
def test_metaseq_is_told_a_file_that_each_rank_finds(tmp_path: Path, folders: bool) -> None:
    """It puts the suffix of a rank before `.pt` (`load_checkpoint`, checkpoint_utils.py), and what
    it does not find it passes over."""
    run = Run.open(fairseq_files.make_run(tmp_path / "run", folders=folders))
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 20}})))
    option, file = launch_flags(run)
    assert option == "--restore-file"
    for suffix in fairseq_files.NAMES:
        document = torch.load(file.replace(".pt", f"{suffix}.pt"), weights_only=False)
        assert document["optimizer_history"][-1]["num_updates"] == 20


@quiet
@pytest.mark.parametrize("name", ["bundled trainer", "torchtitan (DCP)", "DeepSpeed ZeRO 1"])
def test_who_takes_no_such_flags_is_told_so(tmp_path: Path, name: str) -> None:
    run = Run.open(make(name, tmp_path / "run"))
    if name == "bundled trainer":
        (run.root / "train.yaml").write_text("")
    with pytest.raises(SurgeryError, match="has no launch flags") as refused:
        launch_flags(run)
    first = refused.value.next[0]
    assert first.startswith("ckptsurgeon relaunch ") is run.launchable
    assert first.startswith("restart its trainer") is not run.launchable
