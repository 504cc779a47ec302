"""The schedulers of DeepSpeed's own config, before a surgery and as its plan says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from ckptsurgeon import Plan
from tests.support.deepspeed_engine import Options

WARM: dict[str, Any] = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}
SECTIONS: dict[str, dict[str, Any]] = {
    "WarmupLR": WARM,
    "WarmupLR-linear": {**WARM, "warmup_type": "linear", "warmup_num_steps": 9},
    "WarmupLR-log": {**WARM, "warmup_num_steps": 9},
    "WarmupDecayLR": {**WARM, "total_num_steps": 20},
    "WarmupDecayLR-warming": {**WARM, "total_num_steps": 20, "warmup_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
    "WarmupCosineLR-warming": {"total_num_steps": 20, "warmup_num_steps": 9},
}


def options(name: str, stage: int = 1) -> Options:
    section = {"type": name.partition("-")[0], "params": SECTIONS[name]}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    return Options(stage=stage, scheduler_config=section, config=config, optimizer="config")


def as_planned(made: Plan, before: Options) -> Options:
    """The options with the parts of the config that the plan says the relaunch must carry."""
    (warning,) = made.warnings
    config, section = dict(before.config), dict(before.scheduler_config or {})
    for part in re.findall(r'"(?:optimizer|scheduler)": \{"params": \{.*?\}\}', warning):
        ((name, inner),) = json.loads("{" + part + "}").items()
        if name == "scheduler":
            section["params"] = {**section["params"], **inner["params"]}
        else:
            old = dict(config["optimizer"])
            config["optimizer"] = {**old, "params": {**old["params"], **inner["params"]}}
    return replace(before, config=config, scheduler_config=section)
