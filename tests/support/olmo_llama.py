"""A Llama that OLMo-core's own Trainer trains, and transformers' of the same shape."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import llamas

STEP, MORE = 4, 5
SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 256, "rope_theta": 500000.0,
}  # fmt: skip
"""Of the model that `olmo_core` trains."""
ADAM = {"beta2": 0.999, "eps": 1e-8}
BARE = "model.embed_tokens.weight"
"""What does not decay there."""


@dataclass
class Seen:
    """What OLMo-core's Trainer loaded, and the words and the loss of each update after that."""

    loaded: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    words: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


def olmo(root: Path, stop: int) -> Seen:
    """Train to step `stop`, from where the Trainer itself resumes."""
    from olmo_core.train.callbacks import Callback

    from tests.support.olmo_core import Start, trainer

    seen = Seen()

    class Listen(Callback):
        def pre_train(self) -> None:
            module: Any = self.trainer.train_module
            states = module.optim.state
            for name, p in module.model.named_parameters():
                kinds = ("exp_avg", "exp_avg_sq") if states.get(p) else ()
                seen.loaded[name] = {kind: states[p][kind].clone() for kind in kinds}
                seen.loaded[name]["weights"] = p.detach().clone()

        def pre_step(self, batch: dict[str, Any]) -> None:
            seen.words[self.step] = batch["input_ids"].clone()

        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                seen.losses[step] = metrics["train/CE loss"]

    start = Start(scheduler=None, lr=llamas.RATE, save_interval=1)
    live, _ = trainer(root, stop, start)
    live.add_callback("listen", Listen())
    live.metrics_collect_interval = 1
    live.fit()
    return seen


def copied(runs: Path, name: str, to: Path) -> Path:
    shutil.copy(runs / "data.npy", to)
    return Path(shutil.copytree(runs / name, to / "run"))
