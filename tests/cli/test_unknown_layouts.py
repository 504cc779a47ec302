"""What is no run, or in no known layout, is called so, and leads to a page that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import Result

from tests.cli.conftest import Surgeon, hints
from tests.support.tiny_run import GROUP, make_run, write_torch_file


def test_a_run_as_deep_as_lightnings_is_found_from_its_root(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = make_run(tmp_path / "lightning_logs" / "version_0" / "checkpoints")
    (found,) = hints(surgeon("status", "-C", tmp_path).stderr)
    assert found == ["-C", str(root), "status"]


def test_a_step_of_no_run_is_told_as_such(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no training run in" in surgeon("diff", "10", "20").stderr


@pytest.mark.parametrize("name", ["step-000004", "step_4", "Step4", "iter-000004", "000004"])
def test_a_step_of_an_unknown_layout_is_called_so(
    surgeon: Surgeon, tmp_path: Path, name: str
) -> None:
    step = tmp_path / "out" / name
    step.mkdir(parents=True)
    write_torch_file(step / "lit_model.pth", {"optimizer": {"state": {}, "param_groups": [GROUP]}})
    for typed in (step.parent, step):
        refused = surgeon("status", "-C", typed)
        assert f"{step} is a saved step in no layout that is known here" in refused.stderr
        reads_what_is_drafted(surgeon, refused, tmp_path / f"{typed.name}.yaml", 4)


@pytest.mark.parametrize("name", ["checkpoint_8.pt", "iter_8.pth", "epoch8.bin"])
def test_a_file_of_an_unknown_layout_leads_to_a_format_that_reads_it(
    surgeon: Surgeon, tmp_path: Path, name: str
) -> None:
    """As ignite and MMEngine name theirs."""
    for number in (4, 8):
        path = tmp_path / name.replace("8", str(number))
        write_torch_file(path, {"optimizer": {"state": {}, "param_groups": [GROUP]}})
    refused = surgeon("status", "-C", tmp_path)
    assert "in no layout that is known here" in refused.stderr
    reads_what_is_drafted(surgeon, refused, tmp_path / "page.yaml", 8)


@pytest.mark.parametrize("name", ["CKPT+ep3/opt.ckpt", "net_a/7/adam.pth", "last.pt"])
def test_what_looks_like_no_step_leads_to_a_draft_where_torch_saved_something(
    surgeon: Surgeon, tmp_path: Path, name: str
) -> None:
    """As SpeechBrain names its; a folder in which nothing was saved leads to no draft."""
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    assert "draft-format" not in surgeon("status", "-C", tmp_path / "run").stderr
    write_torch_file(file, {"adam": {"state": {}, "param_groups": [GROUP]}, "step": 7})
    refused = surgeon("status", "-C", tmp_path / "run")
    reads_what_is_drafted(surgeon, refused, tmp_path / "page.yaml", 3 if "ep3" in name else 7)


def reads_what_is_drafted(surgeon: Surgeon, refused: Result, page: Path, step: int) -> None:
    """The last hint of `refused`, typed, makes a page with which the step is read."""
    assert refused.exit_code == 2
    words = hints(refused.stderr)[-1]
    drafted = surgeon(*words, "-o", page)
    assert drafted.exit_code == 0, drafted.stderr
    read = surgeon("show", step, *words[:2], "--format", page)
    assert read.exit_code == 0, read.stderr


def test_a_file_that_is_none_of_torchs_is_called_so(surgeon: Surgeon, tmp_path: Path) -> None:
    (tmp_path / "000004").mkdir()
    (tmp_path / "000004" / "optimizer.safetensors").touch()
    format = "torch:{step}/optimizer.safetensors="
    refused = surgeon("status", "-C", tmp_path, "--format", format)
    assert "optimizer.safetensors is no file of torch.save" in refused.stderr
    assert "--format FILE.yaml" in refused.stderr
