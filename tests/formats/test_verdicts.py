"""A verdict reaches as far as its witness: what is only written is not called verified.

Two loops of their own train, are edited, and train on: one multiplies initial_lr, as nanochat does,
and one takes its rates from its flags, as nanoGPT does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from ckptsurgeon import Run, look, report, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.formats.described import pages
from ckptsurgeon.formats.detect import DESCRIBED
from ckptsurgeon.recipe.file import from_data
from tests.formats.matrix import make
from tests.support import claims, own_loops
from tests.support.own_loops import FORMAT, by_flags, by_initial_lr, train, train_scheduled

NOT_KNOWN = "whether your trainer takes it is not known"


def call(root: Path, *words: object, format: str = FORMAT) -> Result:
    environment = {"NO_COLOR": "1", "COLUMNS": "120"}
    given = ["-C", str(root), "--format", format, *map(str, words)]
    return CliRunner(env=environment).invoke(app, given)


@pytest.fixture(params=[by_initial_lr, by_flags])
def loop(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_rate_that_nobody_was_asked_about_is_written_and_not_verified(
    tmp_path: Path, loop: Any
) -> None:
    root = tmp_path / "run"
    train(root, loop, 6)
    plain = train(root, loop, 2)
    done = call(root, "set-lr", "0.5x", "--yes")
    assert done.exit_code == 0, done.output
    assert f"done: receipt 0001; written, and read back; {NOT_KNOWN}" in done.stdout
    assert "verified" not in done.stdout and "verify --log FILE" in done.stdout
    assert "initial_lr of the param groups is scaled as lr is" in " ".join(done.stdout.split())
    share = 0.5 if loop is by_initial_lr else 1.0
    assert train(root, loop, 2) == pytest.approx([rate * share for rate in plain], rel=1e-12)
    assert call(root, "undo", "--yes").exit_code == 0
    assert train(root, loop, 2) == plain


def test_initial_lr_keeps_the_proportions_of_the_groups(tmp_path: Path) -> None:
    """Also where a new rate is given, and for one group alone (`--params`)."""
    root = tmp_path / "run"
    train(root, by_initial_lr, 6)
    assert call(root, "set-lr", "0.001", "--yes").exit_code == 0
    groups = torch.load(root / "ckpt_6.pt", weights_only=True)["optimizer"]["param_groups"]
    factor = 0.001 / (own_loops.PEAK * (1 - 5 / own_loops.TOTAL))
    assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.0005])
    initial = [own_loops.PEAK * factor, own_loops.PEAK * factor / 2]
    assert [group["initial_lr"] for group in groups] == pytest.approx(initial)


def test_json_and_verify_say_how_far_they_reach(tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(root, by_flags, 6)
    planned = json.loads(call(root, "set", "beta2=0.9", "--dry-run", "--json").stdout)
    assert planned["verdict"] is None and planned["promise"]["asked"] is False
    done = json.loads(call(root, "set", "beta2=0.9", "--yes", "--json").stdout)
    assert done["verdict"] == "written" and done["promise"]["asked"] is False
    found = call(root, "verify", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["verdict"] == "written"
    text = call(root, "verify").stdout
    assert "step 7 would use" in text and NOT_KNOWN in text


def test_what_the_loop_prints_would_tell(tmp_path: Path) -> None:
    """The hint of the verdict, followed: a loop that prints its rates in a form that is known."""
    root = tmp_path / "run"
    train(root, by_flags, 6)
    assert call(root, "set-lr", "0.5x", "--yes").exit_code == 0
    line = (
        " iteration {}/ 40 | consumed samples: 7 | learning rate: {:.3E} | global batch size: 1 |"
    )
    log = tmp_path / "log.txt"
    used = train(root, by_flags, 2)
    log.write_text("\n".join(line.format(7 + k, rate) for k, rate in enumerate(used)))
    found = call(root, "verify", "--log", log)
    assert found.exit_code == 4, found.output
    assert "says 8.500E-03, as before the surgery" in found.stdout


def test_the_lines_of_any_loop_tell(tmp_path: Path, loop: Any) -> None:
    """The hint followed as it stands: by what the loop logs itself, and not before it has begun."""
    root = tmp_path / "run"
    train(root, loop, 6)
    os.utime(root / "log.jsonl", (0, 0))
    assert call(root, "set-lr", "0.5x", "--yes").exit_code == 0
    early = call(root, "verify", "--log", root / "log.jsonl")
    assert early.exit_code == 1 and "was not written to since surgery 0001" in early.stderr
    train(root, loop, 2)
    (receipt,) = (root / ".ckptsurgeon" / "receipts").glob("*/receipt.json")
    for path in (root / "log.jsonl", receipt):  # the clock of the file server is an hour slow
        at = path.stat().st_mtime - 3600
        os.utime(path, (at, at))
    found = call(root, "verify", "--log", root / "log.jsonl")
    if loop is by_initial_lr:  # code makes it of initial_lr: no promise to hold it against
        assert found.exit_code == 0, found.output
        assert "agrees: step 7\n" in found.stdout and "not compared: lr of update 7" in found.stdout
    else:
        assert found.exit_code == 4, found.output
        assert "says 0.0085, as before the surgery" in found.stdout


@pytest.mark.parametrize("late", [False, True], ids=["its own rate", "the next rate"])
@pytest.mark.parametrize("first", [0, 1], ids=["from 0", "from 1"])
def test_a_loop_with_a_saved_scheduler_is_held_to_its_curve(
    tmp_path: Path, first: int, late: bool
) -> None:
    root = tmp_path / "run"
    train_scheduled(root, 6, first=first, late=late)
    assert call(root, "set-lr", "0.5x", "--yes", format=str(root / "own.yaml")).exit_code == 0
    train_scheduled(root, 4, first=first, late=late)
    found = call(root, "verify", "--log", root / "out.txt", format=str(root / "own.yaml"))
    assert found.exit_code == 0, found.output
    assert (
        "verified: the trainer matches" in found.stdout
        and f"lr of update {7 + late}: " in found.stdout
    )
    train_scheduled(root, 4, first=first, late=late, scheduler=False)
    found = call(root, "verify", "--log", root / "out.txt", format=str(root / "own.yaml"))
    assert found.exit_code == 4 and "mismatch" in found.stdout


def test_a_trainer_that_was_asked_is_verified_by_the_field_that_was_set(tmp_path: Path) -> None:
    root = make("Hugging Face", tmp_path / "run")
    for recipe, says in (
        ({"set": {"beta2": 0.9}}, "verified: step 5 uses beta 0.9, 0.9"),
        ({"set": {"eps": 1e-6}}, "verified: step 5 uses eps 1e-06"),
        ({"set": {"lr": "0.5x"}}, "verified: step 5 uses lr "),
        ({"reset": ["moments"]}, "verified: step 5 uses fresh moments"),
        ({"reset": ["moments"], "set": {"eps": 1e-5}}, "verified: step 5 uses eps 1e-05, fresh"),
        ({"rollback": {"to": 2}}, "verified: step 3 uses lr "),
    ):
        run = Run.open(root)
        plan = surgery.plan(run, from_data(recipe))
        receipt = surgery.apply(run, plan)
        head = report.done(receipt, report.Style(False, 100)).splitlines()[0]
        assert says in head and NOT_KNOWN not in head
        assert head.count("uses") == 1 and (" lr " in head) is (" lr " in says)
        assert report.plan_json(plan, "transformers", receipt)["verdict"] == "verified"


ASKED = {"Hugging Face": True, "Megatron-LM legacy": True, "torchtitan (DCP)": True,
         "nanotron": True, "Megatron-LM fsdp_dtensor": True}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.parametrize("name", ASKED)
def test_a_format_was_asked_where_a_test_says_so(tmp_path: Path, name: str) -> None:
    """By the table of docs/formats.md: a loader, or a function of the library."""
    said = {each.column for each in claims.witnesses()}
    assert (name in said) is ASKED[name]
    assert look.inspect(Run.open(make(name, tmp_path / "run"))).promise.asked is ASKED[name]


def test_a_page_was_asked_where_it_names_its_witness() -> None:
    asked = [name for name in DESCRIBED if not pages.shipped(name).description.doubts()]  # type: ignore[attr-defined]
    assert asked == [
        "lightning", "lightning-sharded", "lightning-deepspeed", "nemo", "composer",
        "composer-sharded", "automodel", "verl", "lingua", "open-clip", "timm", "ultralytics",
        "fairseq2", "litgpt", "litgpt-finetune", "mmengine", "mmengine-epochs",
        "nanochat", "detectron2", "detectron2-plain", "lerobot", "prime-rl",
        "nemo-rl", "nemo-rl-native", "coqui", "nerfstudio", "rsl-rl", "detr",
        "sd-scripts",
    ]  # fmt: skip
