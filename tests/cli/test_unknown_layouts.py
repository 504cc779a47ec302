"""What is no run, or in no layout that is known, is called so, with the format that reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    format = re.search(r"torch:\S+=", refused.stderr)
    assert format is not None
    read = surgeon("show", "-C", step.parent, "--format", f"{format[0]}optimizer")
    assert read.exit_code == 0, read.stderr


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
    format = re.search(r"torch:\S+=", refused.stderr)
    assert format is not None
    read = surgeon("show", "8", "-C", tmp_path, "--format", f"{format[0]}optimizer")
    assert read.exit_code == 0, read.stderr


def test_a_file_that_is_none_of_torchs_is_called_so(surgeon: Surgeon, tmp_path: Path) -> None:
    (tmp_path / "000004").mkdir()
    (tmp_path / "000004" / "optimizer.safetensors").touch()
    format = "torch:{step}/optimizer.safetensors="
    refused = surgeon("status", "-C", tmp_path, "--format", format)
    assert "optimizer.safetensors is no file of torch.save" in refused.stderr
    assert "--format FILE.yaml" in refused.stderr
