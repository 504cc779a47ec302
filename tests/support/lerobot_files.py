"""Runs of LeRobot's form: an optimizer flattened into safetensors, all else of it as JSON.

As `save_checkpoint`, `update_last_checkpoint` and `load_training_state` of lerobot 0.6.1 have it,
without a policy: `flatten_dict` joins the keys by `/`, and `deserialize_json_into_object` wants the
types that the live object has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PEAK, WARMUP = 1e-2, 3
EVERY, END = 2, 6


def share(step: int) -> float:
    """The factor of the LambdaLR, which no checkpoint keeps."""
    return min(1.0, (step + 1) / WARMUP) * 0.98**step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """In two groups, as the policies with a backbone have them."""
    first, *rest = parameters
    groups = [{"params": [first]}, {"params": rest, "lr": PEAK / 10}]
    return torch.optim.AdamW(groups, lr=PEAK, weight_decay=0.01)


class Loop:
    """A trainer of so many updates, which says what each of them used."""

    def __init__(
        self, root: Path, make: Callable[[Any], torch.optim.Optimizer] = adamw, *, lr: bool = True
    ) -> None:
        torch.manual_seed(5)
        self.root, self.step = root, 0
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share) if lr else None

    def train(self, until: int = END) -> list[list[float]]:
        """The rates of each update."""
        used = []
        while self.step < until:
            used.append([group["lr"] for group in self.optimizer.param_groups])
            torch.manual_seed(self.step)
            self.model(torch.rand(3, 4)).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.schedule is not None:
                self.schedule.step()
            self.step += 1
            if self.step % EVERY == 0:
                self.save()
        return used

    def save(self) -> None:
        folder = self.root / "checkpoints" / f"{self.step:06}"
        state, weights = folder / "training_state", folder / "pretrained_model"
        state.mkdir(parents=True, exist_ok=True)
        weights.mkdir(exist_ok=True)
        save_file(self.model.state_dict(), weights / "model.safetensors")
        (weights / "config.json").write_text(json.dumps({"type": "act"}))
        saved = self.optimizer.state_dict()
        flat = {f"state/{i}/{k}": v for i, each in saved["state"].items() for k, v in each.items()}
        save_file(flat, state / "optimizer_state.safetensors")
        save_file({"torch_rng_state": torch.get_rng_state()}, state / "rng_state.safetensors")
        _write(state / "optimizer_param_groups.json", saved["param_groups"])
        _write(state / "training_step.json", {"step": self.step})
        if self.schedule is not None:
            _write(state / "scheduler_state.json", self.schedule.state_dict())
        last = folder.parent / "last"
        last.unlink(missing_ok=True)
        last.symlink_to(folder.name)

    def resume(self) -> Loop:
        """From `last`, into what was made anew."""
        folder = self.root / "checkpoints" / "last"
        state = folder / "training_state"
        self.model.load_state_dict(load_file(folder / "pretrained_model" / "model.safetensors"))
        states: dict[int, dict[str, Any]] = {}
        for name, tensor in load_file(state / "optimizer_state.safetensors").items():
            _, number, key = name.split("/")
            states.setdefault(int(number), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        groups = _filled(groups, json.loads((state / "optimizer_param_groups.json").read_text()))
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        if self.schedule is not None:
            saved = json.loads((state / "scheduler_state.json").read_text())
            self.schedule.load_state_dict(_filled(self.schedule.state_dict(), saved))
        self.step = json.loads((state / "training_step.json").read_text())["step"]
        return self


def run(root: Path) -> Path:
    """A run of END updates."""
    Loop(root).train()
    return root


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False))


def _filled(live: Any, saved: Any) -> Any:
    """What was saved, in the types of the live object; any other type or key is an error."""
    if isinstance(live, dict):
        assert live.keys() == saved.keys()
        return {key: _filled(live[key], saved[key]) for key in live}
    if isinstance(live, (list, tuple)):
        assert isinstance(saved, list) and len(live) == len(saved)
        return type(live)(_filled(*pair) for pair in zip(live, saved, strict=True))
    assert type(live) is type(saved), (live, saved)
    return saved
