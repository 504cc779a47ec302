"""A Trainer run with DeepSpeed: what a plan says of its arguments is what the Trainer asks for."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, make, process_group, resume
from tests.support.deepspeed_schedulers import as_planned, options


def nested(root: Path, options: Options) -> Path:
    """A run of the Trainer whose step 6 is this engine's."""
    with process_group():
        make(root / "flat", options)
    folder = root / "run" / "checkpoint-6"
    shutil.copytree(root / "flat" / "global_step6", folder / "global_step6")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 6, "max_steps": 20}))
    return root / "run"


def compared(config: Mapping[str, Any], root: Path, **arguments: Any) -> None:
    """The Trainer's own comparison of its arguments with the DeepSpeed config."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = TrainingArguments(output_dir=str(root), use_cpu=True, **arguments)
    own = HfTrainerDeepSpeedConfig(copy.deepcopy(dict(config)))
    own.trainer_config_process(args)
    own.trainer_config_finalize(args, None, args.max_steps)


def arguments(line: str) -> dict[str, Any]:
    """Those of a printed line."""
    words = line.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return {name.removeprefix("--"): json.loads(value) for name, value in pairs}


@pytest.mark.formats
def test_another_decay_of_deepspeed_needs_the_arguments_too(tmp_path: Path) -> None:
    """WarmupDecayLR, whose rates are in the config and in the Trainer's arguments."""
    before = options("WarmupDecayLR")
    run = Run.open(nested(tmp_path, before))
    made = plan(run, from_data({"set": {"lr": 4e-4, "warmup": 5, "decay": 30}}))
    config_line, flags_line, *_ = made.warnings
    after = as_planned(replace(made, warnings=(config_line,)), before)
    config = {"optimizer": after.config["optimizer"], "scheduler": after.scheduler_config}
    given = arguments(flags_line.removeprefix("relaunch with ").partition(" too: ")[0])
    assert given == {"learning_rate": 4e-4, "warmup_steps": 5, "max_steps": 30}
    config["optimizer"]["params"]["lr"] = "auto"
    compared(config, tmp_path, **given)
    for name, old in {"learning_rate": 1e-3, "warmup_steps": 4, "max_steps": 20}.items():
        with pytest.raises(ValueError, match="mismatch"):
            compared(config, tmp_path, **{**given, name: old})


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_cooldown_is_the_trainers_own_arguments(tmp_path: Path, shape: str) -> None:
    """The engine keeps the Trainer's own scheduler, a LambdaLR of torch."""
    run = Run.open(nested(tmp_path, Options(scheduler="LambdaLR")))
    wanted = from_data({"cooldown": {"steps": 4, "shape": shape, "to": 1e-6}})
    made = plan(run, wanted)
    said = " ".join(made.warnings)
    assert "--lr_scheduler_type warmup_stable_decay" in said and "--max_steps 10" in said
    assert f'"decay_type": "{shape}"' in said


@pytest.mark.formats
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_cooldown_of_deepspeeds_own_is_refused_with_both(tmp_path: Path, shape: str) -> None:
    before = options("WarmupDecayLR")
    run = Run.open(nested(tmp_path, before))
    rate = run.checkpoint(6).locate("lr")[0].value
    with pytest.raises(SurgeryError, match="what it decays to comes from") as no:
        plan(run, from_data({"cooldown": {"steps": 4, "shape": shape, "to": 1e-6}}))
    words, _, sections = str(no.value.next[0]).partition(" and this in the DeepSpeed config: ")
    given = arguments(words.removeprefix("relaunch with "))
    assert (given["learning_rate"], given["max_steps"]) == (rate, 10)
    config = json.loads("{" + sections + "}")
    compared(config, tmp_path, **given)
    config.pop("optimizer", None)
    after = replace(before, scheduler_config=config["scheduler"], lr=rate)
    if shape == "cosine":
        adam = {**before.config["optimizer"]["params"], "lr": rate}
        after = replace(after, config={"optimizer": {"type": "AdamW", "params": adam}})
    with process_group():
        rates = [each for (each, *_) in resume(tmp_path / "flat", after, 4)["rates"]]
    assert rates[0] == pytest.approx(rate) and rates == sorted(rates, reverse=True)
    assert 1e-6 < rates[-1] < rate / 2  # the Trainer ends with the schedule
